"""A draft vocabulary: the tokens of a target that a drafter can draft, and the projection that is cut to them.

With 50,000 tokens and more the product that makes a draft's logits takes most of a small drafter's time, and nearly
all that is drafted is among a few thousand (EAGLE-3, Li et al. 2025; FR-Spec, Zhao et al. 2025, arXiv 2502.14856). So
a drafter may be trained over those alone, or have the rows of its projection cut when it decodes. What it declares is
zero elsewhere, and what it draws is drawn from what it declares: other tokens come from the target, and no output
changes.

A network keeps its map as `d2t`, an offset per token (`hold`); `ids_of` reads it, for every family alike. `DraftHead`
is the projection that drafts: it multiplies the rows of those tokens and lays their logits out over the target's, so
that chains, trees and walks know nothing of it. Read next: `../projection.py`, the projection itself;
`trainers/losses/draft_vocabulary.py`, what is learnt over fewer tokens.

Shapes: U tokens of the draft vocabulary, V of the target's, H hidden size, B rows, X any number of leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...decoding.backbone.stacked import SharedInputLinears, is_bare
from ...decoding.sampling import Warper, draw
from ...errors import RequestError
from ..projection import PLAIN, Shaping
from ..sizes import check_sizes

OFFSETS = "d2t"
"""Of a network's state: by how much the id of each of its tokens is larger than its index."""


def check_size(draft_vocabulary: Any, vocabulary: int | None = None) -> None:
    """Raise ValueError for a size of a draft vocabulary that no network can have; None is none."""
    if draft_vocabulary is None:
        return
    check_sizes(draft_vocabulary=draft_vocabulary)
    if vocabulary is not None and draft_vocabulary > vocabulary:
        raise ValueError(
            f"draft_vocabulary {draft_vocabulary} of vocabulary {vocabulary}; expected at most as many tokens"
        )


def hold(net: nn.Module, size: int | None, ids: Sequence[int] | None = None, *, saved: bool = True) -> None:
    """Let a network draft `size` tokens alone, `ids`; None: all of the target's.

    Args:
        size: how many; weights that are loaded bring the ids with them.
        ids: ascending target ids.
        saved: whether they are part of the network's weights.
    """
    if size is None:
        return
    ids_U = torch.arange(size) if ids is None else torch.tensor(list(ids))
    # an offset, not the id itself: that is what serving engines add
    net.register_buffer(OFFSETS, ids_U - torch.arange(size), persistent=saved)


def count_of(ids: Sequence[int] | None) -> int | None:
    """The size of a draft vocabulary; None where all tokens are drafted."""
    return None if ids is None else len(ids)


def ids_of(net: Any) -> Tensor | None:
    """Target ids of the tokens that a network can draft, int64 [U]; None: all."""
    offsets_U = getattr(net, OFFSETS, None)
    return None if offsets_U is None else offsets_U + torch.arange(len(offsets_U), device=offsets_U.device)


def rows_at(weight_VH: Tensor, ids: Sequence[int] | None) -> Tensor:
    """The rows of a projection that a network of these ids begins with; all where it has none."""
    return weight_VH if ids is None else weight_VH[torch.tensor(list(ids), device=weight_VH.device)]


def is_choice(ids_U: Tensor, vocabulary: int) -> bool:
    """Whether these are ids of a vocabulary, each once."""
    inside = bool(((ids_U >= 0) & (ids_U < vocabulary)).all())
    return inside and len(ids_U.unique()) == len(ids_U)


def common(first: Tensor | None, second: Sequence[int] | None) -> Sequence[int] | None:
    """The ids that both have, ascending; None is all of them.

    Raises:
        RequestError: there is none.
    """
    if first is None or second is None:
        return second if first is None else first.tolist()
    ids = sorted(set(first.tolist()) & set(second))
    if not ids:
        raise RequestError(
            f"drafter.draft_vocabulary names {len(second):,} tokens, none of which is among the {len(first):,} that "
            "the drafter was trained to draft; name some of these, or leave it out"
        )
    return ids


def laid_out(logits_XU: Tensor, ids_U: Tensor, vocabulary: int) -> Tensor:
    """Logits of some tokens among the target's, [..., V]: -inf of all others."""
    wide_XV = logits_XU.new_full((*logits_XU.shape[:-1], vocabulary), -torch.inf)
    return wide_XV.index_copy(-1, ids_U, logits_XU)


def cut_rows(layer: nn.Linear, rows_U: Tensor) -> nn.Linear:
    """A frozen projection of some rows of another one, where and as precise as that is."""
    rows_U, bias_V = rows_U.to(layer.weight.device), layer.bias
    return as_layer(layer.weight[rows_U], None if bias_V is None else bias_V[rows_U])


def as_layer(weight_VH: Tensor, bias_V: Tensor | None = None) -> nn.Linear:
    """A frozen layer of these very weights."""
    made = nn.Linear(weight_VH.shape[1], len(weight_VH), bias=bias_V is not None, device="meta")
    made.weight = nn.Parameter(weight_VH.detach(), requires_grad=False)
    if bias_V is not None:
        made.bias = nn.Parameter(bias_V.detach(), requires_grad=False)
    return made


