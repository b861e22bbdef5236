"""The Triton kernels against plain definitions: kept sets, walks, addresses, and that they compile.

Without a GPU they run in Triton's interpreter (set in `conftest.py`), which is slow, so vocabularies are small where they
can be and blocks are small with them. With one, the same tests run on it.

Shapes: B rows, N nodes, C child slots, D depths, V vocabulary.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import asdict
from unittest import mock

import pytest
import torch
from draftsmith.decoding.kernels import available
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.rules import acceptance
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import Tree
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from draftsmith.decoding.kernels import verify, warp  # noqa: E402

DEVICE = "cuda" if available() else "cpu"
QWEN = 151_936  # not a multiple of any block
inf = torch.inf


def small_blocks(module, tokens: int = 16):
    """Several blocks also for a small vocabulary; large ones make the interpreter bearable, and a compiler slow."""
    return mock.patch.object(module, "BLOCK", tokens if DEVICE == "cpu" else min(tokens, module.BLOCK))


def untouched(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory that costs only the pages one writes to: for tensors beyond 2**31 elements."""
    if DEVICE == "cuda":
        return torch.empty(elements, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, named from Python 3.13
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


# ---------------------------------------------------------------------------------------- warp


def in_front(probs_V: Tensor) -> Tensor:
    """Mass strictly in front of each token, in descending order; ties share it."""
    values, index = probs_V.unique(return_inverse=True)
    mass = torch.zeros_like(values).index_add_(0, index, probs_V)
    return (mass.flip(0).cumsum(0).flip(0) - mass)[index]


def kept(logits_V: Tensor, warper: Warper) -> tuple[Tensor, float]:
    """The tokens that stay, in fp64, and how far the nearest one is from an edge it may round over."""
    x_V = (logits_V.float() / warper.temperature).double()
    if 0 < warper.top_k < len(x_V):
        x_V = x_V.masked_fill(x_V < x_V.sort(descending=True).values[warper.top_k - 1], -inf)
    probs_V, margin = x_V.softmax(-1), inf
    keep_V = probs_V > 0
    if warper.top_p < 1:
        front_V = in_front(probs_V)
        keep_V &= front_V < warper.top_p
        margin = (front_V - warper.top_p).abs().min().item()
    share_V = probs_V / probs_V.max()
    if warper.min_p > 0:
        keep_V &= share_V >= warper.min_p
        margin = min(margin, (share_V / warper.min_p - 1).abs().min().item())
    return keep_V, margin


def clear_top_p(logits_V: Tensor, warper: Warper, near: float) -> float:
    """A top_p at least 1e-5 away from the mass in front of any token."""
    x_V = (logits_V.float() / warper.temperature).double()
    if warper.top_k:
        x_V = x_V.masked_fill(x_V < x_V.sort(descending=True).values[warper.top_k - 1], -inf)
    edges = in_front(x_V.softmax(-1)).unique()
    wide = (edges[1:] - edges[:-1]) > 4e-5
    middle = ((edges[1:] + edges[:-1]) / 2)[wide]
    return middle[(middle - near).abs().argmin()].item()


def check_warp(logits_V: Tensor, warper: Warper) -> Tensor:
    """The kept set exactly, the probabilities to rounding."""
    keep_V, margin = kept(logits_V, warper)
    assert margin > 1e-5, "the case is ambiguous: choose another top_p or min_p"
    got_V = warp.warp(logits_V.to(DEVICE), **asdict(warper)).cpu()
    assert got_V.dtype == torch.float32
    assert torch.equal(got_V > 0, keep_V)
    probs_V = (logits_V.float() / warper.temperature).double().softmax(-1) * keep_V
    torch.testing.assert_close(got_V.double(), probs_V / probs_V.sum(), atol=1e-7, rtol=3e-6)
    return got_V


# few distinct values, so that ties are common; one that dominates, and impossible tokens
LOGITS = st.lists(st.sampled_from([-inf, -3.0, -1.0, -0.0, 0.0, 0.5, 0.5001, 2.0, 7.0]), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None)
@given(
    LOGITS,
    st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    st.integers(0, 41),
    st.sampled_from([0.2, 0.45, 0.81, 0.999, 1.0]),
    st.sampled_from([0.0, 0.13, 0.6]),
)
def test_warp_is_the_warper(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    assume(max(logits) > -inf)
    warper = Warper(temperature, top_k, top_p, min_p)
    logits_V = torch.tensor(logits)
    assume(kept(logits_V, warper)[1] > 1e-5)
    with small_blocks(warp):
        got_V = check_warp(logits_V, warper)
    torch.testing.assert_close(got_V, warper(logits_V), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_all_tokens_but_one_may_be_kept(top_k: int) -> None:
    """Of four tokens; four and five of them are no filter."""
    with small_blocks(warp):
        got_V = check_warp(torch.tensor([0.5, 2.0, -1.0, 0.0]), Warper(1.0, top_k))
    assert int((got_V > 0).sum()) == min(top_k, 4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_and_any_leading_dimensions(dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(2, 2, 300, generator=torch.Generator().manual_seed(1))
    logits, warper = logits.to(dtype), Warper(0.8, 40, 0.9, 0.03)
    with small_blocks(warp, 256):
        got = warp.warp(logits.to(DEVICE), **asdict(warper)).cpu()
        for logits_V in logits.view(-1, 300):
            check_warp(logits_V, Warper(0.8, 40, clear_top_p(logits_V, Warper(0.8, 40), 0.9)))
    torch.testing.assert_close(got, warper(logits), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("near", [0.5, 0.95])
def test_a_real_vocabulary_keeps_exactly_the_right_tokens(near: float) -> None:
    """bf16 logits of a real size tie all over, also at the edges of top-k and top-p."""
    logits_V = (3.5 * torch.randn(QWEN, generator=torch.Generator().manual_seed(2))).bfloat16()
    top_k = Warper(1.0, 20_000)
    warper = Warper(1.0, 20_000, clear_top_p(logits_V, top_k, near), 1e-4)
    assert kept(logits_V, top_k)[0].sum() > 20_000, "ties at the edge are what is tested"
    with small_blocks(warp, 16_384):
        check_warp(logits_V, warper)


def test_a_flat_distribution_errs_by_rounding_only() -> None:
    """Where tokens are lighter than the rounding, only those within it of the edge may differ."""
    logits_V = torch.randn(QWEN, generator=torch.Generator().manual_seed(3))
    with small_blocks(warp, 16_384):
        got_V = warp.warp(logits_V.to(DEVICE), temperature=1.0, top_p=0.9).cpu()
    front_V = in_front(logits_V.double().softmax(-1))
    assert (got_V[front_V < 0.9 - 1e-6] > 0).all()
    assert (got_V[front_V > 0.9 + 1e-6] == 0).all()
    assert abs(got_V.double().sum().item() - 1) < 1e-5


@pytest.mark.parametrize("share", [0.41, 0.9, 0.9999])
def test_one_dominating_token(share: float) -> None:
    """Where thresholds estimated from a sample kept the whole vocabulary."""
    logits_V = torch.randn(3000, generator=torch.Generator().manual_seed(4))
    rest = logits_V[1:].double().exp().sum()
    logits_V[0] = (rest * share / (1 - share)).log()
    for top_p in (0.4, clear_top_p(logits_V, Warper(1.0), (1 + share) / 2)):
        check_warp(logits_V, Warper(1.0, 0, top_p))
    check_warp(logits_V, Warper(1.0, 7, 1.0, 0.3))


def test_ties_stay_together() -> None:
    flat = torch.full((100,), 2.5)
    signs = torch.tensor([0.0, -0.0, -1.0, 0.0, -0.0])
    with small_blocks(warp):
        for warper in (Warper(1.0, 3), Warper(1.0, 0, 0.05), Warper(1.0, 3, 0.5, 0.9)):
            check_warp(flat, warper)
        check_warp(signs, Warper(0.7, 1))
        check_warp(signs, Warper(0.7, 0, 0.1))


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 1), (0.5 + 2**-20, 3)])
@pytest.mark.parametrize("block", [2, 16])
def test_a_mass_of_exactly_top_p_is_enough(top_p: float, kept: int, block: int) -> None:
    """Where `check_warp` is ambiguous by rounding: powers of two, which none moves. As the reference."""
    logits_V = torch.tensor([0.25, 0.5, 0.25]).log()
    with small_blocks(warp, block):
        got_V = warp.warp(logits_V.to(DEVICE), temperature=1.0, top_p=top_p).cpu()
    assert int((got_V > 0).sum()) == kept
    torch.testing.assert_close(got_V, Warper(1.0, top_p=top_p).reference(logits_V))


def test_impossible_tokens_get_nothing() -> None:
    logits_V = torch.full((100,), -inf)
    logits_V[[3, 40, 99]] = torch.tensor([1.0, 2.0, 0.0])
    with small_blocks(warp):
        for warper in (Warper(1.0), Warper(1.0, 50), Warper(1.0, 2), Warper(1.0, 0, 0.99, 0.2)):
            check_warp(logits_V, warper)


@pytest.mark.parametrize("warper", [Warper(1.0), Warper(1.0, 3, 0.9, 0.1)])
def test_a_broken_row_is_loud_and_alone(warper: Warper) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    logits[0], logits[2, 7] = -inf, torch.nan
    with small_blocks(warp):
        got = warp.warp(logits.to(DEVICE), **asdict(warper)).cpu()
    assert got[0].isnan().all()
    assert got[2].isnan().all()
    torch.testing.assert_close(got[1], warper(logits[1]))


def test_rows_lie_anywhere() -> None:
    """Repeated rows are not copied, a transposed vocabulary is; no rows are no launch."""
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    warper = Warper(1.0, 5)
    with small_blocks(warp):
        torch.testing.assert_close(warp.warp(logits.T, **asdict(warper)), warper(logits.T))
        repeated = logits.T[:1].expand(4, 50)
        torch.testing.assert_close(warp.warp(repeated, **asdict(warper)), warper(repeated))
    assert warp.warp(logits[:0].T[:0], **asdict(warper)).shape == (0, 0)
    assert warp.warp(torch.empty(2, 0, 9), **asdict(warper)).shape == (2, 0, 9)


def test_warp_reads_rows_beyond_the_reach_of_int32() -> None:
    """Row 2 of rows 2**30 + 7 apart: both factors fit into int32, their product does not."""
    apart, V = 2**30 + 7, 200
    logits = untouched(2 * apart + V, torch.bfloat16).as_strided((3, V), (apart, 1))
    logits.copy_(torch.randn(3, V, generator=torch.Generator().manual_seed(7)))
    warper = Warper(1.0, 20)
    torch.testing.assert_close(warp.warp(logits, **asdict(warper)), warper(logits))


def test_warp_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="temperature above 0"):
        warp.warp(torch.zeros(2, 5), temperature=0.0)
    with pytest.raises(ValueError, match="float64, expected"):
        warp.warp(torch.zeros(2, 5, dtype=torch.float64), temperature=1.0)


# -------------------------------------------------------------------------------------- verify


def walk(p_NV, q_NV, tokens_N, child_NC, coins_N, extra, *, depth: int, without: bool):
    """The algorithm one child at a time, in fp64: (path, extra token, margin, last).

    The margin is the smallest distance of a coin or of the uniform from where the outcome turns,
    in units of the blur: a residual of mass m magnifies the rounding of P by 1 / m. `last` is the last child that was tried, and the coin at which its own outcome turns.
    """
    at, path, margin, last = 0, [], inf, None
    while True:
        P_V, Q_V, found, blur = p_NV[at].double(), q_NV[at].double(), None, 1.0
        for child in child_NC[at].tolist() if len(path) < depth else []:
            if child < 0:
                continue
            x = tokens_N[child]
            left, right = coins_N[child].double() * Q_V[x], P_V[x]
            last = child, (P_V[x] / Q_V[x]).item()
            if left > 0 or right > 0:
                margin = min(margin, (left - right).abs().item() / blur)
            if left < right:
                found = child
                break
            rest_V = (P_V - Q_V).clamp_min(0)
            if rest_V.sum() > 0:
                margin = min(margin, rest_V.sum().item() / blur)
                blur /= rest_V.sum().item()
                P_V = rest_V / rest_V.sum()
            if without:
                Q_V = Q_V.clone()
                Q_V[x] = 0
                if Q_V.sum() == 0:
                    break
                Q_V = Q_V / Q_V.sum()
        if found is None:
            break
        path.append(found)
        at = found
    edges_V = P_V.cumsum(0)
    point = extra.double() * edges_V[-1]
    token = int((edges_V > point).to(torch.uint8).argmax())
    margin = min(margin, point.item() / blur, (edges_V - point).abs().min().item() / blur)
    return path, token, margin, last


def expected(p, q, tokens, child, coins, extra, *, depth: int, without: bool):
    """`walk` for each row, in the kernel's form; and the smallest margin."""
    rows = [walk(*row, depth=depth, without=without) for row in zip(p, q, tokens, child, coins, extra)]
    path = torch.tensor([path + [-1] * (depth - len(path)) for path, *_ in rows]).long()
    accepted = torch.tensor([len(path) for path, *_ in rows])
    wanted = accepted, path.view(len(rows), depth), torch.tensor([row[1] for row in rows])
    return wanted, min(row[2] for row in rows)


def on_device(*inputs: Tensor, depth: int, without: bool) -> tuple[Tensor, ...]:
    inputs = tuple(each.to(DEVICE) for each in inputs)
    got = verify.verify_tree(*inputs, depth=depth, without_replacement=without)
    return tuple(each.cpu() for each in got)


def check_walk(*inputs: Tensor, depth: int, without: bool) -> tuple[Tensor, ...]:
    wanted, margin = expected(*inputs, depth=depth, without=without)
    assert margin > 1e-6, "the case is ambiguous: choose other coins"
    got = on_device(*inputs, depth=depth, without=without)
    for mine, theirs in zip(got, wanted):
        assert mine.dtype == torch.long
        assert torch.equal(mine, theirs)
    return got


def random_probs(g: torch.Generator, *shape: int, sparse: bool) -> Tensor:
    """Peaked distributions; some entries exactly zero if `sparse`."""
    logits = 1.5 * torch.randn(*shape, generator=g)
    if sparse:
        dropped = torch.rand(shape, generator=g) < 0.4
        dropped[..., 0] = False
        logits = logits.masked_fill(dropped, -inf)
    return logits.softmax(-1)


def random_children(g: torch.Generator, B: int, N: int, C: int) -> Tensor:
    """A tree for each row: every node but the root hangs in a random free slot of an earlier one."""
    child = torch.full((B, N, C), -1)
    for row in child:
        for node in range(1, N):
            free = (row[:node] < 0).nonzero()
            parent, slot = free[int(torch.randint(len(free), (), generator=g))].tolist()
            row[parent, slot] = node
    return child


def draw_children(g: torch.Generator, q_BNV: Tensor, child: Tensor, without: bool) -> Tensor:
    """Tokens drawn from q, in the order of the slots; where q runs out, any token."""
    tokens = torch.randint(q_BNV.shape[-1], child.shape[:2], generator=g)
    for b, n in torch.cartesian_prod(*map(torch.arange, child.shape[:2])).tolist():
        left = q_BNV[b, n].clone()
        for node in child[b, n][child[b, n] >= 0].tolist():
            if left.sum() > 0:
                tokens[b, node] = torch.multinomial(left, 1, generator=g)
            if without:
                left[tokens[b, node]] = 0
    return tokens


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**40),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(2, 21),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_walk_is_its_definition(
    seed: int, N: int, C: int, V: int, without: bool, sparse: bool, dtype: torch.dtype
) -> None:
    g, B = torch.Generator().manual_seed(seed), 2
    p, q = (random_probs(g, B, N, V, sparse=sparse) for _ in range(2))
    child = random_children(g, B, N, C)
    tokens = draw_children(g, q, child, without)
    # squared: high coins, so that rejections and with them deep residuals are common
    coins = 1 - torch.rand(B, N, generator=g, dtype=torch.float64) ** 2
    inputs = (p, q, tokens, child, coins.clamp(1e-3, 1 - 1e-3).to(dtype))
    extra = torch.rand(B, generator=g, dtype=torch.float64).to(dtype)
    assume(expected(*inputs, extra, depth=N, without=without)[1] > 1e-6)
    with small_blocks(verify):
        check_walk(*inputs, extra, depth=N, without=without)


@pytest.mark.parametrize("without", [True, False])
def test_the_last_child_tried_turns_at_its_very_threshold(without: bool) -> None:
    """High coins until the last, which lies 1 % below where it turns, and then above."""
    g, C, found = torch.Generator().manual_seed(11), 4, 0
    child = torch.full((1, C + 1, C), -1)
    child[0, 0] = torch.arange(1, C + 1)
    for _ in range(1500):
        p = random_probs(g, 1, C + 1, 12, sparse=False)
        q = (p.log() + 0.7 * torch.randn(p.shape, generator=g)).softmax(-1)
        inputs = p, q, draw_children(g, q, child, without), child
        coins, extra = torch.full((1, C + 1), 0.97), torch.rand(1, generator=g)
        last, turn = walk(*(x[0] for x in (*inputs, coins, extra)), depth=1, without=without)[3]
        if last < 2 or not 0.05 < turn < 0.95:
            continue
        for factor in (0.99, 1.01):
            coins[0, last] = turn * factor
            if expected(*inputs, coins, extra, depth=1, without=without)[1] > 1e-6:
                path = check_walk(*inputs, coins, extra, depth=1, without=without)[1]
                assert (path.item() == last) == (factor < 1)
                found += 1
        if found > 10:
            return
    raise AssertionError(f"only {found} cases in which the last child's coin decides")


@pytest.mark.parametrize("without", [True, False])
def test_a_real_vocabulary_after_two_rejections(without: bool) -> None:
    """Both children of the root fail, at coins near 1; the token comes from the second residual."""
    g = torch.Generator().manual_seed(8)
    p, q = ((4 * torch.randn(1, 3, QWEN, generator=g)).softmax(-1) for _ in range(2))
    child = torch.tensor([[[1, 2], [-1, -1], [-1, -1]]])
    tokens = draw_children(g, q, child, without)
    coins, extra = torch.tensor([[0.0, 0.999, 0.999]]), torch.tensor([0.4123])
    with small_blocks(verify, 16_384):
        wanted, margin = expected(p, q, tokens, child, coins, extra, depth=1, without=without)
        got = on_device(p, q, tokens, child, coins, extra, depth=1, without=without)
    assert margin > 2e-7, "the distribution sums to 1 within 1e-7, so the token is certain"
    assert got[0].tolist() == [0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted))


