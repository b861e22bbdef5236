"""What ended an answer whose ids are known, and copies among sampled ones, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.server.answer import Answer, _logprobs
from draftsmith.eval.server.answers import Judgeable
from draftsmith.eval.server.evidence import with_ends
from draftsmith.eval.server.sampled import copies, log_odds_of

LIMIT = 16


def told(prompt: list[int], tokens: list[int] | None, **more: Any) -> Judgeable:
    ended = more.pop("ended", True)
    return Judgeable(prompt, Answer("", ended, None, None, tokens, None, **more))


@pytest.fixture(scope="module")
def ended(talking: Backbone, asked: list[Request]) -> Judgeable:
    """The target's own greedy answer that it ended itself."""
    own = autoregressive(
        talking, [each.ids for each in asked], warper=Warper(0.0), max_new_tokens=LIMIT, eos_ids=talking.eos_ids
    ).tokens
    return next(
        told(each.ids, tokens, count=len(tokens))
        for each, tokens in zip(asked, own, strict=True)
        if tokens[-1] in talking.eos_ids
    )


def short(each: Judgeable, by: int = 1, **more: Any) -> Judgeable:
    """The answer without its last tokens."""
    return replace(each, answer=replace(each.answer, tokens=each.answer.tokens[:-by], **more))  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "open_greedy", "added"),
    [
        ({}, 0, True),  # the number of tokens says it
        ({"count": None}, 0, True),  # the target would end there
        ({"by": 3, "count": None}, 1, False),
        ({"by": 3, "count": None, "stop": "a"}, 0, False),
        ({"by": 3, "count": None, "stop": 7}, 0, False),
        ({"by": 3, "count": None, "stop": 0}, 0, True),
        ({"by": 3, "count": None, "ended": False}, 0, False),
        ({"by": 3, "count": None, "ended": None}, 1, False),
        ({"count": 99}, 0, False),  # not all of its tokens
    ],
)
def test_an_end_is_added_where_it_is_certain(
    talking: Backbone, ended: Judgeable, change: dict[str, Any], open_greedy: int, *, added: bool
) -> None:
    by = change.pop("by", 1) if "by" in change else 1
    given = short(ended, by, **change)
    found = with_ends(talking, [given], [], LIMIT)
    (greedy,) = found.greedy
    assert found.open_greedy == open_greedy
    assert greedy.answer.tokens == [*(given.answer.tokens or []), *([0] if added else [])]
    assert found.stops == ([repr(change["stop"])] if change.get("stop") else [])
    change["by"] = by


def test_an_answer_that_has_its_end_is_left(talking: Backbone, ended: Judgeable) -> None:
    found = with_ends(talking, [ended], [ended], LIMIT)
    assert (found.greedy, found.sampled, found.open_greedy, found.open_sampled) == ([ended], [ended], 0, 0)


def test_sampled_ends_follow_greedy_ones(talking: Backbone, ended: Judgeable) -> None:
    """A server that keeps its ends to itself at T = 0 does so above; one of which that is not known is not judged."""
    hidden = short(ended, count=None)
    drawn = told(ended.prompt, [5, 6, 7])
    found = with_ends(talking, [hidden], [drawn], LIMIT)
    assert (found.open_sampled, found.sampled[0].answer.tokens) == (0, [5, 6, 7, 0])
    for greedy in ([], [ended], [hidden, short(ended, 3, count=None)]):
        found = with_ends(talking, greedy, [drawn], LIMIT)
        assert (found.open_sampled, found.sampled) == (1, [drawn])
    nothing = told(ended.prompt, [], count=1)
    assert with_ends(talking, [], [nothing], LIMIT).sampled[0].answer.tokens == [0]
    # where nobody says why it ended, the limit did
    long = told(ended.prompt, list(range(5, 5 + LIMIT)), ended=None)
    assert with_ends(talking, [], [long], LIMIT).open_sampled == 0


def test_copies_are_told_from_answers_that_are_likely() -> None:
    one, two = ((1,), (5, 6)), ((2,), (5, 6))
    rare = dict.fromkeys(range(9), -40.0)
    assert copies([one, one, two], rare) == 1
    assert copies([one, one, one, two, two], rare) == 3
    assert copies([one, two], rare) == 0
    assert copies([one, one, two], dict.fromkeys(range(9), -3.0)) == 0
    assert copies([one, one], {0: -20.0, 1: -20.0}) == 0
    assert copies([one, one], {0: -25.0, 1: -25.0}) == 1


def test_the_odds_of_an_answer_by_hand() -> None:
    """p = (.64, .36), powers of it (.8, .6) and (.512, .216); a token that p rules out says nothing."""
    p = torch.tensor([[0.64, 0.36, 0.0], [0.64, 0.36, 0.0], [0.64, 0.36, 0.0]])
    flat, sharp = log_odds_of(p, torch.tensor([0, 1, 2]))
    assert flat == pytest.approx(math.log(0.8 / 1.4 / 0.64) + math.log(0.6 / 1.4 / 0.36))
    assert sharp == pytest.approx(math.log(0.512 / 0.728 / 0.64) + math.log(0.216 / 0.728 / 0.36))


def test_answers_of_the_target_have_odds_of_one_and_others_more() -> None:
    """Over all answers of three tokens, by their probability: the mean that Markov's inequality needs."""
    g = torch.Generator().manual_seed(0)
    p = torch.randn(3, 4, generator=g, dtype=torch.float64).softmax(-1)
    means = [0.0, 0.0]
    for answer in product(range(4), repeat=3):
        chance = math.prod(float(p[at, x]) for at, x in enumerate(answer))
        for number, odds in enumerate(log_odds_of(p, torch.tensor(answer))):
            means[number] += chance * math.exp(odds)
    assert means == pytest.approx([1.0, 1.0])
    long = p[:1].expand(48, 4)
    assert max(log_odds_of(long, long.argmin(1))) > 30  # at each place the least likely token
    assert max(log_odds_of(long, long.argmax(1))) > 5
    drawn = torch.multinomial(p[0], 48, replacement=True, generator=g)
    assert max(log_odds_of(long, drawn)) < 9


@pytest.mark.parametrize(
    ("values", "known"), [([-0.5, -1.25], True), ([0.0, 1e-7], True), ([-0.5, 7.25], False), ([0.6, 0.28], False)]
)
def test_logits_and_probabilities_are_no_log_probabilities(values: list[float], known: bool) -> None:
    """Whatever a server calls them; the audit then goes without, and accuses nobody."""
    for found in (
        {"tokens": ["a", "b"], "token_logprobs": values},
        {"content": [{"token": name, "logprob": value} for name, value in zip("ab", values, strict=True)]},
    ):
        assert _logprobs(found) == (["a", "b"], values if known else None)
