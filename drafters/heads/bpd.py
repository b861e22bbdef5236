"""Blockwise parallel decoding: k outputs of one feed-forward layer read one projection.

Stern et al. 2018, arXiv 1811.03115. Output 1 is the target itself, the others predict the tokens
after its next one. The call that verifies a block also shows the state from which the following
block is predicted, so that m tokens take m/k + 1 calls when every block is right. The layer that
`trainers/bpd.py` trains is the very layer that drafts here. Read next: `medusa.py`, of which this
is the proposer with another module and a chain for its tree.

Shapes: K outputs that are trained (k - 1), H hidden size, F units of the inner layer, V
vocabulary, X any number of leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ..folder import read_settings
from ..layers.draft_vocabulary import check_size, count_of, hold
from ..projection import Projection, check_logits
from ..sizes import check_sizes
from ..weights import net_for
from .medusa import Heads, Medusa, Paths, empty_heads


@dataclass(frozen=True)
class BpdShape:
    """Sizes of the layer: what `config.json` of a drafter folder holds as its settings."""

    block: int
    """k: tokens of a block, the target's own next one included."""
    inner: int
    """Units of the inner layer per output; it has k times as many."""
    hidden: int
    vocabulary: int
    draft_vocabulary: int | None = None
    """Tokens that can be drafted; None: all of the target's."""
    shared_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no layer can have."""
        check_sizes(block=self.block, inner=self.inner, hidden=self.hidden, vocabulary=self.vocabulary)
        check_size(self.draft_vocabulary, self.vocabulary)
        if self.block < 2:
            raise ValueError(f"block is {self.block}; expected 2 or more, the target's own token among them")

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """The sizes that a drafter folder's `config.json` holds."""
        return cls(**settings)

    @property
    def heads(self) -> int:
        """Outputs that are trained: all but the first."""
        return self.block - 1


class Outputs(nn.Linear):
    """The layer's second half, of which one output can be computed by itself.

    All outputs are rows of one matrix: whichever is trained, every process of a run that splits
    its batch has a gradient for the same parameters.
    """

    def __init__(self, units: int, outputs: int, hidden: int) -> None:
        super().__init__(units, outputs * hidden)
        self.hidden = hidden
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inner_XF: Tensor, output: int | None = None) -> Tensor:
        """[..., outputs, H], or [..., H] of one output, counted from 0."""
        if output is None:
            return super().forward(inner_XF).unflatten(-1, (-1, self.hidden))
        rows = slice(output * self.hidden, (output + 1) * self.hidden)
        return F.linear(inner_XF, self.weight[rows], self.bias[rows])


class BpdHeads(Heads):
    """The k-output layer over the state that the target's output projection reads.

        s_1 = h,   s_i = h + W2_i relu(W1 h + b1) + b2_i  for i = 2..k,   logits_i = P s_i

    (section 6 of the paper), W1 of k times `inner` rows, P the target's projection, no part of this
    module. Output i at position t predicts token t+i. The paper adds a term to output 1 too; without
    it the target stays a model of its own class, and its distribution the one that is decoded. W2 is
    0 at first: an untrained output predicts what the target predicts for token t+1.
    Outputs are counted as Medusa's heads are, head k = 1 being output 2, and head 0 the target.
    """

    family = "bpd"

    def __init__(self, config: BpdShape, ids: Sequence[int] | None = None) -> None:
        """`ids`: of the draft vocabulary, as of `MedusaHeads`."""
        super().__init__()
        self.config = config
        units = config.block * config.inner
        self.first = nn.Linear(config.hidden, units)
        self.second = Outputs(units, config.heads, config.hidden)
        self.lm_heads = empty_heads(config)
        hold(self, config.draft_vocabulary, ids)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """A layer of a drafter folder's sizes, without its weights."""
        return cls(BpdShape.from_settings(settings))

    @classmethod
    def for_target(
        cls, target: nn.Module, *, block: int, inner: int | None = None, ids: Sequence[int] | None = None
    ) -> Self:
        """Untrained outputs for a causal LM of `transformers`, fp32; by default `inner` is its hidden size."""
        V, H = Projection.of(target).weight_VH.shape
        return cls(BpdShape(block, inner or H, H, V, count_of(ids)), ids)

    def forward(self, hidden_XH: Tensor) -> Tensor:
        """[..., H] -> what the projection reads for every output but the first, [..., K, H]."""
        return hidden_XH[..., None, :] + self.second(F.relu(self.first(hidden_XH)))

    def head(self, k: int, given_XF: Tensor) -> Tensor:
        """What the projection reads for head k alone; head 0 is the target's own. [..., H]."""
        if k == 0:
            return given_XF
        return given_XF + self.second(F.relu(self.first(given_XF)), k - 1)


class Bpd(Medusa):
    """Drafts the block after the target's own token: one chain, or a static tree if one is given.

    Tokens are the likeliest ones, a point mass at every temperature.
    """

    family = "bpd"

    def __init__(
        self, heads: Heads, target: Backbone, *, paths: Paths | None = None, ids: Sequence[int] | None = None
    ) -> None:
        """`paths`: a tree (`tree_of_paths`), default: the chain of the likeliest k - 1 tokens; `ids`: as of `Medusa`.

        Raises:
            RequestError: the tree is deeper than there are outputs, or is no tree.
        """
        if paths is None:
            paths = block_chain(heads.config.heads)
        super().__init__(heads, target, paths=paths, ids=ids)


def block_chain(heads: int) -> Paths:
    """The chain of every head's likeliest token, as index paths."""
    return [[0] * depth for depth in range(1, heads + 1)]


def load_bpd(folder: str | Path, target: Backbone, **settings: Any) -> Bpd:
    """Load a BPD drafter folder for `target`; `settings` are those of `Bpd`.

    Raises:
        RequestError: the folder is no BPD drafter, or was made for another target; the message
            names the field that differs.
    """
    _, sizes = read_settings(folder, target, Bpd.family)
    heads = net_for(Path(folder), target, lambda: BpdHeads.from_settings(sizes), "a BPD layer")
    check_logits(target.model)
    return Bpd(heads, target, **settings)