def chain(p: list[list[float]], q: list[list[float]], tokens: list[int], child: list[list[int]]):
    """One row from lists, with coins of one half."""
    N = len(p)
    return (
        torch.tensor([p]),
        torch.tensor([q]),
        torch.tensor([tokens]),
        torch.tensor([child]),
        torch.full((1, N), 0.5),
    )


def test_equal_distributions_accept_everything_down_to_the_depth() -> None:
    distribution = [[0.25, 0.0, 0.75]] * 4
    row = chain(distribution, distribution, [0, 2, 0, 2], [[1], [2], [3], [-1]])
    for depth, path in ((5, [1, 2, 3, -1, -1]), (3, [1, 2, 3]), (2, [1, 2]), (0, [])):
        got = check_walk(*row, torch.tensor([0.9]), depth=depth, without=True)
        assert got[1].tolist() == [path]
        assert got[2].tolist() == [2]


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_edges_of_the_cumulative_sum_belong_to_the_next_possible_token(u: float, token: int) -> None:
    distribution = [[0.0, 0.5, 0.0, 0.5, 0.0, 0.0]]
    row = chain(distribution, distribution, [0], [[-1]])
    extra = torch.tensor([u], dtype=torch.float64)
    with small_blocks(verify, 2):
        assert on_device(*row, extra, depth=1, without=True)[2].tolist() == [token]


