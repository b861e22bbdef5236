"""The card of a drafter on a hub: for which target, what it is worth, how it is used, by draftsmith and by engines.

No tau without its verdict, and none that was measured of other weights. Read next: `card.md.j2`, its text;
`eval/report/report.py`, the whole of the results.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...drafters.families import FAMILIES
from ...drafters.folder import read_entry
from ...drafters.identity import TargetIdentity
from ...errors import RequestError
from ...eval.measure.environment import drafter_hash
from ..check.early import tuned_target
from ..engines import command
from ..export import served_target, start_of
from ..recipe.model import Recipe
from .folder import without_folders

if TYPE_CHECKING:
    from ...drafters.export import ServedTarget

UNKNOWN = "unknown"
TARGET = "TARGET"
"""Stands for a target that has no name on the hub."""
_LICENSE = re.compile("[a-z0-9][a-z0-9.-]{0,60}")


@dataclass(frozen=True)
class CardSubject:
    """What the card is of."""

    name: str
    """OWNER/NAME on the hub."""
    run: Path
    recipe: Recipe
    base_model: str | None
    """Name of the target on the hub."""
    license: str
    license_of_target: bool
    """Whether nobody named it, and the target's own card did."""
    target: ServedTarget | None
    """As engines are told of it, by its name on the hub; None where its config cannot be read here."""

    @property
    def folder(self) -> Path:
        """Of the drafter."""
        return self.run / "drafter"


def card_of(subject: CardSubject) -> str:
    """The text of `README.md`.

    Raises:
        RequestError: the run's results are damaged, or of a drafter with other weights.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from ...eval.report.report import cell, visible
    from ...eval.report.tables import interval, verdict_of

    environment = Environment(  # noqa: S701 - Markdown: `cell` escapes
        loader=PackageLoader("draftsmith.launch.share", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    environment.filters |= {"interval": interval, "cell": cell, "verdict": verdict_of}
    return environment.get_template("card.md.j2").render(_content(subject)) + "\n"


def _content(subject: CardSubject) -> dict[str, Any]:
    entry = read_entry(subject.folder)
    family, identity = entry["family"], entry["identity"]
    results = results_of(subject.run)
    rows = [] if results is None else _rows(results)
    commands, refused = _commands(subject, family, entry["settings"])
    return {
        "head": _head(subject, family),
        "name": subject.name,
        "version": __version__,
        "method": subject.recipe.method,
        "summary": FAMILIES[family].summary,
        "target": identity,
        "base_model": subject.base_model,
        "license": subject.license,
        "model": subject.base_model or TARGET,
        "commands": commands,
        "refused": refused,
        "formats": list(FAMILIES[family].exports),
        "rows": rows,
        "claim": _claim(rows),
        "settings": {} if results is None else results["settings"],
        "machine": "" if results is None else _machine(results["environment"]),
    }


def _head(subject: CardSubject, family: str) -> str:
    """What the hub reads: the YAML in front of the card."""
    from huggingface_hub import ModelCardData

    data: Any = ModelCardData(
        base_model=subject.base_model,
        library_name="draftsmith",
        license=subject.license,
        tags=["speculative-decoding", "draftsmith", family],
        ignore_metadata_errors=False,
    )
    return f"---\n{data.to_yaml()}\n---"


def results_of(run: Path) -> dict[str, Any] | None:
    """What the run's drafter was measured to be worth; None where it was not measured.

    Raises:
        RequestError: its results are damaged, or those of other weights.
    """
    from ...eval.report.results import read_results

    path = run / "eval" / "results.json"
    if not path.is_file():
        return None
    results = read_results(path)
    try:
        measured = {each["method"]: each["sha256"] for each in results["draft"]["loaded"]}
    except (LookupError, TypeError) as error:
        raise RequestError(f"{path} does not say which drafter it measured; evaluate the run again") from error
    now = drafter_hash(run / "drafter")
    if now not in measured.values():
        raise RequestError(
            f"{path} was measured with a drafter of other weights than {run / 'drafter'} has now; measure this one by "
            f"`draftsmith eval {run}`, or move the file away to push without figures"
        )
    return results


def _rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the drafter that goes up, each prompts' source without its folders."""
    own = {each["method"] for each in results["draft"]["loaded"]}
    return [row | {"source": without_folders(row["prompts"])} for row in results["rows"] if row["method"] in own]


