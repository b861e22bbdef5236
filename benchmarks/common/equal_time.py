"""Equal training time instead of equal steps: how many steps of each family fit, by a short run of its own.

The number is kept beside the runs, so that a call that was cut goes on with the same one however busy the
machine is by then; a first call wants the machine for itself. Read next: `runs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from draftsmith.benchmarks.common.runs import kept, seconds_of
from draftsmith.launch.recipe.load import load_recipe

TIMED = 40
"""Steps of the short run; a run reports its speed every ten, and the median counts."""


def steps_within(seconds: float, place: Path, train: Callable[[int], Sequence[Path]]) -> int:
    """The most steps that take no longer than `seconds`, as kept in `place` or found now.

    Args:
        train: (steps) -> the folders of the runs that they are made of.

    Raises:
        SystemExit: fewer than two steps fit.
    """

    def found() -> dict[str, float]:
        timed = sum(seconds_of(run) for run in train(TIMED))
        return {"seconds_of_a_step": timed / TIMED, "steps": int(seconds * TIMED / timed)}

    steps = int(kept(place, found)["steps"])
    if steps < 2:
        raise SystemExit(f"--wall {seconds:g}: {steps} steps fit ({place}); name more seconds and remove that file")
    return steps


def runs_of(run: Path, *, behind: bool) -> list[Path]:
    """A run and, where it began with another run's drafter, that one in front."""
    began_with = load_recipe(str(run / "run.yaml")).recipe.model.start_from if behind else None
    return [run] if began_with is None else [Path(began_with).parent, run]
