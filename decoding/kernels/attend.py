"""Attention of few tokens over a long text under a tree's mask, the text in parts that are read at the same time.

The query heads that share a key-value head are rows of one product, so keys and values are read once. In one part,
only as many multiprocessors would read a text as there are key-value heads, 8 of 132. Here each part gives a weighted
sum of its values, and a second launch adds these up (Dao et al. 2023, Flash-Decoding). Read next:
`../backbone/lean/on_cuda.py`, which calls this.

Shapes: B rows, Q query heads, G key-value heads, N new tokens, D head size, L slots, T slots in view, S parts,
M = Q / G x N rows of a product.
"""
# a jitted function has no Python types to check: its arguments are pointers and device scalars
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLOTS = 64
"""Slots of a product."""
_MOST_ROWS = 64
"""Rows of a product."""


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, slots: int, scale: float) -> Tensor:
    """The outputs of the heads, side by side, [B, N, Q D].

    Args:
        query: [B, Q, N, D], contiguous.
        keys, values: [B, G, L, D], contiguous, whole.
        mask: bool [B or 1, 1, N, T], what a token sees; a token that sees nothing gives 0.
        slots: T, those in view.
    """
    B, Q, N, D = query.shape
    G, L = keys.shape[1:3]
    M = Q // G * N
    rows = min(_MOST_ROWS, max(16, triton.next_power_of_2(M)))
    blocks = triton.cdiv(M, rows)
    part = _part(slots, B * G * blocks, query.device)
    parts = triton.cdiv(slots, part * _SLOTS)
    sums = query.new_empty(B * G, parts, M, D, dtype=torch.float32)
    scores = query.new_empty(2, B * G, parts, M, dtype=torch.float32)
    out = query.new_empty(B, N, Q * D)
    width = triton.next_power_of_2(D)
    with torch.cuda.device_of(query):
        _parts_kernel[(B * G, blocks, parts)](
            query,
            keys,
            values,
            mask,
            sums,
            scores,
            N,
            L,
            slots,
            part,
            mask.stride(0) if mask.shape[0] > 1 else 0,
            mask.stride(2),
            scale * 1.4426950408889634,
            G=G,
            SHARED=Q // G,
            D=D,
            WIDTH=width,
            ROWS=rows,
            SLOTS=_SLOTS,
            num_warps=4 if rows < _MOST_ROWS else 8,
            num_stages=2,
        )
        _sum_kernel[(B * Q * N,)](
            sums,
            scores,
            out,
            N,
            parts,
            Q=Q,
            SHARED=Q // G,
            D=D,
            WIDTH=width,
            PARTS=triton.next_power_of_2(parts),
            num_warps=2,
        )
    return out


def _part(slots: int, programs: int, device: torch.device) -> int:
    """Products along a part: so many that about two programs run on every multiprocessor."""
    most = max(1, 2 * _multiprocessors(device) // programs)
    return triton.cdiv(triton.cdiv(slots, _SLOTS), most)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # interpreted
        return 16
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["N", "L", "slots", "part"])
def _parts_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    mask_ptr,
    sums_ptr,
    scores_ptr,
    N,
    L,
    slots,
    part,
    mask_row,
    mask_node,
    scale,
    G: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """A part of the text for one key-value head and a block of the rows that share it."""
    group, index = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row, head = group // G, group % G
    M = SHARED * N
    at_M = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside_M = at_M < M
    node_M = at_M % N
    at_D = tl.arange(0, WIDTH)
    inside_D = at_D < D
    # the heads of a group stand side by side, so its rows do: head by head, node by node
    query_MD = tl.load(
        query_ptr + group * M * D + at_M[:, None] * D + at_D[None], mask=inside_M[:, None] & inside_D[None], other=0.0
    )
    most_M = tl.full((ROWS,), float("-inf"), tl.float32)
    total_M = tl.zeros((ROWS,), tl.float32)
    sum_MD = tl.zeros((ROWS, WIDTH), tl.float32)
    store = (row * G + head) * L * D
    end = tl.minimum((index + 1) * part * SLOTS, slots)
    for start in range(index * part * SLOTS, end, SLOTS):
        slot_T = start + tl.arange(0, SLOTS)
        inside_T = slot_T < end
        here_TD = slot_T[:, None].to(tl.int64) * D + at_D[None]
        held_TD = inside_T[:, None] & inside_D[None]
        key_TD = tl.load(keys_ptr + store + here_TD, mask=held_TD, other=0.0)
        seen_MT = tl.load(
            mask_ptr + row * mask_row + node_M[:, None] * mask_node + slot_T[None],
            mask=inside_M[:, None] & inside_T[None],
            other=0,
        )
        score_MT = tl.dot(query_MD, tl.trans(key_TD)) * scale
        score_MT = tl.where(seen_MT != 0, score_MT, float("-inf"))
        higher_M = tl.maximum(most_M, tl.max(score_MT, 1))
        # a row that has seen nothing yet has no score to count from
        from_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
        weight_MT = tl.exp2(score_MT - from_M[:, None])
        kept_M = tl.exp2(most_M - from_M)
        value_TD = tl.load(values_ptr + store + here_TD, mask=held_TD, other=0.0)
        sum_MD = sum_MD * kept_M[:, None] + tl.dot(weight_MT.to(value_TD.dtype), value_TD)
        total_M = total_M * kept_M + tl.sum(weight_MT, 1)
        most_M = higher_M
    parts = tl.num_programs(2)
    into_M = (group * parts + index) * M + at_M
    tl.store(sums_ptr + into_M[:, None] * D + at_D[None], sum_MD, mask=inside_M[:, None] & inside_D[None])
    tl.store(scores_ptr + into_M, most_M, mask=inside_M)
    tl.store(scores_ptr + tl.num_programs(0) * parts * M + into_M, total_M, mask=inside_M)


@triton.jit(do_not_specialize=["N", "parts"])
def _sum_kernel(
    sums_ptr,
    scores_ptr,
    out_ptr,
    N,
    parts,
    Q: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """All parts of one head of one token."""
    index = tl.program_id(0).to(tl.int64)  # rows, then heads, then tokens
    row, head, node = index // (Q * N), index // N % Q, index % N
    M = SHARED * N
    groups = tl.num_programs(0) // M
    group, at = row * (Q // SHARED) + head // SHARED, (head % SHARED) * N + node
    part_S = tl.arange(0, PARTS)
    there_S = part_S < parts
    here_S = (group * parts + part_S) * M + at
    most_S = tl.load(scores_ptr + here_S, mask=there_S, other=float("-inf"))
    total_S = tl.load(scores_ptr + groups * parts * M + here_S, mask=there_S, other=0.0)
    most = tl.max(most_S, 0)
    weight_S = tl.exp2(most_S - tl.where(most == float("-inf"), 0.0, most))
    at_D = tl.arange(0, WIDTH)
    inside_D = at_D < D
    sum_SD = tl.load(sums_ptr + here_S[:, None] * D + at_D[None], mask=there_S[:, None] & inside_D[None], other=0.0)
    total = tl.sum(total_S * weight_S, 0)
    out_D = tl.sum(sum_SD * weight_S[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    into_ptr = out_ptr + ((row * N + node) * Q + head) * D
    tl.store(into_ptr + at_D, out_D.to(out_ptr.dtype.element_ty), mask=inside_D)
