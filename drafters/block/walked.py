"""A block whose slots are made in one pass, and walked: each is drafted behind the token in front of it.

What a slot says behind a token is the subclass's `_behind`; drawn from it, a token's q knows the drafted prefix by its
last token. Read next: `dspark.py` and `selected.py`, two ways to hear that token; `trees.py`, in place of a walk.

Shapes: B rows, K drafted tokens, k nodes, H hidden size, V vocabulary, U tokens of it that can be
drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...decoding.proposal import Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper, draw
from ..model.chains import chain_of, cut_short
from ..temperatures import at_depth, samples
from .proposer import DFlash, said
from .trees import grown


class WalkedBlock(DFlash):
    """Drafts a chain in one pass of the network and a walk, or a tree whose every node is ranked behind its parent."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft after `last_B`, each row's anchor."""
        out_BKH = self._block(last_B)
        product_BKU = self.head.product(out_BKH)
        if self.tree_shape is not None:

            def behind(k: int, at_Bk: Tensor) -> Tensor:
                return self._behind(said(out_BKH, k, at_Bk), said(product_BKU, k, at_Bk), at_Bk)

            return grown(last_B, behind, self.draft_length, self.tree_shape)
        random_BK = uniforms.take(self.draft_length) if samples(warper, self.policy) else None
        tokens, q, sure = [last_B], [], []
        for k, (out_BH, product_BU) in enumerate(zip(out_BKH.unbind(1), product_BKU.unbind(1), strict=True)):
            logits_BV = self._behind(out_BH, product_BU, tokens[-1])
            if self.least:
                sure.append(self._trusted(logits_BV, out_BH, tokens[-1]))
            if random_BK is None:
                tokens.append(logits_BV.argmax(-1))
                continue
            q.append(at_depth(warper, self.factors, k)(logits_BV))
            tokens.append(draw(q[-1], random_BK[:, k]))
        proposal = chain_of(tokens, q)
        return cut_short(proposal, torch.stack(sure, 1)) if sure else proposal

    def _trusted(self, logits_BV: Tensor, _out_BH: Tensor, _token_B: Tensor) -> Tensor:
        """Whether a slot may be drafted behind a token. bool [B]."""
        return self._is_sure(logits_BV)
