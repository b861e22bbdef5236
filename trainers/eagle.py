"""Train an EAGLE drafter: guess the target's next feature, and through its head the next law.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077, section 4.2); EAGLE-2 decodes with the same weights.
HASS (Zhang et al. 2025, 2408.15766) is `passes` above 1 and `top_k` above 0: the network learns on
its own features too, as drafting will meet them, without a gradient from pass to pass. The target
runs frozen in the same process. Order of the file, as in every trainer: the module, the objective,
set-up. Read next: `drafters/eagle_net.py`, the network; `losses.py`; `eagle3.py`.

Shapes: R rows, S tokens of a row, P positions that count over all passes, C positions of a chunk,
V vocabulary, K likeliest tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.prepare import Prepared
from ..decoding.backbone import Backbone
from ..drafters.eagle_layers import EagleShape
from ..drafters.eagle_net import EagleNet
from ..errors import RequestError
from .config import EagleConfig, ObjectiveConfig
from .frozen import Given, Save, run_for_target, saver
from .loop import Outcome
from .losses import ChunkedLoss, Teacher
from .objective import Batch, document_mask, hidden_states
from .sharding import standalone

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Lesson(NamedTuple):
    """What the target says about a batch, all [R, S, H]."""

    features_RSH: Tensor
    """f_t, what the target's output projection reads."""
    embeds_RSH: Tensor
    """Embedding of the token behind, x_{t+1}; garbage at the end of a row."""


@dataclass(frozen=True)
class LawLoss:
    """`ce` * - sum_v p(v) log q(v), p being the target's law; `top_k` * the same over its best.

    The second is HASS's: only the `tokens` likeliest, p not renormalised. Reported of
    the first pass: `ce`, `alpha`, sum_v min(p, q), and `agreement` of the argmax; of pass j the
    `alpha` of the j-th drafted token.
    """

    ce: float
    top_k: float
    tokens: int
    passes: int

    def __call__(
        self, draft_CV: Tensor, target_CV: Tensor | None, pass_C: Tensor
    ) -> dict[str, Tensor]:
        """`pass_C`: which pass a position belongs to, in the place of a label."""
        if target_CV is None:
            raise ValueError("EAGLE learns from the target's logits")
        p_CV, log_q_CV = target_CV.softmax(-1), draft_CV.log_softmax(-1)
        # a token that the head rules out has p = 0 and log q = -inf
        each_CV = -(p_CV * log_q_CV).nan_to_num(0.0)
        ce_C = each_CV.sum(-1)
        loss_C = self.ce * ce_C
        if self.top_k:
            best_CK = p_CV.topk(min(self.tokens, p_CV.shape[-1])).indices
            loss_C = loss_C + self.top_k * each_CV.gather(-1, best_CK).sum(-1)
        with torch.no_grad():
            alpha_C = torch.minimum(p_CV, log_q_CV.exp()).sum(-1)
            agreement_C = target_CV.argmax(-1) == draft_CV.argmax(-1)
        first_C = (pass_C == 0).float()
        alphas = {f"alpha_{j + 1}": alpha_C * (pass_C == j) for j in range(1, self.passes)}
        return {
            "loss": loss_C, "ce": ce_C.detach() * first_C, "alpha": alpha_C * first_C,
            "agreement": agreement_C * first_C, **alphas,
        }  # fmt: skip


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
    true_PH: Tensor
    pass_P: Tensor
    """int64, the pass, from 0."""


def compared(outputs: Sequence[Tensor], hidden_RSH: Tensor, batch: Batch) -> Compared:
    """Pair the outputs of `PairNet.unroll` with the target's states that they stand for.

    Pass j at t has seen x_{t+1+j}: it stands for the target's state there, and counts where the
    token behind is a label. All passes go through the head together, for one gradient of it.
    """
    guess, true, number = [], [], []
    for j, out_RSH in enumerate(outputs):
        counts_RX = counted(batch, 2 + j)
        guess.append(out_RSH[:, : -(2 + j)][counts_RX])
        true.append(hidden_RSH[:, 1 + j : -1][counts_RX])
        number.append(torch.full_like(guess[-1][:, 0], j, dtype=torch.long))
    return Compared(torch.cat(guess), torch.cat(true), torch.cat(number))


