"""Train an EAGLE drafter: guess the target's next feature, and through its head the next distribution.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077, section 4.2); EAGLE-2 decodes with the same weights.
HASS (Zhang et al. 2025, 2408.15766) is `passes` above 1 and `top_k` above 0: the network learns on
its own features too, as drafting will meet them, without a gradient from pass to pass. The target
runs frozen in the same process. Order of the file, as in every trainer: the module, the objective,
set-up. Read next: `drafters/eagle/net.py`, the network; `losses/chunked.py`; `eagle3.py`.

Shapes: R rows, S tokens of a row, P positions that count over all passes, C positions of a chunk,
V vocabulary, K likeliest tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.rows.prepare import Prepared
from ..decoding.target.backbone import Backbone
from ..drafters.eagle.net import EagleNet
from ..drafters.projection import check_plain_logits
from .config import Eagle3Config, EagleConfig, ModelConfig, ObjectiveConfig
from .distill import check_terms
from .loop.loop import Outcome
from .loop.objective import Batch
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss, SharedTeacher, Teacher
from .losses.divergences import top_k_cross_entropy
from .losses.mix import Mix
from .losses.pace import anchors_of, geometric, paced
from .losses.soft_cross_entropy import soft_cross_entropy
from .student.warm_start import warm_started
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Given, Save, run_for_target, saver

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TeacherOutput(NamedTuple):
    """What the target says about a batch, all [R, S, H]."""

    features_RSH: Tensor
    """f_t, what the target's output projection reads."""
    embeds_RSH: Tensor
    """Embedding of the token behind, x_{t+1}; garbage at the end of a row."""


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

    def __call__(self, draft_CV: Tensor, target_CV: Tensor | None, place_C2: Tensor) -> dict[str, Tensor]:
        """`place_C2`: label and pass of every position."""
        if target_CV is None:
            raise ValueError("EAGLE learns from the target's logits")
        label_C, pass_C = place_C2.unbind(-1)
        p_CV = target_CV.softmax(-1)
        ce_C, alpha_C, best_C = soft_cross_entropy(draft_CV, p_CV)
        loss_C = self.ce * ce_C
        if self.top_k:
            log_q_CV = draft_CV.log_softmax(-1)
            loss_C = loss_C + self.top_k * top_k_cross_entropy(p_CV, log_q_CV, self.tokens)
        added: dict[str, Tensor] = {}
        if self.mix.asked:
            distributions = self.mix.distributions(draft_CV, self.mix.soften(target_CV))
            added = self.mix.terms(distributions, draft_CV, label_C)
            loss_C = loss_C + self.mix.total(added)
        # an `argmax` takes eight times as long as an `amax` on a CPU
        agreement_C = target_CV.gather(-1, best_C[:, None])[:, 0] == target_CV.amax(-1)
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


def of_first(added: Mapping[str, Tensor], first_C: Tensor) -> dict[str, Tensor]:
    """Terms of a mix as they are reported beside a family's own `ce`: those of the first pass."""
    names = {"ce": "text_ce"}
    return {names.get(name, name): term.detach() * first_C for name, term in added.items()}


def counted(batch: Batch, ahead: int) -> Tensor:
    """Positions t whose output is compared: x_{t + ahead} is a label of t's own document.

    bool [R, S - ahead]. EAGLE's output at t has seen x_{t+1} and speaks of x_{t+2}: `ahead` is 2.
    """
    documents_RS = batch["documents"]
    same_RX = documents_RS[:, ahead:] == documents_RS[:, :-ahead]
    return batch["loss_mask"][:, ahead:] & same_RX


class Compared(NamedTuple):
    """What a network says where it counts, over all passes, and what the target says there."""

    guess_PH: Tensor
    at_P: Tensor
    """int64: the number of the target's state, counted through rows."""
    place_P2: Tensor
    """int64: the label, x_{t+2+j}, and the pass j, from 0."""


