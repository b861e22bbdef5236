"""Answers by our own decoder: batches planned from the rows alone, turn by turn.

What a batch holds depends on the source and the settings, never on where an earlier run stopped,
and every turn draws from a stream of its own: a run that was killed goes on to the same bits.
Read next: `answers.py` for rows, `decoding/engine.py` for decoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import Generation, Watch, autoregressive, generate
from ...decoding.proposal import Proposer, Remembering
from ...decoding.random import FOR_TRAINING, salted
from ...decoding.sampling import Warper
from ..rows.chats.spoken import text_of
from ..rows.raw import Rejected
from ..rows.records import Placed
from .answers import Ask, Asker, Dialogue, Reply, corrections
from .journal import Journal

# batches cut from one stretch of rows, sorted by length: what is read ahead, and a row's neighbours
_BATCHES_AHEAD = 16
_TURNS = 2**16  # streams kept for the turns of a row
_TOGETHER = "batch_rows"  # entry of the manifest
_SIZES = (4, 8, 16, 32, 64)
_UNTIMED = 8
_TIMED_ROWS = 2 * _SIZES[-1]  # read for it, as some have no prompt
_STEPS = 16
_GAIN = 1.05  # by which twice the rows have to be faster, or they are not worth their memory
_log = logging.getLogger(__name__)


class _Enough(Exception):
    """The steps that are timed are done."""


@dataclass(frozen=True)
class Answerer:
    """A target, perhaps with a drafter, and the distribution that answers are drawn from."""

    target: Backbone
    drafter: Proposer | None
    warper: Warper
    max_new_tokens: int
    seed: int
    rows: int | None
    """Rows decoded together; None: as many as are fastest here."""
    keeps_corrections: bool = False
    """Whether a dialogue keeps where a draft was corrected."""

    def __call__(self, asks: Sequence[tuple[int, Ask]]) -> list[Reply]:
        """One reply per question; each comes with the number of its random stream."""
        generation = self.decode([ask.ids for _, ask in asks], [stream for stream, _ in asks])
        if self.drafter is None:
            return [self._reply(ids) for ids in generation.tokens]
        return [
            self._reply(ids, [each == "correction" for each in origin], *counts)
            for ids, origin, counts in zip(generation.tokens, generation.origin, _counts(generation))
        ]

    def decode(self, prompts: list[list[int]], streams: list[int], watch: Watch | None = None) -> Generation:
        """The answers to prompts, each from its random stream."""
        how: dict[str, Any] = {
            "warper": self.warper,
            "max_new_tokens": self.max_new_tokens,
            "eos_ids": self.target.eos_ids,
            "seed": salted(self.seed, FOR_TRAINING),
            "requests": streams,
            "watch": watch,
        }
        if self.drafter is None:
            return autoregressive(self.target, prompts, **how)
        return generate(self.target, self.drafter, prompts, **how)

    def _reply(
        self,
        ids: list[int],
        corrected: list[bool] | None = None,
        steps: int = 0,
        emitted: int = 0,
        tested: int = 0,
        accepted: int = 0,
    ) -> Reply:
        ended = ids[-1] in self.target.eos_ids
        return Reply(
            text_of(self.target.tokenizer, ids[:-1] if ended else ids),
            len(ids),
            ended,
            ids,
            corrected=corrected,
            steps=steps,
            emitted=emitted,
            tested=tested,
            accepted=accepted,
        )


def answer_rows(rows: Iterable[Placed | Rejected], asker: Asker, answerer: Answerer, journal: Journal) -> None:
    """Answer every row of the source that the journal does not hold yet."""
    first = list(islice(source := iter(rows), _TIMED_ROWS if answerer.rows is None else 0))
    together = answerer.rows or _settled(first, asker, answerer, journal)
    numbered = enumerate(chain(first, source))
    while window := list(islice(numbered, together * _BATCHES_AHEAD)):
        if all(number in journal for number, _ in window):
            continue
        dialogues = [asker.open(number, each) for number, each in window]
        asks = {each.number: asker.ask(each) for each in dialogues if each.talking}
        over = [each for each in dialogues if not each.talking]
        journal.add(asker.entry(each) for each in over if each.number not in journal)
        for batch in _batches(dialogues, asks, together):
            if not all(each.number in journal for each in batch):
                _converse(batch, asker, answerer)
                journal.add(asker.entry(each) for each in batch)


def _settled(first: Sequence[Placed | Rejected], asker: Asker, answerer: Answerer, journal: Journal) -> int:
    """How many rows are decoded together: as the folder was begun with, or what is fastest, and is kept in it."""
    together = journal.manifest.get(_TOGETHER) or fastest(_prompts(first, asker), answerer)
    journal.settle(_TOGETHER, together, f"--batch {together}")
    return int(together)


def _prompts(rows: Sequence[Placed | Rejected], asker: Asker) -> list[list[int]]:
    """The first questions of some rows, in tokens, the longest last."""
    dialogues = [asker.open(number, each) for number, each in enumerate(rows)]
    asks = [asker.ask(each) for each in dialogues if each.talking]
    return sorted((ask.ids for ask in asks if ask is not None), key=len)


def fastest(prompts: list[list[int]], answerer: Answerer) -> int:
    """The number of rows at which most tokens a second are written, of what is timed for some steps and thrown away.

    Where there are few rows, or a drafter that would draft from what it saw, nothing is timed.
    """
    if len(prompts) < _SIZES[-1] or isinstance(answerer.drafter, Remembering):
        return _UNTIMED
    rates: dict[int, float] = {}
    best = _SIZES[0]
    for rows in _SIZES:
        try:
            rates[rows] = _rate(prompts[-rows:], answerer)
        except torch.OutOfMemoryError:
            if not rates:
                raise
            break
        if rates[rows] < _GAIN * rates[best] and rows != best:
            break
        best = rows
    shown = ", ".join(f"{rows}: {rate:.4g}" for rows, rate in rates.items())
    _log.info("%d rows are decoded together, the fastest here (tokens per second by rows: %s)", best, shown)
    return best


def _rate(prompts: list[list[int]], answerer: Answerer) -> float:
    """Tokens a second behind the prefill, of the first steps with room for the whole answers."""
    seen: list[tuple[float, int]] = []

    def watch(tokens: list[list[int]], _origins: list[list[str]]) -> None:
        seen.append((time.perf_counter(), sum(map(len, tokens))))
        if len(seen) > _STEPS:
            raise _Enough

    with suppress(_Enough):
        answerer.decode(prompts, list(range(len(prompts))), watch)
    # the first step makes what later ones reuse
    (began, before), (ended, after) = seen[min(1, len(seen) - 1)], seen[-1]
    return (after - before) / (ended - began) if ended > began else 0.0


def _batches(dialogues: Sequence[Dialogue], first: dict[int, Ask | None], rows: int) -> Iterator[list[Dialogue]]:
    """Those that talk, with neighbours of about their length."""
    lengths = {number: len(ask.ids) for number, ask in first.items() if ask is not None}
    talking = [each for each in dialogues if each.talking]
    ordered = iter(sorted(talking, key=lambda each: (lengths[each.number], each.number)))
    while batch := list(islice(ordered, rows)):
        yield batch


def _converse(batch: Sequence[Dialogue], asker: Asker, answerer: Answerer) -> None:
    """All turns of a batch: those that are not over answer their next one together."""
    turn, talking = 0, list(batch)
    while talking:
        asked = [(each, ask) for each in talking if (ask := asker.ask(each)) is not None]
        if asked:
            replies = answerer([(each.number * _TURNS + turn, ask) for each, ask in asked])
            for (each, ask), reply in zip(asked, replies, strict=True):
                asker.hear(each, reply)
                if answerer.keeps_corrections:
                    each.corrections += corrections(ask.ids, reply)
        turn, talking = turn + 1, [each for each in talking if each.talking]


def _counts(generation: Generation) -> list[tuple[int, int, int, int]]:
    """Steps, emitted, tested and accepted tokens of each row, over the steps that count."""
    log = generation.steps
    counted_TB = log.counted_TB
    tested_B = (log.tested_TBD.sum(-1) * counted_TB).sum(0)
    accepted_B = ((log.tested_TBD & log.passed_TBD).sum(-1) * counted_TB).sum(0)
    emitted_B = (log.kept_TB * counted_TB).sum(0)
    columns = (counted_TB.sum(0), emitted_B, tested_B, accepted_B)
    return [tuple(int(column[row]) for column in columns) for row in range(log.rows)]  # type: ignore[misc]
