"""Medusa: heads on the target's last hidden state, each one position further ahead, and a static tree.

Cai et al. 2024, arXiv 2401.10774. The heads that `trainers/medusa.py` trains are the very heads
that draft here. Tensors have the names that serving engines load. Read next:
`decoding/tree/build.py`, which fills the tree; `hydra.py`, heads that see each other's tokens.

Shapes: B rows, D depths of the tree, R ranks, K heads, H hidden size, V vocabulary, X any number
of leading dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import LAST
from ...decoding.proposal import Committed, DraftSampling, Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ...decoding.tree.build import Choices, fill_choices, tree_of_paths
from ...decoding.tree.search import Path as IndexPath
from ...decoding.tree.search import best_tree_greedy
from ...errors import RequestError
from ..folder import read_settings
from ..layers.draft_vocabulary import DraftHead, as_layer, check_size, common, count_of, hold, ids_of, rows_at
from ..projection import Projection, check_logits, scaled_weight
from ..sizes import check_parts, check_sizes
from ..weights import net_for

Paths = Sequence[Sequence[int]]


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of the heads: what `config.json` of a drafter folder holds as its settings."""

    heads: int
    layers: int
    hidden: int
    vocabulary: int
    shared_head: bool = False
    draft_vocabulary: int | None = field(default=None, kw_only=True)
    """Tokens that can be drafted; None: all of the target's."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no heads can have."""
        check_sizes(heads=self.heads, layers=self.layers, hidden=self.hidden, vocabulary=self.vocabulary)
        check_parts(self.heads * self.layers, f"{self.heads} heads of {self.layers} layers")
        check_size(self.draft_vocabulary, self.vocabulary)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """The sizes that a drafter folder's `config.json` holds."""
        return cls(**settings)


class ResidualBlock(nn.Module):
    """`layers` times x + SiLU(W x + b); it passes x on as it is until it is trained."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_XH: Tensor) -> Tensor:
        for layer in self.layers:
            x_XH = x_XH + F.silu(layer(x_XH))
        return x_XH


class Heads(nn.Module, ABC):
    """The base of all families of heads: K heads, each with its own output projection or the target's."""

    config: Any
    lm_heads: nn.ModuleList

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights, in which hidden states are taken."""
        return next(self.parameters()).dtype

    @abstractmethod
    def head(self, k: int, given_XF: Tensor) -> Tensor:
        """What the projection of head k, counted from 1, reads: [..., F] -> [..., H]."""

    def logits(self, hidden_XKH: Tensor, target: Projection) -> Tensor:
        """fp32 logits [..., K, V] after `forward`, of the first K heads; -inf of tokens that cannot be drafted.

        `target` is the target's own projection, which is read where it is shared.
        """
        return self.logits_by(self.over(target), hidden_XKH)

    def logits_by(self, over: Sequence[DraftHead], hidden_XKH: Tensor) -> Tensor:
        """The same by the heads' projections, as `over` gives them."""
        if self.config.shared_head:  # one product for all of them
            return over[0].logits(hidden_XKH)
        return torch.stack([over[k].logits(hidden_XH) for k, hidden_XH in enumerate(hidden_XKH.unbind(-2))], -2)

    def over(self, target: Projection, ids: Sequence[int] | None = None) -> list[DraftHead]:
        """The projection of every head, its own or the target's, of the tokens that can be drafted.

        Args:
            ids: draft these alone, of those that the heads can; None: all of them.
        """
        own_U, vocabulary = ids_of(self), self.config.vocabulary
        if self.config.shared_head:
            layer, only = as_layer(target.weight_VH, target.bias_V), common(own_U, ids)
            head = DraftHead(layer, vocabulary, only=only, shaping=target.shaping, product=target.product)
            return [head] * self.config.heads
        only, own = None if ids is None else common(own_U, ids), cast("Sequence[nn.Linear]", self.lm_heads)
        return [
            DraftHead(each, vocabulary, own=own_U, only=only, product=Projection(each.weight, each.bias).product)
            for each in own
        ]


