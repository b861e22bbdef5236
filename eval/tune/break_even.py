"""From which cost of a target call each method would pay, as the speed model has it.

Read next: `profile.py`, whose predictions say it setting by setting; `launch/measure/tune_words.py`, which tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...drafters.tuned_file import from_call
from .race import Raced
from .settings import Prediction, Setting

AT_LEAST = 1.1
"""Predicted and measured differ by some per cent: what was measured to be slower pays no sooner."""


@dataclass(frozen=True)
class BreakEven:
    """The setting of a method that pays at the lowest cost of a target call, and that cost."""

    setting: Setting
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