def _claim(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the rows show of the drafter; nothing of what none of them does, or not all of them do."""
    if not rows:
        return ""
    from ...eval.report.tables import stand_in

    fewer = all(row["tau"][0] is not None and row["tau"][0] > 1 and not row["flagged"] for row in rows)
    claims = ["With it the target decoded in fewer calls"] if fewer else []
    if all(row["verdict"] == "lossless" and stand_in(row) is None for row in rows):
        claims.append("the audit found the text to be the target's own")
    said = "; ".join(claims)
    return f"{said[0].upper()}{said[1:]}." if said else ""


def _machine(environment: Mapping[str, Any]) -> str:
    devices = ", ".join(environment["devices"]) or f"{environment['processor']}, {environment['threads']} threads"
    return f"{devices}, torch {environment['versions'].get('torch')}"


def _commands(subject: CardSubject, family: str, settings: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """What `draftsmith export` prints for each engine that takes its models from the hub; refused formats, and why."""
    commands: list[str] = []
    refused: dict[str, str] = {}
    target = subject.target
    if target is None:
        return commands, refused
    for form, record in FAMILIES[family].exports.items():
        as_it_is = record.make is None
        out = subject.name if as_it_is else f"{subject.name.rpartition('/')[2]}-{form}"
        try:
            start = start_of(subject.folder, subject.recipe, settings, (family, form), target=target, out=out)
        except RequestError as error:
            refused[form] = str(error)
            continue
        try:
            started = textwrap.dedent(command(form, start))
        except RequestError:  # it reads the target from a folder
            continue
        export = f"draftsmith export --drafter hub:{subject.name} --target {target.path} --format {form} --out {out}\n"
        commands.append(started if as_it_is else export + started)
    return commands, refused


def subject_of(run: Path, name: str, recipe: Recipe, base_model: str | None, license_: str | None) -> CardSubject:
    """What is pushed, with the target's name on the hub and the licence, as far as they are known.

    Raises:
        RequestError: a licence or a name that the hub has no room for.
    """
    from ...drafters.hub import parsed

    identity: TargetIdentity = read_entry(run / "drafter")["identity"]
    if base_model is None and identity.tuned is None:
        base_model = _hub_name(recipe.target.path)
    elif base_model is not None:
        base_model = parsed(base_model)[0]
    path = tuned_target(run, recipe) or recipe.target.path
    own = None if license_ is not None else _license_of(path)
    license_ = license_ or own or UNKNOWN
    if not _LICENSE.fullmatch(license_):
        raise RequestError(f"--license is {license_!r:.80}; expected an id of the hub, such as apache-2.0 or other")
    target = _target_of(path, recipe.target.revision, base_model or TARGET)
    return CardSubject(name, run, recipe, base_model, license_, own is not None, target)


def _target_of(path: str, revision: str | None, name: str) -> ServedTarget | None:
    """The target as engines are told of it; None where no config is here, or one that code of its own would read."""
    from ...decoding.backbone.hub import load_config

    config = _file_here(path, "config.json", revision)
    if config is None:
        return None
    try:
        return served_target(name, load_config(str(config.parent)))
    except RequestError:  # a drafter goes up all the same, and its card says that it names no engine's command
        return None


def _hub_name(path: str) -> str | None:
    """The target's name on the hub; None for a folder, or the embedded one."""
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return None
    return path


def _license_of(target: str) -> str | None:
    """What the card of a target that is here says; None where there is no card, or it says nothing."""
    from huggingface_hub import ModelCard

    found = _file_here(target, "README.md")
    if found is None:
        return None
    try:
        said = ModelCard.load(found).data.to_dict().get("license")
    except (ValueError, OSError, TypeError):  # no card, or one that the library cannot read: it says nothing
        return None
    return said if isinstance(said, str) and _LICENSE.fullmatch(said) else None


def _file_here(target: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a target, in its folder or fetched before; no hub is asked."""
    from huggingface_hub import try_to_load_from_cache

    from ...decoding.backbone.hub import folder_or_name

    place = Path(folder_or_name(target))
    found = place / name if place.is_dir() else None
    if found is None and _hub_name(target):
        cached = try_to_load_from_cache(target, name, revision=revision)
        found = Path(cached) if isinstance(cached, str) else None
    return found if found is not None and found.is_file() else None
