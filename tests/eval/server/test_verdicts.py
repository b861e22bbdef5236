"""Every verdict on a server, from both sides of each of its edges; answers that are made here, without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.generate.server_request import OFF
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.audit.replay import Replay
from draftsmith.eval.audit.rosenblatt import Rosenblatt
from draftsmith.eval.audit.scores import Scores, ScoreTest
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.server import audit as auditing
from draftsmith.eval.server import evidence
from draftsmith.eval.server import sampled as sampling
from draftsmith.eval.server.answer import Answer
from draftsmith.eval.server.answers import Judgeable, RequestStyle, ServedAnswers
from draftsmith.eval.server.audit import audit_server
from draftsmith.eval.server.precision import LIMIT, Precision, precision_of
from draftsmith.eval.server.sampled import SampledJudgement, judge_sampled
from draftsmith.eval.server.texts import own_greedy, replay_texts
from helpers.servers.scripted_server import REQUEST

CONFIG = AuditConfig(tokens=500, prompts=2, max_new_tokens=16, batch=2)
WAY = RequestStyle("ids", off=tuple(OFF), ids=True, logprobs=True)
ASKED = replace(REQUEST, url="http://own")


def replayed(tokens: int = 96, near: int = 0, bugs: int = 0, p: float = 1.0) -> Replay:
    first = "request 0, token 3: ..." if bugs else None
    return Replay(tokens, tokens - near - bugs, near, 0.5, p, bugs, 1e-5, 0.01, [], first)


def at_p(p: float) -> sampling.Tested:
    """All tests at that p-value, the least likely one the histogram."""
    made = Rosenblatt(900, [45] * 20, 19.0, p, 0.5, 0.5, 9.0, 0.5, 0.1, 0.0, "p")
    return sampling.Tested(made, Scores(900, [ScoreTest(*_score())], 0.5, 0.1))


def _score() -> list[Any]:
    values = {"name": "some", "p_value": 0.5}
    names = list(ScoreTest.__dataclass_fields__)
    return [values.get(name, 1.0) for name in names]


def sampled(
    p: float = 0.5, control: float = 0.5, outside: int = 0, copies: int = 0, log_odds: float = 0.0
) -> SampledJudgement:
    first = "answer 0, token 1: 7" if outside else None
    return SampledJudgement(at_p(p), at_p(control), outside, first, 2.0, 2.0, copies, log_odds)


def precision(rms: float | None = 0.001, rounding: float = 0.01) -> Precision:
    return Precision(96 if rms is not None else 0, "raw logits", rms, rms, rounding, rounding)


@pytest.mark.parametrize(("histogram", "contexts", "least"), [(0.3, 0.2, 0.2), (0.2, 0.3, 0.2), (0.9, 0.9, 0.5)])
def test_the_smallest_p_is_of_all_tests(histogram: float, contexts: float, least: float) -> None:
    made = at_p(histogram)
    assert replace(made, scores=replace(made.scores, p_value=contexts)).smallest_p == least


FAILS = 1e-9
NO_GREEDY: Any = None


@pytest.mark.parametrize(
    ("greedy", "drawn", "own", "verdict", "why"),
    [
        (replayed(), sampled(), precision(), "lossless", None),
        (replayed(near=3), sampled(), precision(), "lossless", None),
        (replayed(), sampled(), precision(None), "lossless", None),
        # a test that fails, where rounding alone would pass it and where it would not
        (replayed(), sampled(FAILS), precision(), "NOT lossless", None),
        (replayed(), sampled(FAILS, control=FAILS), precision(), "undecided", "rounding as large as the server's"),
        (replayed(), sampled(control=FAILS), precision(), "lossless", None),
        (replayed(near=40, p=FAILS), sampled(), precision(), "NOT lossless", None),
        (replayed(near=40, p=FAILS), sampled(control=FAILS), precision(), "undecided", "rounding as large"),
        # what no rounding explains, however coarse the server
        (replayed(bugs=1), sampled(), precision(), "NOT lossless", None),
        (replayed(bugs=1), sampled(control=FAILS), precision(), "NOT lossless", None),
        (replayed(), sampled(outside=1), precision(), "NOT lossless", None),
        (replayed(), sampled(outside=1, control=FAILS), precision(), "NOT lossless", None),
        (replayed(), sampled(), precision(0.0399), "lossless", None),
        (replayed(), sampled(), precision(0.0401), "NOT lossless", None),
        (replayed(), sampled(control=FAILS), precision(0.0401), "NOT lossless", None),
        # answers that repeat: from a cache they fail tests of their own draws, but are the target's one by one
        (replayed(), sampled(FAILS, copies=3), precision(), "undecided", "3 sampled answers repeat others"),
        (replayed(), sampled(FAILS, copies=3, log_odds=9.2), precision(), "undecided", "repeat others"),
        (replayed(), sampled(FAILS, copies=3, log_odds=9.3), precision(), "NOT lossless", None),
        (replayed(), sampled(copies=3, log_odds=9.3), precision(), "undecided", "repeat others"),
        # what could not be tested
        (replayed(), None, precision(), "undecided", "T > 0 could not be tested"),
        (NO_GREEDY, sampled(), precision(), "undecided", "no greedy answer could be tested"),
        (replayed(tokens=0), sampled(), precision(), "undecided", "no greedy answer could be tested"),
        (replayed(bugs=1), None, precision(), "NOT lossless", None),
    ],
)
def test_every_verdict_from_both_sides(
    monkeypatch: pytest.MonkeyPatch,
    greedy: Replay | None,
    drawn: SampledJudgement | None,
    own: Precision,
    verdict: str,
    why: str | None,
) -> None:
    judgeable = Judgeable([1], Answer("a", False, [1], 1, [2], None))
    served = ServedAnswers(WAY, [judgeable] * (greedy is not None), [judgeable] * (drawn is not None), [])
    monkeypatch.setattr(auditing, "served_answers", lambda *_, **__: served)
    monkeypatch.setattr(evidence, "precision_of", lambda *_: (own, [0.001]))
    monkeypatch.setattr(evidence, "replay", lambda *_, **__: greedy)
    monkeypatch.setattr(evidence, "_spelled_alike", lambda *_: None)
    monkeypatch.setattr(evidence, "judge_sampled", lambda *_, **__: drawn)
    target: Any = type("Target", (), {"tokenizer": None, "eos_ids": (0,), "vocabulary": 9})()
    report = audit_server(target, [], ASKED, CONFIG, Path("nowhere"))
    assert report.verdict == verdict, report.failures
    assert (report.why is None) is (why is None)
    assert why is None or why in (report.why or "")
    assert bool(report.failures) is (
        verdict == "NOT lossless" or "rounding" in (why or "") or (drawn is not None and drawn.tested.failures != [])
    )
    assert report.text().startswith(f"verdict: {verdict}")


def test_the_rounding_to_reckon_with_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that of 16 bits where none was measured, or where what was measured is none."""
    asked: list[float] = []
    monkeypatch.setattr(evidence, "judge_sampled", lambda *_, **how: asked.append((how["sigma"], how["largest"])))
    judgeable = Judgeable([1], Answer("a", False, [1], 1, [2], None))
    monkeypatch.setattr(auditing, "served_answers", lambda *_, **__: ServedAnswers(WAY, [], [judgeable], []))
    target: Any = type("Target", (), {"tokenizer": None, "eos_ids": (0,), "vocabulary": 9})()
    for own in (precision(0.02), precision(None), precision(0.5)):
        monkeypatch.setattr(evidence, "precision_of", lambda *_, own=own: (own, [0.02, -0.03]))
        audit_server(target, [], ASKED, CONFIG, Path("nowhere"))
    assert asked == [(0.02, 0.03), (0.01, 0.03), (0.01, 0.03)]


