"""Whether a run may get more steps: where those that it has taken are those of a run that was planned so long.

The rate of a step hangs on how many there are, unless it is constant or `wsd` has not begun to decay; so do the
weights of the loss where they move over a share of the steps. Where all of a checkpoint's steps had the same, going on
is exact, to the bit. Where not, more steps are a run of their own. Read next: `resume.py`, which asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import RequestError
from ..recipe.model import Recipe

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
