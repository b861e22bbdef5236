"""Rounds of decoding: whose prompts are timed, what a repeat adds, and how wide a speed's interval is."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from conftest import make_drafter, make_target
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.engine import Generation, autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.steps import StepLog
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.model.pard import Pard
from draftsmith.errors import RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure import rounds
from draftsmith.eval.measure.arms import Arm, check_answer_length
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.rounds import AllRounds, decode, speed_fields

PROMPT = Prompt("0", "any", ("",), chat=False)
REQUESTS = [Request(PROMPT, [5 + n, 7, 11], n) for n in range(4)]


def timed(tokens: int, seconds: float) -> Generation:
    """So many tokens behind the prefill's in so many seconds."""
    return Generation([[0] * (tokens + 1)], [[]], StepLog(1, 1, tokens + 1), decode_seconds=seconds)


def simulated(rng: np.random.Generator, repeats: int, batches: int = 24) -> AllRounds:
    """Batches 20 % apart in what speculation gains (1.5 on average), under a clock with 3 % noise."""
    run = AllRounds()
    for gain in 1.5 * np.exp(rng.normal(0, 0.2, batches)):
        for repeat in range(repeats):
            base, own = np.array([50 * gain, 50]) * rng.normal(1, 0.03, 2)
            run.add(timed(50, base), timed(50, own), first=repeat == 0)
    return run


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_the_interval_of_the_speed_covers_whatever_the_repeats(repeats: int) -> None:
    """Repeats taken for batches of their own covered 0.80 of the time at 2 of them, 0.65 at 4."""
    rng = np.random.default_rng(repeats)
    truth, trials, hits = 1.5 * np.exp(0.2**2 / 2), 150, 0
    for seed in range(trials):
        _, low, high = speed_fields(simulated(rng, repeats), seed)["speedup"]
        hits += low <= truth <= high
    assert 0.88 <= hits / trials <= 0.99


def test_one_pass_is_one_step_at_every_draft_length() -> None:
    """A PARD draft is a draft model, and what it costs is its pass over masks, not K calls of one token."""
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl\n"] * 5, 300)
    drafter = Pard(make_drafter(target).backbone, target.vocabulary, mask=0, draft_length=3)
    arm = Arm("pard", drafter)
    config = EvalConfig(max_new_tokens=12, sweep=[1, 4], repeats=1, draft_length=3, temperatures=[0.0])
    results = evaluate(target, [arm], REQUESTS, config)
    assert results["costs"]["c"] is None, "a call of one token is no step of it"
    [row] = results["rows"]
    assert row["draft_steps"] == 1
    assert [each["draft_length"] for each in results["sweep"]] == [1, 4]
    for each in (row, *results["sweep"]):
        assert each["c"] > 0
        assert each["predicted_speedup"] == pytest.approx(each["tau"][0] / (each["c_v"] + each["c"]), rel=1e-4)
    assert drafter.draft_length == 3


def test_a_repeat_is_added_to_its_batch() -> None:
    """Times and tokens alike, so that speeds stay tokens over seconds; its texts count once."""
    target = make_target("qwen3")
    config = EvalConfig(max_new_tokens=12, batch=2, repeats=3)
    (run,) = decode(target, [(Arm("a", make_drafter(target)), None)], REQUESTS, config, 0.0)
    assert len(run.counts) == len(run.baseline_texts) == 4
    assert len(run.seconds_G) == len(run.generations) == 2
    assert run.tokens_G == run.baseline_tokens_G == [3 * 2 * 11] * 2
    assert run.differing == 0


def test_each_batch_is_timed_on_its_own_prompts() -> None:
    target = make_target("qwen3")
    config = EvalConfig(max_new_tokens=12, batch=2, repeats=1)
    (run,) = decode(target, [(Arm("a", make_drafter(target)), None)], REQUESTS, config, 0.0)
    plain = [autoregressive(target, [each.ids], warper=Warper(0.0), max_new_tokens=12).tokens[0] for each in REQUESTS]
    assert run.baseline_texts == plain


def test_a_speed_up_is_per_token() -> None:
    """The baseline's answers are twice as long and take twice the time: no speed-up."""
    run = AllRounds()
    for _ in range(2):
        run.add(timed(20, 2.0), timed(10, 1.0), first=True)
    fields = speed_fields(run, 0)
    assert fields["speedup"][0] == pytest.approx(1.0)
    assert fields["tokens_per_second"] == fields["baseline_tokens_per_second"] == pytest.approx(10.0)


def test_every_row_has_the_verdict_of_its_own_arm() -> None:
    target = make_target("qwen3")
    arms = [
        Arm("proven", make_drafter(target), "lossless"),
        Arm("biased", PromptLookup(draft_length=3), "NOT lossless"),
        Arm("untrained", make_drafter(target, seed=5), "lossless", audited_as="proven"),
        Arm("unknown", PromptLookup(draft_length=3)),
    ]
    config = EvalConfig(max_new_tokens=12, sweep=[], repeats=1, draft_length=2)
    target.tokenizer = _Letters()
    rows = evaluate(target, arms, REQUESTS, config)["rows"]
    assert [(row["method"], row["verdict"], row["audited"]) for row in rows] == 2 * [
        ("proven", "lossless", "proven"),
        ("biased", "NOT lossless", "biased"),
        ("untrained", "lossless", "proven"),
        ("unknown", "not audited", None),
    ]
    for row in rows:
        assert [each["verdict"] for each in row["categories"]] == [row["verdict"]]


class _Letters:
    """Of random models: what the sample of the report asks for."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + each % 26) for each in ids)


def test_answers_too_short_for_a_step_that_counts() -> None:
    """A step counts if the limit cannot cut it, and behind the prefill's token there is room for one."""
    target = make_target("qwen3")
    arms = [Arm("draft", make_drafter(target)), Arm("lookup", PromptLookup(draft_length=10))]
    config = EvalConfig(max_new_tokens=11, sweep=[], draft_length=4)
    with pytest.raises(RequestError, match="is 11, and lookup drafts up to 10 tokens .* --eval.max_new_tokens 12"):
        check_answer_length(arms, config)
    with pytest.raises(RequestError, match="is 11, and lookup drafts"):
        evaluate(target, arms, REQUESTS, config)
    check_answer_length(arms, config.model_copy(update={"max_new_tokens": 12}))
    check_answer_length(arms[:1], config)
    with pytest.raises(
        RequestError, match=r"is 11, and eval.sweep drafts up to 16 tokens .* --eval.max_new_tokens 18"
    ):
        check_answer_length(arms[:1], config.model_copy(update={"sweep": [2, 16]}))


@pytest.mark.usefixtures("nothing_frozen")
def test_old_objects_are_not_searched_while_arms_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an audit leaves takes long to search, and the prompt that is timed would pay for it."""
    target = make_target("qwen3")
    found: list[int] = []

    def watched(*args: Any, **more: Any) -> Generation:
        found.append(gc.get_freeze_count())
        return autoregressive(*args, **more)

    config = EvalConfig(max_new_tokens=4, sweep=[], repeats=2, temperatures=[0.0])
    monkeypatch.setattr(rounds, "autoregressive", watched)
    decode(target, [(Arm("lookup", PromptLookup()), None)], REQUESTS[:2], config, 0.0)
    warmed, *timed_rounds = found
    assert warmed == 0
    assert len(timed_rounds) == 4
    assert min(timed_rounds) > 10_000
    assert gc.get_freeze_count() == 0
