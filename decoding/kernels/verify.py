"""The accept walk down a candidate tree, the residual and the extra token, in one launch.

Recursive rejection sampling, as the rules of `../rules/acceptance.py` state it: at a node with target
distribution P and proposal distribution Q, child x is accepted if coin * Q(x) < P(x); otherwise P becomes
norm(max(0, P - Q)) and the next child is tried. Each trial is one exact step of speculative
sampling (Leviathan et al. 2023; Chen et al. 2023, theorem 1), and the residual is the distribution of the
output given the rejection; so by induction over children and depths the emitted tokens follow p.
For children drawn without replacement Q is what remains after the children before (Sequoia,
Chen et al. 2024), for independent draws it stays (SpecInfer, Miao et al. 2024).
Read next: tests/decoding/kernels/test_kernels.py, which holds the same algorithm in plain torch.

No [B, V] buffer is written. After some rejections P is a function of p, q, the rejected tokens and
two scalars for each of them, so every pass computes it from p and q; only the scalars are kept.

Shapes: B rows, N nodes (root included), C child slots of a node, D depths, V vocabulary; inside
the kernel T the tokens of one block.
"""
# a jitted function has no Python types to check: its arguments are pointers and device scalars
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # tokens held at once
WARPS = 8


def verify_tree(
    p_BNV: Tensor,
    q_BNV: Tensor,
    tokens_BN: Tensor,
    child_BNC: Tensor,
    coins_BN: Tensor,
    extra_B: Tensor,
    *,
    depth: int,
    without_replacement: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which nodes of each row's tree survive, and the token after them.

    Lossless if `q_BNV` is the distribution that the children were really drawn from, in the order of
    `child_BNC`, and every coin is fresh. A residual without mass (P and Q equal up to rounding)
    leaves P as it is. Where no mass of Q remains after the tried children, trying ends.

    Args:
        p_BNV: fp32 [B, N, V], the warped target distribution at each node.
        q_BNV: fp32 [B, N, V], the distribution of the children of each node; without children, anything.
        tokens_BN: int64 [B, N], in [0, V); the root's is not read.
        child_BNC: int64 [B, N, C], children in the order in which they were drawn; -1 for none.
        coins_BN: fp32 or fp64 [B, N], in [0, 1), one for each node.
        extra_B: fp32 or fp64 [B], in [0, 1), for the extra token.
        depth: D, the most tokens a path may have; deeper nodes are not tried.
        without_replacement: siblings were drawn without replacement (q of the first is `q_BNV`).

    Returns:
        accepted_B int64; path_BD int64, the node kept at each depth, -1 after the accepted;
        extra_B int64, one draw from the current P by inverting its cumulative sum in vocabulary
        order, never a token of probability zero.

    Raises:
        ValueError: a shape or a type is not as above.
    """
    _check(p_BNV, q_BNV, tokens_BN, child_BNC, coins_BN, extra_B)
    B, _, V = p_BNV.shape
    C = child_BNC.shape[-1]
    # rows and nodes may be any distance apart, the vocabulary may not
    p_BNV, q_BNV = (each if each.stride(-1) == 1 else each.contiguous() for each in (p_BNV, q_BNV))
    accepted_B = torch.empty(B, dtype=torch.long, device=p_BNV.device)
    path_BD = torch.empty(B, depth, dtype=torch.long, device=p_BNV.device)
    token_B = torch.empty_like(accepted_B)
    scalars_B2C = torch.empty(B, 2, C, dtype=torch.float32, device=p_BNV.device)
    if B:
        with torch.cuda.device_of(p_BNV):  # Triton launches on the current device
            _verify_kernel[(B,)](
                p_BNV,
                q_BNV,
                tokens_BN.contiguous(),
                child_BNC.contiguous(),
                coins_BN.contiguous(),
                extra_B.contiguous(),
                accepted_B,
                path_BD,
                token_B,
                scalars_B2C,
                p_BNV.stride(0),
                p_BNV.stride(1),
                q_BNV.stride(0),
                q_BNV.stride(1),
                p_BNV.shape[1],
                V,
                C,
                depth,
                WITHOUT=without_replacement,
                BLOCK=BLOCK,
                num_warps=WARPS,
                # the passes compute each distribution anew, and must all round it alike
                enable_fp_fusion=False,
            )
    return accepted_B, path_BD, token_B


def _check(
    p_BNV: Tensor, q_BNV: Tensor, tokens_BN: Tensor, child_BNC: Tensor, coins_BN: Tensor, extra_B: Tensor
) -> None:
    """What can be told without reading the device."""
    if p_BNV.ndim != 3 or 0 in p_BNV.shape[1:]:
        raise ValueError(f"p_BNV has shape {tuple(p_BNV.shape)}, expected [B, N, V]")
    B, N, V = p_BNV.shape
    floats, C = (torch.float32, torch.float64), child_BNC.shape[-1]
    for name, tensor, shape, types in (
        ("p_BNV", p_BNV, (B, N, V), floats[:1]),
        ("q_BNV", q_BNV, (B, N, V), floats[:1]),
        ("tokens_BN", tokens_BN, (B, N), (torch.long,)),
        ("child_BNC", child_BNC, (B, N, C), (torch.long,)),
        ("coins_BN", coins_BN, (B, N), floats),
        ("extra_B", extra_B, (B,), floats),
    ):
        if tensor.shape != shape or tensor.dtype not in types:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {' or '.join(map(str, types))} {shape}"
            )


# trees differ from step to step; of the others each kind that a model has is worth a kernel
@triton.jit(do_not_specialize=["N", "C", "D"])
def _verify_kernel(
    p_ptr,
    q_ptr,
    tokens_ptr,
    child_ptr,
    coins_ptr,
    extra_ptr,
    accepted_ptr,
    path_ptr,
    token_ptr,
    scalars_ptr,
    p_row,
    p_node,
    q_row,
    q_node,
    N,
    V,
    C,
    D,
    WITHOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the walk, then the extra token. All decisions are scalars that every thread computes alike."""
    row = tl.program_id(0).to(tl.int64)  # rows x nodes x V exceeds 2**31 on real batches
    p_ptr += row * p_row
    q_ptr += row * q_row
    tokens_ptr += row * N
    child_ptr += row * N * C
    coins_ptr += row * N
    path_ptr += row * D
    scalars_ptr += row * 2 * C

    at, accepted, slot = _walk(
        p_ptr, q_ptr, tokens_ptr, child_ptr, coins_ptr, path_ptr, scalars_ptr, p_node, q_node, V, C, D, WITHOUT, BLOCK
    )
    tl.store(accepted_ptr + row, accepted)
    for empty in range(accepted, D):
        tl.store(path_ptr + empty, tl.full((), -1, tl.int64))
    uniform = tl.load(extra_ptr + row).to(tl.float64)
    token = _draw(
        p_ptr + at * p_node,
        q_ptr + at * q_node,
        V,
        uniform,
        tokens_ptr,
        child_ptr + at * C,
        scalars_ptr,
        slot,
        C,
        WITHOUT,
        BLOCK,
    )
    tl.store(token_ptr + row, token)


@triton.jit
def _walk(
    p_ptr,
    q_ptr,
    tokens_ptr,
    child_ptr,
    coins_ptr,
    path_ptr,
    scalars_ptr,
    p_node,
    q_node,
    V,
    C,
    D,
    WITHOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Descend as far as children are kept, and note the path.

    Returns the node reached, how many were kept, and the slot up to which its children are rejected.
    """
    at = tl.full((), 0, tl.int64)  # the node reached
    accepted = tl.full((), 0, tl.int64)
    slot = tl.full((), 0, tl.int32)  # children of `at` before this slot are rejected
    q_scale = tl.full((), 1, tl.float32)  # makes what remains of q at `at` a distribution
    while (slot < C) & (accepted < D) & (q_scale > 0):
        child = tl.load(child_ptr + at * C + slot)
        if child < 0:
            slot += 1
        else:
            x = tl.load(tokens_ptr + child)
            p_x, q_x = _row_probs(
                p_ptr + at * p_node,
                q_ptr + at * q_node,
                x,
                (x >= 0) & (x < V),
                tokens_ptr,
                child_ptr + at * C,
                scalars_ptr,
                slot,
                C,
                WITHOUT,
            )
            coin = tl.load(coins_ptr + child).to(tl.float64)
            # no division, and strict: a token with P = 0 is never kept
            if coin * (q_x * q_scale).to(tl.float64) < p_x.to(tl.float64):
                tl.store(path_ptr + accepted, child)
                at = child
                accepted += 1
                slot = tl.full((), 0, tl.int32)
                q_scale = tl.full((), 1, tl.float32)
            else:
                q_scale = _reject(
                    p_ptr + at * p_node,
                    q_ptr + at * q_node,
                    V,
                    x,
                    tokens_ptr,
                    child_ptr + at * C,
                    scalars_ptr,
                    slot,
                    C,
                    q_scale,
                    WITHOUT,
                    BLOCK,
                )
                slot += 1
    return at, accepted, slot


@triton.jit
def _row_probs(p_ptr, q_ptr, token_T, inside_T, tokens_ptr, child_ptr, scalars_ptr, slot, C, WITHOUT: tl.constexpr):
    """P, and the unscaled remainder of q, after the children before `slot` were rejected."""
    p_T = tl.load(p_ptr + token_T, mask=inside_T, other=0.0)
    q_T = tl.load(q_ptr + token_T, mask=inside_T, other=0.0)
    for i in range(slot):
        child = tl.load(child_ptr + i)
        if child >= 0:
            q_scale = tl.load(scalars_ptr + i)
            p_mass = tl.load(scalars_ptr + C + i)
            if p_mass > 0:  # otherwise the residual was nothing but rounding: P stays
                p_T = tl.div_rn(tl.maximum(p_T - q_T * q_scale, 0.0), p_mass + tl.zeros_like(p_T))
            if WITHOUT:
                q_T = tl.where(token_T == tl.load(tokens_ptr + child), 0.0, q_T)
    return p_T, q_T


@triton.jit
def _reject(
    p_ptr,
    q_ptr,
    V,
    x,
    tokens_ptr,
    child_ptr,
    scalars_ptr,
    slot,
    C,
    q_scale,
    WITHOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Note the scalars of the child in `slot`. Returns the scale of q after it, 0 for none."""
    p_mass = tl.full((), 0, tl.float64)
    q_mass = tl.full((), 0, tl.float64)
    for start in range(0, V, BLOCK):
        token_T = start + tl.arange(0, BLOCK)
        p_T, q_T = _row_probs(p_ptr, q_ptr, token_T, token_T < V, tokens_ptr, child_ptr, scalars_ptr, slot, C, WITHOUT)
        p_mass += tl.sum(tl.maximum(p_T - q_T * q_scale, 0.0).to(tl.float64), 0)
        q_mass += tl.sum(tl.where(token_T == x, 0.0, q_T).to(tl.float64), 0)
    tl.store(scalars_ptr + slot, q_scale)
    tl.store(scalars_ptr + C + slot, p_mass.to(tl.float32))
    tl.debug_barrier()  # one thread wrote what all will read
    if WITHOUT:
        # to stop trying is lossless at any point; the bound keeps the scale finite in fp32
        q_scale = tl.where(q_mass > 1e-38, 1 / tl.maximum(q_mass, 1e-38), 0.0).to(tl.float32)
    return q_scale


@triton.jit
def _draw(
    p_ptr, q_ptr, V, uniform, tokens_ptr, child_ptr, scalars_ptr, slot, C, WITHOUT: tl.constexpr, BLOCK: tl.constexpr
):
    """First token whose cumulative mass exceeds the uniform's share of the total; fp64."""
    total = tl.full((), 0, tl.float64)
    for start in range(0, V, BLOCK):
        token_T = start + tl.arange(0, BLOCK)
        p_T, _ = _row_probs(p_ptr, q_ptr, token_T, token_T < V, tokens_ptr, child_ptr, scalars_ptr, slot, C, WITHOUT)
        total += tl.sum(p_T.to(tl.float64), 0)

    point = uniform * total
    before = tl.full((), 0, tl.float64)
    first = tl.full((), 0, tl.int32) + V
    last = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        token_T = start + tl.arange(0, BLOCK)
        p_T, _ = _row_probs(p_ptr, q_ptr, token_T, token_T < V, tokens_ptr, child_ptr, scalars_ptr, slot, C, WITHOUT)
        beyond_T = before + tl.cumsum(p_T.to(tl.float64), 0) > point
        # a parallel sum may step up by rounding where the mass is zero
        first = tl.minimum(first, tl.min(tl.where(beyond_T & (p_T > 0), token_T, V), 0))
        last = tl.maximum(last, tl.max(tl.where(p_T > 0, token_T, 0), 0))
        before += tl.sum(p_T.to(tl.float64), 0)
    return tl.minimum(first, last).to(tl.int64)
