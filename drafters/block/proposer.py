"""DFlash: a block of drafts in one pass, after the target's states of what was accepted.

Every draft is read off its own slot without seeing the others, so a block is a chain whose k-th token
comes from a distribution that does not depend on the drafted ones before it: drawn from it, the
distributions are the proposal's q (`IID`); the likeliest of each are a point mass. Both are lossless by
the rule that the declared sampling asks for. Read next: `net.py`, the network; `../layers/true_states.py`,
the target's states; `../model/chains.py`, how the tokens are drawn.

Shapes: R and B rows, E tokens that a step can emit, S tokens of a prompt or text, A anchors, K drafted
tokens, k nodes, N slots, F numbers of the target's features, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.proposal import Committed, Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ...decoding.tree.tree import Nodes, chain, tree_mask
from ...errors import RequestError
from ..layers.draft_vocabulary import common, head_of_target, ids_of
from ..layers.true_states import TrueStates
from ..model.chains import cut_short, off_slots
from ..temperatures import Policy, samples
from .attention import Cached, SlotView
from .net import BlockNet
from .trees import TreeShape, leaves

_ANCHORS = 256
"""Blocks of a known text that are made at once."""


class DFlash:
    """Drafts a chain of `draft_length` tokens in one pass of the network."""

    family = "dflash"
    net: BlockNet
    replayable = True
    skips = False
    """Whether steps may be left to another drafter, by `skip`."""
    draft_steps = 1

    def __init__(
        self,
        net: BlockNet,
        target: Backbone,
        *,
        draft_length: int | None = None,
        policy: Policy = "sample",
        factors: Sequence[float] = (),
        tree: TreeShape | None = None,
        least: float = 0.0,
        ids: Sequence[int] | None = None,
    ) -> None:
        """`draft_length`: at most, and by default, as many as a block has; `factors` as of `at_depth`.

        `tree`: draft a tree of the likeliest tokens of so many nodes; None: a chain. `least`: a slot whose likeliest
        token has a lower probability ends the draft; 0 for none. `ids`: draft these tokens alone, of those that the
        network can.

        A shorter draft is the beginning of a whole block: slots see each other, and a block of
        another size than the trained one would have other distributions in all of them.
        """
        self.net, self._target, self.policy, self.factors = net, target, policy, tuple(factors)
        self.layers = net.config.layers
        most = net.config.most
        self.draft_length = most if draft_length is None else draft_length
        if not 1 <= self.draft_length <= most:
            raise RequestError(
                f"a draft of {self.draft_length} tokens is asked for; expected 1 to {most}, what a block of "
                f"{net.config.size} slots holds: set draft_length (eval.draft_length of a recipe) to that, or train "
                "with a larger block.size"
            )
        if tree is not None:
            tree.check(self.draft_length)
            # no node of a tree is deeper, nor has the KV cache slots for a longer path
            self.draft_length = min(self.draft_length, tree.nodes - 1)
        # without later slots a causal block is the same
        self._slots = net.config.first + self.draft_length if net.config.causal else net.config.size
        self.tree_shape = tree
        self.kind = "chain" if tree is None else "dynamic"
        self.nodes = self.draft_length + 1 if tree is None else tree.nodes
        self.least = least
        if tree is not None:
            if least:
                raise RequestError(
                    f"drafter.confidence is {least:g}, which ends chains, and drafter.block.tree is tree; "
                    "leave one out"
                )
            if self.factors:
                raise RequestError(
                    f"drafter.temperature_factors are {list(self.factors)}, and a tree of the likeliest tokens draws "
                    "nothing; leave them out (--drafter.temperature_factors '[]'), or set --drafter.block.tree chain"
                )
        self._embed: Any = target.model.get_input_embeddings()
        self.head = head_of_target(target, common(ids_of(net), ids))
        if tree is not None and tree.children > self.head.draftable:
            raise RequestError(
                f"drafter.block.children is {tree.children}, and {self.head.draftable} tokens can be drafted; lower it"
            )

    @property
    def module(self) -> BlockNet:
        """What is trained."""
        return self.net

    @property
    def weights_read(self) -> list[nn.Module]:
        """What a proposal reads: the network and the target's projection, once; of states too, keys and values."""
        return [self.net, *self._of_states, self.head.layer]

    @property
    def _of_states(self) -> list[nn.Module]:
        """What is read a second time, for the target's new states."""
        return [getattr(layer.self_attn, part) for layer in self.net.layers for part in ("k_proj", "v_proj")]

    # ---- state ----------------------------------------------------------------------------

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self._states = TrueStates(
            prompts,
            room=room + max(self._slots, self.draft_length + 1),
            depth=self.draft_length,
            device=self._target.device,
            static=static,
        )
        self._kv_cache = self._states.kv_cache

    def begin(self, features: Sequence[Tensor]) -> None:
        """Write every state of the prompts but the last, which the first step adds."""
        for _row, features_1SF, positions_1S in self._states.begin(features):
            self.net.remember(self.net.fuse(features_1SF), positions_1S, self._kv_cache)

    def observe(self, committed: Committed) -> None:
        """Keep the states of what was accepted."""
        self._states.observe(committed)

    def skip(self, last_B: Tensor) -> None:
        """Read what is new up to `last_B`, all that `propose` does before it drafts."""
        new = self._states.waiting(last_B)
        self.net.remember(self.net.fuse(new.features_BEF), new.positions_BE, self._kv_cache)

    # ---- drafting -------------------------------------------------------------------------

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft after `last_B`, each row's anchor."""
        logits_BKV = self.head.logits(self._block(last_B))
        if self.tree_shape is not None:
            return leaves(last_B, lambda k, at_Bk: said(logits_BKV, k, at_Bk), self.draft_length, self.tree_shape)
        source = uniforms if samples(warper, self.policy) else None
        proposal = off_slots(logits_BKV, last_B, warper, self.factors, source)
        return cut_short(proposal, self._is_sure(logits_BKV)) if self.least else proposal

    def _is_sure(self, logits: Tensor) -> Tensor:
        """Whether slots [..., V] may be drafted, by how likely the likeliest token is, whatever is drawn."""
        return logits.softmax(-1).amax(-1) >= self.least

    def _block(self, last_B: Tensor) -> Tensor:
        """What the target's projection reads of the drafting slots, [B, K, H]."""
        self.skip(last_B)
        start_B, N = self._states.length_B, self._slots
        slots = self._kv_cache.aim(start_B, N)
        positions_BN = start_B[:, None] + torch.arange(N, device=last_B.device)
        view = Cached(self._kv_cache, self._masks(start_B, positions_BN, slots))
        out_BNH = self.net(self.net.slots(self._embed(last_B), N), positions_BN, view)
        first = self.net.config.first
        return out_BNH[:, first : first + self.draft_length]

    def _masks(self, start_B: Tensor, positions_BN: Tensor, slots: int) -> list[Tensor | None]:
        """What the slots of every layer see of `slots` slots of the KV cache, which stand for positions."""
        made: dict[SlotView, Tensor | None] = {}
        layers = [self.net.config.view(layer) for layer in range(self.net.config.decoder_layers)]
        for seen in dict.fromkeys(layers):
            nodes = block_nodes(self._slots, start_B.device, causal=seen.causal)
            mask = tree_mask(nodes, start_B, slots, ragged=self._kv_cache.ragged)
            if seen.window is not None:
                near = seen.window.near(positions_BN, torch.arange(slots, device=start_B.device)[None])
                mask = near if mask is None else mask & near
            made[seen] = mask
        return [made[seen] for seen in layers]

    def teacher_forced(self, features_SF: Tensor, tokens_S: Tensor, depth: int) -> Iterator[Tensor]:
        """The logits of a block behind every token of a known text: `decoding.proposal.TeacherForced`.

        Made as training makes them.
        """
        for d, out_XH in enumerate(self._forced(features_SF, tokens_S, depth)):
            yield self._behind(out_XH, self.head.product(out_XH), tokens_S[1 + d :][: len(out_XH)])

    def _behind(self, _out: Tensor, product: Tensor, _token: Tensor) -> Tensor:
        """Logits [..., V] of drafts behind `_token` [...]: here no draft sees another one.

        `_out`: what the projection reads, [..., H]; `product`: what it makes of it, [..., U].
        """
        return self.head.laid_out(self.head.shaping(product))

    def _forced(self, features_SF: Tensor, tokens_S: Tensor, depth: int) -> Iterator[Tensor]:
        """Of every depth what the projection reads, [X, H], for each anchor that has a token to draft there."""
        X, device = len(tokens_S) - 2, tokens_S.device  # anchors with a state before and a token behind
        if X < 1:
            return
        positions_1S = torch.arange(len(tokens_S), device=device)[None]
        parts = [
            self.net.blocks(
                features_SF[None],
                positions_1S,
                torch.zeros_like(positions_1S),
                self._embed(tokens_S[anchor_A])[None],
                anchor_A[None],
            )[0]
            for anchor_A in torch.arange(1, X + 1, device=device).split(_ANCHORS)
        ]
        for d in range(min(depth, self.draft_length, X)):
            yield torch.cat([part_AKH[:, d] for part_AKH in parts])[: X - d]


def said(x_BKY: Tensor, k: int, at_Bk: Tensor) -> Tensor:
    """What slot `k` of a block says, the same behind each of some nodes, [B, k, Y]."""
    return x_BKY[:, k, None].expand(-1, at_Bk.shape[1], -1)


@lru_cache(maxsize=64)
def block_nodes(size: int, device: torch.device, *, causal: bool) -> Nodes:
    """Slots as nodes of a chain, for positions and masks: without `causal` each sees all of them."""
    nodes = chain(size - 1).on(device)
    return nodes if causal else replace(nodes, ancestors_BNN=torch.ones_like(nodes.ancestors_BNN), is_chain=False)
