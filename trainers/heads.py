"""What methods with prediction heads share: labels, losses and chunks of Medusa, Hydra and BPD.

Read next: `medusa.py`, `hydra.py` and `bpd.py`, which say what heads read and how their losses add
up; `losses/chunked.py`.

Shapes: R rows, S tokens of a row, P positions that count, C positions of a chunk, V vocabulary,
H hidden size, F numbers that a head reads, X positions that have a token so far ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..drafters.heads.medusa import Heads
from ..drafters.layers.draft_vocabulary import ids_of
from ..drafters.layers.static import again, as_it_is
from ..drafters.projection import Shaping
from ..errors import RequestError
from .config import ObjectiveConfig
from .labels import label_places
from .loop.objective import Batch
from .loop.sums import COUNT
from .losses.buckets import behind, next_size
from .losses.chunked import ChunkedLoss, Teacher, cross_entropy
from .losses.mix import Mix, OfTarget, drafted
from .losses.pace import DraftPace, geometric, joined
from .method_config import MedusaConfig
from .student.drafted import Drafted, DraftsBehind

Reads = Callable[[int], Tensor]
"""k -> what head k reads at every position that has a token k + 1 ahead, [R, X, F]."""


def check_no_prefix(medusa: MedusaConfig) -> None:
    """Raise RequestError where a layer is asked for that Medusa's heads do not have, or other parts of Hydra's."""
    if medusa.as_published:
        raise RequestError(
            "medusa.as_published is on, and Medusa's heads are as published already; leave it out, or train with "
            "method `hydra`"
        )
    if medusa.prefix:
        raise RequestError(
            "medusa.prefix is on, and Medusa's heads have no layer in front of them; leave it out, "
            "or train with method `hydra`"
        )


class HeadLoss:
    """The loss of one head: the recipe's mix of terms, for `ChunkedLoss`.

    p is the target's distribution of the very token that the head speaks of. Also reported: `top1`, how
    often the head's likeliest token is the text's own, and the distributions' overlap `alpha` where a term
    asks for the target's.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.mix = Mix.of(config)
        self.distils = self.mix.asks_the_target
        self.names: tuple[str, ...] = ("loss", "top1")
        if self.distils:
            self.names += ("alpha",) if config.teacher_top_k is None else ("alpha", "cut_mass")

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | OfTarget | None, label_C: Tensor) -> dict[str, Tensor]:
        top1_C = (draft_CV.argmax(-1) == label_C).float()
        if not self.distils:
            ce_C = cross_entropy(draft_CV, None, label_C)["loss"]
            return {"loss": self.mix.ce * ce_C, "top1": top1_C}
        terms = self.mix(draft_CV, target_CV, label_C)
        reported = {name: terms[name] for name in self.names if name in terms}
        return {"loss": terms["loss"], "top1": top1_C, **reported}


