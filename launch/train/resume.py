"""The run's folder before a run: whether it may go on there, and with this recipe.

Read next: `run.py`, which asks; `trainers/loop/setup.py`, where a checkpoint is chosen.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...errors import RequestError
from ...storage import explain_full_disk, write_text
from ..check.unread import flat
from ..recipe.load import Resolved, load_recipe
from ..recipe.model import Recipe

_log = logging.getLogger(__name__)


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


def check_resume(folder: Path, recipe: Recipe, resume: str) -> None:
    """Raise RequestError where checkpoints are in the way, or are not of this recipe."""
    runs = [folder] if has_begun(folder) else []
    if resume != "auto":
        from ...trainers.loop.setup import resume_from

        own = recipe.record.hook("check_resume")
        if own is not None:
            own(folder, resume)
        checkpoint = resume_from(folder, resume)
        runs += [] if checkpoint is None else [checkpoint.resolve().parents[1]]
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
# what the probes decode, which says which draft is the best
_PROBED = ("eval.prompts", "eval.seed", "eval.prompt_tokens")


def _differences(before: Recipe, now: Recipe) -> set[str]:
    old, new = flat(before.model_dump()), flat(now.model_dump())
    return {path for path in old.keys() | new.keys() if old.get(path) != new.get(path) and _is_read(path, now)}


def _is_read(path: str, recipe: Recipe) -> bool:
    """Whether what a run computes hangs on that value."""
    if path in _PROBED:
        return recipe.record.reads_value("probe", recipe)
    return not path.startswith(_FREE) and recipe.record.reads_value(path, recipe)
