"""The loss of a block drafter: every draft of every block against the target's distribution there.

Many blocks speak of the same token, so the target's distributions are made once for every position and
looked up. What each draft of a block counts is a fixed decay or D-PACE's weight (`losses/pace.py`), and
the weights of a row add up to its labels: a row's loss is a weighted mean times the number of labels
that the loop divides by, whatever row, micro-batch or process stands beside it. (`block.weigh: blocks`
has one mean over a micro-batch in its place.) Read next: `anchors.py`, where blocks begin;
`drafters/block/net.py`, the network; `../student/compared.py`, how drafts are compared.

Shapes: R rows, S tokens of a row, A anchors of a row, K drafts of a block, P drafts that count, C
drafts of a chunk, H hidden size, F numbers of the fused states, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...decoding.on_host import on_host, places, sent
from ...drafters.block.net import BlockNet
from ...drafters.projection import Shaping
from ..loop.objective import Batch
from ..losses.candidates import likeliest
from ..losses.chunked import Added, ChunkedLoss
from ..losses.mix import Mix, OfTarget, drafted
from ..packed.passes import are_long
from ..recipe import TrainingRecipe
from ..student.compared import Drafts, Student
from ..student.drafted import Draw, Where
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

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | OfTarget | None, label_C2: Tensor) -> dict[str, Tensor]:
        """`label_C2`: label, and which draft of its block it is, from 0."""
        label_C, place_C = label_C2.unbind(-1)
        terms = self.mix(draft_CV, target_CV, label_C)
        assert target_CV is not None  # or the mix has refused
        loss_C, alpha_C = terms.pop("loss"), terms.pop("alpha")
        # an `argmax` takes eight times as long as an `amax` on a CPU
        best_C1 = draft_CV.argmax(-1, keepdim=True)
        if isinstance(target_CV, OfTarget):
            agreement_C = (target_CV.best_C == best_C1[:, 0]).float()
        else:
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


class BlockStudent(Student):
    """The network over the blocks of a batch, and the loss of their drafts."""

    compiles = False

    def __init__(self, draft: BlockNet, target: Any, recipe: TrainingRecipe, *, keeps_overlap: bool = False) -> None:
        """`keeps_overlap`: `auxiliary_loss` is told how much of every draft's distribution is accepted."""
        self._config = recipe.block
        mix = Mix.of(recipe.objective)
        loss = BlockLoss(mix, draft.config.most, keeps_overlap)
        head, shaping = target.get_output_embeddings(), Shaping.of(target)
        judge = ChunkedLoss(head, loss, chunk=recipe.objective.chunk, shaping=shaping, over=draft)
        super().__init__(draft, judge, recipe.objective, drafts=draft.config.most, decay=recipe.block.decay, mix=mix)
        self._keeps_overlap = keeps_overlap

    def forward(self, batch: Batch, teacher_output: BlockTeacher) -> tuple[Tensor, dict[str, Tensor]]:
        anchors = teacher_output.anchors
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
        return self.compare(Drafts(out_RAKH[place], *compared(batch, anchors)), batch, teacher_output)

    def weights(self, drafts: Drafts, batch: Batch, given: BlockTeacher) -> Tensor:
        """As in `Student`, the drafts of a row weighing as much together as it has labels; or all drafts together as
        much as the batch has (`block.weigh: blocks`). Weights by the accepted length keep their size: a row's blocks
        count alike, together as much as its labels."""
        known_RAK, own_P = given.anchors.known_RAK, super().weights(drafts, batch, given)
        place = places(on_host(known_RAK), known_RAK.device)
        weight_RAK = known_RAK.float()
        of_length = self._pace is not None and self._pace.by_target
        if own_P is not None and not of_length:
            weight_RAK = weight_RAK.index_put(place, own_P)
        counted_RAK = known_RAK.any(2, keepdim=True).float() if of_length else weight_RAK
        labels_R = batch["loss_mask"].sum(1)
        if self._config.weigh == "blocks":  # one mean over all blocks, times as many labels as the loop divides by
            labels_R, weight_R = labels_R.sum()[None], counted_RAK.sum()[None]
        else:
            weight_R = counted_RAK.sum((1, 2))
        mean_R = labels_R / weight_R.clamp_min(torch.finfo(torch.float32).tiny)
        mean_P = mean_R.expand(len(known_RAK))[place[0]]
        return mean_P if own_P is None else own_P * (mean_P if own_P.ndim == 1 else mean_P[:, None])

    def drafts_behind(self, batch: Batch, given: BlockTeacher, where: Where, draw: Draw, embed: Any) -> Tensor:
        """As of `DraftsBehind`: a block behind every root."""
        root_RA = (where.at_RA + 1).clamp_max(batch["input_ids"].shape[1] - 1)
        out_RAKH = self.draft.blocks(
            given.fused_RSF,
            batch["positions"],
            batch["documents"],
            embed(batch["input_ids"].gather(1, root_RA)),
            root_RA,
            recompute=self._config.recompute,
        )
        hidden_XKH = out_RAKH[where.row_X, where.number_X]
        for hidden_XH in hidden_XKH.unbind(1):
            draw(hidden_XH)
        return hidden_XKH

    def draft_logits(self, hidden_CH: Tensor, before_C: Tensor, j: int) -> Tensor:
        """As of `DraftsBehind`: with what the token in front adds."""
        parts, projection = self.draft.behind(before_C), self.judge.projection
        if parts is None:
            return super().draft_logits(hidden_CH, before_C, j)
        added_CU = Added(*parts).part(slice(None), hidden_CH.dtype)
        return projection.shaping(projection.product(hidden_CH).float() + added_CU)

    @property
    def first_weight(self) -> float:
        """What the first draft of a text's block counts: all drafts of a row count as many as it has labels."""
        if self._pace is not None and self._pace.by_target:
            return 1.0
        return 1 / sum(self._decay**j for j in range(self._drafts))

    def labels(self, drafts: Drafts, given: BlockTeacher) -> Tensor:
        """The labels, or the target's likeliest tokens in their places, where the recipe has it so."""
        if self._config.ce_label == "text" or not len(drafts.at_P):
            return drafts.label_P2
        seen_X, where_P = on_host(drafts.at_P).unique(return_inverse=True)  # many drafts speak of one token
        device = drafts.at_P.device
        seen_XH = given.hidden_RSH.flatten(0, 1)[sent(seen_X, device)]
        with torch.no_grad():
            best_X = likeliest(seen_XH, self.judge.whole, 1, self.judge.chunk)[:, 0]
            if self.ids_U is not None:
                best_X = drafted(best_X, self.ids_U)
        return torch.stack([best_X[sent(where_P, device)], drafts.label_P2[:, 1]], 1)

    def prefix_logits(self, drafts: Drafts, batch: Batch) -> Added | None:
        """What the text's token in front of each draft adds, which is where the target's state speaks of it."""
        parts = self.draft.behind(batch["input_ids"].flatten()[drafts.at_P])
        return None if parts is None else Added(*parts)

    @property
    def keeps_overlap(self) -> bool:
        return self._keeps_overlap


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