@pytest.mark.parametrize(("rms", "rounds"), [(0.04, True), (0.0400001, False), (None, True)])
def test_what_is_rounding(rms: float | None, *, rounds: bool) -> None:
    assert LIMIT == 4
    assert precision(rms).is_rounding is rounds
    assert precision(rms).sigma == (0.01 if rms is None else rms)
    assert precision(4e-5, rounding=0.0).is_rounding
    assert not precision(5e-5, rounding=0.0).is_rounding


def answers_of(target: Backbone, prompts: list[list[int]], temperature: float, tokens: int = 40) -> list[Judgeable]:
    """The target's own, with its raw log-probabilities."""
    made = autoregressive(target, prompts, warper=Warper(temperature), max_new_tokens=tokens)
    return [_told(target, prompt, each) for prompt, each in zip(prompts, made.tokens, strict=True)]


@pytest.fixture(scope="module")
def written(served: Backbone, requests: list[Request]) -> dict[float, list[Judgeable]]:
    """Greedy answers, and drawn ones."""
    prompts = [each.ids for each in requests]
    return {0.0: answers_of(served, prompts, 0.0), 0.7: answers_of(served, prompts * 3, 0.7)}


def _told(target: Backbone, prompt: list[int], tokens: list[int], *, temperature: float = 1.0) -> Judgeable:
    """An answer that a server would tell all of."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = target.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    values = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    text = target.tokenizer.decode(tokens, skip_special_tokens=True)
    return Judgeable(prompt, Answer(text, tokens[-1] in target.eos_ids, prompt, len(prompt), tokens, values))


def off(some: list[Judgeable], by: float) -> list[Judgeable]:
    """Log-probabilities that lie so far off, up and down in turn; every fifth is not told."""

    def moved(each: Judgeable) -> list[float | None]:
        told = each.answer.logprobs or []
        return [None if at % 5 == 4 else v + by * (1 - 2 * (at % 2)) for at, v in enumerate(told) if v is not None]

    return [Judgeable(each.prompt, replace(each.answer, logprobs=moved(each))) for each in some]


def test_a_rounding_is_measured_as_it_is(served: Backbone, written: dict[float, list[Judgeable]]) -> None:
    """On greedy and drawn answers alike, whose raw log-probabilities are told."""
    greedy, drawn = off(written[0.0], 0.003), off(written[0.7], 0.003)
    made, near = precision_of(served, greedy, drawn, Warper(0.7))
    assert made.of == "raw logits"
    assert made.tokens == (len(greedy) + 8) * 32 == len(near)
    assert made.rms == pytest.approx(0.003, rel=1e-3)
    assert made.largest == pytest.approx(0.003, rel=1e-3)
    assert 1e-4 < made.rounding_rms < made.rounding_largest
    assert np.abs(near).max() == pytest.approx(0.003, rel=1e-3)


def test_log_probabilities_behind_the_temperature_are_told_from_raw_ones(
    served: Backbone, written: dict[float, list[Judgeable]]
) -> None:
    """An honest server that gives those of what it drew has the target's weights; greedy ones have no temperature."""
    warm = [_told(served, each.prompt, each.tokens, temperature=0.7) for each in written[0.7]]
    made, _ = precision_of(served, written[0.0], warm, Warper(0.7))
    assert made.of == "logits over the temperature"
    assert made.rms < 1e-4
    assert made.is_rounding
    other, near = precision_of(served, written[0.0], warm, Warper(1.3))
    assert other.rms > 0.1
    assert not other.is_rounding
    assert max(map(abs, near)) == pytest.approx(other.rounding_largest), "what is no rounding explains no near-tie"


