"""The loss of a block drafter: every draft of every block against the target's distribution there.

Many blocks speak of the same token, so the target's distributions are made once for every position and
looked up. What each draft of a block counts is a fixed decay or D-PACE's weight (`losses/pace.py`), and
the weights of a row add up to its labels: a row's loss is a weighted mean times the number of labels
that the loop divides by, whatever row, micro-batch or process stands beside it. (`block.weigh: blocks`
has one mean over a micro-batch in its place.) Read next: `anchors.py`, where blocks begin;
`drafters/block/net.py`, the network; `../eagle_common.py`, shared parts.

Shapes: R rows, S tokens of a row, A anchors of a row, K drafts of a block, P drafts that count, C
drafts of a chunk, H hidden size, F numbers of the fused states, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...decoding.on_host import on_host, places, sent
from ...drafters.block.net import BlockNet
from ...drafters.projection import Shaping
from ..eagle_common import in_text_order, reported, told_by_row
from ..loop.objective import Batch
from ..losses.candidates import likeliest
from ..losses.chunked import Added, ChunkedLoss, Kept, SharedTeacher
from ..losses.mix import Mix
from ..losses.pace import d_pace, geometric
from ..packed.passes import are_long
from ..sections import Sections
from .anchors import Anchors


class BlockTeacher(NamedTuple):
    """What the frozen target provides for a batch, in its own precision, and where blocks begin."""

    hidden_RSH: Tensor
    """The last hidden states, which its output projection reads."""
    fused_RSF: Tensor
    """Hidden states of several layers side by side."""
    roots_RAH: Tensor
    """Its embeddings of the anchors' tokens."""
    anchors: Anchors


@dataclass(frozen=True)
class BlockLoss:
    """The recipe's mix of terms at every draft, for `ChunkedLoss`.

    Reported: the terms of the mix, `ce`, the overlap `alpha`, sum_v min(p, q), and `agreement` of the argmax,
    of the first draft; `alpha_j` of the j-th.
    """

    mix: Mix
    drafts: int
    keeps_overlap: bool = False
    """Whether the overlap of every draft is a term."""

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | None, label_C2: Tensor) -> dict[str, Tensor]:
        """`label_C2`: label, and which draft of its block it is, from 0."""
        label_C, place_C = label_C2.unbind(-1)
        terms = self.mix(draft_CV, target_CV, label_C)
        assert target_CV is not None  # or the mix has refused
        loss_C, alpha_C = terms.pop("loss"), terms.pop("alpha")
        # an `argmax` takes eight times as long as an `amax` on a CPU
        best_C1 = draft_CV.argmax(-1, keepdim=True)
        agreement_C = (target_CV.gather(-1, best_C1)[:, 0] == target_CV.amax(-1)).float()
        first_C = place_C == 0
        alphas = {f"alpha_{j + 1}": alpha_C * (place_C == j) for j in range(1, self.drafts)}
        own = {name: term.detach() * first_C for name, term in terms.items()}
        kept = {"overlap": alpha_C} if self.keeps_overlap else {}
        return {
            "loss": loss_C,
            **own,
            "alpha": alpha_C * first_C,
            "agreement": agreement_C * first_C,
            **alphas,
            **kept,
        }


class Compared(NamedTuple):
    """The drafts that count, in the order of the text."""

    guess_PH: Tensor
    """What the projection reads."""
    label_P2: Tensor
    """Label, and which draft of its block it is, from 0."""
    at_P: Tensor
    """Number of the token in front, counted through rows."""
    share_P: Tensor
    """How much each counts in the loss."""
    told_P: Tensor
    """How much each counts in what is reported."""
    overlap_P: Tensor | None
    """Of a student that keeps it, the share of each draft's distribution that is accepted, without a gradient."""

    @property
    def told_first_P(self) -> Tensor:
        """The same of what is reported of first drafts alone."""
        return self.told_P * (self.label_P2[:, 1] == 0)


