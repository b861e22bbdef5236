"""From which cost of a target call each method pays: the least of its settings, held to what was measured."""

from __future__ import annotations

import pytest
from draftsmith.eval.measure.metrics import Interval
from draftsmith.eval.tune.race import Raced
from draftsmith.eval.tune.settings import Contender, DraftSetting, Prediction
from draftsmith.eval.tune.surfaces import BreakEven, break_evens

ONE, TWO = (Contender(name, name, (), True, lambda _: None) for name in ("one", "two"))  # type: ignore[arg-type, return-value]


def prediction(contender: Contender, length: int, pays_from: float | None) -> Prediction:
    return Prediction(DraftSetting(contender, {"eval.draft_length": str(length)}), 2.0, 5.0, 1.0, 1.0, pays_from)


def raced(each: Prediction, low: float, high: float) -> Raced:
    return Raced(each, Interval((low + high) / 2, low, high), Interval(2.0, 1.9, 2.1), 24)


def test_the_setting_that_pays_first_stands_for_its_method() -> None:
    """It need not have been among those that were measured."""
    ours = [prediction(ONE, 1, 1.9), prediction(ONE, 2, 1.4), prediction(ONE, 3, None)]
    theirs = [prediction(TWO, 1, None), prediction(TWO, 4, None)]
    done = [raced(ours[0], 0.8, 0.9), raced(theirs[1], 0.5, 0.6)]
    first, second = break_evens([*ours, *theirs], done, 0.01)
    assert (first.setting, first.factor) == (ours[1].setting, 1.4)
    assert first.words == "would pay from a target call of 14 ms, 1.40 times the one measured"
    assert (second.setting, second.factor) == (theirs[1].setting, None)
    assert second.words == "would pay at no cost of a target call"
    assert first.to_dict()["label"] == "one, chain of 2"


@pytest.mark.parametrize(
    ("low", "high", "pays_from", "factor", "words"),
    [
        (0.8, 0.9, 0.7, 1.1, "would pay from a target call of 22 ms, 1.10 times the one measured"),
        (0.9, 1.06, 0.7, 0.7, "is predicted to pay from a target call of 14 ms, 0.70 times the one measured"),
        (1.2, 1.4, 0.7, 0.7, "pays from a target call of 14 ms, 0.70 times the one measured"),
        (1.2, 1.4, 1.3, 1.0, "pays from a target call of 20 ms, 1.00 times the one measured"),
        (1.2, 1.4, 0.0, 0.0, "pays at any cost of a target call"),
        (1.2, 1.4, None, None, "pays at no cost of a target call that the speed model knows"),
    ],
)
def test_what_was_measured_has_the_last_word(
    low: float, high: float, pays_from: float | None, factor: float | None, words: str
) -> None:
    each = prediction(ONE, 1, pays_from)
    (made,) = break_evens([each], [raced(each, low, high)], 0.02)
    assert isinstance(made, BreakEven)
    assert made.factor == factor
    assert made.words == words
