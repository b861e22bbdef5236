"""Where a setting pays: speed-up against draft length, nodes of a tree, batch, context and temperature.

Lengths and nodes are the predictions of `profile.py`. For the others the best setting of each method decodes short
answers beside plain decoding, at other batches and behind other contexts, which gives the time of a step; at other
temperatures it decodes together, which gives tau. Then speed-up = tau * plain step / step, where a row's tau does
not depend on its batch. On a context it may: what a drafter accepts far into a text is not measured here.

From which cost of a target call each method would pay is told too, as the speed model has it.

Read next: `profile.py`; `../report/plots.py`, which draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from math import exp, log
from typing import Any

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import Generation, autoregressive, generate
from ...decoding.proposal import Proposer
from ...decoding.sampling import Warper
from ...drafters.grids import Grid
from ...drafters.tuned_file import from_call
from ..config import EvalConfig
from ..measure.metrics import tau
from ..measure.requests import Request
from ..measure.timing import enough_tokens
from ..report.plots import LOGARITHMIC
from .race import Raced
from .settings import Contender, DraftSetting, Prediction, phrases

_BATCHES = (1, 2, 4, 8)
_CONTEXTS = (32, 128, 512)
_TEMPERATURES = (0.0, 0.5, 1.0)
_TOKENS = 12  # of an answer that is timed, where none is replayed
_ROUNDS = 2  # the quicker one counts


@dataclass(frozen=True)
class Surface:
    """Speed-up against one thing, the others as they were tuned."""

    method: str
    """The contender's name."""
    label: str
    axis: str
    """`draft length`, `nodes`, `batch`, `context` or `temperature`."""
    points: tuple[tuple[float, float], ...]
    """Value and predicted speed-up, in growing order of the value."""

    def crossings(self) -> list[float]:
        """Where the speed-up passes 1, on a line between points; on a logarithmic axis between logarithms."""
        scale, back = (log, exp) if self.axis in LOGARITHMIC else (float, float)
        found = []
        for (x0, y0), (x1, y1) in pairwise(self.points):
            if (y0 >= 1) != (y1 >= 1):
                share = (1 - y0) / (y1 - y0)
                found.append(back(scale(x0) + share * (scale(x1) - scale(x0))))
        return found

    def to_dict(self) -> dict[str, Any]:
        """For `tune.json`."""
        return {
            "method": self.method,
            "label": self.label,
            "axis": self.axis,
            "points": [list(point) for point in self.points],
            "crosses_1_at": self.crossings(),
        }


def by_size(predictions: Sequence[Prediction], temperature: float) -> list[Surface]:
    """Every grid of every method: chains against their length, trees against their nodes."""
    speed = {
        (each.setting.contender.name, tuple(sorted(each.setting.values.items()))): each.speedup for each in predictions
    }
    contenders = {each.setting.contender.name: each.setting.contender for each in predictions}
    made = []
    for contender in contenders.values():
        grids = contender.grids_at(temperature)
        for grid in grids:
            points = tuple(
                (float(size), speed[contender.name, tuple(sorted(grid.values(size).items()))]) for size in grid.sizes
            )
            made.append(Surface(contender.name, _grid_label(contender, grid, grids), _axis(grid), points))
    return made


def _axis(grid: Grid) -> str:
    return "draft length" if grid.chain else "nodes"


def _grid_label(contender: Contender, grid: Grid, grids: Sequence[Grid]) -> str:
    """The method, and what tells the grid from its others on the same axis."""
    others = [each.fixed for each in grids if _axis(each) == _axis(grid)]
    differing = {name for name, value in grid.fixed.items() if any(other.get(name) != value for other in others)}
    words = phrases(grid.values(grid.sizes[0]))
    return ", ".join([contender.title, *(each for name, each in words if name in differing)])


def measured_surfaces(
    target: Backbone, best: Sequence[Prediction], requests: Sequence[Request], config: EvalConfig, temperature: float
) -> Iterator[Surface]:
    """Batch, context and temperature of some settings, one of each method."""
    for prediction in best:
        drafter = prediction.setting.contender.load(prediction.setting.values)
        step = _Steps(target, drafter, config, temperature)
        room = target.context - step.tokens - drafter.nodes - 1
        ids = [each.ids for each in requests]
        batches = [(float(b), prediction.tau * step.ratio(_rows(ids, b))) for b in _BATCHES]
        contexts = [
            (float(length), prediction.tau * step.ratio(_rows([_long(ids, length)], config.batch)))
            for length in _CONTEXTS
            if length <= room
        ]
        here = step.ratio(_rows(ids, config.batch))
        warm = [(T, step.tau_at(T, requests) * here) for T in _TEMPERATURES]
        for axis, points in (("batch", batches), ("context", contexts), ("temperature", warm)):
            yield Surface(prediction.setting.contender.name, prediction.setting.label, axis, tuple(points))


