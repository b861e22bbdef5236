"""Answers by our own decoder: which random numbers a turn draws, and what is counted of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from draftsmith.data.generate import decoded
from draftsmith.data.generate.answers import Ask, Asker, Reply
from draftsmith.data.rows.records import Placed
from draftsmith.data.rows.shapes import Chat
from draftsmith.decoding.engine import Generation
from draftsmith.decoding.random import salted
from draftsmith.decoding.rules.acceptance import Outcome
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.steps import StepLog

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Noted:
    """Answers every question with a word, and keeps the streams that it was given."""

    keeps_corrections = False

    def __init__(self) -> None:
        self.streams: list[list[int]] = []

    def __call__(self, asks: Sequence[tuple[int, Ask]]) -> list[Reply]:
        self.streams.append([stream for stream, _ in asks])
        return [Reply("so", 2, ended=True) for _ in asks]


def chat(turns: int) -> Placed:
    pairs = (({"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "OLD"}) for n in range(turns))
    return Placed("rows.jsonl", 1, Chat([each for pair in pairs for each in pair]))


def test_no_stream_is_used_twice(tokenizer: PreTrainedTokenizerBase) -> None:
    """65,536 of them are kept for every row: its number in the source says where they begin, the turn which one."""
    asker = Asker(tokenizer, prompt_tokens=8, longest_prompt=400, keep_cut=False)
    answerer: Any = Noted()
    decoded._converse([asker.open(number, chat(turns)) for number, turns in ((0, 3), (1, 1), (5, 2))], asker, answerer)
    assert answerer.streams == [[0, 65_536, 327_680], [1, 327_681], [2]]


def stepped(log: StepLog, accepted: list[int], kept: list[int]) -> None:
    """A step of a chain of two, each row of which tests one token more than it accepts."""
    accepted_B, place_D = torch.tensor(accepted), torch.arange(2)
    passed_BD = place_D < accepted_B[:, None]
    path_BD = torch.where(passed_BD, place_D + 1, -1)
    tested_BD = place_D <= accepted_B[:, None]
    log.add(
        Outcome(accepted_B, path_BD, torch.zeros_like(accepted_B), tested_BD, passed_BD.float()), torch.tensor(kept)
    )


def test_what_is_counted_of_a_row_is_of_the_steps_that_count() -> None:
    """Answers of seven tokens, of which the first is the prefill's: a step of three counts if it begins behind four
    at the most. So do the first two of the first row, behind 1 and 4 tokens, and all of the second, behind 1, 2 and
    4, whose last one meets its end."""
    log = StepLog(2, 2, limit=7)
    stepped(log, [2, 0], [3, 1])
    stepped(log, [0, 1], [1, 2])
    stepped(log, [1, 2], [2, 2])
    # steps, emitted, tested, accepted
    assert decoded._counts(Generation([[], []], [[], []], log)) == [(2, 4, 3, 2), (3, 5, 5, 3)]


@pytest.mark.parametrize("drafter", [None, SimpleNamespace()])
def test_answers_to_learn_draw_other_numbers_than_an_evaluation(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same seed: theirs is salted; the streams are those of the questions."""
    seen: list[dict[str, Any]] = []

    def noted(*_given: Any, **how: Any) -> Generation:
        seen.append(how)
        return Generation([[4], [5]], [["prefill"], ["prefill"]], StepLog(2, 1, 1))

    monkeypatch.setattr(decoded, "autoregressive", noted)
    monkeypatch.setattr(decoded, "generate", noted)
    target: Any = SimpleNamespace(eos_ids=(5,), tokenizer=SimpleNamespace(decode=lambda ids, **_how: str(ids)))
    answerer = decoded.Answerer(target, drafter, Warper(0.5), 1, 3, 8)
    replies = answerer([(9, Ask([1], "one")), (7, Ask([2], "two"))])
    assert [(each.text, each.ended) for each in replies] == [("[4]", False), ("[]", True)]
    (how,) = seen
    assert how["seed"] == salted(3, 1) != 3
    assert (how["requests"], how["max_new_tokens"], how["eos_ids"], how["warper"]) == ([9, 7], 1, (5,), Warper(0.5))


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({4: 100, 8: 105, 16: 110, 32: 115}, 8),  # 1.05 times is enough, and less is not
        ({4: 100, 8: 104}, 4),
        ({4: 100, 8: 200, 16: 400, 32: 800, 64: 1600}, 64),
    ],
)
def test_more_rows_are_taken_where_they_gain_a_twentieth(
    rates: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many prompts as the largest batch has; of one less nothing is timed."""
    tried: list[int] = []

    def rate(prompts: list[list[int]], _answerer: Any) -> float:
        tried.append(len(prompts))
        return rates[len(prompts)]

    monkeypatch.setattr(decoded, "_rate", rate)
    answerer: Any = SimpleNamespace(drafter=None)
    assert decoded.fastest([[1]] * 64, answerer) == best
    assert tried == [*rates][: len(tried)]
    tried.clear()
    assert decoded.fastest([[1]] * 63, answerer) == 8
    assert tried == []


@pytest.mark.parametrize(("steps", "rate"), [(40, 8.0), (3, 8.0), (2, 0.0), (1, 0.0)])
def test_the_first_step_of_a_trial_is_not_timed(steps: int, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes ten seconds, and each of the others half a second, for two tokens in each of two rows."""
    now = [0.0]
    monkeypatch.setattr(decoded.time, "perf_counter", lambda: now[0])
    taken: list[int] = []

    def decode(prompts: list[list[int]], _streams: list[int], watch: Any) -> None:
        for step in range(1, steps + 1):
            now[0] += 0.5 if step > 1 else 10.0
            taken.append(step)
            watch([[0] * (2 * step)] * len(prompts), [])

    answerer: Any = SimpleNamespace(decode=decode)
    assert decoded._rate([[1], [2]], answerer) == rate
    assert len(taken) == min(steps, 17)
