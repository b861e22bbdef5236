"""Attention over packed rows and several passes: a dense softmax's results without its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from draftsmith.benchmarks.common.peak import peak_bytes
from draftsmith.drafters.eagle.net import EagleNet, EagleShape, PairNet
from draftsmith.drafters.eagle.net3 import Eagle3Net, Eagle3Shape
from draftsmith.drafters.layers.llama import Projected
from draftsmith.drafters.layers.passes import Packing, Passes
from draftsmith.drafters.layers.sinks import Keys
from torch import Tensor

SIZES = {"hidden": 16, "intermediate": 24, "heads": 4, "kv_heads": 2, "head_size": 8, "rope_theta": 1e4, "eps": 1e-6}
# rows of documents and, by the number -1, padding
PACKED = [[5, 1, 4, 2], [2, 9, -1], [12], [1, 1, 1, 3, 6]]


def documents_of(rows: list[list[int]]) -> Tensor:
    """Numbers of documents [B, N]; a length below 0 fills the row up with padding."""
    width = sum(rows[0])
    numbers = []
    for lengths in rows:
        row = [number for number, length in enumerate(lengths) for _ in range(length)]
        numbers.append(row + [-1] * (width - len(row)))
    return torch.tensor(numbers)


def dense_mask(documents_BN: Tensor, later: int) -> Tensor:
    """[B, 1, N, (1 + later) N]: causal in a document, and the own place of each later pass."""
    N = documents_BN.shape[1]
    same = documents_BN[:, :, None] == documents_BN[:, None]
    own = torch.eye(N, dtype=torch.bool).expand_as(same)
    return torch.cat([same & torch.ones(N, N, dtype=torch.bool).tril(), *[own] * later], 2)[:, None]


def dense(passes: list[Projected], documents_BN: Tensor) -> Tensor:
    """The last of the passes, as one softmax over all keys under one mask."""
    key, value = (torch.cat([p[at] for p in passes], 2).repeat_interleave(2, 1) for at in (1, 2))
    mask = dense_mask(documents_BN, len(passes) - 1)
    return F.scaled_dot_product_attention(passes[-1].query_BQND, key, value, attn_mask=mask)


def drawn(count: int, B: int, N: int, seed: int, dtype: torch.dtype) -> list[Projected]:
    g = torch.Generator().manual_seed(seed)
    sizes = ((4, 2.0), (2, 1.0), (2, 1.0))
    return [
        Projected(*(a * torch.randn(B, heads, N, 8, generator=g, dtype=dtype) for heads, a in sizes))
        for _ in range(count)
    ]


def attended(documents_BN: Tensor, passes: list[Projected]) -> list[Tensor]:
    """Every pass behind the ones before it."""
    attention, keys = Passes(documents_BN, 2), [Keys(each.key_BGND, each.value_BGND) for each in passes]
    sunk = attention.sunk(keys[0])
    later = [attention.later(each, sunk, keys[1 : 1 + j]) for j, each in enumerate(passes[1:])]
    return [attention.first(passes[0]), *later]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [PACKED, [[6], [6]], [[1], [1]]], ids=["packed", "whole", "one"])
def test_every_pass_is_a_softmax_over_all_keys(rows: list[list[int]], dtype: torch.dtype) -> None:
    documents = documents_of(rows)
    passes = drawn(5, *documents.shape, 1, torch.float64)
    close = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    rounded = [Projected(*(x.to(dtype) for x in each)) for each in passes]
    for j, found in enumerate(attended(documents, rounded)):
        assert found.dtype == dtype
        wanted = dense(passes[: j + 1], documents)
        torch.testing.assert_close(found.double(), wanted, atol=close, rtol=close)


def test_a_document_is_what_it_is_alone() -> None:
    """Neighbours in a row, in a batch and in a group change nothing."""
    documents = documents_of(PACKED)
    passes = drawn(3, *documents.shape, 2, torch.float64)
    found = attended(documents, passes)[-1]
    for row, lengths in enumerate(PACKED):
        at = 0
        for length in lengths:
            end = at + length if length > 0 else documents.shape[1]
            alone = torch.zeros(1, end - at, dtype=torch.long)
            cut = [Projected(*(x[row : row + 1, :, at:end] for x in each)) for each in passes]
            wanted = attended(alone, cut)[-1]
            torch.testing.assert_close(found[row : row + 1, :, at:end], wanted)
            at = end


def net_of(family: str, **more: bool) -> PairNet:
    torch.manual_seed(3)
    if family == "eagle":
        return EagleNet(EagleShape(**SIZES))
    sizes = {"layers": (0, 1, 2), "vocabulary": 30, "draft_vocabulary": 20}
    return Eagle3Net(Eagle3Shape(**SIZES, **sizes, **more))


def given(net: PairNet, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, embeddings and positions for the pairs of some rows."""
    g = torch.Generator().manual_seed(4)
    B, N = documents.shape
    width = 16 if isinstance(net, EagleNet) else 48
    hidden = net.fuse(torch.randn(B, N, width, generator=g))
    return hidden, torch.randn(B, N, 16, generator=g), torch.arange(N).expand(B, -1)