def restrict(model: Any, ids: Sequence[int] | None) -> None:
    """Let a causal LM that drafts draft `ids` alone, ascending; its projection keeps their rows. None: all.

    A projection that is more than a matrix, as with an adapter, keeps all rows, of which the others are not drafted.
    """
    if ids is None:
        return
    head = model.get_output_embeddings()
    hold(model, len(ids), ids, saved=False)
    model.d2t = model.d2t.to(head.weight.device)
    if is_bare(head):
        model.set_output_embeddings(cut_rows(head, torch.tensor(list(ids))))


def among_all(logits: Tensor, ids_U: Tensor, vocabulary: int) -> Tensor:
    """`laid_out` of a model's logits; of those of all its rows, as a model in training has them, the drafted ones."""
    own = logits if logits.shape[-1] == len(ids_U) else logits.index_select(-1, ids_U)
    return laid_out(own, ids_U, vocabulary)


class DraftHead:
    """The projection that a drafter drafts by."""

    def __init__(
        self,
        layer: nn.Linear,
        vocabulary: int,
        *,
        own: Tensor | None = None,
        only: Sequence[int] | None = None,
        shaping: Shaping = PLAIN,
        product: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """The head of some projection.

        Args:
            layer: the projection.
            vocabulary: V.
            own: target ids of its rows, each once; None: those of row i is i.
            only: which of these may be drafted, ascending; None: all. The others' rows are left out.
            shaping: what becomes of the product before it is a logit.
            product: makes it where no row is left out, in place of the layer.
        """
        self.vocabulary, self.shaping = vocabulary, shaping
        self.ids_U = own
        self.rows_U: Tensor | None = None
        """The rows that are left of the projection; None: all."""
        self.layer, self._product = layer, product
        if only is not None and (own is None or list(only) != own.tolist()):
            self.ids_U = torch.tensor(list(only), device=layer.weight.device)
            self.rows_U = self.ids_U if own is None else places_in(own, self.ids_U)
            self.layer, self._product = cut_rows(layer, self.rows_U), None
        self._rows = SharedInputLinears(nn.ModuleDict({"rows": self.layer}), "rows")
        # then the first of equals is the lowest id; in folders of others they may be in any order
        self._ascending = self.ids_U is None or bool((self.ids_U.diff() > 0).all())

    @property
    def draftable(self) -> int:
        """How many different tokens can be drafted."""
        return self.vocabulary if self.ids_U is None else len(self.ids_U)

    def product(self, hidden: Tensor) -> Tensor:
        """The product of states [..., H] and the rows, fp32 [..., U], before what stands behind it."""
        return self._made(hidden).float()

    def _made(self, hidden: Tensor) -> Tensor:
        """The product in the precision that it is made in."""
        if self._product is not None:
            return self._product(hidden)
        (made,) = self._rows(hidden.to(self.layer.weight.dtype))
        return made

    def laid_out(self, logits_XU: Tensor) -> Tensor:
        """Logits of the drafted tokens as those of all, [..., V]: -inf of what is never drafted."""
        return logits_XU if self.ids_U is None else laid_out(logits_XU, self.ids_U, self.vocabulary)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., V] of states."""
        return self.laid_out(self.shaping(self.product(hidden)))

    def likeliest(self, hidden: Tensor) -> Tensor:
        """The token [...] of the largest logit, the lowest id among equals; nothing is laid out for it."""
        if self.ids_U is None or not self._ascending:
            return self.logits(hidden).argmax(-1)
        # rounding to fp32 would change no order, and is a launch
        logits_XU = self._made(hidden) if self.shaping == PLAIN else self.shaping(self.product(hidden))
        return self.ids_U[logits_XU.argmax(-1)]

    def drawn(self, hidden_BH: Tensor, warper: Warper, random_B: Tensor) -> tuple[Tensor, Tensor]:
        """The distribution [B, V] of the next token, and a token [B] drawn from it.

        On a GPU, where one block of threads reads a row, among the tokens that can be drafted alone.
        """
        if self.ids_U is None or not (self._ascending and hidden_BH.is_cuda):
            q_BV = warper(self.logits(hidden_BH))
            return q_BV, draw(q_BV, random_B)
        q_BU = warper(self.shaping(self.product(hidden_BH)))
        q_BV = q_BU.new_zeros(len(q_BU), self.vocabulary).index_copy_(1, self.ids_U, q_BU)
        return q_BV, self.ids_U[draw(q_BU, random_B)]


def places_in(ids_U: Tensor, some: Tensor) -> Tensor:
    """The index in `ids_U`, in whatever order these are, of every one of `some`, which are among them."""
    order_U = ids_U.argsort()
    return order_U[torch.searchsorted(ids_U[order_U], some.to(ids_U.device))]


def head_of_target(target: Any, only: Sequence[int] | None) -> DraftHead:
    """The head of a drafter that drafts by the projection of its target, a `Backbone`."""
    layer = cast(nn.Linear, target.model.get_output_embeddings())
    return DraftHead(layer, target.vocabulary, only=only, shaping=Shaping.of(target.model), product=target.project)
