"""Hydra: Medusa's heads, each of which also sees the tokens drafted before its own.

Ankner et al. 2024, arXiv 2402.05109. A tree is drafted level by level, every node from the path
that leads to it; Hydra++ puts a layer before the heads. The module that `trainers/hydra.py`
trains is the very module that drafts here.

The layer before Hydra++'s heads (section 4, "prefix attention") reads the whole text, while the target's last state
was trained to predict one token. One decoder layer over the
target's last hidden states, causal, with keys and values of its own; it runs once per target call.
What is trained is what decodes: training passes the documents of whole rows, decoding a KV cache.

Read next: `medusa.py`, with which nearly everything is shared.

Shapes: B rows, N positions, T keys in view, K nodes expanded at once, R ranks, X nodes of the next depth, Y of them
that are expanded in turn, E tokens that a step can emit, H hidden size, F numbers that a head reads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.proposal import Committed, DraftSampling, Proposal, pick
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ...decoding.tree.build import Choices
from ..eagle.net import EagleLayer
from ..folder import read_settings
from ..layers.draft_vocabulary import count_of, rows_at
from ..layers.llama import LayerShape, Norm, Rotary
from ..layers.passes import Passes
from ..layers.true_states import TrueStates
from ..projection import check_logits, scaled_weight
from ..weights import net_for
from .medusa import HeadsOnTree, MedusaHeads, MedusaShape, ResidualBlock, copy_projection


@dataclass(frozen=True)
class HydraShape(MedusaShape):
    """Sizes of the heads, and of the layer before them, where there is one."""

    prefix: LayerShape | None = None
    as_published: bool = field(default=False, kw_only=True)
    """Whether heads have what the authors' code has beside: a linear map in place of the identity that passes states
    on, biases of the projections, and a norm behind the layer in front."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no heads can have, or a layer of other states than the heads'."""
        super().__post_init__()
        if type(self.as_published) is not bool or (self.as_published and self.shared_head):
            raise ValueError(
                f"as_published is {self.as_published!r:.20} and shared_head {self.shared_head}; expected true or "
                "false, and heads with projections of their own where it is true"
            )
        if self.prefix is not None and self.prefix.hidden != self.hidden:
            raise ValueError(f"the layer before the heads has hidden {self.prefix.hidden}, the heads {self.hidden}")

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """The sizes that a drafter folder's `config.json` holds."""
        prefix = settings.get("prefix")
        return cls(**(settings | {"prefix": prefix and LayerShape(**prefix)}))


class HydraBlock(nn.Module):
    """h + SiLU(W [h; e_1; ...; e_k] + b), then residual blocks; h as it is until it is trained.

    The published code passes on a linear map of all that is read, random at first: here it begins as h alone.
    """

    def __init__(self, hidden: int, layers: int, tokens: int, *, maps: bool = False) -> None:
        """`maps`: whether what is passed on goes through a linear map."""
        super().__init__()
        self.hidden = hidden
        self.first = nn.Linear((1 + tokens) * hidden, hidden)
        for parameter in self.first.parameters():
            nn.init.zeros_(parameter)
        self.passed = nn.Linear((1 + tokens) * hidden, hidden) if maps else None
        if self.passed is not None:
            nn.init.eye_(self.passed.weight)
            nn.init.zeros_(self.passed.bias)
        self.rest = ResidualBlock(hidden, layers - 1)

    def forward(self, given_XF: Tensor) -> Tensor:
        passed_XH = given_XF[..., : self.hidden] if self.passed is None else self.passed(given_XF)
        return self.rest(passed_XH + F.silu(self.first(given_XF)))


class HydraHeads(MedusaHeads):
    """K heads; head k at position t reads h_t and the embeddings of tokens t+1 to t+k.

    It predicts token t+k+1, as Medusa's does. Token t+1 is known when drafting begins: it is the
    tree's root. Embeddings are the target's, passed in and never saved. Hydra++ has `layers` 4 and
    a `prefix`, whose output takes the place of h_t; `forward` and the blocks read that.
    """

    def __init__(self, config: HydraShape, ids: Sequence[int] | None = None) -> None:
        """As `MedusaHeads`."""
        super().__init__(config, ids)
        self.prefix = None if config.prefix is None else PrefixLayer(config.prefix, normed=config.as_published)
        self.family = "hydra" if config.prefix is None else "hydra++"

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """Heads of a drafter folder's sizes, with their layer if it has one; without its weights."""
        return cls(HydraShape.from_settings(settings))

    @classmethod
    def for_target(
        cls,
        target: nn.Module,
        *,
        heads: int,
        layers: int = 1,
        shared_head: bool = False,
        prefix: bool = False,
        as_published: bool = False,
        ids: Sequence[int] | None = None,
    ) -> Self:
        """As `MedusaHeads`, with a layer of the target's sizes before the heads if there is to be one."""
        model: Any = target
        weight_VH = scaled_weight(target)
        V, H = weight_VH.shape
        layer = LayerShape.of(model.config) if prefix else None
        shape = HydraShape(
            heads, layers, H, V, shared_head, layer, draft_vocabulary=count_of(ids), as_published=as_published
        )
        made = cls(shape, ids)
        copy_projection(made.lm_heads, rows_at(weight_VH, ids))
        return made

    def block(self, k: int) -> nn.Module:
        """What head k, counted from 1, computes before its projection."""
        return HydraBlock(self.config.hidden, self.config.layers, tokens=k, maps=self.config.as_published)

    def forward(self, hidden_XH: Tensor, embeds: Sequence[Tensor] = ()) -> Tensor:
        """[..., H] and the embeddings of the K tokens after -> [..., K, H], text being known."""
        return torch.stack([block(reads(hidden_XH, embeds[:k])) for k, block in enumerate(self.blocks, 1)], -2)


