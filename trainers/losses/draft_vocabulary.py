"""What EAGLE-3's family minimises: distributions on a draft vocabulary against those of the whole one.

Li et al. 2025 (arXiv 2503.01840). Read next: `../eagle3.py` and `../block/peagle.py`, who minimise it; `mix.py`, the
terms that are added.

Shapes: P and C positions, of all and of a chunk, X positions of a state, U tokens of the draft vocabulary, V of the
target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...drafters.eagle.net3 import Eagle3Net
from ..loop.sums import COMPARED
from .chunked import SharedTeacher
from .mix import RENORMALISED, UNKNOWN, Mix
from .soft_cross_entropy import soft_cross_entropy


class OfTarget(NamedTuple):
    """The part of the target's distribution at some positions that the loss needs; fp32."""

    p_CU: Tensor
    """Its probabilities of the tokens that can be drafted, renormalised."""
    share_C: Tensor
    """Its mass on them."""
    best_C: Tensor
    """Its likeliest token's index in the draft vocabulary, UNKNOWN where the draft may not have it."""
    soft_CU: Tensor | None
    soft_normal_C: Tensor | None
    """For a mix: logits of the tokens that can be drafted, at the mix's temperature, of those that it leaves; and the
    logarithm of what all of them sum up to as weights."""

    @classmethod
    def of(cls, target_CV: Tensor, ids_U: Tensor, mix: Mix) -> Self:
        """From its logits over its whole vocabulary."""
        own_CU, normal_C = target_CV[:, ids_U], target_CV.logsumexp(-1)
        best_C, share_C = drafted(target_CV.argmax(-1), ids_U), (own_CU.logsumexp(-1) - normal_C).exp()
        if not mix.asked:
            return cls(own_CU.softmax(-1), share_C, best_C, None, None)
        if mix.as_it_is:
            return cls(own_CU.softmax(-1), share_C, best_C, own_CU, normal_C)
        soft_CV = mix.soften(target_CV)
        return cls(own_CU.softmax(-1), share_C, best_C, soft_CV[:, ids_U], soft_CV.logsumexp(-1))


@dataclass(frozen=True)
class WholeTeacher(SharedTeacher):
    """A teacher whose logits over the whole vocabulary are cut to what the draft vocabulary needs.

    Those logits cost most here: seven passes would make them seven times.
    """

    ids_U: Tensor
    mix: Mix

    def select(self, logits_XV: Tensor, _vocabulary: int) -> OfTarget:
        return OfTarget.of(logits_XV, self.ids_U, self.mix)


@dataclass(frozen=True)
class DraftVocabularyLoss:
    """`ce` * - sum_u p~(u) log q(u), p~ the target's distribution on the draft vocabulary, and `mix`.

    p~ is renormalised. As in the official code, positions at which the target's likeliest token
    cannot be drafted do not count. The same holds for the terms of the mix that compare two distributions of
    the same tokens. Total variation and LK-alpha take p as it is, at every position: they say
    what is accepted, and mass outside never is. The text's own token counts where it can be
    drafted. Reported: `alpha`, sum min(p, q) with p as it is, `agreement` of the argmax and the
    terms of the mix, of the first pass (its cross-entropy as `text_ce`); `alpha_j` of the j-th
    draft; and of the first pass how much the draft vocabulary covers, `covered_labels` of the text's tokens and
    `covered_mass` of the target's distribution.
    """

    net: Eagle3Net
    passes: int
    ce: float = 1.0
    mix: Mix = Mix()

    def __call__(self, draft_CU: Tensor, target: OfTarget, label_C2: Tensor) -> dict[str, Tensor]:
        """`label_C2`: label, as its index in the draft vocabulary, and pass of every position."""
        label_C, pass_C = label_C2.unbind(-1)
        drafted_C = target.best_C != UNKNOWN
        ce_C, alpha_C, most_C = soft_cross_entropy(draft_CU, target.p_CU, target.share_C)
        ce_C = ce_C * drafted_C
        loss_C = self.ce * ce_C
        added: dict[str, Tensor] = {}
        if self.mix.asked:
            assert target.soft_CU is not None  # `OfTarget.of` makes it where a mix asks
            distributions = self.mix.distributions(draft_CU, target.soft_CU, target.soft_normal_C)
            terms = self.mix.terms(distributions, draft_CU, label_C)
            added = {name: term * drafted_C if name in RENORMALISED else term for name, term in terms.items()}
            loss_C = loss_C + self.mix.total(added)
        # the target's best is the draft's too where the draft has no larger logit: an `argmax` of the draft's would
        # take eight times as long on a CPU
        own_C = draft_CU.detach().gather(-1, target.best_C.clamp_min(0)[:, None])[:, 0]
        agreement_C = drafted_C & (own_C == most_C) & (pass_C == 0)
        alphas = {f"alpha_{j + 1}": alpha_C * (pass_C == j) for j in range(1, self.passes)}
        return {
            "loss": loss_C,
            "ce": ce_C.detach() * (pass_C == 0),
            "alpha": alpha_C * (pass_C == 0),
            "agreement": agreement_C.float(),
            "covered_labels": (label_C != UNKNOWN).float() * (pass_C == 0),
            "covered_mass": target.share_C * (pass_C == 0),
            **alphas,
            **of_first(added, pass_C == 0),
            **self._compared(added, drafted_C, label_C != UNKNOWN),
        }

    def _compared(self, added: Mapping[str, Tensor], drafted_C: Tensor, known_C: Tensor) -> dict[str, Tensor]:
        """Where the loss and its own cross-entropy compare something."""
        parts = [known_C if name == "ce" else drafted_C for name in added if name in RENORMALISED or name == "ce"]
        if self.ce:
            parts.append(drafted_C)
        anywhere = len(parts) < len(added) + bool(self.ce)  # a term that takes p as it is
        loss_C = torch.ones_like(drafted_C) if anywhere else torch.stack(parts).any(0)
        return {f"{COMPARED}loss": loss_C.float(), f"{COMPARED}ce": drafted_C.float()}


def drafted(label_P: Tensor, ids_U: Tensor) -> Tensor:
    """Target ids as indices into the draft vocabulary, UNKNOWN where they cannot be drafted."""
    index_P = torch.searchsorted(ids_U, label_P.contiguous()).clamp_max(len(ids_U) - 1)
    return torch.where(ids_U[index_P] == label_P, index_P, UNKNOWN)


def of_first(added: Mapping[str, Tensor], first_C: Tensor) -> dict[str, Tensor]:
    """Terms of a mix as they are reported beside a family's own `ce`: those of the first pass."""
    names = {"ce": "text_ce"}
    return {names.get(name, name): term.detach() * first_C for name, term in added.items()}
