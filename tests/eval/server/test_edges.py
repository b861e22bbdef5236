"""Edges of what is judged of a server's answers, each from both sides, without a server."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftsmith.data.generate.server_request import OFF
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.server import precision, sampled
from draftsmith.eval.server.answer import Answer
from draftsmith.eval.server.answers import Judgeable, RequestStyle, ServedAnswers, _Collect, prompt_read
from draftsmith.eval.server.evidence import evidence_of
from draftsmith.eval.server.exchange import identity_of
from draftsmith.eval.server.sampled import copies, judge_sampled
from draftsmith.eval.server.texts import _Found, alteration
from helpers.servers.scripted_server import REQUEST

WAY = RequestStyle("text", off=tuple(OFF), ids=True, logprobs=True)
NOTHING: Any = None


def answer(tokens: list[int], count: int | None, prompt: list[int] | None = None) -> Answer:
    return Answer("a", False, prompt, None, tokens, None, count)


@pytest.mark.parametrize(("count", "whole"), [(1, False), (2, True), (3, True), (4, True), (5, False), (None, True)])
def test_ids_are_whole_but_for_one_that_ended_the_answer(count: int | None, *, whole: bool) -> None:
    assert answer([5, 6, 7], count).whole is whole


def test_a_prompt_of_ids_that_the_target_has() -> None:
    assert prompt_read(answer([5], 1, [3, 9]), WAY, [4], vocabulary=10) == [3, 9]
    assert prompt_read(answer([5], 1, [3, 10]), WAY, [4], vocabulary=10) is None


def test_kept_answers_hang_on_the_variables_of_the_template() -> None:
    """The server's own, or else the prompt's."""
    quiet, thoughtful = {"enable_thinking": False}, {"enable_thinking": True}
    plain, told = Prompt("a", "all", ("why",), chat=True), Prompt("a", "all", ("why",), True, template_values=quiet)
    server = replace(REQUEST, url="http://localhost:1")
    assert identity_of(server, plain) == {"url": server.public_url, "model": server.model}
    assert identity_of(server, told)["template_values"] == quiet
    assert identity_of(replace(server, template_values=thoughtful), told)["template_values"] == thoughtful


def test_sampled_answers_begin_with_the_first_prompt_again() -> None:
    """Of five prompts three are asked greedily, numbers 0 to 2; from 3 on all go round."""
    requests = [Request(Prompt(str(n), "all", (), chat=False), [n], n) for n in range(5)]
    collect = _Collect(NOTHING, requests, REQUEST, AuditConfig(prompts=3), NOTHING)
    assert collect.greedy == 3
    assert [collect.asked(number).number for number in range(9)] == [0, 1, 2, 0, 1, 2, 3, 4, 0]


def test_near_ties_and_bugs_are_no_argmax() -> None:
    made = _Found(0.1, tested=10, near=2, bugs=1, margins=[0.5, 0.2]).replay([])
    assert (made.tokens, made.argmax, made.near_ties, made.bugs, made.smallest_margin) == (10, 7, 2, 1, 0.2)


def test_four_characters_alike_are_the_beginning_of_the_targets_text() -> None:
    assert alteration("abcd, and so", "abcdefgh", ended=True) is None
    assert (alteration("abc, and so", "abcdefgh", ended=True) or "").startswith("they begin otherwise")


@pytest.mark.parametrize(
    ("counts", "gap"), [((1, 1), None), ((4, 1), "1 of 2 sampled answers do not say all"), ((4, 4), None)]
)
def test_to_leave_out_some_is_to_choose_and_to_leave_out_all_is_not(counts: tuple[int, ...], gap: str | None) -> None:
    target: Any = SimpleNamespace(vocabulary=10, eos_ids=(0,))
    drawn = [Judgeable([1], answer([5], count)) for count in counts]
    found = evidence_of(target, ServedAnswers(WAY, [], drawn, []), AuditConfig())
    assert [each for each in found.gaps if gap and each.startswith(gap)] == found.gaps
    assert (gap is None) == (found.gaps == [])
    assert len(found.sampled) == (2 if counts == (1, 1) else 0)


@pytest.mark.parametrize(("log_p", "found"), [(-21.8, 0), (-22.2, 1)])
def test_the_chance_of_copies_is_shared_by_all_answers(log_p: float, found: int) -> None:
    """Two answers to one prompt: log 2 + log p against log(1e-9 / 2), which is -21.4."""
    one = ((1,), (5, 6))
    assert copies([one, one], {0: log_p, 1: log_p}) == found


def test_odds_are_the_mean_of_one_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three to one and one to one are two to one on average."""
    noted = SimpleNamespace(outside=0, first_outside=None, log_p={}, log_odds=[math.log(3), 0.0])
    noted.nats, noted.expected = [np.array([1.0, 2.0]), np.array([3.0])], [np.array([4.0])]
    monkeypatch.setattr(sampled, "distributions", lambda *_, **__: iter(()))
    monkeypatch.setattr(sampled, "_Noted", lambda: noted)
    monkeypatch.setattr(sampled, "_Sums", lambda *_: SimpleNamespace(test=lambda: None))
    target: Any = SimpleNamespace(vocabulary=10, device="cpu")
    made = judge_sampled(target, [], Warper(1.0), sigma=0.1, largest=0.2, seed=3)
    assert made.log_odds == pytest.approx(math.log(2))
    assert (made.nats, made.expected_nats) == (2.0, 4.0)


@pytest.mark.parametrize(("left", "name"), [(94, "raw logits"), (95, "what the filters leave")])
def test_log_probabilities_of_few_tokens_are_not_taken_for_being_near(
    left: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred the filters have to leave 95: rounding moves no more across their edge."""
    seen = iter([np.zeros(0), np.full(100, 0.01), np.full(left, 0.001)])
    monkeypatch.setattr(precision, "_differences", lambda *_: next(seen))
    monkeypatch.setattr(precision, "_rounding", lambda *_: np.array([0.003, -0.004]))
    made, differences = precision.precision_of(NOTHING, [], [], Warper(1.0, top_k=3))
    assert (made.of, made.tokens) == (name, {"raw logits": 100}.get(name, left))
    assert made.rms == pytest.approx(0.01 if name == "raw logits" else 0.001)
    assert len(differences) == made.tokens