def test_without_log_probabilities_16_bits_are_assumed(
    served: Backbone, written: dict[float, list[Judgeable]]
) -> None:
    silent = [Judgeable(each.prompt, replace(each.answer, logprobs=None)) for each in written[0.0]]
    made, near = precision_of(served, silent, [], Warper(0.7))
    assert (made.tokens, made.rms, made.largest) == (0, None, None)
    assert made.sigma == made.rounding_rms
    assert max(map(abs, near)) == pytest.approx(made.rounding_largest)


@pytest.fixture(scope="module")
def drawn(served: Backbone, requests: list[Request]) -> list[Judgeable]:
    """1,280 tokens at T = 1."""
    return answers_of(served, [each.ids for each in requests] * 8, 1.0)


def test_the_control_draws_with_the_servers_rounding(served: Backbone, drawn: list[Judgeable]) -> None:
    """Rounding of 2 nats would fail every server, of a hundred-thousandth none; what was written is the same."""
    fine, coarse = (
        judge_sampled(served, drawn, Warper(1.0), sigma=sigma, largest=sigma, seed=0) for sigma in (1e-5, 2.0)
    )
    assert fine.tested == coarse.tested
    assert not fine.tested.failures
    assert not fine.control.failures
    assert coarse.control.failures
    assert coarse.control.smallest_p < 1e-6 < fine.control.smallest_p
    assert fine.control.rosenblatt.histogram != fine.tested.rosenblatt.histogram, "the control is other tokens"
    assert fine.nats == pytest.approx(fine.expected_nats, abs=0.15)
    assert fine.tested.smallest_p == min(
        fine.tested.rosenblatt.histogram_p,
        fine.tested.rosenblatt.mean_p,
        fine.tested.rosenblatt.serial_p,
        fine.tested.scores.p_value,
    )


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_tokens_of_another_temperature_fail_where_their_rounding_would_pass(
    served: Backbone, drawn: list[Judgeable], temperature: float
) -> None:
    """The same tokens as of a server that draws too warm or too cold; its own rounding is no excuse."""
    found = judge_sampled(served, drawn, Warper(temperature), sigma=1e-5, largest=1e-5, seed=0)
    assert found.tested.failures
    assert not found.control.failures
    assert (found.nats > found.expected_nats) is (temperature < 1)


