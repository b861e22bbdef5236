"""Train from a recipe: what `draftsmith train` and `accelerate launch -m draftsmith.launch.train` do.

The day that a run's chat template is told, if it has a clock, is that of the run's beginning, later on too. Without it
rows of today and prompts of tomorrow would differ, and a resumed run would find other rows.

How a run ended stands in `status.json` with its true exit code, which launchers turn into 1.

Read next: `recipe/load.py`; then `trainers/loop/loop.py`, where the work is done.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DraftsmithError, RequestError, Stopped
from ...storage import MACHINE_ERRNOS, explain_full_disk, holder_of, is_first, write_text
from ...storage.held import launch
from ...trainers.loop.interruptions import Interrupted, interrupt_on_signal
from ..check.models import check_recipe
from ..check.resume import held_folder
from ..recipe.load import Resolved, field_paths, load_recipe
from ..recipe.model import Recipe
from ..recipe.values import value_path

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone
    from ...trainers.loop.loop import Probe, RunOutcome


_RESUMES = "`auto`, `never` or a checkpoint's path"


def train(
    recipe: str | Path | Mapping[str, Any] | Resolved,
    *,
    out: str | Path | None = None,
    resume: str = "auto",
    **overrides: Any,
) -> RunOutcome:
    """Run a recipe: a shipped one by name, a file, or a dict of its sections.

    Args:
        out: the run's folder, by default `runs/NAME`; it has `run.yaml`, `metrics.jsonl`, `checkpoints/`, and
            `drafter/` or `target/` or both.
        resume: `auto`, `never` or a checkpoint's path.
        overrides: values over the recipe's: `data_source="stdlib"`, `loop__steps=50`, `loop={"steps": 50}`, or
            `steps=50` where one section alone has such a value.

    Returns:
        How the run ended.

    Raises:
        RequestError: a wrong value, or a folder that another run is at work in or that holds another
            run. EnvironmentFailure: the folder cannot be written. Stopped: a signal ended the run.
    """
    if out == "":
        raise RequestError("out is empty; name a folder, or leave it out for runs/NAME")
    resolved = recipe if isinstance(recipe, Resolved) else load_recipe(_named(recipe), _flags(overrides))
    for name, value in (("out", out), ("resume", resume)):
        if not isinstance(value, str | Path | None):
            raise RequestError(f"{name} is {value!r:.60}; expected {'a folder' if name == 'out' else _RESUMES}")
    folder = Path(out) if out is not None else Path("runs") / resolved.recipe.name
    check_recipe(resolved.recipe)
    resolved = on_a_day(resolved, folder, resume)
    with held_folder(folder, resolved, resume):
        return _dispatch(resolved.recipe, folder, resume)


def _named(recipe: object) -> str | Mapping[str, Any]:
    """A recipe's name, or its sections; RequestError for what is neither."""
    if isinstance(recipe, Path):
        return f"./{recipe}" if recipe.name == str(recipe) else str(recipe)  # a file, and no shipped recipe's name
    if not isinstance(recipe, str | Mapping):
        raise RequestError(
            f"recipe is {recipe!r:.60}; expected a shipped recipe's name, a file, or a dict of sections"
        )
    return recipe


