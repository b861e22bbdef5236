"""The loss of a drafter: its drafts compared with the target's distributions, weighed and reported.

A method says which drafts there are (`forward` of its `Student`); the order of the text, what each draft counts, the
teacher, the loss of each, the auxiliary loss and the report are the same for all. Read next: `../losses/pace.py`,
what each draft counts; `../losses/chunked.py`, the loss of a chunk; `../eagle3.py` and `../block/student.py`, which
have drafts.

Shapes: R rows, S tokens of a row, L of them in this process's part, P drafts that count, J drafts behind one place,
N states of the target, H hidden size, U tokens of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...decoding.on_host import on_host, sent
from ...drafters.layers.draft_vocabulary import ids_of
from ...drafters.layers.row_split import WHOLE, RowSplit
from ..config import ObjectiveConfig
from ..labels import has_label, label_places
from ..loop.objective import Batch
from ..loop.sums import COMPARED, COUNT
from ..losses.chunked import Added, ChunkedLoss, PositionTerm, SharedTeacher, Teacher
from ..losses.mix import Mix, OfTarget, drafted
from ..losses.pace import DraftPace, geometric, joined
from .drafted import Drafted, DraftsBehind, Draw, Where


class Drafts(NamedTuple):
    """The drafts of a batch that count, and what each is compared with."""

    hidden_PH: Tensor
    """What the output projection reads."""
    at_P: Tensor
    """int64: the number of the target's state that speaks of it, the one in front of its label, counted through the
    states that are held of rows."""
    label_P2: Tensor
    """int64: its label, and which draft it is of those behind one place, from 0."""
    share_P: Tensor | None = None
    """How much it counts in the loss; None: all alike. [P, 2]: as `ChunkedLoss` takes it."""
    report_weight_P: Tensor | None = None
    """How much it counts in what is reported (`report_weights`)."""
    overlap_P: Tensor | None = None
    """Of a student that asks for it, the share of its distribution that is accepted, without a gradient."""

    @property
    def counted_P(self) -> Tensor | None:
        """How much each draft's own terms count, fp32 [P]; None: all alike."""
        return self.share_P if self.share_P is None or self.share_P.ndim == 1 else self.share_P[:, 0]

    @property
    def first_weight_P(self) -> Tensor:
        """How much it counts in what is reported of first drafts alone."""
        assert self.report_weight_P is not None  # `Student.compare` has made it
        return self.report_weight_P * (self.label_P2[:, 1] == 0)