@pytest.mark.parametrize(
    ("filters", "largest", "outside"),
    [({"top_k": 3}, 0.0, True), ({"top_k": 3}, 50.0, False), ({"top_p": 0.3}, 0.0, True), ({}, 0.0, False)]
    + [({"min_p": 0.9}, 0.0, True), ({"min_p": 0.9}, 50.0, False)],
)
def test_what_lies_outside_the_filters_is_counted_unless_rounding_explains_it(
    served: Backbone, drawn: list[Judgeable], filters: dict[str, Any], largest: float, *, outside: bool
) -> None:
    found = judge_sampled(served, drawn[:3], Warper(1.0, **filters), sigma=0.0, largest=largest, seed=0)
    assert bool(found.outside) is outside
    assert (found.first_outside is None) is not outside
    plain = judge_sampled(served, drawn[:3], Warper(1.0), sigma=0.0, largest=largest, seed=0)
    assert found.nats == pytest.approx(plain.nats), "filters apart"
    if filters == {"top_k": 3} and outside:
        ranks = [_rank(served, each, at) for each in drawn[:3] for at in range(len(each.tokens))]
        assert found.outside == sum(rank >= 3 for rank in ranks)


def _rank(target: Backbone, each: Judgeable, at: int) -> int:
    ids = torch.tensor([[*each.prompt, *each.tokens[:at]]])
    with torch.inference_mode():
        logits = target.model(ids, use_cache=False).logits[0, -1]
    return int((logits > logits[each.tokens[at]]).sum())


@pytest.fixture(scope="module")
def ending(served: Backbone) -> tuple[list[int], list[int]]:
    """A prompt and its greedy answer, whose last token stands nowhere before: the end of text, where it is made one."""
    prompts = [[n, n + 7, n + 2] for n in range(5, 65)]
    for prompt, tokens in zip(prompts, (each.tokens for each in answers_of(served, prompts, 0.0, 9)), strict=True):
        fresh = [at for at in range(5, 9) if tokens[at] not in tokens[:at]]
        if fresh:
            return prompt, tokens[: fresh[0] + 1]
    raise AssertionError("no such answer")


