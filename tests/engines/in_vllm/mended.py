"""The CPU build's faulty `expand_batch_to_tokens`, replaced in whichever process of vLLM imports this.

The build's own hands its compiled part a temporary copy of whatever is not int64, so that temperature, top-k
and top-p of a batch with drafts stay uninitialised memory (vllm/utils/cpu_triton_utils.py,
`_expand_kernel_impl`; a GPU has another kernel). Above T = 0 the text is then not the target's.
"""

from __future__ import annotations

import torch
import vllm.v1.sample.rejection_sampler as rejection_sampler


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value once for every drafted token, `replace_from` written as `replace_to`."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts)


rejection_sampler.expand_batch_to_tokens = expanded


class Mended:
    """For `--worker-extension-cls mended.Mended`, by which a server's worker imports this file."""
