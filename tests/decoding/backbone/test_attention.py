"""Attention over shared key-value heads equals the stock function, with and without a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import make_target
from draftsmith.decoding.backbone.attention import NAME, attend_by_groups, goes_by_groups, use_grouped_attention


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


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_heads_of_a_group_as_tokens_are_the_same_to_the_bit(
    tokens: int, heads: int, shared: int, masked: bool
) -> None:
    torch.manual_seed(0)
    query, keys, values = (
        torch.randn(2, count, length, 16).bfloat16() for count, length in ((heads, tokens), (shared, 40), (shared, 40))
    )
    mask = None
    if masked:
        hidden = torch.rand(2, 1, tokens, 40) < 0.5
        hidden[..., 0] = False
        mask = torch.zeros(2, 1, tokens, 40, dtype=torch.bfloat16).masked_fill(hidden, -torch.inf)
    with torch.no_grad():
        assert goes_by_groups(query, mask) == (masked or tokens == 1)
        got = attend_by_groups(query, keys, values, mask, scale=0.3)
        expected = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.equal(got, expected)


def test_what_trains_or_reads_a_prompt_does_not_go_by_groups() -> None:
    one = torch.randn(1, 2, 1, 8).bfloat16()
    assert not goes_by_groups(one, None)
    with torch.no_grad():
        assert goes_by_groups(one, None)
        assert not goes_by_groups(one.float(), None)
        assert not goes_by_groups(torch.randn(1, 2, 17, 8).bfloat16(), torch.zeros(1, 1, 17, 17))
        assert not goes_by_groups(torch.randn(1, 2, 2, 8).bfloat16(), None)