def test_a_residual_without_mass_leaves_the_distribution() -> None:
    distribution = [[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]]
    row = chain(distribution, distribution, [0, 1], [[1], [-1]])  # token 1 was impossible, so it is refused
    got = on_device(*row, torch.tensor([0.5]), depth=1, without=False)
    assert [each.tolist() for each in got] == [[0], [[-1]], [2]]


def test_behind_the_last_of_q_no_child_is_tried() -> None:
    """q was a point mass: nothing can have been drawn behind it, whatever the slots hold."""
    p, q = [[0.1, 0.9, 0.0]] * 3, [[1.0, 0.0, 0.0]] * 3
    row = chain(p, q, [0, 0, 1], [[1, 2], [-1, -1], [-1, -1]])
    got = check_walk(*row, torch.tensor([0.5]), depth=1, without=True)
    assert [each.tolist() for each in got] == [[0], [[-1]], [1]]
    again = check_walk(*row, torch.tensor([0.5]), depth=1, without=False)
    assert again[1].tolist() == [[2]], "with replacement the second child is tried, and kept"


def test_the_proposal_of_a_leaf_is_not_used() -> None:
    nan = [torch.nan] * 3
    p, q = [[0.2, 0.3, 0.5]] * 2, [[0.2, 0.3, 0.5], nan]
    row = chain(p, q, [0, 2], [[-1, 1], [-1, -1]])
    got = on_device(*row, torch.tensor([0.4]), depth=2, without=True)
    assert [each.tolist() for each in got] == [[1], [[1, -1]], [1]]