class MedusaHeads(Heads):
    """K heads over the state that the target's output projection reads.

    At position t that projection predicts token t+1; head k, counted from 1, predicts token t+k+1:

        logits_k = W2_k (h + SiLU(W1_k h + b_k)),  W1_k and b_k 0, W2_k the target's own at first

    (section 2.1.1 of the paper), so a new head predicts what the target predicts for the token before
    its own, but for a bias or a cap of the target (`scaled_weight`). With `shared_head` W2_k is the
    target's projection for good, with all that stands behind it, neither trained nor saved.
    """

    family = "medusa"

    def __init__(self, config: MedusaShape, ids: Sequence[int] | None = None) -> None:
        """Heads whose own projections hold nothing yet; `for_target` copies them.

        Args:
            ids: of the draft vocabulary, ascending; None where there is none, or weights are loaded, which hold them.
        """
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(self.block(k) for k in range(1, config.heads + 1))
        self.lm_heads = empty_heads(config)
        hold(self, config.draft_vocabulary, ids)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """Heads of a drafter folder's sizes, without its weights."""
        return cls(MedusaShape.from_settings(settings))

    @classmethod
    def for_target(
        cls,
        target: nn.Module,
        *,
        heads: int,
        layers: int = 1,
        shared_head: bool = False,
        ids: Sequence[int] | None = None,
    ) -> Self:
        """Untrained heads for a causal LM of `transformers`, fp32, which draft `ids`, or all tokens."""
        weight_VH = scaled_weight(target)
        V, H = weight_VH.shape
        made = cls(MedusaShape(heads, layers, H, V, shared_head, draft_vocabulary=count_of(ids)), ids)
        copy_projection(made.lm_heads, rows_at(weight_VH, ids))
        return made

    def block(self, _k: int) -> nn.Module:
        """What head k, counted from 1, computes before its projection."""
        return ResidualBlock(self.config.hidden, self.config.layers)

    def head(self, k: int, given_XF: Tensor) -> Tensor:
        """What the projection of head k, counted from 1, reads: [..., F] -> [..., H]."""
        return self.blocks[k - 1](given_XF)

    def forward(self, hidden_XH: Tensor) -> Tensor:
        """[..., H] -> what every head's projection reads, [..., K, H]."""
        return torch.stack([block(hidden_XH) for block in self.blocks], -2)


def empty_heads(config: Any) -> nn.ModuleList:
    """A projection for every head, its weights not set; none where the target's is shared."""
    count = 0 if config.shared_head else config.heads
    rows = config.draft_vocabulary or config.vocabulary
    device = torch.get_default_device()  # which `skip_init` does not look at
    return nn.ModuleList(
        # at once overwritten: to draw random weights first takes seconds for a large vocabulary
        nn.utils.skip_init(nn.Linear, config.hidden, rows, bias=getattr(config, "as_published", False), device=device)
        for _ in range(count)
    )


def copy_projection(lm_heads: nn.ModuleList, weight_VH: Tensor) -> None:
    """Start every head with the target's own projection, and no bias."""
    with torch.no_grad():
        for name, parameter in lm_heads.named_parameters():
            parameter.copy_(weight_VH if name.endswith("weight") else torch.zeros_like(parameter))


class HeadsOnTree(ABC):
    """The base of drafters with heads: a static tree from one hidden state of the target per row.

    The heads read the target's hidden state at the last committed position t: where the target's
    own projection made the root, token t+1, head k proposes the tokens of depth k. Candidates are
    the likeliest tokens, a point mass at every temperature.
    """

    replayable = True
    skips = False
    """Whether steps may be left to another drafter, by `skip`."""
    layers: Sequence[int] = (LAST,)

    def __init__(
        self,
        heads: Heads,
        target: Backbone,
        *,
        paths: Paths | None = None,
        nodes: int = 20,
        ids: Sequence[int] | None = None,
    ) -> None:
        """`paths`: the tree (`tree_of_paths`); by default `default_paths` of `nodes` nodes.

        `ids`: draft these tokens alone, of those that the heads can.

        Raises:
            RequestError: the tree is deeper than there are heads, or is no tree.
        """
        self.heads, self._target = heads, target
        self._drafting = heads.over(Projection.of(target.model), ids)
        vocabulary = self._drafting[0].draftable
        self._choices = static_tree(paths, heads=heads.config.heads, vocabulary=vocabulary, nodes=nodes)

    @property
    def module(self) -> Heads:
        """What is trained."""
        return self.heads

    @property
    def draft_length(self) -> int:
        """Depth of the tree."""
        return self._choices.tree.depth

    @property
    def choices(self) -> Choices:
        """The tree, and which rank each of its nodes takes."""
        return self._choices

    @property
    @abstractmethod
    def draft_steps(self) -> int:
        """Heads that run one after another per target call."""

    @property
    def weights_read(self) -> list[nn.Module]:
        """What a proposal reads: the heads, and once the target's projection if they share it."""
        if self.heads.config.shared_head:
            return [self.heads, self._drafting[0].layer]
        if self._drafting[0].rows_U is None:
            return [self.heads]
        parts = [each for name, each in self.heads.named_children() if name != "lm_heads"]
        return [*parts, *(head.layer for head in self._drafting)]

    @property
    def nodes(self) -> int:
        """Nodes of the tree, the root included."""
        return len(self._choices.tree)

    def reset(  # noqa: B027 - every family's, and there is nothing to do
        self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False
    ) -> None:
        """Nothing to prepare: all that is kept of a row is one hidden state, set by `begin`."""

    def begin(self, features: Sequence[Tensor]) -> None:
        """Start with what the target saw at the last token of every prompt."""
        self._hidden_BH = last_features(features)

    @abstractmethod
    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """The tree after `last_B`."""

    def skip(self, _last_B: Tensor) -> None:  # noqa: B027 - nothing to read but one hidden state, set by `observe`
        """In place of `propose`: read what is new up to `last_B`, and draft nothing."""

    def observe(self, committed: Committed) -> None:
        """Keep the hidden state at the last accepted node."""
        take_last_accepted(self._hidden_BH, committed)

    def teacher_forced(self, hidden_SH: Tensor, tokens_S: Tensor, depth: int) -> Iterator[Tensor]:
        """Logits of every head along a known text: `decoding.proposal.TeacherForced`."""
        for k in range(1, min(depth, self.heads.config.heads, len(tokens_S) - 2) + 1):
            read_XH = self.heads.head(k, self.given(k, hidden_SH, tokens_S))
            yield self._drafting[k - 1].logits(read_XH)

    def given(self, k: int, hidden_SH: Tensor, _tokens_S: Tensor) -> Tensor:
        """What head k reads at every position of a text that has a token k + 1 positions ahead."""
        return hidden_SH[: -(k + 1)].to(self.heads.dtype)


