"""What EAGLE's families minimise: distributions on a draft vocabulary against those of the whole one.

Li et al. 2025 (arXiv 2503.01840). Read next: `../eagle3.py`, `../eagle.py` and `../block/peagle.py`, who minimise it;
`mix.py`, the terms that are added, and what all other methods minimise over one.

Shapes: C positions of a chunk, U tokens of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..loop.sums import COMPARED
from .divergences import top_k_cross_entropy
from .mix import RENORMALISED, UNKNOWN, Mix, OfTarget, drafted
from .soft_cross_entropy import soft_cross_entropy

__all__ = ["DraftVocabularyLoss", "OfTarget", "drafted", "of_first"]


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

    net: nn.Module
    passes: int
    ce: float = 1.0
    mix: Mix = Mix()
    top_k: float = 0.0
    """Weight of the same cross-entropy over the likeliest `tokens` alone (HASS)."""
    tokens: int = 10

    def __call__(self, draft_CU: Tensor, target: OfTarget, label_C2: Tensor) -> dict[str, Tensor]:
        """`label_C2`: label, as its index in the draft vocabulary, and pass of every position."""
        label_C, pass_C = label_C2.unbind(-1)
        drafted_C = target.best_C != UNKNOWN
        ce_C, alpha_C, most_C = soft_cross_entropy(draft_CU, target.p_CU, target.share_C)
        ce_C = ce_C * drafted_C
        loss_C = self.ce * ce_C
        if self.top_k:
            best_C = top_k_cross_entropy(target.p_CU, draft_CU.log_softmax(-1), self.tokens)
            loss_C = loss_C + self.top_k * best_C * drafted_C
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
        own = bool(self.ce) + bool(self.top_k)
        parts += [drafted_C] * own
        anywhere = len(parts) < len(added) + own  # a term that takes p as it is
        loss_C = torch.ones_like(drafted_C) if anywhere else torch.stack(parts).any(0)
        return {f"{COMPARED}loss": loss_C.float(), f"{COMPARED}ce": drafted_C.float()}


def of_first(added: Mapping[str, Tensor], first_C: Tensor) -> dict[str, Tensor]:
    """Terms of a mix as they are reported beside a family's own `ce`: those of the first pass."""
    names = {"ce": "text_ce"}
    return {names.get(name, name): term.detach() * first_C for name, term in added.items()}
