"""Train an EAGLE drafter: guess the target's next feature, and through its head the next distribution.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077, section 4.2); EAGLE-2 decodes with the same weights.
HASS (Zhang et al. 2025, 2408.15766) is `passes` above 1 and `top_k` above 0: the network learns on
its own features too, as drafting will meet them, without a gradient from pass to pass. The target
runs frozen in the same process. Order of the file, as in every trainer: what it requires and what is
trained, the loss, the teacher's side, how a run begins. Read next: `drafters/eagle/net.py`, the network;
`spine.py`, the run; `student/compared.py`, what is compared; `losses/chunked.py`; `eagle3.py`.

Shapes: R rows, S tokens of a row, L of them in this process's part (all, but for rows that are cut), P positions
that count over all passes, C positions of a chunk, V vocabulary, K likeliest tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.eagle.net import EagleNet
from ..drafters.layers.draft_vocabulary import ids_of
from ..drafters.projection import Shaping
from .loop.objective import Batch, Objective
from .losses.chunked import ChunkedLoss, Teacher, TokenLoss
from .losses.divergences import top_k_cross_entropy
from .losses.draft_vocabulary import DraftVocabularyLoss, of_first
from .losses.mix import Mix
from .losses.soft_cross_entropy import soft_cross_entropy
from .losses.terms import check_terms
from .own_drafts.places import check_own_drafts
from .pruning.sizes import check_not_pruned
from .recipe import Run, TrainingRecipe
from .spine import DrafterObjective, begun
from .student.compared import Drafts, Student
from .student.drafted import Draw, Where
from .student.fused import drafted_ids
from .teacher.frozen import Save
from .teacher.output import TeacherOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: TrainingRecipe) -> None:
    """Raise RequestError where `eagle` and `objective` together teach nothing."""
    config = recipe.eagle
    own = {"eagle.feature": config.feature, "eagle.ce": config.ce, "eagle.top_k": config.top_k}
    check_terms(recipe.objective, own=own, positions=config.passes, counted_by="eagle.passes")
    check_not_pruned(recipe.model)
    check_own_drafts(recipe)


def student(recipe: TrainingRecipe, target: PreTrainedModel, ids: Sequence[int] | None = None) -> EagleNet:
    """An untrained network for `target`; on the meta device its shapes alone. `ids`: as of `drafted_ids`."""
    return EagleNet.for_target(target, ids=drafted_ids(recipe.eagle.vocabulary, target, ids))


@dataclass(frozen=True)
class DistributionLoss:
    """`ce` * - sum_v p(v) log q(v), p being the target's distribution; `top_k` * the same over its best.

    The second is HASS's: only the `tokens` likeliest, p not renormalised. What the recipe adds is
    `mix`. Reported of the first pass: `ce`, `alpha`, sum_v min(p, q), `agreement` of the argmax,
    and the terms of the mix (its cross-entropy as `text_ce`); of pass j the `alpha` of the j-th
    drafted token.
    """

    ce: float
    top_k: float
    tokens: int
    passes: int
    mix: Mix = Mix()

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | None, label_C2: Tensor) -> dict[str, Tensor]:
        """`label_C2`: label and pass of every position."""
        if target_CV is None:
            raise ValueError("EAGLE learns from the target's logits")
        label_C, pass_C = label_C2.unbind(-1)
        p_CV = target_CV.softmax(-1)
        ce_C, alpha_C, most_C = soft_cross_entropy(draft_CV, p_CV)
        loss_C = self.ce * ce_C
        if self.top_k:
            log_q_CV = draft_CV.log_softmax(-1)
            loss_C = loss_C + self.top_k * top_k_cross_entropy(p_CV, log_q_CV, self.tokens)
        added: dict[str, Tensor] = {}
        if self.mix.asked:
            distributions = self.mix.distributions(draft_CV, self.mix.soften(target_CV))
            added = self.mix.terms(distributions, draft_CV, label_C)
            loss_C = loss_C + self.mix.total(added)
        # an `argmax` takes eight times as long as an `amax` on a CPU: one of the two has it
        agreement_C = draft_CV.detach().gather(-1, target_CV.argmax(-1, keepdim=True))[:, 0] == most_C
        first_C = (pass_C == 0).float()
        alphas = {f"alpha_{j + 1}": alpha_C * (pass_C == j) for j in range(1, self.passes)}
        return {
            "loss": loss_C,
            "ce": ce_C.detach() * first_C,
            "alpha": alpha_C * first_C,
            "agreement": agreement_C * first_C,
            **alphas,
            **of_first(added, first_C),
        }


class EagleStudent(Student):
    """The network and its loss: SmoothL1 of the features, and the distributions' soft cross-entropy."""

    def __init__(self, draft: EagleNet, target: Any, recipe: TrainingRecipe) -> None:
        config = self._config = recipe.eagle
        mix = Mix.of(recipe.objective, kl=0.0)
        best = (config.top_k, config.top_k_tokens)
        loss: TokenLoss = DistributionLoss(config.ce, *best, config.passes, mix)
        if ids_of(draft) is not None:
            loss = DraftVocabularyLoss(draft, config.passes, config.ce, mix, *best)
        head, shaping = target.get_output_embeddings(), Shaping.of(target)
        judge = ChunkedLoss(head, loss, chunk=recipe.objective.chunk, shaping=shaping, over=draft)
        super().__init__(draft, judge, recipe.objective, drafts=config.passes, decay=config.decay, mix=mix)

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        embeds_RSH, features_RLH = teacher_output.embeds_RSH, self.own(teacher_output.hidden_RSH, batch)
        assert embeds_RSH is not None  # `EagleObjective` asks for them
        again = self._config.recompute
        drafts = self.unrolled(self._noisy(features_RLH), embeds_RSH, batch, detach=True, recompute=again)
        return self.compare(drafts, batch, teacher_output)

    def drafts_behind(self, batch: Batch, given: TeacherOutput, places: Where, draw: Draw, embed: Any) -> Tensor:
        """As of `DraftsBehind`: of features as they are, as while decoding."""
        embeds_RSH, again = given.embeds_RSH, self._config.recompute
        assert embeds_RSH is not None  # `EagleObjective` asks for them
        states = (given.hidden_RSH, embeds_RSH)
        return torch.stack(self.unrolled_behind(*states, batch, places, draw, embed, detach=True, recompute=again), 1)

    def teacher(self, given: TeacherOutput, at_P: Tensor) -> Teacher:
        """The target's distributions; one pass asks for each once as it is."""
        if self._config.passes > 1:
            return super().teacher(given, at_P)
        return Teacher(given.hidden_RSH.flatten(0, 1)[at_P], self.judge.whole, cut=self.cut)

    def auxiliary_loss(
        self, drafts: Drafts, _batch: Batch, given: TeacherOutput
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """The distance of predicted features from the target's; reported of the first pass."""
        true_PH = given.hidden_RSH.flatten(0, 1)[drafts.at_P].float()
        feature_P = F.smooth_l1_loss(drafts.hidden_PH.float(), true_PH, reduction="none").mean(-1)
        counted_P = feature_P if drafts.counted_P is None else feature_P * drafts.counted_P
        return self._config.feature * counted_P.sum(), {"feature": (feature_P.detach() * drafts.first_weight_P).sum()}

    def _noisy(self, features_RLH: Tensor) -> Tensor:
        """Features shaken by uniform noise, so that guessed ones are no surprise in decoding."""
        if not (self.training and self._config.noise):
            return features_RLH
        return features_RLH + (2 * torch.rand_like(features_RLH) - 1) * self._config.noise


class EagleObjective(DrafterObjective):
    """Trains `draft` to predict the features of the frozen `target`."""

    def __init__(self, recipe: TrainingRecipe, draft: EagleNet, target: PreTrainedModel, save: Save) -> None:
        goal = EagleStudent(draft, target, recipe)
        super().__init__(goal, draft, target, save, reads_tokens=True, ahead=recipe.eagle.passes)


def build(run: Run, target: Backbone, rows: Prepared) -> Objective:
    """What a run trains: a fresh network, or the one that `model.start_from` names, as HASS behind EAGLE-1."""
    return begun(EagleObjective, student, run, target, rows)