class _Steps:
    """Short decodings of one setting and of plain decoding, at one temperature."""

    def __init__(self, target: Backbone, drafter: Proposer, config: EvalConfig, temperature: float) -> None:
        self._target, self._drafter, self._config, self._temperature = target, drafter, config, temperature
        # prompts leave room for answers of that length
        self.tokens = max(_TOKENS, min(enough_tokens(_TOKENS, target.device), config.max_new_tokens))

    def _warper(self, temperature: float) -> Warper:
        return Warper.of(self._config, temperature)

    def ratio(self, ids: Sequence[Sequence[int]]) -> float:
        """Time of a step of plain decoding / time of a step of the setting."""
        how: dict[str, Any] = {
            "warper": self._warper(self._temperature),
            "max_new_tokens": max(self.tokens, self._drafter.draft_length + 2),
            "seed": self._config.seed,
        }
        plain, own = [], []
        for _ in range(_ROUNDS):
            plain.append(_step_seconds(autoregressive(self._target, ids, **how)))
            own.append(_step_seconds(generate(self._target, self._drafter, ids, rule=self._config.rule, **how)))
        return min(plain) / min(own)

    def tau_at(self, temperature: float, requests: Sequence[Request]) -> float:
        """Tokens per step at another temperature, all requests decoded together."""
        done = generate(
            self._target,
            self._drafter,
            [each.ids for each in requests],
            warper=self._warper(temperature),
            max_new_tokens=self._config.max_new_tokens,
            eos_ids=self._target.eos_ids,
            seed=self._config.seed,
            requests=[each.number for each in requests],
            rule=self._config.rule,
        )
        return tau([done.steps])


def _step_seconds(done: Generation) -> float:
    return done.decode_seconds / max(1, done.target_calls)


def _rows(ids: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    return [list(each) for each in islice(cycle(ids), count)]


def _long(ids: Sequence[Sequence[int]], length: int) -> list[int]:
    """A text of that many tokens, out of the prompts' own."""
    return list(islice(cycle([token for each in ids for token in each]), length))


AT_LEAST = 1.1
"""Predicted and measured differ by some per cent: what was measured to be slower pays no sooner."""


@dataclass(frozen=True)
class BreakEven:
    """The setting of a method that pays at the lowest cost of a target call, and that cost."""

    setting: DraftSetting
    factor: float | None
    """How many times as long as here a call would take, drafting as long as here; None: at no length."""
    call_seconds: float
    """What a call took here."""
    pays: bool | None
    """Whether the method was measured to pay here; None where its interval does not tell."""

    @property
    def words(self) -> str:
        """`would pay from a target call of 14.3 ms, 1.40 times the one measured`."""
        may = {True: "pays", False: "would pay", None: "is predicted to pay"}[self.pays]
        known = " that the speed model knows" if self.pays and self.factor is None else ""
        return f"{may} {from_call(self.factor, self.call_seconds)}{known}"

    def to_dict(self) -> dict[str, Any]:
        """For `tune.json`."""
        return {
            "method": self.setting.contender.name,
            "title": self.setting.contender.title,
            "settings": dict(self.setting.values),
            "label": self.setting.label,
            "factor": self.factor,
            "target_call_seconds": self.call_seconds,
            "pays": self.pays,
            "words": self.words,
        }


def break_evens(predictions: Sequence[Prediction], done: Sequence[Raced], call_seconds: float) -> list[BreakEven]:
    """One of each method that was measured, the fastest first."""
    fastest = {each.prediction.setting.contender.name: each for each in reversed(done)}
    made = []
    for name in dict.fromkeys(each.prediction.setting.contender.name for each in done):
        own = [each for each in predictions if each.setting.contender.name == name]
        made.append(_break_even(own, fastest[name], call_seconds))
    return made


def _break_even(predictions: Sequence[Prediction], fastest: Raced, call_seconds: float) -> BreakEven:
    """Of a method's predictions, and how the fastest of its settings was measured."""
    known = [(each.pays_from, each.setting) for each in predictions if each.pays_from is not None]
    factor, setting = min(known, key=lambda each: each[0], default=(None, fastest.prediction.setting))
    slower = fastest.speedup.high < 1
    if factor is not None:
        factor = max(AT_LEAST, factor) if slower else min(1.0, factor) if fastest.pays else factor
    return BreakEven(setting, factor, call_seconds, fastest.pays or (False if slower else None))
