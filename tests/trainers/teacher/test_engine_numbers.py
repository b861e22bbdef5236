"""What an engine is asked for and held to, without one: seeds of answers, filters, and shares of tokens that are near."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.features import engine as asking
from draftsmith.data.features.engine import AnswerStates, Engine, EngineRequest
from draftsmith.data.generate.continuations import Wanted
from draftsmith.data.rows.packed import Document, pack
from draftsmith.trainers.teacher import engine_answers, handshake
from draftsmith.trainers.teacher.engine import chosen_documents
from draftsmith.trainers.teacher.handshake import _distance, _far_from

WANTED = Wanted(samples=None, held_out=None, prompt_tokens=4, tokens=3, temperature=0.7, seed=0, weights="w")


def seeds_of(wanted: Wanted, numbers: range) -> list[int]:
    """The seeds that the engine is sent for these answers."""
    asked: list[int] = []

    def answers(prompts: Any, seeds: Any, *, tokens: int, temperature: float) -> list[AnswerStates]:
        assert (tokens, temperature) == (3, 0.7)
        asked.extend(seeds)
        return [AnswerStates([7], torch.zeros(len(each), 1, 2), None) for each in prompts]

    source: Any = SimpleNamespace(answers=answers, keep=lambda _batch, _states: None)
    engine_answers._by_engine(source, wanted)([[1, 2]] * len(numbers), numbers)
    return asked


def test_every_answer_of_an_engine_draws_its_own_numbers() -> None:
    """Equal prompts too, in every part, and of runs of neighbouring seeds: none has what another one had."""
    seen = [
        seed
        for own in range(4)
        for part in (range(64), range(64, 128), range(128, 131))
        for seed in seeds_of(replace(WANTED, seed=own), part)
    ]
    assert len(set(seen)) == len(seen) == 4 * 131
    assert all(0 <= each < 2**31 for each in seen), "what servers take"
    assert seeds_of(WANTED, range(5, 7)) == seeds_of(WANTED, range(7))[5:]


def test_an_answer_is_asked_for_without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said, because a server fills in what the model's generation_config.json has."""
    request = EngineRequest("http://own", "small", Path("shared"), layers=(0, 1), hidden=2)
    engine = Engine(request)
    bodies: list[dict[str, Any]] = []

    def send(method: str, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return {"choices": [{"token_ids": [9, 8], "prompt_token_ids": [1, 2, 3]}]}

    monkeypatch.setattr(engine, "_send", send)
    monkeypatch.setattr(engine, "_path", lambda _content: Path("none"))
    states = {asking.IDS: torch.tensor([1, 2, 3, 9])}
    monkeypatch.setattr(asking, "take", lambda *_: states)
    monkeypatch.setattr(asking, "checked", lambda tensors, ids, layers, hidden: torch.zeros(len(ids), 2, 2))
    found = engine.answer([1, 2, 3], 5, temperature=0.7, seed=11)
    (body,) = bodies
    assert found.ids == [9, 8]
    assert len(found.states_TNH) == 4, "all but the last token's"
    expected = {"temperature": 0.7, "seed": 11, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: body[name] for name in expected} == expected
    assert (body["max_tokens"], body["prompt"], body["return_token_ids"]) == (5, [1, 2, 3], True)
    engine.ask([1, 2, 3], logprobs=False)
    assert (bodies[-1]["temperature"], bodies[-1]["max_tokens"]) == (0, 1)


@pytest.mark.parametrize(("wrong", "near"), [(0, True), (1, True), (2, False), (9, False)])
def test_states_are_near_where_19_of_20_are(wrong: int, *, near: bool) -> None:
    own_TH = torch.ones(20, 4)
    found_TH = own_TH * 1.04
    found_TH[:wrong] = own_TH[:wrong] * 1.06
    made = _distance(found_TH, own_TH)
    assert made.near is near
    assert made.middle == pytest.approx(0.04, abs=1e-6)
    shares_T = torch.arange(21) / 100
    spread = _distance(3 * torch.ones(21, 4) * (1 + shares_T)[:, None], 3 * torch.ones(21, 4))
    assert spread.middle == pytest.approx(0.10, abs=1e-6)
    assert not spread.near


class Cut:
    """A projection of two tokens, whose states are their logits."""

    device = torch.device("cpu")
    dtype = torch.float32


@pytest.mark.parametrize(("wrong", "near"), [(0, True), (1, True), (2, False), (12, False)])
@pytest.mark.parametrize("next_token", [0, 1, None])
def test_log_probabilities_are_near_where_19_of_20_are(
    wrong: int, next_token: int | None, monkeypatch: pytest.MonkeyPatch, *, near: bool
) -> None:
    """20 tokens behind the first, and the engine's own next one has to be the likeliest."""
    plain: Any = SimpleNamespace(in_dtype=lambda _dtype: plain, logits=lambda states: states)
    monkeypatch.setattr(handshake, "Projection", SimpleNamespace(of=lambda _cut: plain))
    states_TV = torch.tensor([[3.0, 1.0]] * 21)
    own = float(states_TV[0].log_softmax(-1)[0])
    logprobs = [own + 0.2] * 20
    logprobs[:wrong] = [own + 0.3] * wrong
    reply: Any = SimpleNamespace(logprobs=logprobs, next_token=next_token)
    made = _far_from(reply, [0] * 21, states_TV, Cut())  # type: ignore[arg-type]
    assert made.near is (near and next_token == 0)
    assert made.middle == pytest.approx(0.2 if wrong < 10 else 0.3, abs=1e-5)


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [([2, 5, 3, 8, 4, 6, 7], [8, 6, 4]), ([2, 3], [3, 2]), ([2, 5, 3, 4], [5, 4, 3]), ([*[2] * 16, 9], [2, 2, 2])],
)
def test_an_engine_is_proved_by_the_longest_document_and_two_others(lengths: list[int], chosen: list[int]) -> None:
    """Evenly from the longest on, of the first sixteen rows; each document has a row."""
    documents = [Document(np.full(length, 7, np.int32), np.ones(length, np.bool_)) for length in lengths]
    rows = pack(documents, 9, pad=0, fingerprint="", together=False)
    assert [len(ids) for ids in chosen_documents(rows)] == chosen


def test_an_engine_is_as_far_away_as_its_furthest_document(monkeypatch: pytest.MonkeyPatch) -> None:
    early, last = iter([0.01, 0.03, 0.02]), iter([0.1, 0.05, 0.2])
    for name, made in (
        ("_kept", lambda _: 1),
        ("decoder_of", lambda _: None),
        ("last_norm", lambda _: None),
        ("_first_states", lambda *_: torch.zeros(2, 1, 4)),
        ("_check_early", lambda *_: next(early)),
        ("_check_last", lambda *_: next(last)),
    ):
        monkeypatch.setattr(handshake, name, made)
    reply = SimpleNamespace(states_TNH=torch.zeros(1, 2, 4, dtype=torch.bfloat16), fingerprint="own")
    engine: Any = SimpleNamespace(ask=lambda _ids, **_: reply, request=SimpleNamespace(layers=(1, 3)))
    cut: Any = None
    assert handshake.shake(engine, cut, [[1], [2], [3]]) == ("own", "bfloat16", 0.03, 0.2)