class BlockStudent(nn.Module):
    """The network over the blocks of a batch, and the loss of their drafts."""

    def __init__(self, draft: BlockNet, target: Any, recipe: Sections, *, keeps_overlap: bool = False) -> None:
        """`keeps_overlap`: `beside` is told how much of every draft's distribution is accepted."""
        super().__init__()
        self.draft, self._config, self._objective = draft, recipe.block, recipe.objective
        self._keeps_overlap = keeps_overlap
        loss = BlockLoss(Mix.of(recipe.objective), draft.config.most, keeps_overlap)
        # in a tuple it is no part of this module: the projection is the target's, and what wraps,
        # shards or saves this module must not touch it
        head, shaping = target.get_output_embeddings(), Shaping.of(target)
        self._frozen = (ChunkedLoss(head, loss, chunk=recipe.objective.chunk, shaping=shaping),)

    def forward(self, batch: Batch, teacher_output: BlockTeacher) -> tuple[Tensor, dict[str, Tensor]]:
        anchors, (head,) = teacher_output.anchors, self._frozen
        out_RAKH = self.draft.blocks(
            teacher_output.fused_RSF,
            batch["positions"],
            batch["documents"],
            teacher_output.roots_RAH,
            anchors.at_RA,
            masked=not are_long(batch["input_ids"].shape[1]),
            recompute=self._config.recompute,
        )
        place = places(on_host(anchors.known_RAK), out_RAKH.device)
        guess_PH, at_P, label_P2 = out_RAKH[place], *compared(batch, anchors)
        weight_RAK = self._weights(guess_PH, label_P2[:, 0], at_P, batch, anchors.known_RAK, place)
        labels_R = batch["loss_mask"].sum(1)
        if self._config.weigh == "blocks":  # one mean over all blocks, times as many labels as the loop divides by
            labels_R, weight_R = labels_R.sum()[None], weight_RAK.sum()[None]
        else:
            weight_R = weight_RAK.sum((1, 2))
        mean_R = labels_R / weight_R.clamp_min(torch.finfo(torch.float32).tiny)
        share_P = (weight_RAK * mean_R[:, None, None])[place]
        states_NH = teacher_output.hidden_RSH.flatten(0, 1)
        label_P2 = self._relabelled(label_P2, at_P, states_NH)
        at_P, guess_PH, label_P2, sorted_P = in_text_order(at_P, guess_PH, label_P2, share_P)
        assert sorted_P is not None
        told_P = told_by_row(at_P, label_P2[:, 1], batch)
        teacher = SharedTeacher.of(states_NH, head.projection, at_P) if len(at_P) else None
        keep = Kept("overlap", []) if self._keeps_overlap else None
        loss, terms = head(
            guess_PH, label_P2, teacher, sorted_P, added=self._behind(at_P, batch), keep=keep, told_P=told_P
        )
        terms.pop("overlap", None)
        # without drafts there are no parts
        overlap_P = None if keep is None else torch.cat([sorted_P[:0], *keep.parts])
        more, own = self.beside(Compared(guess_PH, label_P2, at_P, sorted_P, told_P, overlap_P), batch)
        loss, terms = loss + more, terms | own if terms else {}
        return loss, reported(loss, terms, told_P, label_P2[:, 1], self.draft.config.most)

    def _relabelled(self, label_P2: Tensor, at_P: Tensor, states_NH: Tensor) -> Tensor:
        """The labels, or the target's likeliest tokens in their places, where the recipe has it so."""
        (head,) = self._frozen
        if self._config.ce_label == "text" or not len(at_P):
            return label_P2
        seen_X, where_P = on_host(at_P).unique(return_inverse=True)  # many drafts speak of one token
        device = at_P.device
        with torch.no_grad():
            best_X = likeliest(states_NH[sent(seen_X, device)], head.projection, 1, head.chunk)[:, 0]
        return torch.stack([best_X[sent(where_P, device)], label_P2[:, 1]], 1)

    def beside(self, _compared: Compared, _batch: Batch) -> tuple[Tensor | float, dict[str, Tensor]]:
        """A loss beside the slots' own, summed over drafts, and sums that are reported: here none."""
        return 0.0, {}

    def _behind(self, at_P: Tensor, batch: Batch) -> Added | None:
        """What the text's token in front of each draft adds, which is where the target's state speaks of it."""
        parts = self.draft.behind(batch["input_ids"].flatten()[at_P])
        return None if parts is None else Added(*parts)

    def _weights(
        self,
        guess_PH: Tensor,
        label_P: Tensor,
        at_P: Tensor,
        batch: Batch,
        known_RAK: Tensor,
        place: tuple[Tensor, ...],
    ) -> Tensor:
        """How much every draft counts beside the others of its row, fp32 [R, A, K]; 0 where it has no label.

        Args:
            place: where `known_RAK` is true.
        """
        weight_RAK = known_RAK.float()
        if self._objective.positions == "d-pace":
            (head,) = self._frozen
            q_P, _ = head(guess_PH, label_P, added=self._behind(at_P, batch), only_label_q=True)
            q_RAK = torch.zeros_like(weight_RAK).index_put(place, q_P)
            weight_RAK = d_pace(q_RAK.flatten(0, 1), known_RAK.flatten(0, 1), self._objective.pace_floor)
            return weight_RAK.view_as(known_RAK)
        place_K = torch.arange(known_RAK.shape[-1], device=known_RAK.device)
        decay_K = geometric(place_K, self._config.decay)
        return weight_RAK if decay_K is None else weight_RAK * decay_K


def compared(batch: Batch, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Of every draft that has a label: the target's state that speaks of it, and the label.

    Returns:
        int64 [P], numbers of states counted through rows: the one in front of the label. And int64 [P, 2]:
        label, and which draft of its block it is, from 0.
    """
    ids_RS, label_RAK = on_host(batch["input_ids"]), on_host(anchors.label_RAK)
    place = on_host(anchors.known_RAK).nonzero(as_tuple=True)
    row_P, _, place_P = place
    label_P = label_RAK[place]
    at_P = row_P * ids_RS.shape[1] + label_P - 1
    label_P2 = torch.stack([ids_RS[row_P, label_P], place_P], 1)
    device = batch["input_ids"].device
    return sent(at_P, device), sent(label_P2, device)
