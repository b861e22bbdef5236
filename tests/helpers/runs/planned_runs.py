"""Runs of decoding whose times and acceptance are planned: the clock is the test's, and every number known by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from draftsmith.data.prompts import Prompt
from draftsmith.eval.measure.metrics import Counts
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.rounds import AllRounds


def requests_of(lengths: list[int], first: int = 0) -> list[Request]:
    """Prompts of those lengths, numbered from `first`, no two alike."""
    return [
        Request(Prompt(str(n), "all", (), chat=False), [n + 1] * length, n)
        for n, length in enumerate(lengths, start=first)
    ]


def drafter_of(size: int, nodes: int | None = None) -> Any:
    """What is asked of a proposer where nothing is decoded."""
    return SimpleNamespace(draft_length=size, nodes=size + 1 if nodes is None else nodes)


def counts_of(steps: int, accepted: list[int]) -> Counts:
    """Of one request whose depths were accepted so often."""
    passed_D = np.array(accepted, float)
    tested_D = np.array([steps, *accepted[:-1]], float)
    return Counts(steps, steps + sum(accepted), 0, tested_D, passed_D, passed_D.copy())


def run_of(counts: list[Counts], **amounts: Any) -> AllRounds:
    """A run with these sums; a number stands for a list of it alone."""
    lists = ("seconds_G", "baseline_seconds_G", "tokens_G", "baseline_tokens_G")
    values = {
        name: [value] if name in lists and not isinstance(value, list) else value for name, value in amounts.items()
    }
    return AllRounds(counts=counts, **values)
