"""Answers by our own decoder: batches planned from the rows alone, turn by turn.

What a batch holds depends on the source and the settings, never on where an earlier run stopped,
and every turn draws from a stream of its own: a run that was killed goes on to the same bits.
Read next: `answers.py` for rows, `decoding/engine.py` for decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import Generation, autoregressive, generate
from ...decoding.proposal import Proposer
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


@dataclass(frozen=True)
class Answerer:
    """A target, perhaps with a drafter, and the distribution that answers are drawn from."""

    target: Backbone
    drafter: Proposer | None
    warper: Warper
    max_new_tokens: int
    seed: int
    rows: int
    """Rows decoded together."""
    keeps_corrections: bool = False
    """Whether a dialogue keeps where a draft was corrected."""

    def __call__(self, asks: Sequence[tuple[int, Ask]]) -> list[Reply]:
        """One reply per question; each comes with the number of its random stream."""
        prompts = [ask.ids for _, ask in asks]
        eos_ids, streams = self.target.eos_ids, [stream for stream, _ in asks]
        if self.drafter is None:
            generation = autoregressive(
                self.target,
                prompts,
                warper=self.warper,
                max_new_tokens=self.max_new_tokens,
                eos_ids=eos_ids,
                seed=salted(self.seed, FOR_TRAINING),
                requests=streams,
            )
            return [self._reply(ids) for ids in generation.tokens]
        generation = generate(
            self.target,
            self.drafter,
            prompts,
            warper=self.warper,
            max_new_tokens=self.max_new_tokens,
            eos_ids=eos_ids,
            seed=salted(self.seed, FOR_TRAINING),
            requests=streams,
        )
        return [
            self._reply(ids, [each == "correction" for each in origin], *counts)
            for ids, origin, counts in zip(generation.tokens, generation.origin, _counts(generation))
        ]

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
    numbered = enumerate(rows)
    while window := list(islice(numbered, answerer.rows * _BATCHES_AHEAD)):
        if all(number in journal for number, _ in window):
            continue
        dialogues = [asker.open(number, each) for number, each in window]
        first = {each.number: asker.ask(each) for each in dialogues if each.talking}
        over = [each for each in dialogues if not each.talking]
        journal.add(asker.entry(each) for each in over if each.number not in journal)
        for batch in _batches(dialogues, first, answerer.rows):
            if not all(each.number in journal for each in batch):
                _converse(batch, asker, answerer)
                journal.add(asker.entry(each) for each in batch)


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
