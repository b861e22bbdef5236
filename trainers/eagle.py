"""Train an EAGLE drafter: guess the target's next feature, and through its head the next distribution.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077, section 4.2); EAGLE-2 decodes with the same weights.
HASS (Zhang et al. 2025, 2408.15766) is `passes` above 1 and `top_k` above 0: the network learns on
its own features too, as drafting will meet them, without a gradient from pass to pass. The target
runs frozen in the same process. Order of the file, as in every trainer: what it requires and what is
trained, the loss, the teacher's side, the run. Read next: `drafters/eagle/net.py`, the network;
`eagle_common.py`, what is compared; `losses/chunked.py`; `eagle3.py`.

Shapes: R rows, S tokens of a row, L of them in this process's part (all, but for rows that are cut), P positions
that count over all passes, C positions of a chunk, V vocabulary, K likeliest tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.backbone.backbone import Backbone
from ..drafters.eagle.net import EagleNet
from ..drafters.layers.row_split import WHOLE, RowSplit
from ..drafters.layers.static import Static, as_it_is
from ..drafters.projection import Shaping
from .eagle_common import compared, in_text_order, reported, shares, told_by_pass
from .loop.loop import Outcome
from .loop.objective import Batch
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss, SharedTeacher, Teacher
from .losses.divergences import top_k_cross_entropy
from .losses.draft_vocabulary import of_first
from .losses.mix import Mix
from .losses.soft_cross_entropy import soft_cross_entropy
from .losses.terms import check_terms
from .pruning.sizes import check_not_pruned
from .sections import MakeProbe, Run, Sections
from .student.warm_start import warm_started
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Save, check_teacher, freeze, run_for_target, saver
from .teacher.output import Part, TeacherOutput, next_embeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where `eagle` and `objective` together teach nothing."""
    config = recipe.eagle
    own = {"eagle.feature": config.feature, "eagle.ce": config.ce, "eagle.top_k": config.top_k}
    check_terms(recipe.objective, own=own, positions=config.passes, counted_by="eagle.passes")
    check_not_pruned(recipe.model)


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """Raise RequestError for logits that training cannot make, or rows beyond the context."""
    check_teacher(recipe, target)


def student(_recipe: Sections, target: PreTrainedModel) -> EagleNet:
    """An untrained network for `target`; on the meta device its shapes alone."""
    return EagleNet.for_target(target)


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


class EagleStudent(nn.Module):
    """The network and its loss: SmoothL1 of the features, and the distributions' soft cross-entropy."""

    def __init__(self, draft: EagleNet, target: Any, recipe: Sections) -> None:
        super().__init__()
        config = recipe.eagle
        self.draft, self._config, self._objective = draft, config, recipe.objective
        self.split = WHOLE
        """The part of every row that is learnt from here; what is held of the target goes on behind it by a halo."""
        self.static: Static = as_it_is
        mix = Mix.of(recipe.objective, kl=0.0)
        loss = DistributionLoss(config.ce, config.top_k, config.top_k_tokens, config.passes, mix)
        # in a tuple it is no part of this module: the head is the target's, and what wraps,
        # shards or saves this module must not touch it
        head, shaping = target.get_output_embeddings(), Shaping.of(target)
        self._frozen = (ChunkedLoss(head, loss, chunk=recipe.objective.chunk, shaping=shaping),)

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        features_RSH, embeds_RSH = teacher_output.hidden_RSH, teacher_output.embeds_RSH
        assert embeds_RSH is not None  # `EagleObjective.prepare` makes them
        own = self.split.own(batch["input_ids"].shape[1])
        outputs = self.draft.unroll(
            self._noisy(features_RSH[:, : own.stop - own.start]),
            embeds_RSH,
            batch["positions"],
            batch["documents"],
            self._config.passes,
            detach=True,
            recompute=self._config.recompute,
            split=self.split,
            static=self.static,
        )
        guess_PH, at_P, label_P2 = compared(outputs, batch, self.split)
        (head,) = self._frozen
        share_P = shares(label_P2, guess_PH, head, batch, self._config, self._objective, self.split)
        if self._config.passes > 1:  # one pass is in order as it is
            at_P, guess_PH, label_P2, share_P = in_text_order(at_P, guess_PH, label_P2, share_P)
        told_P = told_by_pass(at_P, label_P2[:, 1], batch, self._config.passes, self.split)
        states_NH = features_RSH.flatten(0, 1)
        distributions, terms = head(
            guess_PH, label_P2, self._teacher(states_NH, at_P), share_P, told_P=told_P, static=self.static
        )
        feature_P = F.smooth_l1_loss(guess_PH.float(), states_NH[at_P].float(), reduction="none").mean(-1)
        counted_P = feature_P if share_P is None else feature_P * share_P
        loss = self._config.feature * counted_P.sum() + distributions
        if terms:
            terms["feature"] = (feature_P.detach() * told_P * (label_P2[:, 1] == 0)).sum()
        return loss, reported(loss, terms, told_P, label_P2[:, 1], self._config.passes)

    def _teacher(self, states_NH: Tensor, at_P: Tensor) -> Teacher:
        """The target's distributions, each asked for once."""
        (head,) = self._frozen
        if self._config.passes == 1:
            return Teacher(states_NH[at_P], head.projection)
        return SharedTeacher.of(states_NH, head.projection, at_P)

    def _noisy(self, features_RLH: Tensor) -> Tensor:
        """Features shaken by uniform noise, so that guessed ones are no surprise in decoding."""
        if not (self.training and self._config.noise):
            return features_RLH
        return features_RLH + (2 * torch.rand_like(features_RLH) - 1) * self._config.noise


class EagleObjective:
    """Trains `draft` to predict the features of the frozen `target`."""

    def __init__(self, recipe: Sections, draft: EagleNet, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = EagleStudent(draft, freeze(target), recipe)
        self.features: FeatureSource = OnlineFeatures(target)
        self._ahead = recipe.eagle.passes
        self._draft, self._target, self._save = draft, target, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's features, its last hidden states, and the embeddings of the tokens behind them."""
        (features_RSH,) = self.features(batch)
        return TeacherOutput(features_RSH, next_embeds(self._target, batch, self.features.part))

    def split_rows(self, split: RowSplit) -> None:
        """Learn from a part of every row; what the target gives goes on behind it for the later passes."""
        self.module.split = split  # type: ignore[assignment]
        self.features.part = Part(split, self._ahead)

    def export(self, folder: Path) -> None:
        """Write a drafter folder."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train a drafter into `out/drafter`; terms of `objective` are added to those of `eagle`.

    It is fresh, or the one that `model.start_from` names: HASS behind EAGLE-1.
    """
    check_recipe(recipe)

    def build(target: Backbone, _rows: Prepared) -> EagleObjective:
        objective = EagleObjective(recipe, student(recipe, target.model), target.model, saver(target, "eagle"))
        return warm_started(objective, recipe, target)

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
