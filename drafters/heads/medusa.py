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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

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

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no heads can have."""
        check_sizes(heads=self.heads, layers=self.layers, hidden=self.hidden, vocabulary=self.vocabulary)
        check_parts(self.heads * self.layers, f"{self.heads} heads of {self.layers} layers")

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
        """fp32 logits [..., K, V] after `forward`, of the first K heads.

        `target` is the target's own projection, which is read where it is shared.
        """
        if self.config.shared_head:  # one product for all of them
            return target.logits(hidden_XKH)
        K = hidden_XKH.shape[-2]
        return torch.stack([head_logits(self, k, hidden_XKH[..., k, :], target) for k in range(K)], -2)


class MedusaHeads(Heads):
    """K heads over the state that the target's output projection reads.

    At position t that projection predicts token t+1; head k, counted from 1, predicts token t+k+1:

        logits_k = W2_k (h + SiLU(W1_k h + b_k)),  W1_k and b_k 0, W2_k the target's own at first

    (section 2.1.1 of the paper), so a new head predicts what the target predicts for the token before
    its own, but for a bias or a cap of the target (`scaled_weight`). With `shared_head` W2_k is the
    target's projection for good, with all that stands behind it, neither trained nor saved.
    """

    family = "medusa"

    def __init__(self, config: MedusaShape) -> None:
        """Heads whose own projections hold nothing yet; `for_target` copies them."""
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(self.block(k) for k in range(1, config.heads + 1))
        self.lm_heads = empty_heads(config)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """Heads of a drafter folder's sizes, without its weights."""
        return cls(MedusaShape.from_settings(settings))

    @classmethod
    def for_target(cls, target: nn.Module, *, heads: int, layers: int = 1, shared_head: bool = False) -> Self:
        """Untrained heads for a causal LM of `transformers`, fp32."""
        weight_VH = scaled_weight(target)
        V, H = weight_VH.shape
        made = cls(MedusaShape(heads, layers, H, V, shared_head))
        copy_projection(made.lm_heads, weight_VH)
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
    device = torch.get_default_device()  # which `skip_init` does not look at
    return nn.ModuleList(
        # at once overwritten: to draw random weights first takes seconds for a large vocabulary
        nn.utils.skip_init(nn.Linear, config.hidden, config.vocabulary, bias=False, device=device)
        for _ in range(count)
    )


def copy_projection(lm_heads: nn.ModuleList, weight_VH: Tensor) -> None:
    """Start every head with the target's own projection."""
    with torch.no_grad():
        for parameter in lm_heads.parameters():
            parameter.copy_(weight_VH)


def head_logits(module: Any, k: int, hidden_XH: Tensor, target: Projection) -> Tensor:
    """fp32 logits [..., V] of head k, counted from 0, by its own projection or the target's."""
    own = target if module.config.shared_head else Projection(module.lm_heads[k].weight)
    return own.logits(hidden_XH)


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

    def __init__(self, heads: Heads, target: Backbone, *, paths: Paths | None = None, nodes: int = 20) -> None:
        """`paths`: the tree (`tree_of_paths`); by default `default_paths` of `nodes` nodes.

        Raises:
            RequestError: the tree is deeper than there are heads, or is no tree.
        """
        self.heads, self._target = heads, target
        self._projection = Projection.of(target.model)
        self._choices = static_tree(paths, heads=heads.config.heads, vocabulary=heads.config.vocabulary, nodes=nodes)

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
        shared: Any = self._target.model
        return [self.heads, *([shared.get_output_embeddings()] * self.heads.config.shared_head)]

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
            yield head_logits(self.heads, k - 1, read_XH, self._projection)

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
        return self.heads.logits(hidden_BKH, self._projection)


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


def load_medusa(folder: str | Path, target: Backbone, *, paths: Paths | None = None, nodes: int = 20) -> Medusa:
    """Load a Medusa drafter folder for `target`; the tree is as for `Medusa`.

    Raises:
        RequestError: the folder is no Medusa drafter, or was made for another target; the message
            names the field that differs.
    """
    _, sizes = read_settings(folder, target, Medusa.family)
    heads = net_for(Path(folder), target, lambda: MedusaHeads.from_settings(sizes), "Medusa heads")
    if heads.config.shared_head:
        check_logits(target.model)
    return Medusa(heads, target, paths=paths, nodes=nodes)