@pytest.mark.parametrize("drawn_without", [True, False])
def test_the_definition_itself_is_lossless(drawn_without: bool) -> None:
    """The first token of many walks follows p; under the distribution of other draws it would not."""
    g, B, V = torch.Generator().manual_seed(2), 5000, 4
    p, q = random_probs(g, 3, V, sparse=False), random_probs(g, 3, V, sparse=False)
    child = torch.tensor([[1, 2], [-1, -1], [-1, -1]])
    drawn = torch.multinomial(q[0].expand(B, V), 2, generator=g, replacement=not drawn_without)
    tokens = torch.cat([torch.zeros(B, 1).long(), drawn], 1)
    coins, extra = torch.rand(B, 3, generator=g), torch.rand(B, generator=g)
    wanted = B * p[0].double()
    statistic = {}
    for without in (True, False):
        counts = torch.zeros(V, dtype=torch.double)
        for row, coin, u in zip(tokens, coins, extra):
            path, token, *_ = walk(p, q, row, child, coin, u, depth=1, without=without)
            counts[int(row[path[0]]) if path else token] += 1
        statistic[without] = ((counts - wanted) ** 2 / wanted).sum().item()
    # chi-square of 3 degrees: 30.7 is passed once in a million
    assert statistic[drawn_without] < 30.7 < statistic[not drawn_without], statistic


