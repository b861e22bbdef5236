"""Experts that a verify call reaches: counted anew one window at a time, and in the speed model's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.benchmarks.common.random_models import EXPERTS, GROUPED
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.experts import expert_widths, unread_by_a_token
from draftsmith.eval.measure.speed import bytes_of, experts_read
from draftsmith.eval.report.tables import experts_line
from helpers.models.random_models import random_model, ready

KINDS: dict[str, dict[str, Any]] = {"qwen3_moe": {"num_experts": 8}, "mixtral": {"num_local_experts": 8}}
TEXT = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(3)).tolist()
SIZES = [1, 2, 5, 9]


def mixture(family: str) -> Backbone:
    return ready(random_model(family, **GROUPED | EXPERTS | KINDS[family]))


@pytest.mark.parametrize("family", KINDS)
@torch.no_grad()
def test_the_count_is_the_routers_own(family: str) -> None:
    target = mixture(family)
    found = experts_read(target, TEXT, SIZES)
    assert found is not None
    logits = target.model(torch.tensor([TEXT]), output_router_logits=True, use_cache=False).router_logits
    chosen = [each.topk(2, -1).indices.tolist() for each in logits]
    for n in SIZES:
        counts = [
            len({expert for token in layer[at : at + n] for expert in token})
            for layer in chosen
            for at in range(len(TEXT) - n + 1)
        ]
        assert found.read[n] == pytest.approx(sum(counts) / len(counts))
    assert found.read[1] == 2
    assert found.of == 8
    assert [found.read[n] for n in SIZES] == sorted({*found.read.values()}), "more nodes reach more"


def test_bytes_are_the_dense_part_and_the_experts_that_are_read() -> None:
    target = mixture("qwen3_moe")
    found = experts_read(target, TEXT, [5])
    assert found is not None
    experts = sum(p.nbytes for name, p in target.model.named_parameters() if ".experts." in name)
    whole = bytes_of(target.model)
    for n, size in found.call_bytes.items():
        assert size == pytest.approx(whole - experts + experts * found.read[n] / 8)
    assert found.growth(1) == 1 < found.growth(3) < found.growth(5)
    assert "a call on 5 nodes reads" in experts_line(found.to_dict())


@pytest.mark.parametrize("family", KINDS)
def test_what_a_token_does_not_read(family: str) -> None:
    """Two of eight experts: three quarters of their weights are not read, and a chosen one takes rows of its own."""
    model = mixture(family).model
    held = [p for name, p in model.named_parameters() if ".experts." in name]
    assert unread_by_a_token(model) == sum(p.numel() for p in held) * 6 // 8
    layers = model.config.num_hidden_layers
    assert sum(expert_widths(model)) == 2 * sum(sum(p.shape[1:]) for p in held)
    assert len([*expert_widths(model)]) == layers
    assert unread_by_a_token(make_target("qwen3").model) == 0


def test_a_dense_model_has_none() -> None:
    assert experts_read(make_target("qwen3"), TEXT, SIZES) is None
