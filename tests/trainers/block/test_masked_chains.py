"""Masked chains: the paper's K copies with fewer rows, and the passes that decoding makes."""

from __future__ import annotations

import pytest
import torch
from conftest import make_target
from draftsmith.trainers.block.masked_chains import Chains, chain_mask, chain_states, drawn, listed
from draftsmith.trainers.packed import passes
from draftsmith.trainers.packed.masks import document_mask
from draftsmith.trainers.packed.passes import hidden_states
from helpers.models.packed_rows import MASK, packed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


def kept(chains: Chains) -> set[tuple[int, int]]:
    """(depth, anchor) of every mask of the first row."""
    real = chains.real_RM[0]
    return set(zip(chains.depth_RM[0][real].tolist(), chains.anchor_RM[0][real].tolist(), strict=True))


def copies_mask(length: int, copies: int) -> Tensor:
    """The paper's mask over K whole copies: copy i at t sees x_<=t-i, copy j at t-i+j for 1 <= j < i, and itself."""
    size = length * copies
    mask = torch.zeros(size, size, dtype=torch.bool)
    for i in range(copies):
        for t in range(i, length):
            at = i * length + t
            mask[at, : t - i + 1] = True
            for j in range(1, i + 1):
                mask[at, j * length + t - i + j] = True
    return mask


def test_kept_masks_see_what_rows_of_the_whole_copies_see() -> None:
    length, copies = 9, 4
    batch = packed([length], unlabelled=0.0)
    whole = copies_mask(length, copies)
    for seed in range(5):
        chains = drawn(batch, copies, seed, keep=0.7, least=0.2)
        real = chains.real_RM[0]
        place = chains.depth_RM[0][real] * length + chains.place_RM[0][real]
        rows = torch.cat((torch.arange(length), place))
        mine = torch.cat((torch.ones(length, dtype=torch.bool), real)).nonzero()[:, 0]
        mask = chain_mask(batch["documents"], chains)[0, 0]
        assert torch.equal(mask[mine][:, mine], whole[rows][:, rows])
        # what a kept row saw of the whole copies was kept
        assert torch.equal(whole[rows].sum(1), whole[rows][:, rows].sum(1))


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    drafts=st.integers(1, 6),
    keep=st.floats(0.1, 1.0),
    seed=st.integers(0, 99),
)
def test_chains_are_nested_and_inside_a_document(lengths: list[int], drafts: int, keep: float, seed: int) -> None:
    batch = packed(lengths, seed=seed)
    documents, labels = batch["documents"][0], batch["loss_mask"][0]
    masks = kept(drawn(batch, drafts, seed, keep=keep, least=0.2))
    for depth, anchor in masks:
        assert depth < drafts
        assert depth == 1 or (depth - 1, anchor) in masks
        last = anchor + depth + 1
        assert documents[anchor] == documents[last]
        assert labels[anchor + 1 : last + 1].all()


def test_shares_are_those_of_the_drop() -> None:
    batch = packed([4000], unlabelled=0.0)
    masks = kept(drawn(batch, 8, 0, keep=0.7, least=0.2))
    for depth in range(1, 8):
        share = sum(each == depth for each, _ in masks) / 4000
        assert share == pytest.approx(max(0.7**depth, 0.2), abs=0.03)


@torch.no_grad()
def test_one_draft_is_the_plain_language_model_to_the_bit() -> None:
    model = make_target("qwen3").model
    batch = packed([7, 12])
    chains = drawn(batch, 1, 0, keep=0.7, least=0.2)
    text, masks = chain_states(model, batch, chains, MASK)
    assert masks.shape[1] == 0
    assert torch.equal(text, hidden_states(model, batch))


@pytest.mark.parametrize("masked", [True, False], ids=["with a mask", "without"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@torch.no_grad()
def test_a_mask_in_training_is_the_mask_of_a_pass_behind_the_text(
    architecture: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "MASKED", 24 if masked else 23)
    model = make_target(architecture).model
    batch = packed([6, 13, 5])
    chains = drawn(batch, 4, 1, keep=0.9, least=0.2)
    text, masks = chain_states(model, batch, chains, MASK)
    torch.testing.assert_close(text, hidden_states(model, batch), atol=1e-5, rtol=1e-4)
    assert len(kept(chains)) > 10
    for m in chains.real_RM[0].nonzero()[:, 0].tolist():
        anchor, depth = int(chains.anchor_RM[0, m]), int(chains.depth_RM[0, m])
        start = anchor - int(batch["positions"][0, anchor])
        ids = torch.cat((batch["input_ids"][:, start : anchor + 1], torch.full((1, depth), MASK)), 1)
        alone = model.model(ids).last_hidden_state[0, -1]
        torch.testing.assert_close(masks[0, m], alone, atol=1e-5, rtol=1e-4)


def test_filling_sees_itself_alone_and_nobody_sees_it() -> None:
    batch = packed([5])
    chains = listed(torch.zeros(1, 5, 2, dtype=torch.bool).index_fill(1, torch.tensor([0]), True))
    mask = chain_mask(batch["documents"], chains)[0, 0]
    filling = 5 + (~chains.real_RM[0]).nonzero()[:, 0]
    assert len(filling)
    for at in filling.tolist():
        assert mask[at].nonzero().tolist() == mask[:, at].nonzero().tolist() == [[at]]
    assert torch.equal(mask[:5, :5], document_mask(batch["documents"])[0, 0])
