"""The weighted sum of terms that a recipe asks for, over one chunk of positions.

A mix is plain numbers. Weights that change from step to step are another mix at every step
(`ramp.py`). Read next: `divergences.py`, the terms; `losses/chunked.py`, the chunks.

Shapes: C positions of a chunk, V the target's vocabulary, U the tokens that can be drafted, all of
V but for EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ObjectiveConfig
from . import divergences as d

TERMS = ("kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "top_k", "ce")
UNKNOWN = -100  # a label that cannot be drafted, or that is none: torch's own mark for it


class Distributions(NamedTuple):
    """A draft's distribution and the target's, as logarithms, softened alike. [C, U] each."""

    log_q_CU: Tensor
    log_p_CU: Tensor
    """p on the tokens that can be drafted, renormalised where these are not all."""
    log_part_CU: Tensor
    """p over all tokens, of which other tokens' mass is left out: it may sum to less than 1."""


@dataclass(frozen=True)
class Mix:
    """Weights of the terms and what they are computed with; see `ObjectiveConfig` for each.

    Called, it is a `TokenLoss` over the target's whole vocabulary, of `distill` and of heads; EAGLE's
    losses take its `terms` over the tokens that can be drafted.
    """

    kl: float = 0.0
    ce: float = 0.0
    temperature: float = 1.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    jsd_beta: float = 0.5
    tv: float = 0.0
    lk_alpha: float = 0.0
    lk_lambda: float = 0.0
    lk_eta: float = 3.0
    top_k: float = 0.0
    top_k_tokens: int = 10
    teacher_top_k: int | None = None

    @classmethod
    def of(cls, objective: ObjectiveConfig, *, kl: float = 1.0) -> Mix:
        """The recipe's mix; `kl` is the method's default weight of the KL."""
        return cls(
            kl=kl if objective.kl is None else objective.kl,
            ce=objective.ce,
            temperature=objective.temperature,
            reverse_kl=objective.reverse_kl,
            jsd=objective.jsd,
            jsd_beta=objective.jsd_beta,
            tv=objective.tv,
            lk_alpha=objective.lk_alpha,
            lk_lambda=objective.lk_lambda,
            lk_eta=objective.lk_eta,
            top_k=objective.top_k,
            top_k_tokens=objective.top_k_tokens,
            teacher_top_k=objective.teacher_top_k,
        )

    @property
    def asked(self) -> list[str]:
        """Names of the terms that have a weight, in the order of TERMS."""
        return [name for name in TERMS if getattr(self, name)]

    @property
    def asks_the_target(self) -> bool:
        """Whether a term compares with the target's distribution."""
        return any(name in DIVERGENCES for name in self.asked)

    @property
    def as_it_is(self) -> bool:
        """Whether `soften` leaves the target's logits as they are."""
        return self.temperature == 1 and self.teacher_top_k is None

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | None, label_C: Tensor) -> dict[str, Tensor]:
        """The weighted sum as `loss`, and what is reported, [C] each.

        `kl` and `ce` are reported whatever is minimised, every other term that has a weight, and
        `alpha`, sum_v min(p, q): the acceptance rate of sampling at temperature 1 (Leviathan et al.
        2023, theorem 3.5), the quantity that distillation is for, with the target's distribution as
        it is. Where that distribution is cut to its likeliest tokens, `cut_mass` is what is left out.

        Args:
            draft_CV: the draft's logits, fp32.
            target_CV: the target's, fp32; without them there is nothing to compare with (ValueError).
            label_C: the text's own token at each position.
        """
        if target_CV is None:
            raise ValueError("distillation needs the target's logits")
        distributions = self.distributions(draft_CV, self.soften(target_CV))
        terms = self.terms(distributions, draft_CV, label_C)
        loss_C = self.total(terms)
        with torch.no_grad():
            if "kl" not in terms:
                terms["kl"] = d.forward_kl(distributions.log_p_CU, distributions.log_q_CU)
            if "ce" not in terms:
                terms["ce"] = cross_entropy(draft_CV, label_C)
            alpha_C = torch.minimum(draft_CV.softmax(-1), target_CV.softmax(-1)).sum(-1)
            if self.teacher_top_k is not None:
                terms["cut_mass"] = self.cut_mass(target_CV)
        reported = {name: term.detach() for name, term in terms.items()}
        return {"loss": loss_C, **reported, "alpha": alpha_C}

    def distributions(self, draft_CU: Tensor, soft_CU: Tensor, normal_C: Tensor | None = None) -> Distributions:
        """Both distributions at the mix's temperature.

        Args:
            draft_CU: the draft's logits as they are.
            soft_CU: the target's as `soften` leaves them, of the tokens that can be drafted.
            normal_C: where those are not all, logsumexp over all of the target's logits.
        """
        log_q_CU = (draft_CU / self.temperature).log_softmax(-1)
        log_p_CU = soft_CU.log_softmax(-1)
        part_CU = log_p_CU if normal_C is None else soft_CU - normal_C[:, None]
        return Distributions(log_q_CU, log_p_CU, part_CU)

    def soften(self, target_CV: Tensor) -> Tensor:
        """The target's logits at the mix's temperature, cut to its likeliest tokens."""
        return self.cut(target_CV) / self.temperature

    def cut(self, target_CV: Tensor) -> Tensor:
        """The target's logits, those beyond its `teacher_top_k` likeliest tokens -inf.

        Ties are kept by value, as everywhere, so that the order of tokens does not matter.
        """
        if self.teacher_top_k is None or self.teacher_top_k >= target_CV.shape[-1]:
            return target_CV
        least_C1 = target_CV.topk(self.teacher_top_k, -1).values[:, -1:]
        return target_CV.masked_fill(target_CV < least_C1, -torch.inf)

    def cut_mass(self, target_CV: Tensor) -> Tensor:
        """Mass [C] that `cut` takes from the distribution at the mix's temperature."""
        all_C = (target_CV / self.temperature).logsumexp(-1)
        kept_C = self.soften(target_CV).logsumexp(-1) - all_C
        return -torch.expm1(kept_C.clamp_max(0.0))

    def terms(self, distributions: Distributions, draft_CU: Tensor, label_C: Tensor) -> dict[str, Tensor]:
        """The terms that have a weight, [C] each, without it. A label UNKNOWN has no `ce`."""
        terms = {name: DIVERGENCES[name](self, distributions) for name in self.asked if name != "ce"}
        if self.ce:
            terms["ce"] = cross_entropy(draft_CU, label_C)
        return terms

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        """The weighted sum [C] of the result of `terms`, which must not be empty."""
        first, *others = (getattr(self, name) * terms[name] for name in TERMS if name in terms)
        return sum(others, start=first)


