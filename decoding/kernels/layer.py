"""The steps between the matrix products of a layer, in one launch each: sum and norm, heads, gate.

They compute what `../backbone/lean/on_cuda.py` defines in plain torch, which rounds after each operation; they round
once. Read next: `attend.py`, the attention between them.

Shapes: B rows, N new tokens, H hidden, Q query heads, G key-value heads, D head size, I inner size, L slots.
"""
# a jitted function has no Python types to check: its arguments are pointers and device scalars
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATED = 1024
"""Numbers of the gate that one program computes."""


def enter(
    hidden: Tensor, out: Tensor | None, post_norm: Tensor | None, weight: Tensor, eps: float, *, from_one: bool
) -> tuple[Tensor, Tensor]:
    """`hidden + norm(out)` and its norm, both [B, N, H]; without `post_norm` `out` is added as it is.

    Args:
        hidden, out: [B, N, H], contiguous; without `out` nothing is added.
        post_norm, weight: [H], of the norms; `from_one`: what is above or below one.
    """
    H = hidden.shape[-1]
    summed = hidden if out is None else torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(H)
    with torch.cuda.device_of(hidden):
        _enter_kernel[(hidden.numel() // H,)](
            hidden,
            out,
            post_norm,
            weight,
            summed,
            normed,
            H,
            eps,
            ADDED=out is not None,
            POST_NORM=post_norm is not None,
            FROM_ONE=from_one,
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
        )
    return summed, normed


@triton.jit
def _enter_kernel(
    hidden_ptr,
    out_ptr,
    post_norm_ptr,
    weight_ptr,
    summed_ptr,
    normed_ptr,
    H,
    eps,
    ADDED: tl.constexpr,
    POST_NORM: tl.constexpr,
    FROM_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token."""
    start = tl.program_id(0).to(tl.int64) * H
    at_H = tl.arange(0, BLOCK)
    inside_H = at_H < H
    x_H = tl.load(hidden_ptr + start + at_H, mask=inside_H, other=0.0).to(tl.float32)
    kind = normed_ptr.dtype.element_ty
    if ADDED:
        out_H = tl.load(out_ptr + start + at_H, mask=inside_H, other=0.0).to(tl.float32)
        if POST_NORM:
            out_H = _normed(out_H, post_norm_ptr, at_H, inside_H, H, eps, FROM_ONE).to(kind).to(tl.float32)
        sum_H = (x_H + out_H).to(kind)
        tl.store(summed_ptr + start + at_H, sum_H, mask=inside_H)
        x_H = sum_H.to(tl.float32)  # the norm is of what was kept
    normed_H = _normed(x_H, weight_ptr, at_H, inside_H, H, eps, FROM_ONE)
    tl.store(normed_ptr + start + at_H, normed_H.to(kind), mask=inside_H)


@triton.jit
def _normed(x_H, weight_ptr, at_H, inside_H, H, eps, FROM_ONE: tl.constexpr):
    weight_H = tl.load(weight_ptr + at_H, mask=inside_H, other=0.0).to(tl.float32)
    if FROM_ONE:
        weight_H += 1.0
    return x_H * tl.rsqrt(tl.sum(x_H * x_H, 0) / H + eps) * weight_H


def place_heads(
    joined: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    turn: tuple[Tensor, Tensor],
    stores: tuple[Tensor, Tensor],
    slots_BN: Tensor,
    eps: float,
    *,
    from_one: bool,
) -> Tensor:
    """Norm and turn the heads of queries and keys, write keys and values to their slots; queries [B, Q, N, D].

    Args:
        joined: [B, N, (Q + 2 G) D], queries, keys and values side by side; contiguous.
        norms: [D], of query and of key heads; None where heads are not normed.
        turn: cosines and sines [B, N, D].
        stores: keys and values [B, G, L, D], contiguous.
        slots_BN: int64, where each token's are written.
    """
    keys, values = stores
    B, N, width = joined.shape
    G, L, D = keys.shape[1:]
    Q = width // D - 2 * G
    query = joined.new_empty(B, Q, N, D)
    query_norm, key_norm = norms or (None, None)
    with torch.cuda.device_of(joined):
        _heads_kernel[(B * N, Q + 2 * G)](
            joined,
            query_norm,
            key_norm,
            *turn,
            query,
            keys,
            values,
            slots_BN,
            N,
            L,
            Q,
            G,
            eps,
            NORMED=norms is not None,
            FROM_ONE=from_one,
            D=D,
            BLOCK=triton.next_power_of_2(D // 2),
            num_warps=1,
        )
    return query


@triton.jit(do_not_specialize=["N", "L"])
def _heads_kernel(
    joined_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    N,
    L,
    Q,
    G,
    eps,
    NORMED: tl.constexpr,
    FROM_ONE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one token, its halves apart."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, node = token // N, token % N
    half: tl.constexpr = D // 2
    at_D = tl.arange(0, BLOCK)
    inside_D = at_D < half
    start = (token * (Q + 2 * G) + head) * D
    left_D = tl.load(joined_ptr + start + at_D, mask=inside_D, other=0.0).to(tl.float32)
    right_D = tl.load(joined_ptr + start + half + at_D, mask=inside_D, other=0.0).to(tl.float32)
    if NORMED:  # noqa: SIM102  known when it is compiled, so not one condition with the next
        if head < Q + G:
            weight_ptr = query_norm_ptr
            if head >= Q:
                weight_ptr = key_norm_ptr
            scale = tl.rsqrt((tl.sum(left_D * left_D, 0) + tl.sum(right_D * right_D, 0)) / D + eps)
            left_D *= scale * _head_weight(weight_ptr, at_D, inside_D, FROM_ONE)
            right_D *= scale * _head_weight(weight_ptr + half, at_D, inside_D, FROM_ONE)
    if head < Q + G:
        left_D, right_D = _turned(left_D, right_D, cos_ptr + token * D, sin_ptr + token * D, at_D, inside_D, half)
    if head < Q:
        into_ptr = query_ptr + ((row * Q + head) * N + node) * D
    else:
        slot = tl.load(slots_ptr + token)
        into_ptr = keys_ptr + ((row * G + head - Q) * L + slot) * D
        if head >= Q + G:
            into_ptr = values_ptr + ((row * G + head - Q - G) * L + slot) * D
    kind = query_ptr.dtype.element_ty
    tl.store(into_ptr + at_D, left_D.to(kind), mask=inside_D)
    tl.store(into_ptr + half + at_D, right_D.to(kind), mask=inside_D)


@triton.jit
def _head_weight(weight_ptr, at_D, inside_D, FROM_ONE: tl.constexpr):
    weight_D = tl.load(weight_ptr + at_D, mask=inside_D, other=0.0).to(tl.float32)
    if FROM_ONE:
        weight_D += 1.0
    return weight_D


@triton.jit
def _turned(left_D, right_D, cos_ptr, sin_ptr, at_D, inside_D, half: tl.constexpr):
    """Halves turned against each other (Su et al. 2021)."""
    cos_left_D = tl.load(cos_ptr + at_D, mask=inside_D, other=0.0).to(tl.float32)
    cos_right_D = tl.load(cos_ptr + half + at_D, mask=inside_D, other=0.0).to(tl.float32)
    sin_left_D = tl.load(sin_ptr + at_D, mask=inside_D, other=0.0).to(tl.float32)
    sin_right_D = tl.load(sin_ptr + half + at_D, mask=inside_D, other=0.0).to(tl.float32)
    return left_D * cos_left_D - right_D * sin_left_D, right_D * cos_right_D + left_D * sin_right_D


def gated(gate_up: Tensor, *, by_tanh: bool) -> Tensor:
    """`act(gate) * up` [..., I] of both side by side [..., 2 I]; SiLU, or GELU by its tanh form."""
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    with torch.cuda.device_of(gate_up):
        _gated_kernel[(out.numel() // inner, triton.cdiv(inner, _GATED))](
            gate_up, out, inner, TANH=by_tanh, BLOCK=_GATED, num_warps=4
        )
    return out


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, inner, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one token's."""
    token = tl.program_id(0).to(tl.int64)
    at_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_I = at_I < inner
    gate_I = tl.load(gate_up_ptr + token * 2 * inner + at_I, mask=inside_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up_ptr + (token * 2 + 1) * inner + at_I, mask=inside_I, other=0.0).to(tl.float32)
    if TANH:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z
        gate_I *= tl.sigmoid(1.5957691216057308 * (gate_I + 0.044715 * gate_I * gate_I * gate_I))
    else:
        gate_I *= tl.sigmoid(gate_I)
    tl.store(out_ptr + token * inner + at_I, (gate_I * up_I).to(out_ptr.dtype.element_ty), mask=inside_I)
