"""Fingerprints of the logits that every token of an answer came from.

Two ways to decode are twins only if all logits are the same to the bit; keeping 64 bits of every
row of logits is enough to tell. Read next: `determinism.py`, which compares them.

Shapes: B rows, N nodes of a call, V vocabulary, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...decoding.backbone.backbone import Backbone, Seen
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.proposal import Proposal
from ...decoding.random import Uniforms
from ...decoding.rules.acceptance import Outcome
from ...decoding.rules.choice import rule_for
from ...decoding.sampling import Warper
from ...decoding.tree.tree import AnyTree

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watched(Backbone):
    """A target that remembers, for every node of every call, a fingerprint of its logits."""

    def __init__(self, target: Backbone) -> None:
        super().__init__(target.model, name=target.name, revision=target.revision)
        self._target = target
        self._prints: list[Tensor] = []  # [B, N] of every call, the prefill first
        self._kept: list[Tensor] = []  # [B, D] of every speculative call, -1 behind the path

    def prefill(self, prompts: Sequence[Sequence[int]], kv_cache: KVCache, **features: Any) -> Tensor:
        """The target's own, remembered."""
        logits_BV = self._target.prefill(prompts, kv_cache, **features)
        self._prints.append(fingerprints(logits_BV[:, None]))
        return logits_BV

    def see(self, tokens_BN: Tensor, lengths_B: Tensor, tree: AnyTree, kv_cache: KVCache, **how: Any) -> Seen:
        """The target's own, remembered."""
        seen = self._target.see(tokens_BN, lengths_B, tree, kv_cache, **how)
        self._prints.append(fingerprints(seen.logits_BNV))
        return seen

    def rule(self, logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
        """The lossless rule, and a note of the nodes that it kept."""
        outcome = rule_for(proposal, warper)(logits_BNV, proposal, warper, uniforms)
        self._kept.append(outcome.path_BD.clone())
        return outcome

    def deciding(self, answers: Sequence[Sequence[int]]) -> list[list[int]]:
        """The fingerprint in front of every token: of the root, and of each node that was kept."""
        prefill, *calls = (print_BN.tolist() for print_BN in self._prints)
        kept = [path_BD.tolist() for path_BD in self._kept] or [[[]] * len(answers)] * len(calls)
        fingerprints = []
        for row, answer in enumerate(answers):
            prints = list(prefill[row])
            for print_BN, path_BD in zip(calls, kept, strict=True):
                prints += [print_BN[row][n] for n in (0, *path_BD[row]) if n >= 0]
            # a row that has ended is still computed
            fingerprints.append(prints[: len(answer)])
        return fingerprints


def fingerprints(logits: Tensor) -> Tensor:
    """64 bits for every row of logits [..., V], equal only if all bits are; int64 [...]."""
    bits = logits.contiguous().view(_BITS[logits.element_size()]).long()
    # a sum modulo 2**64, with a random odd factor for every position
    return (bits * _factors(logits.shape[-1], logits.device)).sum(-1)


@lru_cache(maxsize=8)
def _factors(vocabulary: int, device: torch.device) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (vocabulary,), generator=g).mul(2).add(1).to(device)
