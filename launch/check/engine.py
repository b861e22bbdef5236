"""What a recipe has to say, and may not say, where no process has the whole target: it is cut, or an engine has it.

Read next: `unread.py` and `features.py`, which ask here; `trainers/teacher/engine.py`, the run.
"""

from __future__ import annotations

import logging
from typing import Any

from ...errors import RequestError
from ...trainers.config import FROM_TARGET, FeaturesConfig
from ..recipe.model import Recipe

_log = logging.getLogger(__name__)
_WHOLE = "it has to be here and whole: features.source online, target.sharding none, target.tensor_parallel 1"
_OF_ENGINE = ("server", "served_model", "shared", "requests", "timeout", "answers", "answer_temperature")


def check_whole_target(recipe: Recipe) -> None:
    """Raise RequestError for what only a whole target can do where there is none, and for values of no engine."""
    features = recipe.features
    if recipe.target.is_shared:
        _check_cut(recipe)
    if features.source != "engine":
        default = FeaturesConfig()
        given = next((name for name in _OF_ENGINE if getattr(features, name) != getattr(default, name)), None)
        if given is not None:
            raise RequestError(
                f"features.{given} is {getattr(features, given)!r}, and features.source is {features.source}, which "
                "asks no engine; set features.source to engine, or leave it out"
            )
        return
    for name in ("server", "shared"):
        if not getattr(features, name):
            raise RequestError(
                f"features.source is engine, and features.{name} is not set; docs/engine.md says to what"
            )
    _check_answers(recipe)
    reason = needs_whole(recipe) or _probes_early(recipe)
    if reason is not None:
        raise RequestError(f"features.source is engine, so the whole target is not here, and {reason}")


def _check_answers(recipe: Recipe) -> None:
    """Raise RequestError for answers that leave no room for a prompt, and for a temperature of none."""
    features, length = recipe.features, recipe.data.sequence_length
    if features.answers is None:
        if features.answer_temperature:
            raise RequestError(
                f"features.answer_temperature is {features.answer_temperature:g}, and no answers are asked for; set "
                "features.answers to their most tokens, or leave it out"
            )
    elif features.answers >= length - 1:
        raise RequestError(
            f"features.answers is {features.answers}, and a row has {length} tokens (data.sequence_length): no room "
            "is left for a prompt; lower the one or raise the other"
        )


def _check_cut(recipe: Recipe) -> None:
    """Raise RequestError for what only a whole target can do, and for a target that is nowhere here."""
    target = recipe.target
    if recipe.features.source == "engine":
        raise RequestError(
            f"{target.cut_as}, and features.source is engine: the engine holds the target, and nothing is left here "
            "to cut; leave target.sharding and target.tensor_parallel"
        )
    reason = needs_whole(recipe)
    if reason is not None:
        raise RequestError(f"{target.cut_as}, so no process has the whole target, and {reason}")
    if target.tensor_parallel > 1 and recipe.loop.context_parallel > 1:
        raise RequestError(
            f"{target.cut_as} and loop.context_parallel {recipe.loop.context_parallel}: a team makes a pass for the "
            "rows of each of its processes, which would be the same rows; set one of the two to 1"
        )


def needs_whole(recipe: Recipe) -> str | None:
    """What of a recipe runs the target itself, and what to do; None where nothing does."""
    if recipe.tunes_target:
        return f"{recipe.method} trains it; {_WHOLE}"
    if recipe.record.samples(recipe) is not None:
        return f"{recipe.method} learns from texts that it writes; {_WHOLE}"
    if recipe.rollouts.share and recipe.record.drafts_its_own:
        return "rollouts.share has it read what is drafted, in this process; set it to 0"
    if recipe.rollouts.share:
        return "rollouts.share has it follow texts that the draft writes; set it to 0 (answers: draftsmith generate)"
    if recipe.model.start_from == FROM_TARGET:
        return f"model.start_from {FROM_TARGET} cuts the draft out of it; start from another model, or from none"
    return None


def _probes_early(recipe: Recipe) -> str | None:
    if recipe.probe.every_steps is not None:
        return (
            f"a probe every {recipe.probe.every_steps} steps (probe.every_steps) would decode with it; leave that "
            'empty: held-out rows still measure the loss (--probe.every_steps "")'
        )
    return None


def engine_line(recipe: Recipe, target: Any, states: tuple[int, ...]) -> str:
    """What the engine is asked for; how it is started goes to the log, whole, as a table would cut it."""
    from ...data.features.engine import start_command
    from ...trainers.teacher.engine import request_of

    request = request_of(recipe.features, recipe.target.path, states, target.config)
    _log.info("the engine is started by\n%s", start_command(recipe.target.path, request))
    return f"asked of {request.public_url}, the states {list(request.layers)}"