def test_verify_reads_nodes_beyond_the_reach_of_int32() -> None:
    """Rows 2**30 + 7 apart for p, nodes for q: the last one's offset does not fit into int32."""
    apart, V, g = 2**30 + 7, 50, torch.Generator().manual_seed(10)
    memory = untouched(2 * apart + 20 * V, torch.float32)
    p = memory.as_strided((3, 3, V), (apart, V, 1))
    q = memory.as_strided((3, 3, V), (V, apart, 1), 5 * V)
    p.copy_(random_probs(g, 3, 3, V, sparse=False))
    q.copy_(p.roll(1, -1))
    child = torch.tensor([[1, -1], [2, -1], [-1, -1]]).expand(3, 3, 2)
    tokens = q.argmax(-1).roll(1, 1).cpu()
    coins, extra = torch.full((3, 3), 1e-3), torch.tensor([0.2, 0.5, 0.8])
    wanted, margin = expected(p.cpu(), q.cpu(), tokens, child, coins, extra, depth=2, without=False)
    assert margin > 1e-6
    got = verify.verify_tree(
        p, q, *(each.to(DEVICE) for each in (tokens, child, coins, extra)), depth=2, without_replacement=False
    )
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(got, wanted))
    assert got[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.zeros(1, 2), "p_BNV has shape"),
        (1, torch.zeros(1, 2, 4), "q_BNV is"),
        (2, torch.zeros(1, 2), "tokens_BN is torch.float32"),
        (3, torch.zeros(1, 2, 1, dtype=torch.int32), "child_BNC is torch.int32"),
        (4, torch.zeros(2, 2), "coins_BN is"),
        (5, torch.zeros(1, dtype=torch.bfloat16), "extra_B is torch.bfloat16"),
    ],
)
def test_verify_says_which_tensor_is_wrong(place: int, wrong: Tensor, message: str) -> None:
    distribution = [[0.5, 0.5, 0.0]] * 2
    inputs = [*chain(distribution, distribution, [0, 1], [[1], [-1]]), torch.tensor([0.5])]
    inputs[place] = wrong
    with pytest.raises(ValueError, match=message):
        verify.verify_tree(*inputs, depth=1, without_replacement=True)


