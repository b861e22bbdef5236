"""What is faulty in the CPU build, replaced in whichever process of vLLM imports this.

- `expand_batch_to_tokens`: the build's own hands its compiled part a temporary copy of whatever is not int64, so that
  temperature, top-k and top-p of a batch with drafts stay uninitialised memory (vllm/utils/cpu_triton_utils.py,
  `_expand_kernel_impl`; a GPU has another kernel). Above T = 0 the text is then not the target's.
- `_normalize_context_k` of DFlash: it hands `rms_norm` one row of weights per layer, and the compiled one of the CPU
  build reads the first row alone. Every layer behind the first then norms its context's keys by the first layer's
  weights: the text stays the target's, drafts are others.

`faults` says which of them the build at hand still has.
"""

from __future__ import annotations

import torch
import vllm.v1.sample.rejection_sampler as rejection_sampler
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.utils.cpu_triton_utils import _expand_kernel_impl

AS_IT_COMES = DFlashQwen3Model._normalize_context_k


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value once for every drafted token, `replace_from` written as `replace_to`."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts)


def normed(self: DFlashQwen3Model, keys: torch.Tensor) -> torch.Tensor:
    """The context's keys [layers, tokens, heads, size], each layer's by its own weights."""
    out = torch.empty_like(keys)
    for layer, weights in enumerate(self._k_norm_weights):
        ops.rms_norm(out[layer], keys[layer], weights, self._rms_norm_eps)
    return out


rejection_sampler.expand_batch_to_tokens = expanded
DFlashQwen3Model._normalize_context_k = normed


class Mended:
    """For `--worker-extension-cls mended.Mended`, by which a server's worker imports this file."""


def faults() -> list[str]:
    """Which of the two the build at hand still has."""
    found = {"expand_batch_to_tokens": _expand_is_faulty(), "rms_norm": _norm_is_faulty()}
    return [name for name, faulty in found.items() if faulty]


def _expand_is_faulty() -> bool:
    """Whether the output is left as it was for numbers that are not int64."""
    out = torch.full((5,), -99.0)
    _expand_kernel_impl(out, torch.tensor([0.7, 1.0]), torch.tensor([2, 5], dtype=torch.int32), 0, 1)
    return bool((out == -99.0).any())


def _norm_is_faulty() -> bool:
    """Whether a second layer is normed by the first one's weights."""
    keys = torch.ones(2, 1, 1, 32)
    out = torch.empty_like(keys)
    ops.rms_norm(out, keys, torch.stack([torch.ones(32), torch.full((32,), 2.0)]), 0.0)
    return not bool((out[1] == 2.0).all())
