"""The loop of a recipe's run, made as `draftsmith train` makes it, whose steps a script takes itself.

Read next: `../train_step.py` and `../compiled_step.py`, which time them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.train import train
from draftsmith.trainers.loop.loop import Loop, RunOutcome


def loop_of(recipe: str, parent: Path, values: dict[str, str]) -> Loop:
    """The loop that `draftsmith train` would run, made by it and kept in place of being run."""
    kept: list[Loop] = []

    def keep(loop: Loop, _resume: Path | None) -> RunOutcome:
        kept.append(loop)
        return RunOutcome(0, float("nan"), None)

    folder = Path(tempfile.mkdtemp(dir=parent))
    real, Loop.run = Loop.run, keep  # type: ignore[method-assign, assignment]
    try:
        train(load_recipe(recipe, list(values.items())), out=folder)
    finally:
        Loop.run = real  # type: ignore[method-assign]
    (loop,) = kept
    return loop
