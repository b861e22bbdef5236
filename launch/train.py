"""Train from a recipe: `draftsmith train`, or `accelerate launch -m draftsmith.launch.train`.

Read next: `recipe/load.py`; then `trainers/loop/loop.py`, where the work is done.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DraftsmithError, RequestError
from ..storage import MACHINE_ERRNOS, explain_full_disk, write_text
from .check.unread import check_read
from .recipe.load import Recipe, Resolved, load_recipe

if TYPE_CHECKING:
    from ..decoding.target.backbone import Backbone
    from ..trainers.loop.loop import Outcome, Probe

_log = logging.getLogger(__name__)


def train(recipe: str | Resolved, *, out: str | Path | None = None, resume: str = "auto", **overrides: Any) -> Outcome:
    """Run a recipe. Overrides are `section__field=value`.

    Returns how the run ended; files are in `out` (default `runs/NAME`): `run.yaml`,
    `metrics.jsonl`, `checkpoints/`, and `drafter/` or `target/` or both.
    """
    flags = [
        (key.replace("__", "."), value if isinstance(value, str) else json.dumps(value))
        for key, value in overrides.items()
    ]
    resolved = load_recipe(recipe, flags) if isinstance(recipe, str) else recipe
    folder = Path(out) if out is not None else Path("runs") / resolved.recipe.name
    _check(resolved.recipe)
    prepare_folder(folder, resolved, resume)
    return _dispatch(resolved.recipe, folder, resume)


def prepare_folder(folder: Path, resolved: Resolved, resume: str) -> None:
    """Make the run's folder.

    Raises:
        RequestError: `resume` asks for what cannot be gone on with; nothing is written then.
    """
    check_resume(folder, resolved.recipe, resume)
    try:
        with explain_full_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if os.environ.get("RANK", "0") == "0":
                write_text(folder / "run.yaml", resolved.yaml())
    except OSError as error:
        raise RequestError(f"cannot write the run folder {folder}: {error.strerror}") from error


def _check(recipe: Recipe) -> None:
    from ..trainers.student.lora import check_adapter

    check_adapter(recipe.lora, recipe.model, recipe.method)
    check_read(recipe)


def check_resume(folder: Path, recipe: Recipe, resume: str) -> None:
    """Raise RequestError where checkpoints are in the way, or are not of this recipe."""
    runs = [folder] if has_begun(folder) else []
    if resume != "auto":
        from ..trainers.loop.setup import resume_from

        if recipe.method == "boost":
            from ..trainers import boost

            boost.check_resume(folder, resume)
        place = resume_from(folder, resume)
        runs += [] if place is None else [place.resolve().parents[1]]
    for run in runs:
        _check_same_recipe(run, recipe)


def _check_same_recipe(run: Path, recipe: Recipe) -> None:
    saved = run / "run.yaml"
    if not saved.is_file():
        _log.warning("%s is missing, so nothing says whether its run had this recipe", saved)
        return
    changed = sorted(_differences(load_recipe(str(saved)).recipe, recipe))
    if changed:
        raise RequestError(
            f"{run} holds a run of another recipe; these values differ: "
            f"{', '.join(changed[:6])}. Give the same values to go on, or begin in another --out"
        )


def has_begun(folder: Path) -> bool:
    """Whether there is work to go on from: a checkpoint, of an SSM too, or an SSM that is done."""
    places = ("checkpoints/step-*", "ssm-*/checkpoints/step-*", "ssm-*/coverage.safetensors")
    return any(any(folder.glob(each)) for each in places)


# what may change between the parts of a run: how it is measured and reported, not what it computes
_FREE = (
    "eval.",
    "audit.",
    "checkpoint.",
    "loop.log_every",
    "loop.trackers",
    "summary",
    "name",
    "machine.",
    "target.sizes",
    "model.sizes",
    "features.folder",
    "features.max_gb",
    "features.prefetch",
    "boost.continuations",
    "drafter.",
)
# sections that not every method reads, and those that do
_HEADS = ("medusa", "medusa2", "hydra")
_WITH_TARGET = ("distill", "boost", *_HEADS, "bpd", "eagle", "eagle3")
_READ_BY = {
    "tokenizer": ("target",),
    "target": _WITH_TARGET,
    "features": _WITH_TARGET,
    "probe": _WITH_TARGET,
    "lora": ("distill", "boost"),
    "rollouts": ("distill",),
    "boost": ("boost",),
    "medusa": _HEADS,
    "medusa2": ("medusa2",),
    "tune": ("medusa2", "bpd"),
    "bpd": ("bpd",),
    "eagle": ("eagle",),
    "eagle3": ("eagle3",),
}
# what the probes decode, which says which draft is the best
_PROBED = ("eval.prompts", "eval.seed", "eval.prompt_tokens")


def _differences(before: Recipe, now: Recipe) -> set[str]:
    old, new = _flat(before.model_dump()), _flat(now.model_dump())
    return {path for path in old.keys() | new.keys() if old.get(path) != new.get(path) and _is_read(path, now.method)}


def _is_read(path: str, method: str) -> bool:
    """Whether what a method computes hangs on that value."""
    section = "probe" if path in _PROBED else path.split(".")[0]
    free = path.startswith(_FREE) and path not in _PROBED
    return not free and method in _READ_BY.get(section, (method,))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _dispatch(recipe: Recipe, out: Path, resume: str) -> Outcome:
    status = _Status(out)
    try:
        with explain_full_disk(out):
            status.write("running", None)
            outcome = _train_method(recipe, out, resume)
            status.write("finished", 0)
    except BaseException as error:  # whatever ends the run
        status.fail(error)
        raise
    return outcome


def _train_method(recipe: Recipe, out: Path, resume: str) -> Outcome:
    method = import_module(f"..trainers.{recipe.method}", __package__)
    outcome: Outcome = method.run(recipe, out, resume, lambda target: _probe(target, recipe))
    return outcome


def _probe(target: Backbone, recipe: Recipe) -> Probe:
    """Real decoding for the training loop: trainers know of no prompts and no measures."""
    from ..data.prompts import fitting, load_prompts, render
    from ..eval.measure.probe import as_proposer, tau_probe
    from .check.room import check_probe_length, check_room, probe_depth

    check_probe_length(recipe)
    prompts = load_prompts(recipe.eval.prompts, limit=recipe.probe.prompts, seed=recipe.eval.seed)
    tokenizer, most = target.tokenizer, recipe.eval.prompt_tokens
    kept = fitting(prompts, tokenizer, most, warn=True)
    ids = [render(prompt, tokenizer, limit=most) for prompt in kept]
    longest, answer = max(map(len, ids)), recipe.probe.max_new_tokens
    check_room(recipe, target.model.config, longest, answer=answer, depth=probe_depth(recipe))
    return tau_probe(
        target, ids, make_proposer=as_proposer(recipe.method, target, recipe.probe.draft_length), max_new_tokens=answer
    )


class _Status:
    """`status.json`: the true exit code, for launchers that turn every code into 1."""

    def __init__(self, out: Path) -> None:
        self._path = out / "status.json"
        self._active = os.environ.get("RANK", "0") == "0"

    def write(self, state: str, code: int | None, message: str = "") -> None:
        if self._active:
            write_text(self._path, _status_line(state, code, message))

    def fail(self, error: BaseException) -> None:
        """How the run ended, as the first process that fails tells it."""
        if self._is_told():
            return
        code = _exit_code(error)
        state = "stopped" if code == 75 else "failed"
        message = str(error) or type(error).__name__
        try:
            write_text(self._path, _status_line(state, code, message))
        except OSError:
            # a full disk has no room for a second file, but for a few words in the one there is
            with contextlib.suppress(OSError), self._path.open("r+", encoding="utf-8") as file:
                file.write(_status_line(state, code, message[:300]))
                file.truncate()

    def _is_told(self) -> bool:
        try:
            return bool(json.loads(self._path.read_text(encoding="utf-8"))["state"] == "failed")
        except (OSError, ValueError, KeyError):
            return False


def _status_line(state: str, code: int | None, message: str) -> str:
    return json.dumps({"state": state, "exit_code": code, "message": message}) + "\n"


def _exit_code(error: BaseException) -> int:
    """As `cli.main` returns it."""
    if isinstance(error, DraftsmithError):
        return error.exit_code
    if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
        return 4
    return 130 if isinstance(error, KeyboardInterrupt) else 5


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
