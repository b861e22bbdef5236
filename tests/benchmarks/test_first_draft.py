"""Acceptance of first drafts along known texts, against walks by hand."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from draftsmith.benchmarks.common.records import Figure
from draftsmith.data.rows.packed import Document, PackedRows, pack
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import LAST
from draftsmith.drafters.projection import Projection
from helpers.benchmark_scripts import load
from helpers.models.small_drafters import make_on_target as make
from torch import Tensor

first_draft = load("first_draft")


class Ahead:
    """Not a drafter: it knows the target's logits, of the token that is asked for or of one some tokens away."""

    family, layers = "ahead", (LAST,)

    def __init__(self, target: Backbone, away: int = 0) -> None:
        self._projection, self._away = Projection.of(target.model), away

    def teacher_forced(self, features_SF: Tensor, _tokens_S: Tensor, _depth: int) -> Iterator[Tensor]:
        yield self._projection.logits(features_SF[1:-1].roll(self._away, 0))


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    """Two documents a row, and one too short to draft behind; every fifth token counts for nothing."""
    rng = np.random.default_rng(2)
    lengths = (30, 20, 2) * 6
    ids = [rng.integers(3, 60, length).astype(np.int32) for length in lengths]
    documents = [Document(each, np.arange(len(each)) % 5 > 0) for each in ids]
    return pack(documents, 52, pad=0, fingerprint="")


def test_a_first_draft_is_held_to_the_token_behind_its_root(target: Backbone, rows: PackedRows) -> None:
    """The target's own logits of that token agree with it everywhere; those of a neighbour do not."""
    drafters = {"itself": [Ahead(target)], "early": [Ahead(target, 1)], "late": [Ahead(target, -1)]}
    sums = {name: [first_draft.empty()] for name in drafters}
    for row in range(len(rows)):
        first_draft.add_row(sums, rows, row, target, drafters)
    asked = [int(np.sum(np.arange(2, length) % 5 > 0)) for length in (30, 20)]
    assert sum(sums["itself"][0]["T0 below"]) == 6 * sum(asked)
    for at in ("T0", "T1"):
        (itself,), (early,), (late,) = sums.values()
        assert itself[f"{at} above"] == pytest.approx(itself[f"{at} below"])
        for other in (early, late):
            assert sum(other[f"{at} above"]) < 0.9 * sum(other[f"{at} below"])


@pytest.mark.parametrize("family", ["eagle", "dflash"])
def test_sums_of_a_row_are_those_of_a_walk_by_hand(family: str, target: Backbone, rows: PackedRows) -> None:
    drafter = make(family, target)
    sums = {family: [first_draft.empty()]}
    first_draft.add_row(sums, rows, 0, target, {family: [drafter]})
    agree = overlap = asked = 0.0
    for document in set(rows.document_RS[0].tolist()) - {-1}:
        own = rows.document_RS[0] == document
        ids, counts = torch.from_numpy(rows.ids_RS[0][own]).long(), rows.in_loss_RS[0][own]
        if len(ids) < 3:
            continue
        with torch.no_grad():
            out = target.model(ids[None], output_hidden_states=True)
            features = torch.cat([out.hidden_states[layer][0] for layer in drafter.layers], -1)
            (draft_XV,) = drafter.teacher_forced(features, ids, 1)
        for at in range(2, len(ids)):
            p_V, q_V = out.logits[0, at - 1].softmax(-1), draft_XV[at - 2].softmax(-1)
            asked += counts[at]
            agree += counts[at] * int(p_V.argmax() == q_V.argmax())
            overlap += counts[at] * float(torch.minimum(p_V, q_V).sum())
    found = sums[family][0]
    assert found["T0 below"] == found["T1 below"] == [asked]
    assert found["T0 above"] == [agree]
    assert found["T1 above"] == pytest.approx([overlap], rel=1e-5)


def test_rows_are_added_until_intervals_are_narrow(target: Backbone, rows: PackedRows) -> None:
    drafters = {"itself": [Ahead(target)], "early": [Ahead(target, 1)]}
    used = [
        len(
            first_draft.measured_on(rows, target, drafters, Namespace(rows=2, half_width=width))["early"][0][
                "T0 below"
            ]
        )
        for width in (1.0, 0.0)
    ]
    assert used == [2, len(rows)]


def test_the_gate_asks_the_whole_interval() -> None:
    ends = {
        "within 0.03": (-0.02, 0.03),
        "not told from 0.03": (-0.04, 0.01),
        "more than 0.03 below": (-0.08, -0.031),
        "more than 0.03 above": (0.04, 0.06),
    }
    for said, (low, high) in ends.items():
        assert first_draft.passed(Figure(value=(low + high) / 2, low=low, high=high), 0.03) == said
    assert first_draft.passed(None, 0.03) is None


def test_slots_alone_are_asked_without_the_token_in_front(target: Backbone, rows: PackedRows) -> None:
    """DFlash 2's selector leaves its candidates alone with a probability; its slots speak of every token."""
    drafters = {name: [make(name, target)] for name in ("eagle", "dflash", "dflash2")}
    added = first_draft.slots_alone(drafters, target)
    assert list(added) == ["dflash2, slots alone"]
    sums = {name: [first_draft.empty()] for name in drafters | added}
    first_draft.add_row(sums, rows, 0, target, drafters | added)
    assert sums["dflash2, slots alone"][0]["T1 above"] != sums["dflash2"][0]["T1 above"]
    slots, selected = added["dflash2, slots alone"][0], drafters["dflash2"][0]
    assert slots.net is selected.net