def compared(outputs: Sequence[Tensor], batch: Batch) -> Compared:
    """Pair the outputs of `PairNet.unroll` with the target's states that they stand for.

    Pass j at t has seen x_{t+1+j}: it stands for the target's state there, and counts where the
    token behind is a label. All passes go through the head together, for one gradient of it.
    """
    guess, at, place = [], [], []
    S = batch["input_ids"].shape[1]
    for j, out_RSH in enumerate(outputs):
        counts_RX = counted(batch, 2 + j)
        guess.append(out_RSH[:, : -(2 + j)][counts_RX])
        at.append(anchors_of(counts_RX, S) + 1 + j)
        label_P = batch["input_ids"][:, 2 + j :][counts_RX]
        place.append(torch.stack([label_P, torch.full_like(label_P, j)], 1))
    return Compared(torch.cat(guess), torch.cat(at), torch.cat(place))


def in_text_order(
    at_P: Tensor, hidden_PH: Tensor, place_P2: Tensor, share_P: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same by number of the target's state: passes at one position come together."""
    order_P = at_P.argsort(stable=True)
    share_P = None if share_P is None else share_P[order_P]
    return at_P[order_P], hidden_PH[order_P], place_P2[order_P], share_P


def shares(
    place_P2: Tensor,
    hidden_PH: Tensor,
    head: ChunkedLoss,
    batch: Batch,
    config: EagleConfig | Eagle3Config,
    objective: ObjectiveConfig,
) -> Tensor | None:
    """How much every position of `compared` counts, fp32 [P]; None where all count alike.

    D-PACE asks first what the draft says of each label, a chunk of logits at a time.
    """
    label_P, pass_P = place_P2.unbind(-1)
    if objective.positions == "geometric":
        return geometric(pass_P, config.decay)
    S = batch["input_ids"].shape[1]
    anchors = [anchors_of(counted(batch, 2 + j), S) for j in range(config.passes)]
    said_P, _ = head(hidden_PH, label_P, only_label_q=True)
    said = said_P.split([len(anchor_P) for anchor_P in anchors])
    return torch.cat(paced(said, anchors, batch["input_ids"].numel(), objective.pace_floor))


def per_label(terms: dict[str, Tensor], pass_P: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Terms of a pass grown as if it spoke of every label, which is what the loop divides by.

    Pass j has nothing to say of the first j + 2 tokens of a document. Names ending in _j are of the
    j-th pass, counted from 1, the others of the first; `loss` is of all passes and stays.
    """
    labels = batch["loss_mask"].sum()

    def share(name: str) -> Tensor:
        number = name.rpartition("_")[2]
        said = (pass_P == (int(number) - 1 if number.isdecimal() else 0)).sum()
        return labels / said.clamp_min(1)

    return {name: term if name == "loss" else term * share(name) for name, term in terms.items()}


class EagleStudent(nn.Module):
    """The network and its loss: SmoothL1 of the features, and the distributions' soft cross-entropy."""

    def __init__(self, draft: EagleNet, head: nn.Linear, config: EagleConfig, objective: ObjectiveConfig) -> None:
        super().__init__()
        self.draft, self._config, self._objective = draft, config, objective
        mix = Mix.of(objective, kl=0.0)
        loss = DistributionLoss(config.ce, config.top_k, config.top_k_tokens, config.passes, mix)
        # in a tuple it is no part of this module: the head is the target's, and what wraps,
        # shards or saves this module must not touch it
        self._frozen = (ChunkedLoss(head, loss, chunk=objective.chunk),)

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = self.draft.unroll(
            self._noisy(teacher_output.features_RSH),
            teacher_output.embeds_RSH,
            batch["positions"],
            batch["documents"],
            self._config.passes,
            detach=True,
        )
        guess_PH, at_P, place_P2 = compared(outputs, batch)
        true_PH = teacher_output.features_RSH.flatten(0, 1)[at_P]
        feature_P = F.smooth_l1_loss(guess_PH.float(), true_PH.float(), reduction="none").mean(-1)
        (head,) = self._frozen
        share_P = shares(place_P2, guess_PH, head, batch, self._config, self._objective)
        distributions, terms = head(*self._in_order(guess_PH, place_P2, at_P, share_P, teacher_output))
        counted_P = feature_P if share_P is None else feature_P * share_P
        loss = self._config.feature * counted_P.sum() + distributions
        if not terms:
            return loss, {}
        pass_P = place_P2[:, 1]
        terms |= {"loss": loss.detach(), "feature": feature_P.detach()[pass_P == 0].sum()}
        return loss, per_label(terms, pass_P, batch)

    def _in_order(
        self, guess_PH: Tensor, place_P2: Tensor, at_P: Tensor, share_P: Tensor | None, teacher_output: TeacherOutput
    ) -> tuple[Tensor, Tensor, Teacher, Tensor | None]:
        """What the head reads, in the order of the text, and a target that is asked once."""
        (head,) = self._frozen
        states_NH = teacher_output.features_RSH.flatten(0, 1)
        if self._config.passes == 1:  # in order as it is
            return guess_PH, place_P2, Teacher(states_NH[at_P], head.weight), share_P
        at_P, guess_PH, place_P2, share_P = in_text_order(at_P, guess_PH, place_P2, share_P)
        return guess_PH, place_P2, SharedTeacher.of(states_NH, head.weight, at_P), share_P

    def _noisy(self, features_RSH: Tensor) -> Tensor:
        """Features shaken by uniform noise, so that guessed ones are no surprise in decoding."""
        if not (self.training and self._config.noise):
            return features_RSH
        return features_RSH + (2 * torch.rand_like(features_RSH) - 1) * self._config.noise


class EagleObjective:
    """Trains `draft` to foresee the features of the frozen `target`."""

    def __init__(
        self, draft: EagleNet, target: PreTrainedModel, config: EagleConfig, objective: ObjectiveConfig, save: Save
    ) -> None:
        head: Any = target.get_output_embeddings()
        self.module: nn.Module = EagleStudent(draft, head, config, objective)
        self._draft, self._target, self._save = draft, target, save
        self.features: FeatureSource = OnlineFeatures(target)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's features and the embeddings of the tokens behind them."""
        (features_RSH,) = self.features(batch)
        embed: Any = self._target.get_input_embeddings()
        return TeacherOutput(features_RSH, embed(batch["input_ids"].roll(-1, 1)))

    def export(self, folder: Path) -> None:
        """A drafter checkpoint, as `drafters/` writes and reads it."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def build(config: EagleConfig, objective: ObjectiveConfig, target: PreTrainedModel, save: Save) -> EagleObjective:
    """A fresh network for `target`, which is frozen here.

    Raises:
        RequestError: nothing would be learnt, or the target's logits are more than a projection.
    """
    check_objective(config, objective)
    check_plain_logits(target)
    target.requires_grad_(False).eval()
    net = EagleNet.for_target(target)
    return EagleObjective(net, target, config, objective, save)


def check_objective(config: EagleConfig, objective: ObjectiveConfig) -> None:
    """Raise RequestError where both sections together teach nothing; see `check_terms`."""
    own = {f"eagle.{name}": getattr(config, name) for name in ("feature", "ce", "top_k")}
    check_terms(objective, own=own, places=config.passes)


def run(*, eagle: EagleConfig, objective: ObjectiveConfig, model: ModelConfig, **given: Unpack[Given]) -> Outcome:
    """Train a drafter into `out/drafter`; terms of `objective` are added to those of `eagle`.

    It is fresh, or the one that `model.start_from` names: HASS behind EAGLE-1.
    """

    def make(target: Backbone, _rows: Prepared) -> EagleObjective:
        goal = build(eagle, objective, target.model, saver(target, "eagle"))
        return warm_started(goal, model, target)

    return run_for_target(make, given)