def reads(hidden_XH: Tensor, embeds: Sequence[Tensor]) -> Tensor:
    """What a head reads: the target's hidden state, then the tokens after it, oldest first."""
    return torch.cat([hidden_XH, *(each.to(hidden_XH.dtype) for each in embeds)], -1)


class Hydra(HeadsOnTree):
    """Fills the tree level by level, every node from the path that leads to it."""

    family = "hydra"
    heads: HydraHeads

    def __init__(self, heads: HydraHeads, target: Backbone, **settings: Any) -> None:
        """`settings`: those of `HeadsOnTree`."""
        super().__init__(heads, target, **settings)
        self._embed: Any = target.model.get_input_embeddings()

    @property
    def draft_steps(self) -> int:
        """Heads that run one after another per target call."""
        return self.draft_length

    @property
    def weights_read(self) -> list[nn.Module]:
        """What a proposal reads: a head for every level, and the projection after it."""
        heads, levels = self.heads, range(self.draft_length)
        prefix = [] if heads.prefix is None else [heads.prefix]
        return [*prefix, *(part for k in levels for part in (heads.blocks[k], self._drafting[k].layer))]

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The tree after `last_B`, every node the likeliest after its path."""
        tokens = [last_B[:, None]]
        hidden_BH = self._hidden_BH.to(self.heads.dtype)
        given_BKF = reads(hidden_BH, [self._embed(last_B)])[:, None]
        for depth, level in enumerate(_levels(self._choices, last_B.device)):
            topk_BKR = self.logits(depth, given_BKF).topk(level.ranks).indices
            tokens.append(topk_BKR.flatten(1)[:, level.pick_X])
            embeds_BYH = self._embed(tokens[-1][:, level.inner_Y])
            given_BKF = reads(given_BKF[:, level.parent_Y], [embeds_BYH])
        return Proposal(torch.cat(tokens, 1), self._choices.tree, DraftSampling.POINT_MASS)

    def given(self, k: int, hidden_SH: Tensor, tokens_S: Tensor) -> Tensor:
        """What head k reads at every position of a text that has a token k + 1 positions ahead."""
        X = len(tokens_S) - (k + 1)
        embeds_SH = self._embed(tokens_S)
        embeds = [embeds_SH[ahead : ahead + X] for ahead in range(1, k + 1)]
        return reads(hidden_SH[:X].to(self.heads.dtype), embeds)

    def logits(self, depth: int, given_BKF: Tensor) -> Tensor:
        """fp32 logits [B, K, V] of the tokens after some nodes; the root has depth 0."""
        hidden_BKH = self.heads.blocks[depth](given_BKF)
        return self._drafting[depth].logits(hidden_BKH)


class _Level(NamedTuple):
    """From the expanded nodes of one depth to those of the next."""

    ranks: int  # candidates taken of every node
    pick_X: Tensor  # indices of the nodes of the next depth in [K, R], flattened
    inner_Y: Tensor  # which of them are expanded in turn
    parent_Y: Tensor  # indices in K of the parents of those


@lru_cache(maxsize=64)
def _levels(choices: Choices, device: torch.device) -> tuple[_Level, ...]:
    """The levels of a tree whose nodes are ordered by depth; kept, as copying them would wait."""
    tree, ranks = choices.tree, choices.ranks
    levels, expanded = [], [0]
    for depth in range(1, tree.depth + 1):
        nodes = [node for node in range(len(tree)) if tree.depths[node] == depth]
        width = 1 + max(ranks[node] for node in nodes)
        parent_at = {node: expanded.index(tree.parents[node]) for node in nodes}
        inner = [at for at, node in enumerate(nodes) if tree.children[node]]
        picks = [parent_at[node] * width + ranks[node] for node in nodes]
        lists = (picks, inner, [parent_at[nodes[at]] for at in inner])
        tensors = (torch.tensor(each, dtype=torch.long, device=device) for each in lists)
        levels.append(_Level(width, *tensors))
        expanded = [nodes[at] for at in inner]
    return tuple(levels)


class HydraPlus(Hydra):
    """Hydra++: the heads read the prefix layer's output at the last committed token.

    The layer's keys and values are those of true states alone: what a step accepted is written at
    the beginning of the next, and nothing is written while drafting.
    """

    family = "hydra++"

    @property
    def draft_steps(self) -> int:
        """The layer, and the heads that run one after another."""
        return 1 + self.draft_length

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self._states = TrueStates(
            prompts,
            room=room + self.draft_length + 1,
            depth=self.draft_length,
            device=self._target.device,
            static=static,
        )

    def begin(self, features: Sequence[Tensor]) -> None:
        """Read every state of the prompts but the last, which the first step reads."""
        for _, hidden_1SH, positions_1S in self._states.begin(features):
            self._run(hidden_1SH, positions_1S, None)

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """The tree after `last_B`, drafted from the layer's output at the last committed token."""
        self.skip(last_B)
        return super().propose(last_B, warper, uniforms)

    def skip(self, last_B: Tensor) -> None:
        """Read what is new up to `last_B`, all that `propose` does before it drafts."""
        new = self._states.waiting(last_B)
        out_BEH = self._run(new.features_BEF, new.positions_BE, new.mask)
        self._hidden_BH = pick(out_BEH, new.last_B1)[:, 0]

    def observe(self, committed: Committed) -> None:
        """Keep the true states of what was accepted until the next step reads them."""
        self._states.observe(committed)

    def teacher_forced(self, hidden_SH: Tensor, tokens_S: Tensor, depth: int) -> Iterator[Tensor]:
        """As for `Hydra`, the layer reading the whole text first."""
        assert self.heads.prefix is not None
        positions_1S = torch.arange(len(tokens_S), device=tokens_S.device)[None]
        read_1SH = self.heads.prefix(hidden_SH[None].to(self.heads.dtype), positions_1S, None)
        return super().teacher_forced(read_1SH[0], tokens_S, depth)

    def _run(self, hidden_BEH: Tensor, positions_BE: Tensor, mask: Tensor | None) -> Tensor:
        """The layer over some states; the KV cache has been aimed."""
        assert self.heads.prefix is not None  # as `hydra_on` has seen
        hidden_BEH = hidden_BEH.to(self.heads.dtype)
        return self.heads.prefix(hidden_BEH, positions_BE, mask, self._states.kv_cache)


