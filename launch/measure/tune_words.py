"""What `draftsmith tune` says and keeps: a sentence, a table of predicted against measured, `tune.json`.

Read next: `tune.py`, whose results they are; `eval/report/report.py`, which shows them beside an evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from ...decoding.backbone.backbone import Backbone
from ...drafters.identity import shown_name
from ...drafters.tuned_file import from_call
from ...eval.config import EvalConfig
from ...eval.measure.arms import NOT_AUDITED
from ...eval.measure.environment import environment
from ...eval.measure.weight_files import target_hash
from ...eval.report.pays import in_words
from ...eval.report.tables import accuracy, interval, number, off, plain_table
from ...eval.tune.race import Raced
from ...eval.tune.settings import Prediction
from ...eval.tune.surfaces import AT_LEAST, BreakEven, Surface
from ..check.early import NamedFolders
from .held_out import where

if TYPE_CHECKING:
    from ..requests import TuneRequest


def sentence(done: Sequence[Raced], temperature: float, batch: int) -> str:
    """What pays, in one sentence."""
    best = done[0]
    where_ = f"at T = {temperature:g}, batch {batch}"
    measured = f"{best.prediction.setting.label}: {interval(best.speedup.to_list())} times plain decoding {where_}"
    if best.pays:
        return measured + _closest(done)
    if isnan(best.speedup.low):
        return f"{measured}; too little was timed to tell"
    if best.speedup.high >= 1:
        return f"{measured}; not told apart from plain decoding"
    least, label = best.prediction.pays_from, best.prediction.setting.label
    hope = from_call(None if least is None else max(AT_LEAST, least))
    nearest = f"{label} comes nearest with {interval(best.speedup.to_list())} times"
    return f"nothing beats plain decoding {where_}: {nearest}, and would pay {hope}"


def _closest(done: Sequence[Raced]) -> str:
    """Which setting was measured faster than the one that is kept, by less than its interval."""
    best, method = done[0], done[0].prediction.setting.contender.name
    faster = [
        each.prediction.setting.label
        for each in done[1:]
        if each.speedup.value > best.speedup.value and each.prediction.setting.contender.name == method
    ]
    return f" (measured level with {', '.join(faster)}; predicted and measured together decide)" if faster else ""


def table(request: TuneRequest, done: Sequence[Raced]) -> Any:
    """What was measured, the setting that is kept first, beside what was predicted."""
    columns = (
        ("method", ""),
        ("predicted", "speed-up"),
        ("measured", "speed-up"),
        ("off", "%"),
        ("by cost", "%"),
        ("tau", "tokens/call"),
    )
    cells = [
        (
            each.prediction.setting.label,
            number(each.prediction.speedup),
            interval(each.speedup.to_list()),
            off(each.prediction.speedup, each.speedup.value),
            off(each.predicted_at_tau, each.speedup.value),
            interval(each.tau.to_list()),
        )
        for each in done
    ]
    at = f"T = {request.temperature:g}, batch {request.batch}"
    # one verdict for all rows: a column of it would leave no room for the settings' names
    intervals = "95 % intervals, over all looks and settings together"
    title = f"Speed-up over plain decoding at {at}, {NOT_AUDITED} [{intervals}]"
    return plain_table(title, columns, cells)


def accuracy_lines(done: Sequence[Raced]) -> list[str]:
    """How far predictions were off; then what is left of it, which is the costs', once the prompts' tau is known."""
    return [
        accuracy([(each.prediction.speedup, each.speedup.value) for each in done]),
        "by cost, at the tau of the measured prompts: "
        + accuracy([(each.predicted_at_tau, each.speedup.value) for each in done]),
    ]


def content_of(
    request: TuneRequest,
    first: NamedFolders,
    target: Backbone,
    config: EvalConfig,
    predictions: Sequence[Prediction],
    done: Sequence[Raced],
) -> dict[str, Any]:
    """What `tune.json` holds."""
    return {
        "target": shown_name(target),
        "target_sha256": target_hash(target),
        "temperature": request.temperature,
        "batch": request.batch,
        "prompts": request.prompts or where(first.recipe),
        "max_new_tokens": config.max_new_tokens,
        "verdict": NOT_AUDITED,
        "sentence": sentence(done, request.temperature, request.batch),
        "measured": [_raced(each) for each in done],
        "predicted": [_prediction(each) for each in predictions],
        "environment": environment(),
    }


def _raced(each: Raced) -> dict[str, Any]:
    """A row of the table: what was predicted, measured, and how far off that was."""
    return _prediction(each.prediction) | {
        "label": each.prediction.setting.label,
        "predicted_at_tau": each.predicted_at_tau,
        "measured": each.speedup.to_list(),
        "predicted_over_measured": None if isnan(each.speedup.value) else each.prediction.speedup / each.speedup.value,
        "measured_tau": each.tau.to_list(),
        "requests": each.requests,
    }


def break_even_lines(evens: Sequence[BreakEven]) -> list[str]:
    """From which cost of a target call each method pays."""
    return [f"{each.setting.label}: {each.words}" for each in evens]


def surface_lines(surfaces: Sequence[Surface]) -> list[str]:
    """Where each surface lies above 1."""
    return [f"{each.label}: {in_words(each.axis, each.points, each.crossings())}" for each in surfaces if each.points]


def _prediction(each: Prediction) -> dict[str, Any]:
    own = {name: value for name, value in vars(each).items() if name != "setting"}
    return {"method": each.setting.contender.name, "settings": dict(each.setting.values), **own}
