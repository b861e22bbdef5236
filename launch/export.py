"""`draftsmith export`: a trained drafter as a folder that a serving engine loads.

Read next: `drafters/export.py`, what the engines expect.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..drafters.families import FAMILIES, family_of
from ..drafters.hub import drafter_folder
from ..drafters.tuned_file import DRAFT_LENGTH, read_tuned
from ..errors import RequestError
from ..storage import replace_folder, writable_folder
from .check.early import check_trust, tuned_target
from .recipe.load import load_recipe
from .recipe.model import Recipe

if TYPE_CHECKING:
    from ..drafters.export import Export as Exported
    from .requests import ExportRequest


_log = logging.getLogger(__name__)


def export(request: ExportRequest) -> str:
    """Write the folder and return what to do with it.

    Raises:
        RequestError: no run folder, a drafter that nobody loads or made for another target, or a
            folder that is there. EnvironmentFailure: nobody may write where it is to be.
    """
    source = _source(request)
    folder, recipe, out = source.folder, source.recipe, source.out
    if out.exists():
        raise RequestError(f"{out} exists; name a new folder by --out")
    writable_folder(out.parent)

    from ..decoding.target.hub import load_config, load_tokenizer, skeleton
    from ..decoding.target.loading import load_model
    from ..drafters.export import ServedTarget, export_of
    from ..drafters.folder import read_entry
    from ..drafters.heads.medusa import projection_of
    from ..drafters.identity import TargetIdentity

    entry = read_entry(folder)
    family, settings = entry["family"], entry["settings"]
    family_of(family, str(folder))
    path = _where_it_lies(source.target)
    speculation = speculation_of(folder, recipe, family, settings)
    _check_served(folder, family, request.format, path, speculation)
    revision, trust = recipe.target.revision, request.trust_remote_code
    config = load_config(path, revision=revision, trust_remote_code=trust)
    target = ServedTarget.of(path, config, skeleton(config, trust).get_input_embeddings())
    tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust)
    identity = TargetIdentity.of_parts(config, tokenizer, name=path, revision=revision)
    entry["identity"].check_same(identity, str(folder))
    head = None
    if settings.get("shared_head"):
        model = load_model(path, revision=revision, trust_remote_code=trust)
        head = projection_of(model).detach()
    made = export_of(
        folder, family, settings, target, request.format, dtype=request.dtype, head_VH=head, tokens=speculation.tokens
    )
    replace_folder(out, lambda folder: _fill(folder, made))
    return f"{out}: load it with\n  {command_of(str(out.resolve()), family, request.format, target.path, speculation)}"


@dataclass(frozen=True)
class _Source:
    """What is exported, and where to."""

    folder: Path
    """Of the drafter."""
    recipe: Recipe
    target: str
    out: Path


def _source(request: ExportRequest) -> _Source:
    """The run's drafter, or the one that is named by itself.

    Raises:
        RequestError: neither, both, or no run folder; a run that trusts its target's code.
    """
    if request.drafter is not None:
        if request.run_folder is not None or request.target is None or request.out is None:
            raise RequestError("--drafter is exported by itself: name --target and --out beside it, and no run")
        recipe = load_recipe("distill-tiny").recipe  # any would do: it says how a drafter drafts by default
        return _Source(drafter_folder(request.drafter), recipe, request.target, request.out)
    run = request.run_folder
    if run is None:
        raise RequestError("nothing to export: name a run folder, or --drafter with --target and --out")
    recipe = run_recipe(run)
    check_trust(recipe, run / "run.yaml", said=request.trust_remote_code, flag="--trust-remote-code")
    target = request.target or tuned_target(run, recipe) or recipe.target.path
    return _Source(run / "drafter", recipe, target, request.out or run / request.format)


def run_recipe(run: Path) -> Recipe:
    """The recipe of a run; RequestError where the folder is no run's."""
    if not (run / "run.yaml").is_file():
        raise RequestError(f"{run} is no run folder: run.yaml is missing; name the --out of a run")
    return load_recipe(str(run / "run.yaml")).recipe


@dataclass(frozen=True)
class Speculation:
    """What an engine has to be told beside the folder."""

    tokens: int
    sampled: bool
    """Whether drafts are drawn from q at temperatures above 0, where engines take the argmax unasked."""


def speculation_of(folder: Path, recipe: Recipe, family: str, settings: Mapping[str, Any]) -> Speculation:
    """As the recipe decodes, or as the drafter in `folder` was tuned."""
    tuned = read_tuned(folder)
    chosen = tuned.values if tuned.is_chain else {}  # a tree's depth says nothing of a chain
    tokens = int(chosen.get(DRAFT_LENGTH, recipe.eval.draft_length))
    most = FAMILIES[family].most_tokens(settings)
    policy = chosen.get("drafter.policy", recipe.drafter.policy)
    if DRAFT_LENGTH in chosen:
        _log.info("%d tokens per draft: tuned for %s", tokens, tuned.measured)
    return Speculation(tokens if most is None else min(most, tokens), FAMILIES[family].samples and policy == "sample")


def _where_it_lies(target: str) -> str:
    """A folder by its whole path, as an engine is started elsewhere; a name on the hub as it is."""
    from ..decoding.target.hub import EMBEDDED, embedded_target

    if target == EMBEDDED:
        target = embedded_target()  # a name that no engine knows
    return str(Path(target).resolve()) if Path(target).is_dir() else target


def _check_served(folder: Path, family: str, form: str, target: str, speculation: Speculation) -> None:
    """Raise RequestError where no engine loads it in this form; of a draft model with the command that loads it."""
    from ..drafters.export import check_served

    try:
        check_served(family, form)
    except RequestError as error:
        if FAMILIES[family].kind != "model":
            raise
        command = command_of(str(folder.resolve()), family, "vllm", target, speculation)
        raise RequestError(f"{error}. For vLLM:\n  {command}") from error


def _fill(folder: Path, made: Exported) -> None:
    from safetensors.torch import save_file

    save_file(made.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(made.config, indent=2) + "\n")


def command_of(out: str, family: str, form: str, target: str, speculation: Speculation) -> str:
    """How the engine is started, quoted for a shell; the method is named, or it would be guessed from the path.

    Args:
        out: the exported folder, or a name on the hub that the engine loads as it is.
    """
    folder, model = shlex.quote(out), shlex.quote(target)
    if form == "speculators":
        return f"vllm serve {folder}"
    if form == "sglang":
        name = family.upper()
        return (
            f"python -m sglang.launch_server --model-path {model} "
            f"--speculative-algorithm {name} --speculative-draft-model-path {folder}"
        )
    config: dict[str, Any] = {"method": family, "model": out, "num_speculative_tokens": speculation.tokens}
    if speculation.sampled:
        config["draft_sample_method"] = "probabilistic"
    return f"vllm serve {model} --speculative-config {shlex.quote(json.dumps(config))}"