def hydra_on(heads: HydraHeads, target: Backbone, **settings: Any) -> Hydra:
    """The drafter of some heads, with their layer if they have one; `settings` are those of `HeadsOnTree`."""
    kind = Hydra if heads.prefix is None else HydraPlus
    return kind(heads, target, **settings)


def load_hydra(folder: str | Path, target: Backbone, **settings: Any) -> Hydra:
    """Load a Hydra or Hydra++ drafter folder for `target`; `settings` are those of `HeadsOnTree`.

    Raises:
        RequestError: the folder is no Hydra drafter, or was made for another target; the message
            names the field that differs.
    """
    _, sizes = read_settings(folder, target, Hydra.family, HydraPlus.family)
    heads = net_for(Path(folder), target, lambda: HydraHeads.from_settings(sizes), "Hydra heads")
    if heads.config.shared_head:
        check_logits(target.model)
    return hydra_on(heads, target, **settings)


class PrefixLayer(EagleLayer):
    """A Llama layer of the target's sizes, without biases; it passes h on until it is trained.

    The published code has one more norm after the layer, which heads that begin as copies of the
    target's projection would have to unlearn; with `normed` it is there.
    """

    def __init__(self, shape: LayerShape, *, normed: bool = False) -> None:
        """`normed`: whether there is a norm behind the layer."""
        super().__init__(shape)
        self.norm = Norm(shape.hidden, shape.eps) if normed else None
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.rotary = Rotary(shape)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.zeros_(last.weight)

    def forward(
        self,
        hidden_BNH: Tensor,
        positions_BN: Tensor,
        mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        *,
        documents_BN: Tensor | None = None,
    ) -> Tensor:
        """What the heads read in place of the target's states, [B, N, H].

        Args:
            hidden_BNH: the target's last hidden states, in the precision of the weights.
            positions_BN: counted from the first token of the document.
            mask: bool, broadcastable to [B, 1, N, T]; None is causal.
            kv_cache: where keys and values are kept, aimed by the caller; None in training.
            documents_BN: in training, in place of a mask: the document of every position, which
                sees no other; memory then grows with N alone.
        """
        attention, turn = self.self_attn, self.rotary(positions_BN)
        read_BNH = self.input_layernorm(hidden_BNH)
        if documents_BN is None:
            hidden_BNH = hidden_BNH + attention(read_BNH, turn, mask, kv_cache)
        else:
            seen = Passes(documents_BN, attention.group).first(attention.project(read_BNH, turn))
            hidden_BNH = hidden_BNH + attention.joined(seen)
        hidden_BNH = hidden_BNH + self.mlp(self.post_attention_layernorm(hidden_BNH))
        return hidden_BNH if self.norm is None else self.norm(hidden_BNH)
