"""The folder of a run, and whether a run may go on in it: there is something whole, and it is of this recipe.

A run may get more steps where those that it has taken are those of a run that was planned so long. The rate of a step
hangs on how many there are, unless it is constant or `wsd` has not begun to decay; so do the weights of the loss where
they move over a share of the steps. Where all of a checkpoint's steps had the same, going on is exact, to the bit.
Where not, more steps are a run of their own.

The folder is fit to be written, held against other runs, cleared of what kills have left.

Read next: `trainers/loop/setup.py`, where a checkpoint is chosen.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import RequestError
from ...storage import (
    MANIFEST,
    check_identity,
    check_name,
    delete_leftovers,
    hold,
    is_first,
    writable_folder,
    write_text,
    writing,
)
from ...storage.identity import flat
from ...storage.staging import remove
from ..recipe.identity import changes_weights, compared, identity_of
from ..recipe.load import Resolved, load_recipe
from ..recipe.model import Recipe

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
    """Compare what a checkpoint says it is of; a damaged one says nothing."""
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


STEPS = "loop.steps"


def check_longer(checkpoint: Path, there: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise RequestError where a checkpoint is of a run of other steps, and going on would not be exact.

    Args:
        there: what the checkpoint says it is of, by dotted path.
    """
    planned, now = there.get(STEPS), recipe.loop.steps
    if planned is None or planned == now:
        return
    why = _why_not(int(planned), now, _taken(checkpoint), recipe)
    if why is None:
        return
    run = checkpoint.resolve().parents[1]
    made = run / ("target" if recipe.record.family is None else "drafter")
    raise RequestError(
        f"{checkpoint} is of a run of {planned} steps, and {STEPS} is {now} here: {why}. Give --{STEPS} {planned} to "
        f"go on with that run; more steps behind its end are a run of their own, with --model.start_from {made} and "
        "another --out: its weights go on, its moments and the learning rate begin anew"
    )


def _taken(checkpoint: Path) -> int:
    """Steps behind which the checkpoint was written."""
    return int(checkpoint.resolve().name.rpartition("-")[2])


def _why_not(planned: int, now: int, taken: int, recipe: Recipe) -> str | None:
    """What of the steps that were taken would have been otherwise; None where nothing would."""
    from ...trainers.loop.optimizer import rate
    from ...trainers.losses.ramp import Ramp

    config = recipe.optimizer
    if now < planned:
        return "a run is not made shorter"
    if recipe.record.runs(recipe) > 1:
        return "several models are trained one behind the other, each in so many steps"
    odd = next((step for step in range(taken) if rate(step, planned, config) != rate(step, now, config)), None)
    if odd is not None and config.schedule == "wsd":
        return (
            f"its learning rate has decayed since step {odd} (optimizer.decay_share), and {taken} are taken. A "
            f"checkpoint from step {odd} or before goes on exactly, by --resume PATH with another --out"
        )
    if odd is not None:
        return (
            f"under {now} steps the learning rate ({config.schedule}) would have been another from step {odd} on, and "
            f"{taken} are taken. Under optimizer.schedule wsd a run gets more steps before its decay"
        )
    if recipe.record.reads_value("objective.from_kl_share", recipe):
        ramp = Ramp.of(recipe.objective)
        if any(ramp.at(step, planned) != ramp.at(step, now) for step in range(taken)):
            return "the weights of the loss move over a share of the steps (objective.from_kl_share)"
    return None


_FILES = ("run.yaml", "status.json", "metrics.jsonl", "data.json", "rejected.jsonl")
_FOLDERS = ("checkpoints", "drafter", "target", "tokenizer", "continuations")


@contextmanager
def held_folder(folder: Path, resolved: Resolved, resume: str) -> Iterator[None]:
    """Make the run's folder, and keep other runs out of it inside.

    Raises:
        RequestError: `resume` asks for what cannot be gone on with, another run is at work there, or a
            file is in the way: nothing is written then. EnvironmentFailure: nobody may write there.
    """
    check_name(folder)
    check_resume(folder, resolved.recipe, resume)
    writable_folder(folder)
    check_places(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not is_first():
        yield  # the first process holds the folder for all
        return
    with hold(folder) as alone:
        check_resume(folder, resolved.recipe, resume)  # again: from here on nobody else writes
        _clear(folder, alone=alone)
        with writing(folder):
            write_text(folder / "run.yaml", resolved.yaml())
        yield


def check_places(folder: Path) -> None:
    """Raise RequestError where something else has the name of what the run writes."""
    for name in _FILES:
        if (folder / name).is_dir():
            raise RequestError(f"{folder / name} is a folder, where the run writes a file: move it away")
    for name in _FOLDERS:
        if os.path.lexists(folder / name) and not (folder / name).is_dir():
            raise RequestError(f"{folder / name} is a file, where the run writes a folder: move it away")


def _clear(folder: Path, *, alone: bool) -> None:
    """Delete what killed runs have left half written or half deleted."""
    from ...trainers.loop.checkpoint import delete_halves

    remove(folder / ".alive")  # `trainers/loop/interruptions.py`
    for place in (folder, folder / "eval", folder / "continuations", *folder.glob("ssm-*")):
        delete_leftovers(place, alone=alone)
    for place in (folder, *folder.glob("ssm-*")):
        delete_halves(place / "checkpoints", alone=alone)
