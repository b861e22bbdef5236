"""P-EAGLE: a chain of drafts in one pass over the new true pairs and the mask pairs behind them.

The true pairs' keys and values stay, those of the mask pairs are overwritten by the true pairs that come in
their place. Every draft is read off its own pair without seeing the others. Read next: `peagle.py`, the network;
`../model/chains.py`, how the tokens are drawn; `../layers/true_states.py`, the target's states.

Shapes: B rows, E tokens that a step can emit, K drafted tokens, N = E + K - 1 pairs of a pass, S tokens of a text,
F numbers of the target's features, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.proposal import Proposal, pick
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ..model.chains import off_slots
from ..temperatures import Policy, samples
from .peagle import PeagleNet
from .proposer import Eagle3


class Peagle(Eagle3):
    """Drafts a chain of `draft_length` tokens, each without seeing the ones before it.

    q is zero for tokens outside the draft vocabulary, as EAGLE-3's is.
    """

    family = "peagle"
    net: PeagleNet

    def __init__(
        self,
        net: PeagleNet,
        target: Backbone,
        *,
        draft_length: int = 4,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
        ids: Sequence[int] | None = None,
    ) -> None:
        """`factors`: as of `at_depth`; `ids`: as of `Eagle`."""
        super().__init__(net, target, tree="chain", draft_length=draft_length, policy=policy, factors=factors, ids=ids)

    @property
    def draft_steps(self) -> int:
        """One, whatever the length."""
        return 1

    @property
    def weights_read(self) -> list[nn.Module]:
        """What a proposal reads: the network, once."""
        if self.head.rows_U is None and not self.net.config.own_embedding:
            return [self.net]
        # of a table single rows are read
        parts = (each for name, each in self.net.named_children() if name not in ("lm_head", "embed_tokens"))
        return [*parts, self.head.layer]

    @property
    def _most_written(self) -> int:
        # mask pairs stand behind all that a step can emit
        return 2 * self.draft_length

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft after `last_B`."""
        logits_BKV = self._logits(self._ahead(last_B))
        source = uniforms if samples(warper, self.policy) else None
        return off_slots(logits_BKV, last_B, warper, self.factors, source)

    def _ahead(self, last_B: Tensor) -> Tensor:
        """Write the new true pairs, and mask pairs behind each row's last; the K outputs from there on, [B, K, H]."""
        net, masks = self.net, self.draft_length - 1
        new = self._states.waiting(last_B, masks)
        features_BNF, embeds_BNH = new.features_BEF, self._embed(new.tokens_BE)
        if masks:
            index_N = torch.arange(features_BNF.shape[1] + masks, device=last_B.device)
            is_true_BN1 = (index_N <= new.last_B1)[..., None]
            states_11F, mask_11H = net.mask()
            # before they are fused, so that `fc` is read once
            features_BNF = torch.where(is_true_BN1, _longer(features_BNF, masks, states_11F), states_11F)
            embeds_BNH = torch.where(is_true_BN1, _longer(embeds_BNH, masks, mask_11H), mask_11H)
        out_BNH = net(net.fuse(features_BNF), embeds_BNH, new.positions_BE, new.mask, self._kv_cache)
        return pick(out_BNH, new.last_B1 + torch.arange(self.draft_length, device=last_B.device))

    def teacher_forced(self, features_SF: Tensor, tokens_S: Tensor, depth: int) -> Iterator[Tensor]:
        """The network's logits along a known text, made as training makes them: `decoding.proposal.TeacherForced`."""
        X = len(tokens_S) - 2  # pairs of a state and the token after it that have a token to draft
        if X < 1:
            return
        positions_1X = torch.arange(X, device=tokens_S.device)[None]
        embed: Any = self._embed
        outputs = self.net.drafts(
            self.net.fuse(features_SF[None, :X]),
            embed(tokens_S[None, 1:-1]),
            positions_1X,
            torch.zeros_like(positions_1X),
            positions_1X,  # ascending: the first ones have the longest branches
            [X - d for d in range(1, min(depth, X))],
        )
        for out_1XH in outputs:
            yield self._logits(out_1XH)[0]


def _longer(x: Tensor, count: int, like: Tensor) -> Tensor:
    """[B, E + count, Y], zeros at the end, in the precision of `like`."""
    return F.pad(x, (0, 0, 0, count)).to(like.dtype)
