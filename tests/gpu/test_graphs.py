"""Steps replayed as CUDA graphs write what the same steps write when they are launched one by one, token for token.

The same on a pretended GPU, where no card is: `tests/decoding/test_graphs.py`, `tests/drafters/test_on_cuda.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_drafter, make_target
from draftsmith.benchmarks.common.random_models import EXPERTS, GROUPED, RECURRENT, WINDOWED
from draftsmith.decoding import graphs
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import Generation, autoregressive, generate
from draftsmith.decoding.graphs import LEAST_TOKENS, Replayed
from draftsmith.decoding.rules.acceptance import accept_greedy
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.errors import RequestError
from helpers.models.proposers import PROPOSERS, REPLAYED
from helpers.models.random_models import random_model, ready
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7, 9, 2], [11, 4], [1, 2, 3]]
GREEDY, SAMPLED = Warper(0.0), Warper(0.8, top_k=20, top_p=0.95)
WARPERS = {"greedy": GREEDY, "sampled": SAMPLED, "untruncated": Warper(1.0)}
NEW = 64
TARGETS: dict[str, dict[str, Any]] = (
    {name: RECURRENT[name] for name in ("qwen3_5_text", "falcon_h1", "nemotron_h", "lfm2")}
    | {name: GROUPED | settings for name, settings in [*WINDOWED.items()][:2]}
    | {"qwen3_moe": GROUPED | EXPERTS | {"num_experts": 4}}
)
"""Recurrent ones, those with a window, and a mixture, whose products by groups are CUDA's in bf16 alone."""


@pytest.fixture
def target(device: torch.device) -> Backbone:
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    made = make_target("qwen3")
    made.model.to(device)
    return made


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a step was recorded, and how often called."""
    counted: Counter[str] = Counter()
    for name in ("_record", "__call__"):
        whole = getattr(Replayed, name)

        def noted(self: Replayed, *rest: Any, name: str = name, whole: Any = whole) -> Any:
            counted[name] += 1
            return whole(self, *rest)

        monkeypatch.setattr(Replayed, name, noted)
    return counted


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said of steps that are launched one by one."""
    graphs._say.cache_clear()
    caplog.set_level(logging.WARNING, "draftsmith.decoding.graphs")
    return lambda: [each.getMessage() for each in caplog.records if "launched one by one" in each.getMessage()]


def written(target: Backbone, drafter: Any, **how: Any) -> Generation:
    return generate(target, drafter, PROMPTS, **{"warper": GREEDY, "max_new_tokens": NEW, "seed": 3} | how)


@pytest.mark.parametrize("warper", ["greedy", "sampled"])
@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_text_is_the_eager_one(name: str, warper: str, target: Backbone, replays: Counter[str]) -> None:
    common = {"warper": WARPERS[warper]}
    eager = written(target, PROPOSERS[name](target), graphs=False, **common)
    assert not replays
    replayed = written(target, PROPOSERS[name](target), graphs=True, **common)
    assert replayed.tokens == eager.tokens
    assert replayed.origin == eager.origin
    assert replays["_record"] == 2  # drafting and verifying
    assert replays["__call__"] > 8


@pytest.mark.parametrize("warper", WARPERS)
def test_the_baseline_replayed_is_the_eager_one(warper: str, target: Backbone, replays: Counter[str]) -> None:
    common: dict[str, Any] = {"warper": WARPERS[warper], "max_new_tokens": NEW, "seed": 3, "eos_ids": [3]}
    eager = autoregressive(target, PROMPTS, graphs=False, **common)
    replayed = autoregressive(target, PROMPTS, graphs=True, **common)
    assert replayed.tokens == eager.tokens
    assert replays["_record"] == 1
    assert replays["__call__"] >= max(map(len, eager.tokens)) - 1


@pytest.mark.parametrize("family", TARGETS)
def test_targets_of_other_kinds_are_replayed(family: str, target: Backbone, replays: Counter[str]) -> None:
    """In fp32, but for a mixture of experts."""
    model = random_model(family, **TARGETS[family])
    draft = make_drafter(ready(model), noise=0.03)
    other = ready(model.to(torch.bfloat16) if "moe" in family else model)
    for each in (other, draft.backbone):
        each.model.to(target.device)
    prompts = [[(7 * n * n + 3) % VOCABULARY for n in range(21)], [7, 3, 50, 9, 22]]
    common: dict[str, Any] = {"warper": GREEDY, "max_new_tokens": 40}
    if "moe" not in family:
        eager = generate(other, draft, prompts, graphs=False, **common)
        assert generate(other, draft, prompts, graphs=True, **common).tokens == eager.tokens
        assert replays["_record"] == 2
    base = autoregressive(other, prompts, graphs=False, **common)
    assert autoregressive(other, prompts, graphs=True, **common).tokens == base.tokens


def test_long_answers_are_replayed_unasked(target: Backbone, replays: Counter[str], said: Callable) -> None:
    drafter = make_drafter(target)
    for short in (True, False):
        common: dict[str, Any] = {"max_new_tokens": LEAST_TOKENS - 1 if short else NEW}
        eager = written(target, drafter, graphs=False, **common)
        unasked = written(target, drafter, **common)
        assert unasked.tokens == eager.tokens
        assert autoregressive(target, PROMPTS, warper=GREEDY, **common).tokens == unasked.tokens
        assert replays["_record"] == (0 if short else 3)
        assert (unasked.recording_seconds == 0) is short
        assert 0 < unasked.propose_seconds < unasked.decode_seconds
    assert not said()


class Reading(DraftModel):
    """Reads a number of the device in every call, and does not say so."""

    def propose(self, last_B: Tensor, *rest: Any) -> Any:
        int(last_B[0])
        return super().propose(last_B, *rest)


def test_a_step_that_waits_is_found_before_it_is_recorded(
    target: Backbone, replays: Counter[str], said: Callable
) -> None:
    drafter = make_drafter(target)
    reading = Reading(drafter.backbone, target.vocabulary)
    eager = written(target, drafter, graphs=False, warper=SAMPLED)
    for _ in range(2):
        assert written(target, reading, warper=SAMPLED).tokens == eager.tokens
    assert not replays["_record"]
    (line,) = said()
    assert "a step waits for the device at " in line
    assert "test_graphs.py:" in line
    with pytest.raises(RequestError, match=r"graphs were asked for, and a step waits for the device at .*test_graphs"):
        written(target, reading, graphs=True)
    assert written(target, drafter, warper=SAMPLED).tokens == eager.tokens


def test_a_function_that_judges_is_not_recorded(target: Backbone, replays: Counter[str], said: Callable) -> None:
    drafter = make_drafter(target)
    judged = written(target, drafter, rule=lambda *given: accept_greedy(*given))
    assert not replays
    assert judged.tokens == written(target, drafter).tokens
    assert len(said()) == 1


def test_numbers_are_fresh_in_every_replay(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a step that replays the numbers that it was recorded with writes another text."""
    drafter = make_drafter(target)
    right = written(target, drafter, warper=SAMPLED, graphs=True)
    monkeypatch.setattr("draftsmith.decoding.graphs.RecordedUniforms.restart", lambda self: setattr(self, "_taken", 0))
    assert written(target, drafter, warper=SAMPLED, graphs=True).tokens != right.tokens


def test_memory_is_free_when_a_request_ends(target: Backbone) -> None:
    drafter = make_drafter(target)
    held = []
    for _ in range(4):
        written(target, drafter)
        autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=NEW)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    # the drafter's own rows stay until its next ones
    assert len({*held[1:]}) == 1