def cross_entropy(draft_CU: Tensor, label_C: Tensor) -> Tensor:
    """-log q(label), [C]."""
    return F.cross_entropy(draft_CU, label_C, reduction="none", ignore_index=UNKNOWN)


# every term that compares with the target; `ce` does not
DIVERGENCES: dict[str, Callable[[Mix, Distributions], Tensor]] = {
    "kl": lambda mix, distributions: d.forward_kl(distributions.log_p_CU, distributions.log_q_CU),
    "reverse_kl": lambda mix, distributions: d.reverse_kl(distributions.log_p_CU, distributions.log_q_CU),
    "jsd": lambda mix, distributions: d.jsd(distributions.log_p_CU, distributions.log_q_CU, mix.jsd_beta),
    "tv": lambda mix, distributions: d.total_variation(distributions.log_part_CU, distributions.log_q_CU),
    "lk_alpha": lambda mix, distributions: d.lk_alpha(distributions.log_part_CU, distributions.log_q_CU),
    "lk_lambda": lambda mix, distributions: d.lk_lambda(
        d.forward_kl(distributions.log_p_CU, distributions.log_q_CU),
        d.total_variation(distributions.log_part_CU, distributions.log_q_CU),
        mix.lk_eta,
    ),
    "top_k": lambda mix, distributions: d.top_k_cross_entropy(
        distributions.log_p_CU.exp(), distributions.log_q_CU, mix.top_k_tokens
    ),
}
# terms that compare distributions over the same tokens: p is renormalised where not all can be drafted
RENORMALISED = frozenset({"kl", "reverse_kl", "jsd", "lk_lambda", "top_k"})
