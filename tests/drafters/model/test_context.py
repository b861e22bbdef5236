"""A draft's own context: drafts up to it, none behind it, and the text stays the target's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.extras.adaptive import AdaptiveDraft
from draftsmith.drafters.model import draft_model
from draftsmith.drafters.model.adapters import inject, use
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.ensemble import join, join_adapters
from draftsmith.drafters.model.pard import Pard
from draftsmith.errors import RequestError
from draftsmith.eval.audit.rosenblatt import distributions
from draftsmith.eval.measure.speed import measure_costs
from helpers.models.random_models import random_model, ready
from torch import nn

READS, LONG = 24, 96
PROMPTS = [[5, 9, 2, 33, 7], [(7 * n) % 61 for n in range(30)], [(5 * n) % 61 for n in range(21)]]
"""Within the draft's context, behind it, and two tokens in front of its end."""


def learnt(positions: int, *, noise: float = 0.0) -> Backbone:
    """GPT-2, whose learnt positions end: one step behind them is an error. All are cut from one model."""
    torch.manual_seed(0)
    model: Any = random_model("gpt2", n_positions=LONG, n_embd=32, n_head=2, n_layer=2, spread=0.3)
    model.transformer.wpe = nn.Embedding.from_pretrained(model.transformer.wpe.weight[:positions].detach().clone())
    model.config.n_positions = positions
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=g))
    return ready(model)


@pytest.fixture(scope="module")
def target() -> Backbone:
    return learnt(LONG)


def adapted(target: Backbone) -> DraftModel:
    from peft import LoraConfig

    draft = DraftModel(learnt(READS, noise=0.02), target.vocabulary, draft_length=3)
    for name in ("one", "two"):
        inject(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True), draft.module, name)
    draft.module.requires_grad_(False).eval()
    use(draft.module, "one")
    return draft


def single(target: Backbone, reads: int = READS, **settings: Any) -> DraftModel:
    return DraftModel(learnt(reads, noise=0.02), target.vocabulary, **{"draft_length": 3} | settings)


DRAFTS: dict[str, Callable[[Backbone], Any]] = {
    "draft model": single,
    "adapter": adapted,
    "adaptive": lambda target: AdaptiveDraft(learnt(READS, noise=0.02), target.vocabulary, longest=3),
    "pard": lambda target: Pard(learnt(READS, noise=0.02), target.vocabulary, mask=60, draft_length=3),
    "ensemble": lambda target: join([single(target), single(target, READS + 20, policy="sample")]),
    "adapters together": lambda target: join_adapters(adapted(target), ["one", "two"]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", DRAFTS)
@torch.inference_mode()
def test_behind_its_context_nothing_is_drafted(kind: str, temperature: float, static: bool, target: Backbone) -> None:
    how: Any = {"warper": Warper(temperature), "max_new_tokens": 40, "seed": 5, "static": static}
    done = generate(target, DRAFTS[kind](target), PROMPTS, **how)
    for row, prompt in enumerate(PROMPTS):
        drafted = [len(prompt) + place for place, each in enumerate(done.origin[row]) if each == "draft"]
        assert all(place <= READS for place in drafted), (row, drafted)
        assert row != 1 or not drafted
        alone = generate(target, DRAFTS[kind](target), [prompt], requests=[row], **how)
        assert (alone.tokens[0], alone.origin[0]) == (done.tokens[row], done.origin[row])
    assert any("draft" in origin for origin in done.origin)
    if not temperature:
        assert done.tokens == autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=40).tokens


@torch.inference_mode()
def test_up_to_its_context_all_is_drafted(target: Backbone) -> None:
    """A draft with the target's weights is right each time, to the last token that its positions speak of."""
    exact = DraftModel(learnt(READS), target.vocabulary, draft_length=3)
    done = generate(target, exact, [[*PROMPTS[0], 1]], warper=Warper(0.0), max_new_tokens=40)
    # 6 tokens of prompt and the prefill's; behind token 22 two more can be drafted, which reads tokens 22 and 23
    assert done.origin[0][:20] == ["prefill", *(["draft"] * 3 + ["bonus"]) * 4, "draft", "draft", "bonus"]
    assert set(done.origin[0][20:]) == {"bonus"}


@torch.inference_mode()
def test_it_is_said_once(target: Backbone, caplog: pytest.LogCaptureFixture) -> None:
    draft_model._SAID.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            generate(target, single(target), [PROMPTS[0]], warper=Warper(0.0), max_new_tokens=16)
        assert "reads texts" not in caplog.text  # 5 + 16 + 3 tokens are all that it reads
        for _ in range(2):
            generate(target, single(target), [PROMPTS[0]], warper=Warper(0.0), max_new_tokens=17)
    assert (
        caplog.text.count("reads texts of up to 24 tokens, and a prompt with its answer and drafts may take 25") == 1
    )


def test_a_draft_without_room_for_one_draft_is_refused(target: Backbone) -> None:
    draft = single(target, 4)
    with pytest.raises(RequestError, match="reads texts of 4 tokens, and a single draft takes 5 positions"):
        generate(target, draft, [PROMPTS[0]], warper=Warper(0.0), max_new_tokens=8)


@torch.inference_mode()
def test_the_audit_judges_text_that_the_draft_does_not_read(target: Backbone) -> None:
    """Up to its context by what it says, behind it as where there is no draft."""
    prompt, answer = PROMPTS[0], [(3 * n) % 61 for n in range(30)]
    (judged,) = distributions(target, learnt(READS), [prompt], [answer], Warper(1.0))
    (without,) = distributions(target, None, [prompt], [answer], Warper(1.0))
    assert judged.q_MV is not None
    assert torch.equal(judged.p_MV, without.p_MV)
    spoken = READS - len(prompt)  # the first answer token is the prefill's; the state of token 24 speaks of the last
    exact = target.model(torch.tensor([prompt + answer])).logits[0, len(prompt) : READS].softmax(-1)
    torch.testing.assert_close(judged.q_MV[:spoken], exact)
    assert not judged.q_MV[spoken:].any()
    (unread,) = distributions(target, learnt(READS), [PROMPTS[1]], [answer], Warper(1.0))
    assert unread.q_MV is not None
    assert not unread.q_MV.any()


def test_what_a_draft_step_costs_is_timed_where_there_are_drafts(target: Backbone) -> None:
    """The texts that are decoded are longer than the draft reads."""
    costs = measure_costs(target, learnt(READS), [1], context=3 * READS, rounds=1)
    assert costs.c is not None
