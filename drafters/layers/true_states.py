"""The target's states that a drafter's own layer has yet to read, and that layer's KV cache.

Drafters with a layer of their own (EAGLE, Hydra++) keep its keys and values. After every
verification they are computed from the target's true states of what was accepted; what was written
while drafting is garbage after them. Read next: `eagle/proposer.py`, `heads/hydra.py`.

Shapes: B rows, E tokens that a step can emit, F numbers of the target's features, T slots in view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...decoding.backbone.kv_cache import KVCache
from ...decoding.proposal import Committed
from ...decoding.rows import overwrite
from ...decoding.tree.tree import chain, tree_mask


class Waiting(NamedTuple):
    """What a layer reads next: the states after those that it knows, as many as the longest row.

    After a row's own count there is garbage that nothing sees, overwritten next.
    """

    features_BEF: Tensor
    tokens_BE: Tensor
    """The token emitted after each."""
    positions_BE: Tensor
    mask: Tensor | None
    """bool, broadcastable to [B, 1, E, T]."""
    last_B1: Tensor
    """Place of each row's last one in E."""


class TrueStates:
    """The KV cache of a layer, how many true states it holds of each row, and those that wait."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], *, room: int, depth: int, device: torch.device, static: bool
    ) -> None:
        """`room`: slots after the longest prompt; `depth`: drafted tokens accepted at most."""
        self.kv_cache = KVCache(len(prompts), max(map(len, prompts)) + room, static=static)
        # in the KV cache, and those that the next step will add
        self._known_B = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        self._count_B = torch.ones_like(self._known_B)
        shape = (len(prompts), depth + 1)
        self._tokens_BE = torch.zeros(shape, dtype=torch.long, device=device)

    @property
    def length_B(self) -> Tensor:
        """True states of each row, those that wait included: drafting continues after them."""
        return self._known_B + self._count_B

    def begin(self, features: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every prompt's row, states [1, S, F] and positions [1, S], the KV cache aimed at it.

        All but the last state of each, which waits for the token after it; prompts of one token
        have no other.
        """
        B, E = self._tokens_BE.shape
        self._features_BEF = features[0].new_zeros(B, E, features[0].shape[-1])
        for row, features_SF in enumerate(features):
            self._features_BEF[row, 0] = features_SF[-1]
            if len(features_SF) > 1:
                slots = self.kv_cache.aim_at_row(row, len(features_SF) - 1)
                positions_1S = torch.arange(slots, device=features_SF.device)[None]
                yield row, features_SF[None, :-1], positions_1S

    def observe(self, committed: Committed) -> None:
        """Keep the states of what was accepted, each with the token emitted after it.

        A step that drafted less than the longest draft has fewer of both.
        """
        # a row that has ended keeps its last ones, and would draft the same again
        runs_B = committed.count_B > 0
        self._known_B += self._count_B * runs_B
        overwrite(self._count_B, runs_B, committed.count_B)
        E = committed.tokens_BE.shape[1]
        overwrite(self._tokens_BE[:, :E], runs_B[:, None], committed.tokens_BE)
        # the root was verified too: its state stands before the first accepted token
        overwrite(self._features_BEF[:, :E], runs_B[:, None, None], committed.kept_features_BEF)

    def waiting(self, last_B: Tensor, behind: int = 0) -> Waiting:
        """What the layer is to read now, the KV cache aimed; `last_B` follows the last state.

        Args:
            behind: slots that the layer reads behind each row's last state in the same pass: positions and mask
                are then of E + `behind`, a chain. The next call begins before them, so nothing of them is kept.
        """
        last_B1 = (self._count_B - 1)[:, None]
        self._tokens_BE.scatter_(1, last_B1, last_B[:, None])
        E = self._tokens_BE.shape[1]
        if not self.kv_cache.static:
            E = max(self._count_B.tolist())
        slots = self.kv_cache.aim(self._known_B, E + behind)
        nodes = chain(E + behind - 1).on(last_B.device)
        mask = tree_mask(nodes, self._known_B, slots, ragged=self.kv_cache.ragged)
        positions_BE = self._known_B[:, None] + nodes.depths_BN
        return Waiting(self._features_BEF[:, :E], self._tokens_BE[:, :E], positions_BE, mask, last_B1)
