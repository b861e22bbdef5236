"""The weighted sum of terms that a recipe asks for, over one chunk of positions.

A mix is plain numbers. Weights that change from step to step are another mix at every step
(`ramp.py`). Read next: `divergences.py`, the terms; `losses/chunked.py`, the chunks.

Shapes: P and C positions, of all and of a chunk, V the target's vocabulary, U the tokens that can be drafted, all of V
unless there is a draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

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


class OfTarget(NamedTuple):
    """Of a drafter with a draft vocabulary: the part of the target's distribution at some positions that a loss needs.

    fp32. Its logits over the whole vocabulary cost most, and seven passes would make them seven times.
    """

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


def drafted(label_P: Tensor, ids_U: Tensor) -> Tensor:
    """Target ids as indices into the draft vocabulary, UNKNOWN where they cannot be drafted."""
    index_P = torch.searchsorted(ids_U, label_P.contiguous()).clamp_max(len(ids_U) - 1)
    return torch.where(ids_U[index_P] == label_P, index_P, UNKNOWN)


@dataclass(frozen=True)
class Mix:
    """Weights of the terms and what they are computed with; see `ObjectiveConfig` for each.

    Called, it is a `TokenLoss`, of `distill`, of heads and of blocks, over the target's whole vocabulary or over the
    tokens that can be drafted; EAGLE's losses take its `terms` over these.
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
    siblings: int = 1
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
            siblings=objective.siblings,
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

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | OfTarget | None, label_C: Tensor) -> dict[str, Tensor]:
        """The weighted sum as `loss`, and what is reported, [C] each.

        `kl` and `ce` are reported whatever is minimised, every other term that has a weight, and
        `alpha`, sum_v min(p, q): the acceptance rate of sampling at temperature 1 (Leviathan et al.
        2023, theorem 3.5), the quantity that distillation is for, with the target's distribution as
        it is. Where that distribution is cut to its likeliest tokens, `cut_mass` is what is left out.

        Args:
            draft_CV: the draft's logits, fp32.
            target_CV: the target's, fp32; without them there is nothing to compare with (ValueError). Of a draft
                vocabulary: what `over_part` needs of it.
            label_C: the text's own token at each position.
        """
        if target_CV is None:
            raise ValueError("distillation needs the target's logits")
        if isinstance(target_CV, OfTarget):
            return self.over_part(draft_CV, target_CV, label_C)
        distributions = self.distributions(draft_CV, self.soften(target_CV))
        terms = self.terms(distributions, draft_CV, label_C)
        loss_C = self.total(terms)
        with torch.no_grad():
            if "kl" not in terms:
                terms["kl"] = d.forward_kl(distributions.log_p_CU, distributions.log_q_CU)
            if "ce" not in terms:
                terms["ce"] = cross_entropy(draft_CV, label_C)
            alpha_C = acceptance(draft_CV, target_CV)
            if self.teacher_top_k is not None:
                terms["cut_mass"] = self.cut_mass(target_CV)
        reported = {name: term.detach() for name, term in terms.items()}
        return {"loss": loss_C, **reported, "alpha": alpha_C}

    def over_part(self, draft_CU: Tensor, target: OfTarget, label_C: Tensor) -> dict[str, Tensor]:
        """The same over the tokens that can be drafted, the target's distribution renormalised on them.

        As in EAGLE-3's loss: positions at which the target's likeliest token cannot be drafted do not count in terms
        that compare two distributions of the same tokens; the text's own token counts where it can be drafted; total
        variation, LK-alpha and the reported `alpha` take p as it is, at every position. `covered_mass` is p's mass on
        what can be drafted, `covered_labels` how many of the text's tokens can be.

        Args:
            label_C: as indices in the draft vocabulary, UNKNOWN where there is none.
        """
        if target.soft_CU is None:
            raise ValueError("a mix of nothing has no distributions")
        drafted_C = target.best_C != UNKNOWN
        distributions = self.distributions(draft_CU, target.soft_CU, target.soft_normal_C)
        terms = self.terms(distributions, draft_CU, label_C)
        with torch.no_grad():
            kl_C = d.forward_kl(distributions.log_p_CU, distributions.log_q_CU) if "kl" not in terms else terms["kl"]
            ce_C = cross_entropy(draft_CU, label_C) if "ce" not in terms else terms["ce"]
            alpha_C = acceptance(draft_CU, target)
        terms = {name: term * drafted_C if name in RENORMALISED else term for name, term in terms.items()}
        reported = {"kl": kl_C * drafted_C, "ce": ce_C} | terms
        return {
            "loss": self.total(terms),
            **{name: term.detach() for name, term in reported.items()},
            "covered_labels": (label_C != UNKNOWN).float(),
            "covered_mass": target.share_C,
            "alpha": alpha_C,
        }

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