def unrolled_densely(
    net: PairNet, hidden: Tensor, embeds: Tensor, positions: Tensor, documents: Tensor, passes: int, detach: bool
) -> list[Tensor]:
    known: list[Projected] = []
    outputs: list[Tensor] = []
    for j in range(passes):
        residual, read = net.enter(hidden, embeds.roll(-j, 1))
        known.append(net.attention.project(read, net.rotary(positions + j)))
        outputs.append(net.finish(residual, net.attention.joined(dense(known, documents))))
        hidden = outputs[-1].detach() if detach else outputs[-1]
    return outputs


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_outputs_and_gradients_are_those_of_a_dense_mask(family: str, detach: bool) -> None:
    documents = documents_of(PACKED)
    net = net_of(family)
    found: list[list[Tensor]] = []
    for unroll in (
        lambda *where: net.unroll(*where, detach=detach),
        lambda *where: unrolled_densely(net, *where, detach),
    ):
        outputs = unroll(*given(net, documents), documents, 7)
        sum((j + 1) * out.square().mean() for j, out in enumerate(outputs)).backward()
        gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= {name.split(".")[-2] for name in gradients}
        found.append([*outputs, *gradients.values()])
        net.zero_grad()
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
def test_memory_grows_with_the_row_and_not_with_its_square(family: str, packed: bool) -> None:
    """Forward and backward of seven passes; the dense mask is measured too, and is seen."""
    net = net_of(family)

    def peak(N: int, unroll: Callable[..., list[Tensor]]) -> int:
        lengths = [N // 2, N // 4, N // 8, N // 8] if packed else [N]
        documents = documents_of([lengths, lengths])
        where = given(net, documents)
        return peak_bytes(lambda: unroll(*where, documents, 7)[-1].sum().backward(), "cpu")

    def growth(N: int, unroll: Callable[..., list[Tensor]]) -> float:
        return peak(2 * N, unroll) / peak(N, unroll)

    assert growth(1024, net.unroll) < 2.1
    assert growth(256, lambda *where: unrolled_densely(net, *where, False)) > 3
    # and already at 512 pairs it is a small part
    assert peak(512, net.unroll) < 0.25 * peak(512, lambda *w: unrolled_densely(net, *w, False))


def test_groups_hold_at_most_twice_the_pairs() -> None:
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 100, (200,), generator=g).tolist()
    documents = torch.tensor([[n for n, length in enumerate(lengths) for _ in range(length)]])
    packing = Packing(documents)
    pairs = torch.arange(float(documents.numel()))[None, None, :, None]
    groups = packing.side_by_side(pairs)
    assert len(groups) <= 7
    assert sum(each.numel() for each in groups) < 2 * documents.numel()
    assert torch.equal(packing.back(groups), pairs)
    for each in groups:  # every document stands in one piece
        for row in each[:, 0, :, 0].tolist():
            number = documents[0, int(row[0])]
            inside = row[: lengths[number]]
            assert inside == list(range(int(inside[0]), int(inside[0]) + len(inside)))


def saved_bytes(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What `run` gives, and the bytes of the different tensors that autograd keeps for it."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    return out, sum(kept.values())


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_computing_passes_again_changes_no_bit(family: str, detach: bool) -> None:
    """Outputs and gradients, of weights and of what goes in, with less kept in between."""
    documents, net = documents_of(PACKED), net_of(family)
    hidden, embeds, positions = given(net, documents)
    found, kept = [], []
    for recompute in (False, True):
        leaves = [x.detach().requires_grad_() for x in (hidden, embeds)]

        def loss(leaves: list[Tensor] = leaves, recompute: bool = recompute) -> Tensor:
            outputs = net.unroll(*leaves, positions, documents, 6, detach=detach, recompute=recompute)
            return sum((j + 1) * out.square().mean() for j, out in enumerate(outputs))  # type: ignore[return-value]

        total, size = saved_bytes(loss)
        weights = [weight for name, weight in net.named_parameters() if "lm_head" not in name]
        gradients = torch.autograd.grad(total, [*leaves, *weights], allow_unused=True)
        found.append([total, *(each for each in gradients if each is not None)])
        kept.append(size)
    assert len(found[0]) == len(found[1]) > 8
    assert all(map(torch.equal, *found))
    assert kept[1] < 0.6 * kept[0]
