"""Lookahead decoding: n-grams out of the target's own Jacobi iterations, guessed and verified.

Fu et al. 2024 (arXiv 2402.02057): window W = 7, n-gram N = 5, guesses G = 7. One call per step
holds both branches: the window, whose last row takes one Jacobi step, and the guesses, which are
candidates. Here both are nodes of one tree; those of the window are computed and never accepted.
Differences from the released code: all window rows start filled with tokens of the prompt, in place
of warm-up steps, and the token after a full guess is kept.
Read next: `../lookup/lookup.py`, `decoding/tree/tree.py`.

Shapes: B rows, R = N - 1 window rows and tokens of a guess, W columns, G guesses, P n-grams of the
pool, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...decoding.proposal import Committed, DraftSampling, Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ...decoding.tree.tree import RowTrees
from ..config import check_values


class Lookahead:
    """Needs no model and no corpus; pays with (N - 1) (W + G) extra nodes in every call."""

    family = "lookahead"
    replayable = True
    draft_steps = 0

    def __init__(
        self, *, window: int = 7, ngram: int = 5, guesses: int = 7, pool: int = 64, device: torch.device | str = "cpu"
    ) -> None:
        """`pool`: steps whose n-grams are remembered; a row has a pool of its own.

        Raises:
            RequestError: a value that no recipe may have.
        """
        check_values("lookahead", window=window, ngram=ngram, guesses=guesses)
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self._pool, self._device = max(pool * window, guesses), device

    @property
    def draft_length(self) -> int:
        """Depth of a guess."""
        return self.ngram - 1

    @property
    def nodes(self) -> int:
        """Nodes of every call, the root included."""
        return 1 + self.draft_length * (self.window + self.guesses)

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows: a window of tokens of the prompt, an empty pool."""
        R, W = self.draft_length, self.window
        spread = [at * 31 + 7 for at in range(R * W)]
        filled = [[prompt[at % len(prompt)] for at in spread] for prompt in prompts]
        self._static = static
        self._window_BRW = torch.tensor(filled, device=self._device).view(len(prompts), R, W)
        # column 0 is what the n-gram begins with; -1: empty
        self._pool_BPN = torch.full((len(prompts), self._pool, self.ngram), -1, device=self._device)

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The window, and the newest n-grams of the pool that begin with the last token."""
        guess_BGR = self._guesses(last_B)
        if not self._static:
            # unless shapes are fixed, guesses that no row has are left out
            guess_BGR = guess_BGR[:, : max(1, int((guess_BGR[..., 0] >= 0).sum(1).max()))]
        parents_BX, candidate_BX = self._branches(guess_BGR)
        B = len(last_B)
        window_BX = self._window_BRW.flatten(1)
        tokens_BN = torch.cat([last_B[:, None], window_BX, guess_BGR.clamp_min(0).flatten(1)], 1)
        none_B1 = torch.full_like(last_B, -1)[:, None]
        above_BX = self._window_parents.expand(B, -1)
        parents_BN = torch.cat([none_B1, above_BX, parents_BX], 1)
        tree = RowTrees(
            parents_BN,
            depth=self.draft_length,
            width=self.window + self.guesses,
            reach=self.window + self.draft_length,
        )
        outside_BX = torch.zeros_like(above_BX, dtype=torch.bool)
        present_BN = torch.cat([none_B1 < 0, outside_BX, candidate_BX], 1)
        return Proposal(tokens_BN, tree, DraftSampling.POINT_MASS, present_BN=present_BN, coins=self.nodes)

    def observe(self, committed: Committed) -> None:
        """One Jacobi step: remember a column's n-gram each, drop the first row, add the new one."""
        R, W = self.draft_length, self.window
        first = 1 + (R - 1) * W
        new_B1W = committed.logits_BNV[:, first : first + W].argmax(-1)[:, None]
        column_BNW = torch.cat([self._window_BRW, new_B1W], 1)
        self._remember(column_BNW.transpose(1, 2))
        self._window_BRW.copy_(column_BNW[:, 1:])

    def _remember(self, fresh_BWN: Tensor) -> None:
        """Put n-grams at the front of the pool; older copies of the same are forgotten."""
        same_BPW = (self._pool_BPN[:, :, None] == fresh_BWN[:, None]).all(-1)
        kept_BPN = torch.where(same_BPW.any(2)[..., None], -1, self._pool_BPN)
        # of equal columns the first stays
        twin_BWW = (fresh_BWN[:, :, None] == fresh_BWN[:, None]).all(-1).tril(-1)
        fresh_BWN = torch.where(twin_BWW.any(2)[..., None], -1, fresh_BWN)
        self._pool_BPN.copy_(torch.cat([fresh_BWN, kept_BPN], 1)[:, : self._pool])

    def _guesses(self, last_B: Tensor) -> Tensor:
        """The newest n-grams after the last token, without it; -1 where there are fewer."""
        hit_BP = self._pool_BPN[:, :, 0] == last_B[:, None]
        age_P = torch.arange(self._pool, device=last_B.device)
        order_BP = torch.where(hit_BP, age_P, self._pool)
        newest = order_BP.topk(self.guesses, largest=False)
        index_BGR = newest.indices[..., None].expand(-1, -1, self.draft_length)
        guess_BGR = self._pool_BPN[:, :, 1:].gather(1, index_BGR)
        return torch.where((newest.values < self._pool)[..., None], guess_BGR, -1)

    def _branches(self, guess_BGR: Tensor) -> tuple[Tensor, Tensor]:
        """Parents and presence of the guesses' nodes; equal beginnings share theirs. [B, G R]."""
        B, G, R = guess_BGR.shape
        alike_BGGR = (guess_BGR[:, :, None] == guess_BGR[:, None]).long().cumprod(-1) > 0
        # the first guess that begins alike owns the node
        owner_BGR = alike_BGGR.to(torch.uint8).argmax(2)
        guess_G = torch.arange(G, device=guess_BGR.device)
        first = 1 + self.draft_length * self.window
        depth_R = torch.arange(R, device=guess_BGR.device)
        node_BGR = first + owner_BGR * R + depth_R
        root_BG1 = torch.zeros_like(node_BGR[..., :1])
        parents_BGR = torch.cat([root_BG1, node_BGR[..., :-1]], -1)
        present_BGR = (owner_BGR == guess_G[:, None]) & (guess_BGR >= 0)
        parents_BGR = torch.where(present_BGR, parents_BGR, -1)
        return parents_BGR.flatten(1), present_BGR.flatten(1)

    @cached_property
    def _window_parents(self) -> Tensor:
        """Row 0 of the window is a chain after the root, every column hangs from it."""
        W = self.window
        row_0 = list(range(W))
        below = [1 + (row - 1) * W + column for row in range(1, self.draft_length) for column in range(W)]
        return torch.tensor([row_0 + below], device=self._device)