def acceptance(draft_CU: Tensor, target: Tensor | OfTarget, siblings: int = 1) -> Tensor:
    """sum_v min(p, q) by logits of the draft and of the target as it is, [C]; of siblings as `divergences.overlap`."""
    drawn_CU = d.drawn(draft_CU.softmax(-1), siblings)
    if isinstance(target, OfTarget):
        return torch.minimum(drawn_CU, target.p_CU * target.share_C[:, None]).sum(-1)
    return torch.minimum(drawn_CU, target.softmax(-1)).sum(-1)


def label_kept(draft_CU: Tensor, target: Tensor | OfTarget, label_C: Tensor) -> Tensor:
    """min(1, q / p) of the text's own token, [C]: what a draft keeps of a text that the target wrote.

    Drawn from q and accepted with min(1, p / q), a token is drafted and kept with min(p, q), which is p times this.
    0 where the label cannot be drafted.
    """
    log_q_C = label_log_p(draft_CU, label_C)
    if isinstance(target, OfTarget):
        log_p_C = (target.p_CU.gather(-1, label_C.clamp_min(0)[:, None])[:, 0] * target.share_C).log()
    else:
        log_p_C = label_log_p(target, label_C)
    return (log_q_C - log_p_C).clamp_max(0).exp() * (label_C >= 0)


def label_log_p(logits_CV: Tensor, label_C: Tensor) -> Tensor:
    """The logarithm of each label's probability, [C]; arbitrary where the label is below 0, which is none."""
    return logits_CV.gather(-1, label_C.clamp_min(0)[:, None])[:, 0] - logits_CV.logsumexp(-1)


Question = Literal["label_q", "alpha", "kept"]


@dataclass(frozen=True)
class Passed:
    """How likely a draft is accepted, as the weights of positions ask for it (`pace.py`)."""

    what: Question
    """The text's own token; any, sum_v min(p, q); that, and `label_kept`, [C, 2]."""
    siblings: int = 1
    """Tokens that are drawn for a place, of the first two."""

    def __call__(self, draft_CU: Tensor, target: Any, label_C: Tensor) -> Tensor:
        """[C] or [C, 2], by logits."""
        if self.what == "label_q":
            return d.drawn(label_log_p(draft_CU, label_C).exp() * (label_C >= 0), self.siblings)
        alpha_C = acceptance(draft_CU, target, self.siblings)
        return alpha_C if self.what == "alpha" else torch.stack((alpha_C, label_kept(draft_CU, target, label_C)), 1)


def cross_entropy(draft_CU: Tensor, label_C: Tensor) -> Tensor:
    """-log q(label), [C]."""
    return F.cross_entropy(draft_CU, label_C, reduction="none", ignore_index=UNKNOWN)


# every term that compares with the target; `ce` does not
DIVERGENCES: dict[str, Callable[[Mix, Distributions], Tensor]] = {
    "kl": lambda mix, distributions: d.forward_kl(distributions.log_p_CU, distributions.log_q_CU),
    "reverse_kl": lambda mix, distributions: d.reverse_kl(distributions.log_p_CU, distributions.log_q_CU),
    "jsd": lambda mix, distributions: d.jsd(distributions.log_p_CU, distributions.log_q_CU, mix.jsd_beta),
    "tv": lambda mix, distributions: d.total_variation(
        distributions.log_part_CU, distributions.log_q_CU, mix.siblings
    ),
    "lk_alpha": lambda mix, distributions: d.lk_alpha(distributions.log_part_CU, distributions.log_q_CU, mix.siblings),
    "lk_lambda": lambda mix, distributions: d.lk_lambda(
        d.forward_kl(distributions.log_p_CU, distributions.log_q_CU),
        d.total_variation(distributions.log_part_CU, distributions.log_q_CU, mix.siblings),
        mix.lk_eta,
    ),
    "top_k": lambda mix, distributions: d.top_k_cross_entropy(
        distributions.log_p_CU.exp(), distributions.log_q_CU, mix.top_k_tokens
    ),
}
# terms that compare distributions over the same tokens: p is renormalised where not all can be drafted
RENORMALISED = frozenset({"kl", "reverse_kl", "jsd", "lk_lambda", "top_k"})
