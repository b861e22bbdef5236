"""A drafter's layer where launches are what counts: fewer operations, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import make_target
from draftsmith.decoding.backbone import kv_cache
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.eagle.proposer import Eagle3
from draftsmith.drafters.layers import llama
from helpers.operation_counts import Launches


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    with (
        mock.patch.object(llama, "_is_decoding_on_gpu", return_value=True),
        mock.patch.object(kv_cache, "_scatters", return_value=True),
    ):
        yield


def drafter(ids: list[int]) -> Eagle3:
    """In fp16, which a CPU has no ways of its own for."""
    torch.manual_seed(3)
    target = make_target("qwen3")
    target.model.half()
    net = Eagle3Net.for_target(target.model, layers=(0, 1, 2), ids=ids).half()
    return Eagle3(net, target, draft_length=4)


def drafted(made: Eagle3, warper: Warper) -> tuple[list[int], int]:
    """The tokens of a draft behind a prompt, and the launches that it takes."""
    uniforms = Uniforms(0, [0], "cpu")
    with torch.inference_mode():
        made.reset([[1, 2, 3, 4, 5]], 40, static=True)
        made.begin([torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).half()])
        with Launches() as counted:
            proposal = made.propose(torch.tensor([7]), warper, uniforms)
    return proposal.tokens_BN[0].tolist(), counted.number


@pytest.mark.parametrize(("temperature", "most"), [(0.0, 165), (1.0, 196)])
def test_a_draft_takes_few_launches_on_a_gpu(temperature: float, most: int) -> None:
    """EAGLE-3, four tokens on a chain in fixed shapes: 41 a token at temperature 0, where it were 71.

    The masks of a chain and the likeliest of the draft vocabulary save a half of that on every device.
    """
    made, warper = drafter(list(range(0, 61, 2))), Warper(temperature)
    tokens, elsewhere = drafted(made, warper)
    with as_on_a_gpu():
        assert drafted(made, warper)[0] == tokens
        assert drafted(made, warper)[1] <= most < elsewhere - 60


@pytest.mark.parametrize("ascending", [True, False])
def test_the_likeliest_token_is_the_lowest_id_among_equals(ascending: bool) -> None:
    """Whatever order a folder has its draft vocabulary in."""
    made = drafter([30, 4, 50] if not ascending else [4, 30, 50])
    with torch.no_grad():
        made.net.lm_head.weight[2].neg_()  # 30 and 4 are equally likely
        made.net.lm_head.weight[:2] = made.net.lm_head.weight[0]
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(2)).half()
    found = made._likeliest(hidden)
    assert torch.equal(found, made._logits(hidden).argmax(-1))
    assert set(found.flatten().tolist()) == {4, 50}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3])
def test_heads_that_share_keys_attend_as_heads_of_their_own(rows: int, tokens: int) -> None:
    g = torch.Generator().manual_seed(4)
    query = torch.randn(2, tokens, 6, 8, generator=g).transpose(1, 2)
    key, value = (torch.randn(2, 2, 9, 8, generator=g) for _ in range(2))
    mask = torch.rand(rows, 1, tokens, 9, generator=g) < 0.6
    mask[..., 0] = True
    wanted = F.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), attn_mask=mask, scale=0.3
    )
    with as_on_a_gpu(), torch.no_grad():
        got = llama.attend(query, key, value, mask, 3, scale=0.3)
    torch.testing.assert_close(got, wanted)


def test_heads_turn_alike_at_once() -> None:
    g = torch.Generator().manual_seed(5)
    heads = torch.randn(2, 6, 3, 8, generator=g)
    rotary = llama.Rotary(llama.LayerShape(48, 64, 6, 2, 8, 10_000.0, 1e-6))
    turn = rotary(torch.tensor([[3, 4, 900], [0, 1, 2]]))
    torch.testing.assert_close(llama._turned_at_once(heads, turn), llama.turned(heads, turn))


def test_a_norm_in_one_kernel_is_the_norm_in_fp32() -> None:
    """To a rounding of bf16: on CUDA that kernel computes in fp32 and rounds once, on a CPU twice."""
    norm = llama.Norm(64, 1e-6).half()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64, generator=torch.Generator().manual_seed(6)) + 0.5)
        x = (3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(7))).half()
        wanted = norm(x)
        with as_on_a_gpu():
            torch.testing.assert_close(norm(x), wanted, rtol=2**-7, atol=0)
