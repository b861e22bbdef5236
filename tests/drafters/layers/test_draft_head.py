"""The projection that a drafter drafts by: rows of a frozen one, laid out for few rows on a CPU."""

from __future__ import annotations

import pytest
import torch
from draftsmith.decoding import devices
from draftsmith.drafters.layers.draft_vocabulary import DraftHead
from torch import nn

BF16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not devices.multiplies_bf16(), reason="this processor does not multiply bf16"),
)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("only", [None, range(5, 900, 3)])
def test_its_logits_are_the_projections(dtype: torch.dtype, only: range | None) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 1000, bias=False).to(dtype).requires_grad_(False)
    head = DraftHead(layer, 1000, only=only)
    hidden_BH = torch.randn(3, 256).to(dtype)
    with torch.inference_mode():
        logits_BV, expected_BV = head.logits(hidden_BH), layer(hidden_BH).float()
        assert torch.equal(head.likeliest(hidden_BH), logits_BV.argmax(-1))
    drafted = list(range(1000) if only is None else only)
    torch.testing.assert_close(
        logits_BV[:, drafted], expected_BV[:, drafted], rtol=0 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    others = [each for each in range(1000) if each not in drafted]
    assert bool((logits_BV[:, others] == -torch.inf).all())
    assert head._rows._joined is not None  # laid out


def test_a_projection_in_training_is_read_as_it_is() -> None:
    layer = nn.Linear(256, 1000, bias=False)
    head, hidden_BH = DraftHead(layer, 1000), torch.randn(2, 256)
    with torch.inference_mode():
        before_BV = head.logits(hidden_BH)
        layer.weight.add_(1.0)
        assert torch.equal(head.logits(hidden_BH), layer(hidden_BH))
    assert head._rows._joined is None
    assert not torch.equal(before_BV, layer(hidden_BH))