class HeadsStudent(DraftsBehind):
    """Heads and the loss of each, in chunks over the positions where it has a label.

    A method's student adds `forward`: what its heads read, and how their losses add up.
    """

    drafts_likeliest = True
    _decay = 1.0
    """Of a method whose heads' losses count unlike each other."""

    def __init__(self, heads: Heads, target: Any, objective: ObjectiveConfig, *, recompute: bool = False) -> None:
        """What the heads ride on, and how much they keep.

        Args:
            target: the causal LM.
            recompute: keep nothing of a head but the states that all of them read, and compute it again for its
                gradient; no bit of any number differs.
        """
        super().__init__()
        self._recompute = recompute
        self.medusa = heads  # checkpoints name its parameters by this attribute
        self.drafts_made = heads.config.heads
        self._loss = HeadLoss(objective)
        self._pace = DraftPace.of(objective)
        own: Any = heads.lm_heads
        self.losses = nn.ModuleList(ChunkedLoss(lm_head, self._loss, chunk=objective.chunk) for lm_head in own)
        # in a tuple it is no part of this module: the projection is the target's, and what wraps,
        # shards or saves this module must not touch it
        head, shaping = target.get_output_embeddings(), Shaping.of(target)
        self._frozen = (ChunkedLoss(head, self._loss, chunk=objective.chunk, shaping=shaping, over=heads),)

    def frozen_parts(self) -> Iterable[nn.Module]:
        """The target's projection."""
        return self._frozen

    def decayed(
        self, batch: Batch, hidden_RSH: Tensor, reads: Reads, decay: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """sum_k `decay`^k loss_k, or a pace's weights in place of `decay`; and the terms of each head."""
        loss = torch.zeros((), device=hidden_RSH.device)
        terms: dict[str, Tensor] = {}
        paces = None if self._pace is None else self._paces(batch, hidden_RSH, reads, self._pace)
        for k in range(1, self.medusa.config.heads + 1):
            share_P, weight = (None, geometric(k, decay)) if paces is None else (paces[k - 1], None)
            head_loss, head_terms = self.head(k, batch, hidden_RSH, reads, share_P)
            loss = loss + (head_loss if weight is None else weight * head_loss)
            terms |= head_terms
        return loss, {"loss": loss.detach(), **terms}

    def head(
        self, k: int, batch: Batch, hidden_RSH: Tensor, reads: Reads, share_P: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of head k summed over its labels, and its terms, `head{k}_...`, with the number of those labels.

        The loop divides by all labels, of which a head lacks the first k of every document.

        Args:
            hidden_RSH: the target's last hidden states, from which its own distribution follows.
            share_P: how much every label counts in the loss; None: all alike.
        """
        place = label_places(batch, k + 1)
        label_P = self._in_draft_vocabulary(batch["input_ids"][:, k + 1 :][place])
        teacher = None
        if self._loss.distils:
            teacher = self._teacher(hidden_RSH[:, k:-1][place])
        given_PH = again(self._projected, self._recompute)(k, place, reads)
        loss, sums = self._chunked(k)(given_PH, label_P, teacher, share_P)
        # the loop adds up the same names on every process, whatever the batch held there
        terms = {f"head{k}_{name}": sums.get(name, loss.detach() * 0) for name in self._loss.names}
        counted = torch.full_like(loss.detach(), len(label_P))
        return loss, terms | {f"{COUNT}{name}": counted for name in terms}

    @torch.no_grad()
    def _paces(self, batch: Batch, hidden_RSH: Tensor, reads: Reads, pace: DraftPace) -> list[Tensor]:
        """The weights of every head's labels: a first pass, a chunk of logits at a time."""
        passed, anchors, head = [], [], []
        for k in range(1, self.medusa.config.heads + 1):
            place = label_places(batch, k + 1)
            label_P = self._in_draft_vocabulary(batch["input_ids"][:, k + 1 :][place])
            given_PH = self._projected(k, place, reads)
            teacher = self._teacher(hidden_RSH[:, k:-1][place]) if pace.by_target else None
            passed.append(self._chunked(k)(given_PH, label_P, teacher, only=pace.asks)[0])
            anchors.append(joined(place, batch["input_ids"].shape[1]))
            head.append(torch.full_like(label_P, k - 1))
        counts = batch["input_ids"].numel(), len(head)
        weight_P = pace(torch.cat(passed), torch.cat(anchors), torch.cat(head), counts)
        return list(weight_P.split([len(each) for each in anchors]))

    @property
    def judge(self) -> ChunkedLoss:
        """The first head's projection."""
        return self._chunked(1)

    @property
    def ids_U(self) -> Tensor | None:
        """The tokens that can be drafted; None: all."""
        return ids_of(self.medusa)

    @property
    def first_weight(self) -> float:
        """The first head's, lambda."""
        return self._decay if self._pace is None else 1.0

    def draft_logits(self, hidden_CH: Tensor, _before_C: Tensor, j: int) -> Tensor:
        """As of `DraftsBehind`, by the projection of its head."""
        return self._chunked(j + 1).projection.logits(hidden_CH)

    def loss_along(self, found: Sequence[Tensor], made: Drafted, _given: Any) -> Tensor:
        """As of `DraftsBehind`, of what every head reads: the sum of their losses, head by head as for a text."""
        losses = []
        for j in range(self.drafts_made):
            known_P = made.known_XJ[:, j].nonzero()[:, 0]
            label_P = self._in_draft_vocabulary(made.label_XJ[known_P, j])
            teacher = self._teacher(made.states_XTH[known_P, j]) if self._loss.distils else None
            given_PH = again(self.medusa.head, self._recompute)(j + 1, found[j][known_P])
            share_P = made.share_XJ[known_P, j]
            losses.append(self._chunked(j + 1)(given_PH, label_P, teacher, share_P)[0])
        return torch.stack(losses).sum()

    def _projected(self, k: int, place: tuple[Tensor, Tensor], reads: Reads) -> Tensor:
        """What head k's projection reads where it has a label, [P, H]."""
        read_RXF = reads(k)
        given_PF = read_RXF[place].to(self.medusa.dtype)
        if self.static is as_it_is:
            return self.medusa.head(k, given_PF)
        count, (R, X) = len(given_PF), read_RXF.shape[:2]
        given_XF = behind(given_PF, next_size(count, R * (X + k + 1)) - count)  # a row's tokens, for all heads alike
        return self.static("a head", head_of)(self.medusa, k, given_XF)[:count]

    def _chunked(self, k: int) -> ChunkedLoss:
        """The projection of head k and its loss."""
        own: Any = self.losses
        chosen: ChunkedLoss = self._frozen[0] if self.medusa.config.shared_head else own[k - 1]
        return chosen

    def _teacher(self, hidden_PH: Tensor) -> Teacher:
        ids_U = self.ids_U
        cut = None if ids_U is None else partial(OfTarget.of, ids_U=ids_U, mix=self._loss.mix)
        return Teacher(hidden_PH, self._frozen[0].whole, cut=cut)

    def _in_draft_vocabulary(self, label_P: Tensor) -> Tensor:
        """Labels as indices in the draft vocabulary, where there is one; UNKNOWN of what cannot be drafted."""
        ids_U = self.ids_U
        return label_P if ids_U is None else drafted(label_P, ids_U)


def head_of(heads: Heads, k: int, given_XF: Tensor) -> Tensor:
    """What the projection of head k reads, for a family's own `head`."""
    return heads.head(k, given_XF)


def last_states_of(hidden_RSH: Tensor) -> Reads:
    """Heads that read the last hidden states alone, as Medusa's and BPD's do."""
    return lambda k: hidden_RSH[:, : -(k + 1)]
