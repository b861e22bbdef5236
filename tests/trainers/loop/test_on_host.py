"""What a step picks of its rows it picks by what the host knows: on torch's meta device, which holds no numbers, too."""

from __future__ import annotations

import pytest
import torch
from draftsmith.decoding.on_host import on_host, sent
from draftsmith.drafters.layers.passes import Packing
from draftsmith.drafters.projection import Projection
from draftsmith.trainers.labels import has_label, label_places, labelled
from draftsmith.trainers.loop.feed import upload
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.loop.step import cut
from draftsmith.trainers.losses.chunked import SharedTeacher
from draftsmith.trainers.student.compared import compared, in_text_order
from helpers.models.learnable_text import Chains

META = torch.device("meta")
HIDDEN, PASSES = 8, 3


@pytest.fixture
def rows() -> Batch:
    return Chains(8, 0, uneven=True).batch([0, 1, 2, 3])


@pytest.fixture
def batch(rows: Batch) -> Batch:
    return upload(rows, META)


def states(rows: Batch, device: torch.device = META) -> torch.Tensor:
    return torch.zeros(*rows["input_ids"].shape, HIDDEN, device=device)


def test_labels_of_heads_and_drafts(rows: Batch, batch: Batch) -> None:
    for ahead in (1, 2, 4):
        place = label_places(batch, ahead)
        wanted = has_label(rows, ahead).nonzero(as_tuple=True)
        assert all(each.device == META for each in place)
        assert all(torch.equal(on_host(one), other) for one, other in zip(place, wanted, strict=True))
    counted = int(rows["loss_mask"][:, 1:].sum())
    assert labelled(states(rows), batch).hidden_PH.shape == (counted, HIDDEN)


def test_comparisons_of_passes(rows: Batch, batch: Batch) -> None:
    drafts = compared([states(rows)] * PASSES, batch)
    count = sum(int(has_label(rows, 2 + j).sum()) for j in range(PASSES))
    assert drafts.hidden_PH.shape == (count, HIDDEN)
    drafts = in_text_order(drafts)
    at_P, label_P2 = drafts.at_P, drafts.label_P2
    assert (label_P2.shape, at_P.device) == ((count, 2), META)
    teacher = SharedTeacher.of(states(rows).flatten(0, 1), Projection(torch.zeros(5, HIDDEN, device=META)), at_P)
    assert len(teacher.hidden_PH) == len(on_host(at_P).unique())
    assert len(teacher.host_P) == len(teacher.at_P) == count


def test_documents_side_by_side() -> None:
    documents_BS = torch.tensor([[0] * 9 + [1] * 2 + [2], [0] * 5 + [1] * 7])
    made = Packing(sent(documents_BS, META)).side_by_side(torch.zeros(2, 1, 12, HIDDEN, device=META))
    assert [tuple(each.shape) for each in made] == [(1, 1, 1, 8), (1, 1, 2, 8), (2, 1, 7, 8), (1, 1, 9, 8)]
    assert {each.device for each in made} == {META}


@pytest.mark.parametrize("pick", [lambda batch: label_places(batch, 1), lambda batch: Packing(batch["documents"])])
def test_without_twins_they_would_have_to_ask(pick, rows: Batch) -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        pick({name: each.to(META) for name, each in rows.items()})


def test_parts_of_a_micro_batch_have_theirs(rows: Batch, batch: Batch) -> None:
    parts = list(cut(batch, 3))
    for name, each in rows.items():
        assert all(torch.equal(on_host(part[name]), own) for part, own in zip(parts, each.split(3), strict=True))


def test_a_twin_is_what_was_sent() -> None:
    numbers = torch.tensor([3, 1, 2])
    assert on_host(numbers) is numbers
    assert on_host(sent(numbers, META)) is numbers
