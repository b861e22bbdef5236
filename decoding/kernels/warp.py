"""Temperature, top-k, top-p and min-p in one launch, with exact thresholds and without a sort.

The distribution is that of `Warper` (`../sampling.py`), ties by value included. A filter keeps the tokens
in front of which there is less than a limit: less than top_k tokens, or less than top_p of the
mass. That edge is found digit by digit in the bits of the fp32 value, as a radix sort would find
it: a histogram over one digit of the tokens that share the digits found so far names the next
digit. So the number of passes is fixed, and the edge is the value of a token that exists, never
an estimate from a sample (the design that FreeToken's pull request 345 arrived at).
Read next: `verify.py`, which walks a tree with these probabilities.

Shapes: `...` any leading dimensions, R rows (their product), V vocabulary; inside the kernel
T the tokens of one block, H the bins of the histogram.
"""
# a jitted function has no Python types to check: its arguments are pointers and device scalars
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens held at once, each spread over the 2**DIGIT_BITS bins of a histogram
DIGIT_BITS = 4  # 8 passes per edge
WARPS = 8


def warp(logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Probabilities [..., V], fp32, of logits [..., V]: `Warper.reference` as one kernel launch.

    Sums of another order round differently. A token whose mass in front lies within rounding
    (about 1e-6) of `top_p`, or its probability of `min_p` times the largest, may therefore fall
    on the other side of the edge than in `Warper`; every other token is kept or dropped alike,
    and one input always gives one output (no atomics). A row without a finite logit is NaN.

    Args:
        logits: [..., V], fp32, bf16 or fp16; rows any number of elements apart (offsets are
            int64). They are copied only if the vocabulary is not contiguous or no one stride
            leads from row to row.
        temperature: positive; greedy needs an argmax and no kernel.
        top_k, top_p, min_p: as in `Warper`, 0, 1 and 0 being off.

    Raises:
        ValueError: the temperature is 0, or the logits are of another type.
    """
    if not temperature > 0:
        raise ValueError("the warp kernel needs a temperature above 0; use Warper for greedy")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits are {logits.dtype}, expected float32, bfloat16 or float16")
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if not probs.numel():
        return probs
    V = logits.shape[-1]
    logits_RV = (logits if logits.stride(-1) == 1 else logits.contiguous()).reshape(-1, V)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _warp_kernel[(len(logits_RV),)](
            logits_RV,
            probs,
            logits_RV.stride(0),
            V,
            temperature,
            top_k,
            top_p,
            min_p,
            TOP_K=0 < top_k < V,
            TOP_P=top_p < 1,
            BLOCK=BLOCK,
            BITS=DIGIT_BITS,
            num_warps=WARPS,
            # the passes compute each weight anew, and must all round it alike
            enable_fp_fusion=False,
        )
    return probs


@triton.jit
def _warp_kernel(
    logits_ptr,
    probs_ptr,
    row_stride,
    V,
    temperature,
    top_k,
    top_p,
    min_p,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    """One row. Every pass computes the weights anew: cheaper than to write and read them."""
    row = tl.program_id(0).to(tl.int64)  # rows x V exceeds 2**31 on real batches
    logits_ptr += row * row_stride
    probs_ptr += row * V

    peak = _largest(logits_ptr, V, temperature, BLOCK)
    k_edge = tl.full((), 0, tl.uint32)  # keys from here on are kept: all of them
    if TOP_K:
        limit = tl.full((), 0, tl.float64) + top_k
        k_edge = _edge(logits_ptr, V, temperature, peak, k_edge, limit, True, BLOCK, BITS)

    p_edge = tl.full((), 0, tl.uint32)
    if TOP_P:
        mass = _mass(logits_ptr, V, temperature, peak, k_edge, p_edge, 0.0, BLOCK)
        limit = mass * top_p
        p_edge = _edge(logits_ptr, V, temperature, peak, k_edge, limit, False, BLOCK, BITS)

    # the likeliest token weighs exp(0) = 1, so min_p is a weight as it stands
    mass = _mass(logits_ptr, V, temperature, peak, k_edge, p_edge, min_p, BLOCK).to(tl.float32)
    for start in range(0, V, BLOCK):
        token_T = start + tl.arange(0, BLOCK)
        x_T = _scaled(logits_ptr, token_T, V, temperature)
        weight_T = _kept(_weight(x_T, peak, k_edge), p_edge, min_p)
        tl.store(probs_ptr + token_T, tl.div_rn(weight_T, mass), mask=token_T < V)


@triton.jit
def _scaled(logits_ptr, token_T, V, temperature):
    """Logits over temperature in fp32; -inf, hence of weight 0, after the vocabulary."""
    x_T = tl.load(logits_ptr + token_T, mask=token_T < V, other=float("-inf")).to(tl.float32)
    # rounded as torch rounds it: an approximate quotient could part what ties there, or join it
    return tl.div_rn(x_T, tl.zeros_like(x_T) + temperature)


@triton.jit
def _key(x_T):
    """uint32 in the order of the floats; 0.0 and -0.0, being equal, have one key."""
    bits_T = tl.where(x_T == 0, 0.0, x_T).to(tl.uint32, bitcast=True)
    return tl.where((bits_T >> 31) == 1, ~bits_T, bits_T | 0x80000000)


@triton.jit
def _weight(x_T, peak, k_edge):
    """Probability over that of the likeliest token; 0 for a token that top-k drops."""
    return tl.where(_key(x_T) < k_edge, 0.0, tl.exp(x_T - peak))


@triton.jit
def _kept(weight_T, p_edge, min_p):
    """The weights that top-p and min-p keep, 0 for the rest. Ties go together, by value."""
    return tl.where((_key(weight_T) < p_edge) | (weight_T < min_p), 0.0, weight_T)


@triton.jit
def _largest(logits_ptr, V, temperature, BLOCK: tl.constexpr):
    peak = tl.full((), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        token_T = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.max(_scaled(logits_ptr, token_T, V, temperature), 0))
    return peak


@triton.jit
def _mass(logits_ptr, V, temperature, peak, k_edge, p_edge, min_p, BLOCK: tl.constexpr):
    """Sum of the kept weights: fp32 inside a block, fp64 across blocks."""
    mass = tl.full((), 0, tl.float64)
    for start in range(0, V, BLOCK):
        token_T = start + tl.arange(0, BLOCK)
        x_T = _scaled(logits_ptr, token_T, V, temperature)
        weight_T = _kept(_weight(x_T, peak, k_edge), p_edge, min_p)
        mass += tl.sum(weight_T, 0).to(tl.float64)
    return mass


@triton.jit
def _edge(
    logits_ptr, V, temperature, peak, k_edge, limit, COUNT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
):
    """Key of the least token in front of which there is less than `limit`.

    COUNT: the key is the scaled logit's, and tokens are counted (top-k). Otherwise the key is the
    weight's, and weights are added up (top-p).

    Between passes `front` is the amount in front of all tokens whose key starts with `prefix`.
    It is below the limit, and some token has that prefix: so the foremost bin that holds anything
    always qualifies, whatever the rounding, and the search cannot leave the vocabulary.
    """
    BINS: tl.constexpr = 1 << BITS
    bin_H = tl.arange(0, BINS)
    prefix = tl.full((), 0, tl.uint32)
    front = tl.full((), 0, tl.float64)
    shift = tl.full((), 32, tl.uint32)
    for _ in range(32 // BITS):
        shift -= BITS
        amount_H = tl.zeros((BINS,), tl.float64)
        for start in range(0, V, BLOCK):
            token_T = start + tl.arange(0, BLOCK)
            x_T = _scaled(logits_ptr, token_T, V, temperature)
            if COUNT:
                key_T, amount_T = _key(x_T), (token_T < V).to(tl.float32)
            else:
                amount_T = _weight(x_T, peak, k_edge)
                key_T = _key(amount_T)
            head_T = key_T >> shift
            amount_T = tl.where((head_T >> BITS) == prefix, amount_T, 0.0)
            bin_T = (head_T & (BINS - 1)).to(tl.int32)
            hot_TH = tl.where(bin_T[:, None] == bin_H[None, :], amount_T[:, None], 0.0)
            amount_H += tl.sum(hot_TH, 0).to(tl.float64)
        # sums of the bins in front, not a running sum less the bin: empty bins must add nothing
        in_front_HH = tl.where(bin_H[None, :] > bin_H[:, None], amount_H[None, :], 0.0)
        front_H = front + tl.sum(in_front_HH, 1)
        fits_H = (amount_H > 0) & (front_H < limit)
        chosen = tl.min(tl.where(fits_H, bin_H, BINS - 1), 0)
        front = tl.sum(tl.where(bin_H == chosen, front_H, 0.0), 0)
        prefix = (prefix << BITS) | chosen.to(tl.uint32)
    return prefix
