"""A model as a hash of its weights and config: what is stored of a target is taken up for that very target alone.

Read next: `store.py`, whose identity has it; `trainers/pruning/layers.py` and `launch/generate.py`, which keep it too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...decoding.backbone.cut import whole
from ...decoding.backbone.quantised import plain_parts

_CHUNK = 1 << 18  # numbers of a weight that are summed at once; its int64 copy stays in a cache
_BITS = {1: torch.uint8, 2: torch.int16}  # wider ones are read as 32 bits each
_NOT_COMPUTED_WITH = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Entries of a config that change no hidden state; types are seen in the weights."""


def model_hash(model: nn.Module) -> str:
    """A hash of all that a model computes with: its weights, and its config."""
    return hashlib.sha256(f"{weights_hash(model)} {config_hash(model)}".encode()).hexdigest()


def config_hash(model: nn.Module) -> str:
    """A hash of a config's entries that change hidden states, such as RoPE's and the norms'.

    The same weights under another entry are another model, which no weight shows.
    """
    config: Any = model.config
    entries = config.get_text_config(decoder=True).to_dict()
    used = {name: entry for name, entry in entries.items() if name not in _NOT_COMPUTED_WITH}
    return hashlib.sha256(json.dumps(used, sort_keys=True, default=str).encode()).hexdigest()


@torch.no_grad()
def weights_hash(model: nn.Module) -> str:
    """A hash over all weights' names, types, shapes and every bit; the same on all devices.

    That of a target which is cut over processes is the same too; they make it together, weight by weight.
    """
    kept = model.state_dict().keys()  # buffers that are saved: quantised weights are such
    buffers = [(name, each) for name, each in model.named_buffers() if name in kept]
    digest, factors = hashlib.sha256(), _factors(_CHUNK)
    for name, weight in sorted([*model.named_parameters(), *buffers], key=lambda each: each[0]):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        factors = factors.to(weight.device)
        for part in plain_parts(whole(weight)):
            digest.update(_sums(part, factors).numpy().tobytes())
    return digest.hexdigest()


def _sums(weight: Tensor, factors_C: Tensor) -> Tensor:
    """Two sums over each chunk's bits as integers, one of them weighted by position.

    Whole numbers wrap around, so that the order of the sum does not matter, as it does for others.
    """
    sums = []
    size = weight.element_size()
    for chunk in _chunks(weight, len(factors_C) * 4 // max(4, size)):
        bits = chunk.view(_BITS.get(size, torch.int32)).to(torch.int64)
        sums += [bits.sum(), bits.mul_(factors_C[: len(bits)]).sum()]
    return torch.stack(sums).cpu()


def _chunks(weight: Tensor, length: int) -> Iterator[Tensor]:
    """All numbers of a weight in its own order, `length` at a time; no more than that is copied."""
    if weight.is_contiguous():
        yield from weight.view(-1).split(length)
        return
    for at in range(0, weight.numel(), length):
        index = torch.arange(at, min(at + length, weight.numel()), device=weight.device)
        yield weight[torch.unravel_index(index, weight.shape)]


def _factors(count: int) -> Tensor:
    """Odd numbers without a pattern (splitmix64's), one per index of a chunk, int64 [count]."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64))
