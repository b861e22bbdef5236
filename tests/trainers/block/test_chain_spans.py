"""Long rows of a PARD draft: text and masks without a mask of all by all, and the numbers that one would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.benchmarks.common.random_models import GROUPED, WINDOWED
from draftsmith.data.config import DataConfig
from draftsmith.decoding.backbone.attention import NAME, OWN, use_grouped_attention, use_own_attention
from draftsmith.decoding.backbone.hidden_states import decoder_of
from draftsmith.decoding.backbone.windows import Masks
from draftsmith.drafters.layers import spans
from draftsmith.drafters.layers.spans import attending_by_spans
from draftsmith.errors import RequestError
from draftsmith.trainers.block import masked_chains, pard
from draftsmith.trainers.block.chain_spans import chain_spans, check_spans
from draftsmith.trainers.block.masked_chains import Chains, chain_mask, chain_states, drawn
from draftsmith.trainers.config import MASKED, ModelConfig
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.method_config import PardConfig
from draftsmith.trainers.packed import passes
from draftsmith.trainers.student.recomputed import recompute_layers
from helpers.models.method_objectives import build
from helpers.models.packed_rows import MASK, packed
from helpers.models.random_models import random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

FAMILIES: dict[str, dict[str, Any]] = {"qwen3": GROUPED, "llama": GROUPED, "gpt2": {}} | {
    # windows shorter than the documents; a cap on the scores and sinks by the model's own function
    family: {"num_key_value_heads": 2, "head_dim": 8} | more
    for family, more in WINDOWED.items()
}
FAMILIES["gemma2"] |= {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "BLOCK", 16)
    monkeypatch.setattr(spans, "_PIECE", 11)


def two_rows(*, documents: int = 3) -> Batch:
    """Rows of several documents and one, both with padding behind."""
    one, other = packed([13, 21, 6][:documents], seed=1), packed([32], seed=2)
    width = 44
    rows: Batch = {}
    for name, fill in {"input_ids": 0, "positions": 0, "documents": -1, "loss_mask": False}.items():
        parts = [
            torch.nn.functional.pad(each[name], (0, width - each[name].shape[1]), value=fill) for each in (one, other)
        ]
        rows[name] = torch.cat(parts)
    padding = rows["documents"] < 0
    rows["positions"] = torch.where(padding, padding.cumsum(1) - 1, rows["positions"])
    return rows


def seen(span: Tensor, chains: Chains, length: int) -> Tensor:
    """bool [R, N, N] of what `chain_spans` says."""
    at_N = torch.arange(length + chains.anchor_RM.shape[1])
    first, last, own_first, own_last = (x[..., None] for x in span[:, 0].unbind(-1))
    return ((at_N >= first) & (at_N <= last)) | ((at_N >= own_first) & (at_N <= own_last))


def by_kind(masks: Masks) -> dict[str, Tensor | None]:
    return masks if isinstance(masks, dict) else {"": masks}


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    drafts=st.integers(2, 6),
    keep=st.floats(0.1, 1.0),
    seed=st.integers(0, 99),
    window=st.integers(1, 9),
    family=st.sampled_from(["qwen3", "mistral", "gemma3_text", "llama4_text"]),
)
def test_spans_are_the_rows_of_the_mask(
    lengths: list[int], drafts: int, keep: float, seed: int, window: int, family: str
) -> None:
    config = random_model(family, **FAMILIES[family]).config
    config.sliding_window = config.attention_chunk_size = window
    batch = packed(lengths, seed=seed)
    chains = drawn(batch, drafts, seed, keep=keep, least=0.2)
    positions = torch.cat((batch["positions"], batch["positions"].gather(1, chains.anchor_RM) + chains.depth_RM), 1)
    mask = chain_mask(batch["documents"], chains)
    expected = by_kind(masked_chains._windowed(config, mask, positions))
    found = by_kind(chain_spans(config, batch["documents"], chains))
    if len(expected) < len(found):  # nothing is as long as the window
        expected = dict.fromkeys(found, mask)
    real = torch.cat((torch.ones_like(batch["loss_mask"]), chains.real_RM), 1)
    for kind, each in found.items():
        mask = expected[kind]
        assert each is not None
        assert mask is not None
        assert torch.equal(seen(each, chains, sum(lengths))[real], mask[:, 0][real]), kind


def test_padding_and_filling_are_alone() -> None:
    batch = two_rows()
    chains = drawn(batch, 4, 1, keep=0.7, least=0.2)
    found = seen(chain_spans(make_target("qwen3").model.config, batch["documents"], chains), chains, 44)
    alone = torch.cat((batch["documents"] < 0, ~chains.real_RM), 1)
    assert (~chains.real_RM).any()
    assert torch.equal(found[alone], torch.eye(found.shape[1], dtype=torch.bool).expand_as(found)[alone])
    assert not (found[~alone] & alone[:, None].expand_as(found)[~alone]).any()


def draft_of(family: str) -> Any:
    model = random_model(family, **FAMILIES[family])
    use_own_attention(model)
    return model.requires_grad_(True)


def trained_on(model: Any, batch: Batch, chains: Chains) -> tuple[Tensor, Tensor, list[Tensor]]:
    """States of tokens and of masks, and gradients of a sum of them that weighs each differently."""
    model.zero_grad()
    text_RSH, masks_RMH = chain_states(model, batch, chains, MASK)
    found = text_RSH[batch["documents"] >= 0], masks_RMH[chains.real_RM]
    sum((each * torch.linspace(-1, 1, each.numel()).view_as(each)).mean() for each in found).backward()
    return *(each.detach() for each in found), [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("small_blocks")
def test_the_numbers_of_a_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = draft_of(family), two_rows()
    before = model.config._attn_implementation
    chains = drawn(batch, 5, 1, keep=0.8, least=0.2)
    assert set(chains.depth_RM.unique().tolist()) == {0, 1, 2, 3, 4}
    with_mask = trained_on(model, batch, chains)
    monkeypatch.setattr(passes, "MASKED", 43)
    monkeypatch.setattr(masked_chains, "chain_mask", None)  # nothing asks for one
    without = trained_on(model, batch, chains)
    torch.testing.assert_close(without, with_mask, rtol=1e-5, atol=1e-5)
    assert len(without[2]) > 10
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mistral"])
@pytest.mark.usefixtures("small_blocks")
def test_layers_that_are_computed_again_attend_as_they_did(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their second pass comes in the backward pass, when the model attends by its masks again."""
    model, batch = draft_of(family).train(), two_rows()
    chains = drawn(batch, 5, 1, keep=0.8, least=0.2)
    monkeypatch.setattr(passes, "MASKED", 43)
    once = trained_on(model, batch, chains)
    recompute_layers(model, "the draft", row_tokens=MASKED + 1)
    torch.testing.assert_close(trained_on(model, batch, chains), once, rtol=0, atol=0)
    recompute_layers(model, "the draft", row_tokens=MASKED)  # without it the second pass takes the spans for a mask
    with pytest.raises(
        RuntimeError, match=r"attn_mask.dtype: long|The size of tensor a \(172\) must match .* b \(4\)"
    ):
        trained_on(model, batch, chains)


