"""Whether a run may go on where it is pointed at: there is something whole, and it is of this recipe.

Read next: `folder.py`, which asks before it makes the folder; `trainers/loop/setup.py`, where a
checkpoint is chosen.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ...errors import RequestError
from ...storage import MANIFEST, check_identity
from ...storage.identity import flat
from ..recipe.identity import changes_weights, compared, identity_of
from ..recipe.load import load_recipe
from ..recipe.model import Recipe
from .longer import STEPS, check_longer

_log = logging.getLogger(__name__)


def check_resume(folder: Path, recipe: Recipe, resume: str) -> None:
    """Raise RequestError where checkpoints are in the way, or are not of this recipe."""
    runs = [folder] if has_begun(folder) else []
    checkpoints = [each for place in ("", "ssm-*/") for each in folder.glob(f"{place}checkpoints/step-*")]
    if resume != "auto":
        from ...trainers.loop.setup import resume_from

        own = recipe.record.hook("check_resume")
        if own is not None:
            own(folder, resume)
        checkpoint = resume_from(folder, resume)
        if checkpoint is not None:
            runs.append(checkpoint.resolve().parents[1])
            checkpoints.append(checkpoint)
    for run in runs:
        _check_same_recipe(run, recipe, said=any(map(_identity_in, checkpoints)))
    for each in checkpoints:
        _check_same_run(each, recipe)


def _check_same_recipe(run: Path, recipe: Recipe, *, said: bool) -> None:
    """`said`: the checkpoints tell themselves what they are of."""
    saved = run / "run.yaml"
    if not saved.is_file():
        if not said:
            _log.warning("%s is missing, so nothing says whether its run had this recipe", saved)
        return
    before, now = identity_of(load_recipe(str(saved)).recipe, recipe), recipe.identity
    asked = [path for path in before.keys() | now.keys() if changes_weights(path) and not (said and path == STEPS)]
    changed = sorted(path for path in asked if before.get(path) != now.get(path))
    if changed:
        raise RequestError(
            f"{run} holds a run of another recipe; these values differ: "
            f"{', '.join(changed[:6])}. Give the same values to go on, or begin in another --out"
        )


def _check_same_run(checkpoint: Path, recipe: Recipe) -> None:
    """Compare what a checkpoint says it is of; those of 0.1.0 say nothing."""
    there = _identity_in(checkpoint)
    if there is None:
        return
    before = compared(there, recipe)
    # values that a later version has added were what they are by default
    for path, value in identity_of(Recipe(method=recipe.method), recipe).items():
        if not any(_is_within(path, each) or _is_within(each, path) for each in there):
            before[path] = value
    check_longer(checkpoint, before, recipe)
    remedy = "It is of another run. Give the same values to go on with that one, or begin in another --out"
    # what the checkpoint has and this recipe does not, such as an entry of data.columns, differs too
    expected = dict.fromkeys(before) | recipe.identity | {STEPS: before.get(STEPS)}  # which have been looked at
    here = {path: value for path, value in expected.items() if changes_weights(path)}
    check_identity(checkpoint, before, here, remedy=remedy)


def _is_within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _identity_in(checkpoint: Path) -> dict[str, object] | None:
    try:
        recipe = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["recipe"]
        return flat(recipe) if isinstance(recipe, dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a damaged one is passed over when one is chosen


def has_begun(folder: Path) -> bool:
    """Whether there is work to go on from: a checkpoint, of an SSM too, or an SSM that is done."""
    patterns = ("checkpoints/step-*", "ssm-*/checkpoints/step-*", "ssm-*/coverage.safetensors")
    return any(any(folder.glob(each)) for each in patterns)
