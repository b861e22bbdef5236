"""Where blocks begin and what counts of them, against loops over tokens."""

from __future__ import annotations

import torch
from draftsmith.trainers.block.anchors import anchors_at, can_begin, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

Batch = dict[str, Tensor]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows of packed documents with prompts, gaps and padding."""
    S = draw(st.integers(2, 14))
    documents, positions, masks = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
        numbers = [n for n, length in enumerate(lengths) for _ in range(length)][:S]
        places = [at for length in lengths for at in range(length)][:S]
        numbers, places = numbers + [-1] * (S - len(numbers)), places + [0] * (S - len(places))
        counts = draw(st.lists(st.sampled_from([True, True, False]), min_size=S, max_size=S))
        documents.append(numbers)
        positions.append(places)
        masks.append([c and n >= 0 and p > 0 for c, n, p in zip(counts, numbers, places, strict=True)])
    ids = torch.arange(S * len(documents)).view(-1, S)
    return {
        "input_ids": ids,
        "documents": torch.tensor(documents),
        "positions": torch.tensor(positions),
        "loss_mask": torch.tensor(masks),
    }


def starts(batch: Batch, row: int) -> list[int]:
    """Tokens whose successor is a label of the same document."""
    document, mask = batch["documents"][row].tolist(), batch["loss_mask"][row].tolist()
    return [a for a in range(len(mask) - 1) if mask[a + 1] and document[a + 1] == document[a]]


@settings(max_examples=80, deadline=None)
@given(batches(), st.integers(1, 16), st.integers(1, 6), st.integers(0, 5))
def test_anchors_and_labels_are_those_of_loops(batch: Batch, count: int, depth: int, seed: int) -> None:
    anchors = drawn(batch, count, depth, seed)
    R, S = batch["input_ids"].shape
    assert anchors.at_RA.shape == (R, min(count, S))
    for row in range(R):
        able = starts(batch, row)
        assert can_begin(batch)[row].nonzero()[:, 0].tolist() == able
        chosen = anchors.at_RA[row].tolist()
        assert chosen == sorted(set(chosen))
        # as many as there can be, and none that cannot while another one could
        assert len(set(chosen) & set(able)) == min(count, len(able))
        for number, at in enumerate(chosen):
            document, wanted = batch["documents"][row].tolist(), []
            for place in range(at + 1, at + 1 + depth):
                inside = place < S and document[place] == document[at] and bool(batch["loss_mask"][row, place])
                wanted.append(inside and all(wanted))
            assert anchors.known_RAK[row, number].tolist() == wanted
            for k, known in enumerate(wanted):
                assert not known or anchors.label_RAK[row, number, k] == at + 1 + k
            assert any(wanted) == (at in able)


@settings(max_examples=30, deadline=None)
@given(batches(), st.integers(0, 5))
def test_a_row_has_the_same_anchors_whatever_stands_beside_it(batch: Batch, seed: int) -> None:
    whole = drawn(batch, 3, 2, seed)
    for row in range(len(batch["input_ids"])):
        alone = drawn({name: each[row : row + 1] for name, each in batch.items()}, 3, 2, seed)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, whole, strict=True))


def long_row(S: int = 200) -> Batch:
    return {
        "input_ids": torch.arange(S)[None],
        "documents": torch.zeros(1, S, dtype=torch.long),
        "positions": torch.arange(S)[None],
        "loss_mask": torch.ones(1, S, dtype=torch.bool),
    }


def test_every_token_is_an_anchor_as_often_as_the_others() -> None:
    row, seeds = long_row(40), 2000
    counts = torch.zeros(40)
    for seed in range(seeds):
        counts[drawn(row, 10, 1, seed).at_RA[0]] += 1
    wanted = seeds * 10 / 39
    assert counts[39] == 0  # nothing is behind it
    assert float(((counts[:39] - wanted) ** 2 / wanted).sum()) < 80  # 38 degrees of freedom, p = 1e-4


def test_blocks_begin_elsewhere_in_every_step() -> None:
    row = long_row()
    assert torch.equal(drawn(row, 20, 2, 1).at_RA, drawn(row, 20, 2, 1).at_RA)
    assert not torch.equal(drawn(row, 20, 2, 1).at_RA, drawn(row, 20, 2, 2).at_RA)


def test_a_block_ends_at_a_gap() -> None:
    row = long_row(8)
    row["loss_mask"][0, 4] = False
    assert anchors_at(row, torch.tensor([[2]]), 4).known_RAK.tolist() == [[[True, False, False, False]]]