class Medusa(HeadsOnTree):
    """Fills the whole tree at once, every depth from its head's likeliest tokens."""

    family = "medusa"
    draft_steps = 1

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The tree after `last_B`, filled from every head's likeliest tokens."""
        ranks = max(self._choices.ranks) + 1
        topk_BDR = self.logits()[:, : self.draft_length].topk(ranks).indices
        tokens_BN = fill_choices(self._choices, last_B, topk_BDR)
        return Proposal(tokens_BN, self._choices.tree, DraftSampling.POINT_MASS)

    def logits(self) -> Tensor:
        """Logits of the tokens after the root, fp32 [B, K, V]."""
        hidden_BKH = self.heads(self._hidden_BH.to(self.heads.dtype))
        return self.heads.logits_by(self._drafting, hidden_BKH)


def last_features(features: Sequence[Tensor]) -> Tensor:
    """The state at the last token of every prompt, [B, F]."""
    return torch.stack([features_SF[-1] for features_SF in features])


def take_last_accepted(hidden_BF: Tensor, committed: Committed) -> None:
    """Write over `hidden_BF` the state at the last accepted node, the root's if there is none."""
    assert committed.features_BNF is not None  # asked for by `layers`
    # numbers grow along a path, and -1 follows it: the largest is its end
    end_B = committed.path_BD.amax(1).clamp_min(0)
    index_B1F = end_B[:, None, None].expand(-1, 1, hidden_BF.shape[1])
    hidden_BF.copy_(committed.features_BNF.gather(1, index_B1F)[:, 0])


def static_tree(paths: Paths | None, *, heads: int, vocabulary: int, nodes: int) -> Choices:
    """The tree of `paths`, or the default of `nodes` nodes, checked against what is to fill it.

    Raises:
        RequestError: too deep, a rank beyond the vocabulary, no candidate at all, or no tree.
    """
    if paths is None:
        paths = default_paths(heads, nodes, ranks=min(8, vocabulary))
    try:
        choices = tree_of_paths(paths)
    except ValueError as error:
        raise RequestError(f"the drafter's tree: {error}") from error
    depth, ranks = choices.tree.depth, max(choices.ranks) + 1
    if not 1 <= depth <= heads or ranks > vocabulary:
        raise RequestError(
            f"the drafter's tree has depth {depth} and takes {ranks} candidates; expected a depth "
            f"of 1 to {heads}, the number of heads, and at most {vocabulary} candidates"
        )
    return choices


@lru_cache(maxsize=64)
def default_paths(heads: int, nodes: int, *, ranks: int = 8) -> tuple[IndexPath, ...]:
    """The best tree of `nodes` nodes, the root included, for heads as good as published ones.

    Assumed: the likeliest token of head 1 is right 6 times in 10 and one of its five likeliest
    more than 8 times, as the Medusa authors report; each further rank is right 0.3 times as often,
    and each further depth 0.8 times. For a tree measured on your own heads take
    `acceptance_of` and `best_budget` of `decoding/tree/search.py`.
    """
    depth_D1, rank_R = np.arange(heads)[:, None], np.arange(ranks)
    return tuple(best_tree_greedy(0.6 * 0.8**depth_D1 * 0.3**rank_R, nodes))


def load_medusa(folder: str | Path, target: Backbone, **settings: Any) -> Medusa:
    """Load a Medusa drafter folder for `target`; `settings` are those of `HeadsOnTree`.

    Raises:
        RequestError: the folder is no Medusa drafter, or was made for another target; the message
            names the field that differs.
    """
    _, sizes = read_settings(folder, target, Medusa.family)
    heads = net_for(Path(folder), target, lambda: MedusaHeads.from_settings(sizes), "Medusa heads")
    if heads.config.shared_head:
        check_logits(target.model)
    return Medusa(heads, target, **settings)
