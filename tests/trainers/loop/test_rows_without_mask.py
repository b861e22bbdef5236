"""Long rows: documents by the causal kernel, no mask of rows by rows, and the numbers that a mask would give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import VOCABULARY
from draftsmith.benchmarks.common.random_models import GROUPED, WINDOWED
from draftsmith.data.rows.packed import Document, PackedRows, pack
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.loading import keep_soft_cap
from draftsmith.drafters.layers import spans
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.packed import passes
from draftsmith.trainers.packed.passes import PackingMode, hidden_states, way_through
from helpers.models.random_models import random_model
from helpers.operation_counts import Largest
from torch import Tensor

S = 96
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": GROUPED,
    "gpt2": {},
    # windows shorter than the documents; caps on the scores, sinks
    **{family: GROUPED | more for family, more in WINDOWED.items()},
}
FAMILIES["gemma2"] |= {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}
WITHOUT_WINDOWS = {
    "gemma2": {"layer_types": ["full_attention"] * 2},
    "gpt_oss": {"layer_types": ["full_attention"] * 2},
}
"""Families whose scores SDPA cannot compute, seeing all of the text."""


def packed(*lengths: int, row: int = S) -> PackedRows:
    """Rows of documents of such lengths."""
    ids = [(7 * torch.arange(length) ** 2 + 3 + length).remainder(VOCABULARY).numpy() for length in lengths]
    documents = [Document(each.astype("int32"), torch.ones(len(each), dtype=torch.bool).numpy()) for each in ids]
    return pack(documents, row, pad=0, fingerprint="")


def of(family: str) -> Any:
    model = random_model(family, **FAMILIES[family])
    use_grouped_attention(model)
    return model


def trained_on(model: Any, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """States of tokens, and gradients of a sum of them that weighs each differently."""
    model.requires_grad_(True).zero_grad()
    states_RSH = hidden_states(model, batch)
    real = batch["documents"] >= 0
    found = states_RSH[real]
    (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
    return found.detach(), [each.grad for each in model.get_decoder().parameters() if each.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(90, 80), (50, 33, 9, 7, 2, 60)], ids=["alone", "packed"])
def test_the_numbers_of_a_mask(family: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = of(family), packed(*lengths)
    batch = rows.batch(range(len(rows)))
    with_mask = trained_on(model, batch)
    monkeypatch.setattr(passes, "MASKED", S - 1)
    monkeypatch.setattr(passes, "row_masks", None)  # nothing asks for one
    without = trained_on(model, batch)
    torch.testing.assert_close(without, with_mask, rtol=2e-4, atol=2e-5)


def largest(model: Any, batch: Batch) -> int:
    with Largest() as seen:
        trained_on(model, batch)
    return seen.numbers


SMALL = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("family", "sharded"),
    [(family, False) for family in ("qwen3", *WINDOWED, "gemma2 in full", "gpt_oss in full")] + [("qwen3", True)],
    ids=lambda value: {True: "ZeRO-3", False: "whole"}.get(value, value),
)
def test_nothing_grows_with_the_square(family: str, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per token the largest tensor of a row stays what it is, but with a mask, when the row is four times as long."""
    name = family.split()[0]
    more = WINDOWED.get(name, {}) | (WITHOUT_WINDOWS[name] if " " in family else {})
    if name == "llama4_text":
        more |= {"intermediate_size_mlp": 16}
    model = random_model(name, **SMALL | more)
    keep_soft_cap(model)
    use_grouped_attention(model)
    weights = max(each.numel() for each in model.parameters())
    monkeypatch.setattr(passes, "is_sharded", lambda _model: sharded)
    monkeypatch.setattr(spans, "BLOCK", 32)
    found = {}
    for masked in (0, 4096):
        monkeypatch.setattr(passes, "MASKED", masked)
        for length in (256, 1024):
            found[masked, length] = largest(model, packed(length, row=length).batch([0]))
    assert weights < found[0, 256]
    # by spans a block of queries sees all of the text in front of it
    assert found[0, 1024] <= 4 * found[0, 256]
    assert found[4096, 1024] >= 1024**2
    assert found[4096, 1024] > 15 * found[4096, 256]


@pytest.mark.parametrize(
    ("window", "tokens", "way"),
    [
        (None, 90, PackingMode.APART),
        (90, 90, PackingMode.APART),
        (89, 90, PackingMode.SPANS),
        (23, 90, PackingMode.SPANS),
        (5, 90, PackingMode.SPANS),
    ]
    + [(5, 80, PackingMode.MASK)],
)
def test_windows_that_rows_reach_beyond_go_by_spans(
    window: int | None, tokens: int, way: PackingMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Document by document transformers would make a mask for them, of the square of the row."""
    monkeypatch.setattr(passes, "MASKED", 80)
    windows = None if window is None else SimpleNamespace(shortest=window)
    monkeypatch.setattr(passes.Windows, "of", lambda _config: windows)
    assert way_through(of("qwen3").get_decoder(), tokens) == way


def test_pieces_keep_their_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that hold a model together need equally many passes."""
    model = of("qwen3")
    monkeypatch.setattr(passes, "MASKED", 8)
    assert passes.way_through(model, 9) is passes.PackingMode.APART
    assert passes.way_through(model, 8) is passes.PackingMode.MASK
    monkeypatch.setattr(passes, "is_sharded", lambda _model: True)
    made: list[Any] = []
    batch = packed(50, 33, 9).batch([0])
    passes.over_rows(model.get_decoder(), batch, lambda inputs: made.append(inputs) or [batch["positions"]])
    assert [each["attention_mask"].shape for each in made] == [(1, 1, S, 4)]
    model.set_attn_implementation("eager")
    assert passes.way_through(model.get_decoder(), 9) is passes.PackingMode.MASK