class Student(DraftsBehind):
    """A drafter and its loss: `forward` says which drafts there are, `compare` what follows from them.

    What may differ between methods are hooks: `weights`, `teacher`, `labels`, `prefix_logits`, `auxiliary_loss`; and
    those of `DraftsBehind`, of which the drafts of a network over pairs are here.
    """

    def __init__(
        self,
        draft: Any,
        head: ChunkedLoss,
        objective: ObjectiveConfig,
        *,
        drafts: int,
        decay: float = 1.0,
        sums_to_one: bool = False,
        frozen: bool = True,
        mix: Mix | None = None,
    ) -> None:
        """How drafts are made, compared and weighed.

        Args:
            draft: the drafter's network.
            head: its output projection with the loss of a chunk of drafts.
            drafts: J, the most behind one place of the text.
            decay, sums_to_one: see `losses/pace.py`, `geometric`.
            frozen: the projection is the target's, not the drafter's.
            mix: the recipe's terms, for a drafter with a draft vocabulary.
        """
        super().__init__()
        self.draft, self._mix = draft, mix
        self._drafts = self.drafts_made = drafts
        self.split = WHOLE
        """The part of every row that is learnt from here; what is held of the target goes on behind it by a halo."""
        self._decay, self._sums_to_one = decay, sums_to_one
        self._pace = DraftPace.of(objective)
        if frozen:
            # in a tuple it is no part of this module: the projection is the target's, and what wraps,
            # shards or saves this module must not touch it
            self._frozen = (head,)
        else:
            self.head = head

    def frozen_parts(self) -> Iterable[nn.Module]:
        """The frozen head."""
        return getattr(self, "_frozen", ())

    @property
    def judge(self) -> ChunkedLoss:
        """The projection and the loss."""
        return self._frozen[0] if hasattr(self, "_frozen") else self.head

    def own(self, held_RNH: Tensor, batch: Batch) -> Tensor:
        """Of what is held of rows, the positions of this process's part, [R, L, H]."""
        own = self.split.own(batch["input_ids"].shape[1])
        return held_RNH[:, : own.stop - own.start]

    def unrolled(
        self, hidden_RLH: Tensor, embeds_RSH: Tensor, batch: Batch, *, detach: bool = False, recompute: bool = False
    ) -> Drafts:
        """The drafts of a network over pairs that is applied to its own outputs (`PairNet.unroll`)."""
        outputs = self._passes(hidden_RLH, embeds_RSH, batch, detach=detach, recompute=recompute)
        return compared(outputs, batch, self.split)

    def _passes(self, hidden_RLH: Tensor, embeds_RSH: Tensor, batch: Batch, **how: Any) -> list[Tensor]:
        """The outputs of every pass of such a network; `how`: as of `PairNet.unroll`."""
        where = (batch["positions"], batch["documents"])
        outputs: list[Tensor] = self.draft.unroll(
            hidden_RLH, embeds_RSH, *where, self._drafts, split=self.split, **how
        )
        return outputs

    def compare(self, drafts: Drafts, batch: Batch, given: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over labels, and the sums that are reported.

        Args:
            given: the teacher output, with the target's last states `hidden_RSH`.
        """
        drafts = drafts._replace(label_P2=self._in_draft_vocabulary(drafts.label_P2))
        drafts = in_text_order(drafts._replace(share_P=self.weights(drafts, batch, given)))
        label_P2 = self.labels(drafts, given)
        weight_P = report_weights(drafts.at_P, label_P2[:, 1], batch, self._drafts, self.split)
        loss, terms = self._summed(drafts._replace(label_P2=label_P2, report_weight_P=weight_P), batch, given)
        return loss, reported(loss, terms, weight_P, label_P2[:, 1], self._drafts)

    def _summed(self, drafts: Drafts, batch: Batch, given: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of drafts in the order of their states, and the sums of its terms."""
        at_P, weight_P = drafts.at_P, drafts.report_weight_P
        assert weight_P is not None  # the caller has made it
        keep = PositionTerm("overlap", []) if self.keeps_overlap else None
        loss, terms = self.judge(
            drafts.hidden_PH,
            drafts.label_P2,
            self.teacher(given, at_P) if len(at_P) else None,
            drafts.share_P,
            added=self.prefix_logits(drafts, batch),
            keep=keep,
            report_weight_P=weight_P,
        )
        terms.pop("overlap", None)
        # without drafts there are no parts
        overlap_P = None if keep is None else torch.cat([weight_P[:0], *keep.parts])
        if (more := self.auxiliary_loss(drafts._replace(overlap_P=overlap_P), batch, given)) is not None:
            loss, terms = loss + more[0], terms | more[1] if terms else {}
        return loss, terms

    # ---- along its own drafts -------------------------------------------------------------

    @property
    def first_weight(self) -> float:
        """What the first draft behind a place of a text counts in the loss."""
        if self._pace is not None and self._pace.by_target:
            return 1.0
        first = geometric(0.0, self._decay, sum_of=self._drafts if self._sums_to_one else 0)
        return 1.0 if first is None else first

    def draft_logits(self, hidden_CH: Tensor, _before_C: Tensor, _j: int) -> Tensor:
        """As of `DraftsBehind`: of the output alone."""
        return self.judge.projection.logits(hidden_CH)

    def unrolled_behind(
        self,
        hidden_RSH: Tensor,
        embeds_RSH: Tensor,
        batch: Batch,
        places: Where,
        draw: Draw,
        embed: Any,
        *,
        detach: bool = False,
        recompute: bool = False,
    ) -> list[Tensor]:
        """The outputs [X, H] of a network over pairs that is applied to its own outputs and to the tokens that it
        drafts, of every pass."""
        at, found = (places.row_X, places.at_X), []

        def next_embeds(out_RSH: Tensor) -> Tensor:
            found.append(out_RSH[at])
            embeds_XH = embed(draw(self.projected(found[-1])))
            return torch.zeros_like(embeds_RSH).index_put(at, embeds_XH.to(embeds_RSH.dtype))

        how: dict[str, Any] = {"detach": detach, "recompute": recompute, "own": next_embeds}
        next_embeds(self._passes(hidden_RSH, embeds_RSH, batch, **how)[-1])
        return found

    def projected(self, hidden_XH: Tensor) -> Tensor:
        """What the projection reads of an output."""
        return hidden_XH

    def loss_along(self, found: Tensor, made: Drafted, given: Any) -> Tensor:
        """As of `DraftsBehind`: what rows of a root and its drafts give, whose states the target has read."""
        T = made.token_XT.shape[1]
        known = made.known_XJ.nonzero(as_tuple=True)
        x_P, j_P = known
        label_P2 = self._in_draft_vocabulary(torch.stack((made.label_XJ[known], j_P), 1))
        kept_P = made.kept_XJ[known]  # of terms that nobody reports
        drafts = Drafts(found[known], x_P * T + j_P, label_P2, made.share_XJ[known], kept_P)
        read = given._replace(hidden_RSH=made.states_XTH)
        return self._summed(drafts, {"input_ids": made.token_XT}, read)[0]

    @property
    def ids_U(self) -> Tensor | None:
        """The tokens that can be drafted; None: all."""
        return ids_of(self.draft)

    def _in_draft_vocabulary(self, label_P2: Tensor) -> Tensor:
        """Labels as indices in the draft vocabulary, where there is one; UNKNOWN of what cannot be drafted."""
        ids_U = self.ids_U
        if ids_U is None:
            return label_P2
        label_P, draft_P = label_P2.unbind(-1)
        return torch.stack([drafted(label_P, ids_U), draft_P], 1)

    @property
    def cut(self) -> Callable[[Tensor], Any] | None:
        """What a loss over the draft vocabulary needs of the target's logits; None where there is none."""
        ids_U = self.ids_U
        if ids_U is None:
            return None
        assert self._mix is not None  # of every method that trains over one
        return partial(OfTarget.of, ids_U=ids_U, mix=self._mix)

    @property
    def keeps_overlap(self) -> bool:
        """Whether `auxiliary_loss` is told how much of every draft's distribution is accepted, a term of the loss."""
        return False

    def weights(self, drafts: Drafts, batch: Batch, given: Any) -> Tensor | None:
        """How much every draft counts beside the others, fp32 [P]; None where all count alike.

        A pace asks first how likely each is accepted, a chunk of logits at a time.
        """
        draft_P = drafts.label_P2[:, 1]
        if self._pace is None:
            return geometric(draft_P, self._decay, sum_of=self._drafts if self._sums_to_one else 0)
        passed_P = self._passed(drafts, batch, given if self._pace.by_target else None)
        # drafts behind one place are those whose states lie one behind another
        anchors, R = drafts.at_P - draft_P, len(batch["input_ids"])
        held = self.split.held(batch["input_ids"].shape[1], self._drafts)
        return self._pace(passed_P, anchors, draft_P, (R * (held.stop - held.start), self._drafts))

    def _passed(self, drafts: Drafts, batch: Batch, given: Any) -> Tensor:
        """What the pace asks of every draft; by the text's token alone, without `given`."""
        label_P, added = drafts.label_P2[:, 0], self.prefix_logits(drafts, batch)
        assert self._pace is not None  # which asks
        if given is None or not len(label_P):
            return self.judge(drafts.hidden_PH, label_P, added=added, only=self._pace.asks)[0]
        # the teacher takes positions in their order
        order_P = sent(on_host(drafts.at_P).argsort(stable=True), label_P.device)
        added = None if added is None else added._replace(given_PR=added.given_PR[order_P])
        teacher = self.teacher(given, drafts.at_P[order_P])
        states_PH, asks = drafts.hidden_PH[order_P], self._pace.asks
        passed_P, _ = self.judge(states_PH, label_P[order_P], teacher, added=added, only=asks)
        return torch.empty_like(passed_P).index_copy_(0, order_P, passed_P)

    def teacher(self, given: Any, at_P: Tensor) -> Teacher:
        """The target's distributions at its states `at_P`, ascending, each asked for once."""
        return SharedTeacher.of(given.hidden_RSH.flatten(0, 1), self.judge.whole, at_P, cut=self.cut)

    def labels(self, drafts: Drafts, _given: Any) -> Tensor:
        """The labels that the loss is given, and which draft each is: those of the text."""
        return drafts.label_P2

    def prefix_logits(self, _drafts: Drafts, _batch: Batch) -> Added | None:
        """What the text's token in front of each draft adds to its logits."""
        return None

    def auxiliary_loss(
        self, _drafts: Drafts, _batch: Batch, _given: Any
    ) -> tuple[Tensor | float, dict[str, Tensor]] | None:
        """A loss beside that of the distributions, summed over drafts, and sums that are reported."""
        return None


def compared(outputs: Sequence[Tensor], batch: Batch, split: RowSplit = WHOLE) -> Drafts:
    """Pair the outputs of `PairNet.unroll` with the target's states that they stand for.

    Pass j at t has seen x_{t+1+j}: it stands for the target's state there, and counts where the
    token behind is a label. All passes go through the head together, for one gradient of it.

    Args:
        outputs: [R, L, H] each.
        batch: of whole rows.
        split: the part that the outputs are of; the target's states are held for it and for as many
            positions behind it as there are passes.
    """
    hidden, at, label = [], [], []
    device = batch["input_ids"].device
    S = batch["input_ids"].shape[1]
    own, held = split.own(S), split.held(S, len(outputs))
    for j, out_RLH in enumerate(outputs):
        place = label_places(batch, 2 + j, own)
        hidden.append(out_RLH[place])
        at.append(joined((on_host(place[0]), on_host(place[1])), held.stop - held.start) + 1 + j)
        label_P = batch["input_ids"][:, 2 + j :][:, own][place]
        label.append(torch.stack([label_P, torch.full_like(label_P, j)], 1))
    return Drafts(torch.cat(hidden), sent(torch.cat(at), device), torch.cat(label))


def in_text_order(drafts: Drafts) -> Drafts:
    """The same sorted by the target's state: drafts of one position come together."""
    known_P = on_host(drafts.at_P)  # what the teacher groups by is asked of the host
    order = known_P.argsort(stable=True)
    at_P, order_P = sent(known_P[order], drafts.at_P.device), sent(order, drafts.at_P.device)
    share_P = None if drafts.share_P is None else drafts.share_P[order_P]
    return Drafts(drafts.hidden_PH[order_P], at_P, drafts.label_P2[order_P], share_P)


def report_weights(at_P: Tensor, draft_P: Tensor, batch: Batch, drafts: int, split: RowSplit = WHOLE) -> Tensor:
    """How much every draft counts in what is reported of the j-th drafts, fp32 [P].

    Those of a row add up to the row's labels, and what is reported is divided by the labels of the rows that have
    such drafts (`reported`): so it does not depend on which rows share a micro-batch.

    Args:
        at_P: the target's state that each is made with, counted through the states that are held of rows.
        draft_P: which draft of its block or pass it is, from 0.
        drafts: how many there are at most.
        split: the part of rows that they are of; of a part, those of whole rows are counted by their labels.
    """
    held = split.held(batch["input_ids"].shape[1], drafts)
    row_P, R = at_P // (held.stop - held.start), len(batch["input_ids"])
    if split.parts > 1:
        counts_JR = torch.stack([has_label(batch, 2 + j).sum(1) for j in range(drafts)])
    else:
        # counted by adding: a `bincount` waits for the device to know how long it gets
        counts = at_P.new_zeros(drafts * R)
        counts_JR = counts.index_add_(0, draft_P * R + row_P, torch.ones_like(at_P)).view(drafts, R)
    return batch["loss_mask"].sum(1)[row_P] / counts_JR[draft_P, row_P]


def reported(
    loss: Tensor, terms: dict[str, Tensor], report_weight_P: Tensor, draft_P: Tensor, drafts: int
) -> dict[str, Tensor]:
    """The loss, the sums of terms, and of each term the labels that it is over: those of rows that have such drafts.

    A row that is too short for the last drafts says nothing of them, and would count as one that rejects them all.
    Nothing is reported where nothing was compared.

    Args:
        loss: what is minimised, which every label counts for.
        terms: `alpha_j` of the j-th draft, everything else of the first.
        report_weight_P, draft_P, drafts: as of `report_weights`.
    """
    if not terms:
        return {}
    own = [name for name in terms if name != "loss" and not name.startswith(COMPARED)]
    counts_J = report_weight_P.new_zeros(drafts).index_add_(0, draft_P, report_weight_P)
    of_term = {name: int(name[len("alpha_") :]) - 1 if name.startswith("alpha_") else 0 for name in own}
    counts = {f"{COUNT}{name}": counts_J[draft] for name, draft in of_term.items()}
    return terms | {"loss": loss.detach()} | counts