@pytest.mark.parametrize(("attends_by", "masks"), [("sdpa", True), (NAME, True), ("eager", False)])
def test_what_a_draft_may_attend_by(attends_by: str, masks: bool) -> None:
    model = random_model("qwen3", **GROUPED)
    model.set_attn_implementation(attends_by)
    if masks:
        check_spans(model)
        return
    with pytest.raises(RequestError, match=f"attends by 'eager'.* more than 2,048 tokens.*sdpa.*{MASKED} or less"):
        check_spans(model)


def test_a_draft_that_attends_by_its_own_code_is_refused_before_training() -> None:
    model = random_model("bloom")
    assert not model._supports_attention_backend
    with pytest.raises(RequestError, match="BloomForCausalLM attends by code of its own"):
        check_spans(model)


def test_models_that_only_have_their_own_function_go_by_it() -> None:
    model = draft_of("gpt_oss")
    assert model.config._attn_implementation == OWN
    with attending_by_spans(decoder_of(model)):
        assert model.config._attn_implementation == "draftsmith_spans_eager"
    assert model.config._attn_implementation == OWN


def long_row(tokens: int) -> Batch:
    """A row of two documents, beyond what goes with a mask."""
    return packed([tokens // 3, tokens - tokens // 3], seed=3)


def test_a_row_longer_than_masked_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the method itself: its loss, terms and gradients are those of the pass with a mask."""
    torch.manual_seed(0)
    target = make_target("qwen3").model
    target.config.max_position_embeddings = 4096
    sizes = ModelConfig(layers=1, hidden=16, heads=2, kv_heads=1, head_size=8, max_positions=4096)
    tokens = MASKED + 60
    made = build("pard", target, model=sizes, pard=PardConfig(drafts=3), data=DataConfig(sequence_length=tokens))
    batch = long_row(tokens)
    made.begin_step(0, 5)
    teacher = made.prepare(batch)
    found = []
    for masked in (MASKED, tokens):
        monkeypatch.setattr(passes, "MASKED", masked)
        if masked == MASKED:
            monkeypatch.setattr(masked_chains, "chain_mask", None)
        made.module.zero_grad()
        loss, terms = made.module(batch, teacher)
        loss.backward()
        found.append((loss.detach(), terms, [p.grad.clone() for p in made.module.parameters() if p.grad is not None]))
        monkeypatch.setattr(masked_chains, "chain_mask", chain_mask)
    loss, _, gradients = found[0]
    assert len(gradients) > 8
    assert float(loss) > 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_the_method_refuses_them_for_long_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = random_model("qwen3", **GROUPED)
    draft.set_attn_implementation("eager")
    monkeypatch.setattr(pard, "make_draft", lambda *_args, **_more: draft)
    target = make_target("qwen3").model
    target.config.max_position_embeddings = MASKED + 1
    build("pard", target, data=DataConfig(sequence_length=MASKED))
    build("pard", target, data=DataConfig(sequence_length=MASKED + 1), pard=PardConfig(drafts=1))
    with pytest.raises(RequestError, match="attends by 'eager'"):
        build("pard", target, data=DataConfig(sequence_length=MASKED + 1))


def test_grouped_drafts_too() -> None:
    """What probes set for decoding stays, and trains."""
    model = random_model("qwen3", **GROUPED)
    use_grouped_attention(model)
    check_spans(model)
