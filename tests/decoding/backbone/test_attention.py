"""Attention over shared key-value heads equals the stock function, with and without a mask."""

from __future__ import annotations

import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.attention import NAME, use_grouped_attention


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@torch.inference_mode()
def test_logits_do_not_change(architecture: str) -> None:
    model = make_target(architecture).model
    ids = torch.arange(24)[None] % 61
    mask = torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = (mask.tril() | torch.eye(24, dtype=torch.bool))[None, None]
    before = [model(ids, attention_mask=each).logits for each in (None, mask)]
    use_grouped_attention(model)
    assert model.config._attn_implementation == NAME
    after = [model(ids, attention_mask=each).logits for each in (None, mask)]
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_other_implementations_stay() -> None:
    model = make_target("qwen3").model
    model.set_attn_implementation("eager")
    use_grouped_attention(model)
    assert model.config._attn_implementation == "eager"