class EagleStudent(nn.Module):
    """The network and its loss: SmoothL1 of the features, and the laws' soft cross-entropy."""

    def __init__(
        self, draft: EagleNet, head: nn.Linear, config: EagleConfig, *, chunk: int
    ) -> None:
        super().__init__()
        self.draft, self._config = draft, config
        loss = LawLoss(config.ce, config.top_k, config.top_k_tokens, config.passes)
        # in a tuple it is no part of this module: the head is the target's, and what wraps,
        # shards or saves this module must not touch it
        self._frozen = (ChunkedLoss(head, loss, chunk=chunk),)

    def forward(self, batch: Batch, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = self.draft.unroll(
            self._noisy(lesson.features_RSH), lesson.embeds_RSH, batch["positions"],
            document_mask(batch["documents"]), self._config.passes, detach=True,
        )  # fmt: skip
        guess_PH, true_PH, pass_P = compared(outputs, lesson.features_RSH, batch)
        feature_P = F.smooth_l1_loss(guess_PH.float(), true_PH.float(), reduction="none").mean(-1)
        (head,) = self._frozen
        laws, terms = head(guess_PH, pass_P, Teacher(true_PH, head.weight))
        loss = self._config.feature * feature_P.sum() + laws
        if not terms:
            return loss, {}
        feature = feature_P.detach()[pass_P == 0].sum()
        return loss, {**terms, "loss": loss.detach(), "feature": feature}

    def _noisy(self, features_RSH: Tensor) -> Tensor:
        """Features shaken by uniform noise, so that guessed ones are no surprise in decoding."""
        if not (self.training and self._config.noise):
            return features_RSH
        return features_RSH + (2 * torch.rand_like(features_RSH) - 1) * self._config.noise


class EagleObjective:
    """Trains `draft` to foresee the features of the frozen `target`."""

    def __init__(
        self, draft: EagleNet, target: PreTrainedModel, config: EagleConfig, save: Save, *,
        chunk: int,
    ) -> None:  # fmt: skip
        head: Any = target.get_output_embeddings()
        self.module: nn.Module = EagleStudent(draft, head, config, chunk=chunk)
        self._draft, self._target, self._save = draft, target, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Lesson:
        """The target's features and the embeddings of the tokens behind them."""
        target: Any = self._target
        device = batch["input_ids"].device
        if target.device != device:
            target.to(device)
        embeds_RSH = target.get_input_embeddings()(batch["input_ids"].roll(-1, 1))
        return Lesson(hidden_states(target, batch), embeds_RSH)

    def export(self, folder: Path) -> None:
        """A drafter checkpoint, as `drafters/` writes and reads it."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def build(
    config: EagleConfig, target: PreTrainedModel, save: Save, *, chunk: int = 256
) -> EagleObjective:
    """A fresh network for `target`, which is frozen here.

    Raises:
        RequestError: every weight of the objective is zero, or the target's head has a bias.
    """
    if not (config.feature or config.ce or config.top_k):
        raise RequestError(
            "eagle.feature, eagle.ce and eagle.top_k are all 0: nothing would be learnt; set one"
        )
    refuse_biased_head(target)
    target.requires_grad_(False).eval()
    return EagleObjective(
        EagleNet(EagleShape.like(target.config)), target, config, save, chunk=chunk
    )


def refuse_biased_head(target: PreTrainedModel) -> None:
    """Raise RequestError where the chunked losses would leave a part of the head out."""
    head: Any = target.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise RequestError(
            f"the output projection of {type(target).__name__} has a bias, which the loss in "
            "chunks does not add; EAGLE can be trained for targets without one"
        )


def run(*, eagle: EagleConfig, objective: ObjectiveConfig, **given: Unpack[Given]) -> Outcome:
    """Train a drafter into `out/drafter`. Of `objective`, `chunk` alone is read."""

    def make(target: Backbone, _rows: Prepared) -> EagleObjective:
        return build(eagle, target.model, saver(target, "eagle"), chunk=objective.chunk)

    return run_for_target(make, given)
