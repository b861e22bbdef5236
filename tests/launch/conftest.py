"""Evaluations whose figures no test looks at time their calls twice, not thirty times."""

from __future__ import annotations

import pytest
from draftsmith.eval.measure import speed


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed._ROUNDS, "rounds", 2)
    monkeypatch.setitem(speed._ROUNDS, "at_least", 1)