def _flags(overrides: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Values over a recipe's, as Python names them, by their paths; a section may be a dict of its values.

    Raises:
        RequestError: a name that is near to a value's and none itself, or a value that no recipe can hold.
    """
    known = field_paths()
    given: list[tuple[str, Any]] = []
    for key, value in overrides.items():
        is_section = any(each.startswith(f"{key}.") for each in known)
        if is_section and not isinstance(value, Mapping):
            raise RequestError(f"{key} is {value!r:.60}; expected a dict, as {key} is a section of a recipe")
        given += [(f"{key}.{name}", each) for name, each in value.items()] if is_section else [(key, value)]
    flags = []
    for key, value in given:
        path = value_path(key, known)
        near = difflib.get_close_matches(key, {each.rpartition(".")[2] for each in known}, n=1, cutoff=0.75)
        if path not in known and "." not in path and near:
            raise RequestError(f"{key} is no value of a recipe; did you mean {near[0]}?")
        try:
            flags.append((path, str(value) if isinstance(value, str | Path) else json.dumps(value)))
        except (TypeError, ValueError):
            raise RequestError(
                f"{key} is {value!r:.60}; expected a number, a text, a list or a dict of them"
            ) from None
    return flags


def _dispatch(recipe: Recipe, out: Path, resume: str) -> RunOutcome:
    status = Status(out)
    with interrupt_on_signal():
        try:
            with explain_full_disk(out):
                status.write("running", None)
                outcome = _train_method(recipe, out, resume)
                status.write("finished", 0)
        except BaseException as error:  # whatever ends the run
            status.fail(Stopped(str(error)) if isinstance(error, Interrupted) else error)
            raise
    return outcome


def _train_method(recipe: Recipe, out: Path, resume: str) -> RunOutcome:
    from ...trainers.loop.setup import own_kernels
    from ...trainers.spine import run

    with own_kernels():
        return run(recipe, out, resume, lambda target: _probe(target, recipe))


def _probe(target: Backbone, recipe: Recipe) -> Probe:
    """Real decoding for the training loop: trainers know of no prompts and no measures."""
    from ...data.prompts import fitting, load_prompts, render
    from ...eval.measure.probe import as_proposer, tau_probe
    from ..check.unread import check_probe_length, check_room

    check_probe_length(recipe)
    prompts = load_prompts(recipe.eval.prompts, limit=recipe.probe.prompts, seed=recipe.eval.seed, data=recipe.data)
    tokenizer, most = target.tokenizer, recipe.eval.prompt_tokens
    kept = fitting(prompts, tokenizer, most, warn=True)
    ids = [render(prompt, tokenizer, limit=most) for prompt in kept]
    longest, answer = max(map(len, ids)), recipe.probe.max_new_tokens
    check_room(recipe, target.model.config, longest, answer=answer, depth=recipe.record.probe_depth(recipe))
    return tau_probe(
        target,
        ids,
        make_proposer=as_proposer(recipe.record.family or "", target, recipe.probe.draft_length),
        max_new_tokens=answer,
    )


_log = logging.getLogger(__name__)


def on_a_day(resolved: Resolved, folder: Path, resume: str) -> Resolved:
    """The recipe with the day of its run, where its template has a clock and it names no day itself."""
    recipe = resolved.recipe
    if recipe.data.template_date is not None or not _has_clock(recipe):
        return resolved
    from ...data.rows.templates import today

    day = _begun_on(folder, resume) or today()
    _log.info("the chat template has a clock, which shows %s for the whole run (data.template_date)", day)
    data = recipe.data.model_copy(update={"template_date": day})
    return replace(resolved, recipe=recipe.model_copy(update={"data": data}))


def _begun_on(folder: Path, resume: str) -> str | None:
    """The day of the run that is gone on with."""
    if resume == "never":
        return None
    runs = [] if resume == "auto" else [Path(resume).resolve().parents[1]]
    for run in [*runs, folder]:
        try:
            if (run / "run.yaml").is_file():
                return load_recipe(str(run / "run.yaml")).recipe.data.template_date
        except DraftsmithError:
            continue  # a record of another version, which the comparison of recipes speaks of
    return None


def _has_clock(recipe: Recipe) -> bool:
    """Whether the run's template reads the clock; of a target that is not there, the run itself will say so."""
    from ...data.rows.bounded import CLOCK
    from ...data.rows.templates import ChatTemplate, named_template

    data, config = recipe.data, recipe.tokenizer
    try:
        if not recipe.record.has_target and config.path is None:
            return config.chat_template is not None and CLOCK in named_template(config.chat_template)
        from ..inspect import tokenizer_of

        return ChatTemplate(tokenizer_of(recipe), data.chat_template, data.template_values).reads_clock
    except DraftsmithError:
        return False


class Status:
    """`status.json`: the true exit code, for launchers that turn every code into 1."""

    def __init__(self, out: Path) -> None:
        self._out, self._path = out, out / "status.json"
        # libraries may set what a launcher sets while the process runs
        self._active, self._launch = is_first(), launch()

    def write(self, state: str, code: int | None, message: str = "") -> None:
        if self._active:
            write_text(self._path, self._line(state, code, message))

    def fail(self, error: BaseException) -> None:
        """How the run ended, as the first process that fails tells it."""
        if self._is_told() or self._is_of_others():
            return
        code = _exit_code(error)
        state = "stopped" if code == 75 else "failed"
        message = str(error) or type(error).__name__
        try:
            write_text(self._path, self._line(state, code, message))
        except OSError:
            # a full disk has no room for a second file, but for a few words in the one there is
            with contextlib.suppress(OSError), self._path.open("r+", encoding="utf-8") as file:
                file.write(self._line(state, code, message[:300]))
                file.truncate()

    def _is_of_others(self) -> bool:
        """Whether another launch is at work in the folder, and this one's first process was refused there."""
        holder = holder_of(self._out)
        return holder is not None and holder.pid != os.getpid() and holder.launch not in ("", self._launch)

    def _is_told(self) -> bool:
        """Whether another process of this launch has said how it ended; an earlier launch's word is stale."""
        try:
            told = json.loads(self._path.read_text(encoding="utf-8"))
            return told["state"] in ("failed", "stopped") and told["launch"] == self._launch
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _line(self, state: str, code: int | None, message: str) -> str:
        return json.dumps({"state": state, "exit_code": code, "message": message, "launch": self._launch}) + "\n"


def _exit_code(error: BaseException) -> int:
    """As `cli.main` returns it."""
    if isinstance(error, DraftsmithError):
        return error.exit_code
    if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
        return 4
    return 130 if isinstance(error, KeyboardInterrupt) else 5
