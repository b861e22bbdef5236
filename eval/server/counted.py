"""Acceptance of blocks by what a server counted: per answer where it says so, else per block by its counters.

Read next: `counters.py`, which reads them; `rows.py`, which shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..measure.metrics import Counts, Floats
from .blocks import Half
from .counters import ServerCounters, within
from .exchange import Exchange

_OTHERS = 1.02  # tokens that a server wrote / tokens that came here, from which on others were asking too


class Counted:
    """What counts, what is resampled, and what has to be known of it."""

    def __init__(self, halves: Sequence[Half]) -> None:
        self.notes: list[str] = []
        self._drafted = [half.counted.drafted for half in halves if half.counted is not None]
        answers = [each.acceptance for half in halves for each in half.exchanges]
        of_answers = [each for each in answers if each is not None]
        of_blocks = [None if half.counted is None else half.counted.counts() for half in halves]
        self.by_request = bool(answers) and len(of_answers) == len(answers)
        if self.by_request and not any(len(each.tested_D) for each in of_answers):
            # the answers say sums alone: a page that counts steps with a draft, by position, says more
            self.by_request = not all(
                counts is not None and len(counts.tested_D) and _ours(half)
                for half, counts in zip(halves, of_blocks, strict=True)
            )
        found = of_answers if self.by_request else [each for each in of_blocks if each is not None]
        kept = [each for half in halves for each in self._kept(half)]
        if not self.by_request and any(half.counted is None for half in halves):
            found, kept = [], []  # what some blocks counted is not what all of them did
        self.counts = _as_deep(kept if kept else found)
        self._note_source(halves)
        left = sum(each.emitted for each in found) - sum(each.emitted for each in self.counts)
        if left:
            self.notes.append(
                f"{left:,} drafts were accepted behind the end of an answer: tau leaves them out, alpha and n_alpha "
                "are as the server counts"
            )

    def _kept(self, half: Half) -> list[Counts]:
        """Of a block, its counts or those of its answers, without what is behind the ends."""
        if self.by_request:
            return [count for each in half.exchanges if (count := count_of(each)) is not None]
        counts = None if half.counted is None else half.counted.counts()
        if counts is None or half.counted is None:
            return []
        if not _ours(half):
            return [counts]
        return [within(counts, half.counted.written - len(half.exchanges))]

    def _note_source(self, halves: Sequence[Half]) -> None:
        looked = [half.counted for half in halves]
        if self.by_request:
            if self.draft_length is None:
                self.notes.append(
                    "of each answer the server says how many drafts were accepted: tau is of all calls of the target "
                    "behind the first token, those without a draft too"
                )
        elif None in looked:
            self.notes.append(
                "acceptance is not known: the server shows no counters at /metrics that are known here (vLLM's, "
                "SGLang's with --enable-metrics, llama.cpp's with --metrics), or it began anew meanwhile"
            )
        elif not self.counts:
            self.notes.append("the server counts no drafts: it does not speculate, or does not say so")
        elif (note := _others([each for each in looked if each is not None], halves)) is not None:
            self.notes.append(f"{note}: it served others too, and its counts of acceptance are of all of them")

    @property
    def unit(self) -> str | None:
        """What is resampled: whole requests, or whole blocks of them."""
        return None if not self.counts else "requests" if self.by_request else "blocks"

    @property
    def draft_length(self) -> int | None:
        """Positions of a draft; None where the server does not count by position."""
        return max((len(each.tested_D) for each in self.counts), default=0) or None

    @property
    def mean_nodes(self) -> float | None:
        """Tokens of a verify call, the root included."""
        drafted = [each for each in self._drafted if each is not None]
        steps = sum(each.steps for each in self.counts)
        return None if not steps or not drafted or self.by_request else 1 + sum(drafted) / steps


def count_of(answer: Exchange) -> Counts | None:
    """What the drafter did for one answer, without what is behind its end."""
    counts = answer.acceptance
    return counts if counts is None or not answer.counted else within(counts, answer.tokens - 1)


def _ours(half: Half) -> bool:
    """Whether all that the server counted meanwhile is of the requests of this block."""
    counted = half.counted
    if counted is None or half.refused:
        return False
    tokens_known = all(each.counted for each in half.exchanges)
    if counted.requests is None and not tokens_known:
        return False
    return counted.requests in (None, len(half.exchanges)) and (not tokens_known or counted.written == half.tokens)


def _others(looked: Sequence[ServerCounters], halves: Sequence[Half]) -> str | None:
    """By what it shows that others asked too; None where it does not. Pieces of a stream are no tokens."""
    if all(each.counted for half in halves for each in half.exchanges):
        written, tokens = sum(each.written for each in looked), sum(half.tokens for half in halves)
        return (
            f"the server wrote {written:,} tokens while {tokens:,} came here" if written > _OTHERS * tokens else None
        )
    answered = sum(each.requests or 0 for each in looked)
    asked = sum(len(half.exchanges) + len(half.refused) for half in halves)
    return f"the server answered {answered:,} requests while {asked:,} were asked here" if answered > asked else None


def _as_deep(counts: Sequence[Counts]) -> list[Counts]:
    """All with as many positions as the longest draft had: of shorter ones the others were never tested."""
    depth = max((len(each.tested_D) for each in counts), default=0)

    def deep(each_D: Floats) -> Floats:
        return np.pad(each_D, (0, depth - len(each_D)))

    return [
        replace(each, tested_D=deep(each.tested_D), passed_D=deep(each.passed_D), alpha_hat_D=deep(each.alpha_hat_D))
        for each in counts
    ]