@pytest.mark.parametrize(
    ("shown", "ended", "counted", "tokens", "bugs"),
    [
        (0, True, None, 0, 0),  # the end is told
        (-1, True, None, 0, 0),  # it is kept back, and judged all the same
        (-2, False, None, -2, 0),  # the limit cut it: nothing is added
        (-3, True, -2, -2, 1),  # the model ended what the target goes on with: it counts a token more
        (-3, True, None, -3, 0),  # the model ended it, or a stop string did
    ],
)
def test_an_end_is_judged_once_whoever_says_it(
    served: Backbone,
    ending: tuple[list[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    shown: int,
    counted: int | None,
    tokens: int,
    bugs: int,
    *,
    ended: bool,
) -> None:
    prompt, whole = ending
    monkeypatch.setattr(Backbone, "eos_ids", (whole[-1],))
    count = None if counted is None else len(whole) + counted
    each = Judgeable(prompt, Answer("", ended, None, None, whole[: len(whole) + shown], None, count))
    monkeypatch.setattr(auditing, "served_answers", lambda *_, **__: ServedAnswers(WAY, [each], [], []))
    report = audit_server(served, [], ASKED, CONFIG, Path("nowhere"))
    assert report.greedy is not None
    assert (report.greedy.tokens, report.greedy.bugs) == (len(whole) + tokens, bugs)
    assert report.greedy.argmax == len(whole) + tokens - bugs
    assert report.verdict == ("NOT lossless" if bugs else "undecided")
    unknown = ended and counted is None and shown < -1
    assert any("end where the target goes on" in note for note in report.missing) is unknown


def test_of_several_ends_none_is_made_up(
    served: Backbone, ending: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At T = 0 it is the one that the target would write; of what was drawn nobody knows."""
    prompt, whole = ending
    monkeypatch.setattr(Backbone, "eos_ids", (whole[-1], 0))
    each = Judgeable(prompt, Answer("", True, None, None, whole[:-1], None))
    monkeypatch.setattr(auditing, "served_answers", lambda *_, **__: ServedAnswers(WAY, [each], [each], []))
    report = audit_server(served, [], ASKED, CONFIG, Path("nowhere"))
    assert report.greedy is not None
    assert (report.greedy.tokens, report.greedy.bugs) == (len(whole), 0)
    assert report.sampled is None
    assert any("1 sampled answers do not say what ended them" in note for note in report.missing)
    assert report.verdict == "undecided"


def test_texts_are_compared_up_to_where_they_part(served: Backbone, written: dict[float, list[Judgeable]]) -> None:
    """Two right ones, one cut by the limit, one that goes elsewhere from its sixth token on: 40, 40, 3 words, 6."""
    first, second, third, *_ = (
        Judgeable(each.prompt, replace(each.answer, tokens=None, logprobs=None)) for each in written[0.0]
    )
    own = own_greedy(served, [first, second, third], max_new_tokens=40, batch=2)
    right, left = replay_texts(served, [first, second, third], own, [])
    assert right is not None
    assert left == []
    assert (right.tokens, right.argmax, right.near_ties, right.bugs) == (120, 120, 0, 0)
    kept = served.tokenizer.decode(written[0.0][2].tokens[:5], skip_special_tokens=True)
    wrong = Judgeable(third.prompt, replace(third.answer, text=kept + "\x01\x02", ended=True))
    parted, left = replay_texts(served, [first, second, wrong], own, [])
    assert parted is not None
    assert left == []
    assert (parted.tokens, parted.bugs, parted.near_ties) == (86, 1, 0)
    assert parted.argmax == 85
    assert (parted.first_bug or "").startswith("request 2, token 5: the text is not that of the argmax")
    near, left = replay_texts(served, [first, second, wrong], own, [50.0])
    assert near is not None
    assert left == []
    assert (near.tokens, near.bugs, near.near_ties) == (86, 0, 1)