# ----------------------------------------------------------------------------------- compiling

COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from draftsmith.decoding.kernels import verify, warp

POINTERS = dict(tokens_ptr="*i64", child_ptr="*i64", coins_ptr="*fp64", accepted_ptr="*i64",
                path_ptr="*i64", token_ptr="*i64", temperature="fp32", top_p="fp32", min_p="fp32")

def compile(kernel, constants, architecture, floats):
    kinds = {n: "*" + floats if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
    kinds |= {n: kind for n, kind in POINTERS.items() if n in kinds}
    kinds |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
    options = dict(num_warps=8, enable_fp_fusion=False)
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    text = built.asm["ttir"]
    row = re.search(r"(%\\w+) = tt.get_program_id", text)[1]
    uses = [line for line in text.splitlines() if re.search(row + r"\\b(?! =)", line)]
    assert uses and all("arith.extsi" in line and "to i64" in line for line in uses), uses
    print("built", kernel.__name__, architecture, floats)

for architecture in (80, 90):
    for floats in ("fp32", "bf16"):
        compile(warp._warp_kernel, dict(TOP_K=True, TOP_P=True, BLOCK=warp.BLOCK,
                BITS=warp.DIGIT_BITS), architecture, floats)
    for without in (True, False):
        compile(verify._verify_kernel, dict(WITHOUT=without, BLOCK=verify.BLOCK),
                architecture, "fp32")
"""


@pytest.mark.slow
def test_both_compile_for_gpus_and_widen_the_row_before_use() -> None:
    """The interpreter accepts what the compiler refuses; no GPU is needed to compile for one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("built") == 8


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.booleans())
def test_the_rule_is_the_same_by_launch(seed: int, without: bool) -> None:
    """What `accept_tree` does on CUDA equals what it does elsewhere."""
    sampling = DraftSampling.WITHOUT_REPLACEMENT if without else DraftSampling.IID
    g = torch.Generator().manual_seed(seed)
    tree, B, V = Tree((-1, 0, 0, 1, 1, 2)), 6, 7
    logits = torch.randn(B, len(tree), V, generator=g).to(DEVICE)
    q = (logits + torch.randn(logits.shape, generator=g).to(DEVICE)).softmax(-1)
    ids = torch.stack([torch.randperm(V, generator=g)[: len(tree)] for _ in range(B)]).to(DEVICE)
    proposal = Proposal(ids, tree, sampling, q)
    with mock.patch.object(acceptance.kernels, "available", return_value=False):
        plain = acceptance.accept_tree(logits, proposal, Warper(1.0), Uniforms(seed, range(B), DEVICE))
    coins = proposal.take_coins(Uniforms(seed, range(B), DEVICE))
    child = tree.on(torch.device(DEVICE)).children_BNC.expand(B, -1, -1)
    launched = acceptance.launch_tree(logits.softmax(-1), proposal, child, coins)
    for name in ("accepted_B", "path_BD", "extra_B", "tested_BD"):
        assert torch.equal(getattr(launched, name), getattr(plain, name)), name
