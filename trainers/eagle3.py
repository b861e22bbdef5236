"""Train an EAGLE-3 drafter: fused hidden states in, several passes over its own outputs.

Li et al. 2025 (arXiv 2503.01840): no loss on features, only on distributions, and training sees what
drafting will see. The target runs frozen in the same process. Order of the file, as in every
trainer: the module, the objective, set-up. Read next: `drafters/eagle/net3.py`, the network;
`eagle.py`, its predecessor.

Shapes: R rows, S tokens of a row, P positions that count over all passes, C positions of a chunk,
U tokens of the draft vocabulary, V of the target's, H hidden size, F numbers of the fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from ..data.rows.packed import PackedRows
from ..data.rows.prepare import Prepared
from ..decoding.target.backbone import Backbone
from ..decoding.target.hidden_states import LAST
from ..drafters.eagle.net3 import Eagle3Net, fused_layers
from ..drafters.projection import check_plain_logits
from ..errors import RequestError
from .config import Eagle3Config, ModelConfig, ObjectiveConfig
from .distill import check_terms
from .eagle import compared, in_text_order, of_first, per_label, shares
from .loop.loop import Outcome
from .loop.objective import Batch
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss, SharedTeacher
from .losses.mix import RENORMALISED, UNKNOWN, Mix
from .losses.soft_cross_entropy import soft_cross_entropy
from .student.warm_start import warm_started
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Given, Save, run_for_target, saver

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Eagle3TeacherOutput(NamedTuple):
    """What the target says about a batch."""

    features_RSF: Tensor
    """The hidden states that are fused, side by side."""
    embeds_RSH: Tensor
    """Embedding of the token behind, x_{t+1}; garbage at the end of a row."""
    hidden_RSH: Tensor
    """What the target's output projection reads."""
    head_VH: Tensor
    """Its weight."""


class Said(NamedTuple):
    """What the target says at some positions, as far as the loss asks; fp32."""

    own_CU: Tensor
    """Its logits of the tokens that can be drafted."""
    normal_C: Tensor
    """Logarithm of what the logits of all tokens sum up to as weights."""
    soft_CU: Tensor
    soft_normal_C: Tensor
    """Both at the mix's temperature, of the logits that it leaves."""
    best_C: Tensor
    """Its likeliest token, which the draft may not have."""

    @classmethod
    def of(cls, target_CV: Tensor, ids_U: Tensor, mix: Mix) -> Self:
        """From its logits over its whole vocabulary."""
        best_C = target_CV.argmax(-1)
        own_CU, normal_C = target_CV[:, ids_U], target_CV.logsumexp(-1)
        if mix.as_it_is:
            return cls(own_CU, normal_C, own_CU, normal_C, best_C)
        soft_CV = mix.soften(target_CV)
        return cls(own_CU, normal_C, soft_CV[:, ids_U], soft_CV.logsumexp(-1), best_C)


@dataclass(frozen=True)
class WholeTeacher(SharedTeacher):
    """The target over its whole vocabulary, of which the loss hears what concerns the draft's.

    That distribution is what costs most here: seven passes would make it seven times.
    """

    ids_U: Tensor
    mix: Mix

    def select(self, logits_XV: Tensor, _vocabulary: int) -> Said:
        return Said.of(logits_XV, self.ids_U, self.mix)


@dataclass(frozen=True)
class DraftVocabularyLoss:
    """`ce` * - sum_u p~(u) log q(u), p~ the target's distribution on the draft vocabulary, and `mix`.

    p~ is renormalised. As in the official code, positions at which the target's likeliest token
    cannot be drafted do not count. The same holds for the terms of the mix that compare two distributions of
    the same tokens. Total variation and LK-alpha take p as it is, at every position: they say
    what is accepted, and mass outside never is. The text's own token counts where it can be
    drafted. Reported: `alpha`, sum min(p, q) with p as it is, `agreement` of the argmax and the
    terms of the mix, of the first pass (its cross-entropy as `text_ce`); `alpha_j` of the j-th
    draft.
    """

    net: Eagle3Net
    passes: int
    ce: float = 1.0
    mix: Mix = Mix()

    def __call__(self, draft_CU: Tensor, said: Said, place_C2: Tensor) -> dict[str, Tensor]:
        """`place_C2`: label, as its place in the draft vocabulary, and pass of every position."""
        label_C, pass_C = place_C2.unbind(-1)
        drafted_C = self.net.t2d[said.best_C]
        ce_C, _, own_best_C = soft_cross_entropy(draft_CU, said.own_CU.softmax(-1))
        ce_C = ce_C * drafted_C
        loss_C = self.ce * ce_C
        added: dict[str, Tensor] = {}
        if self.mix.asked:
            distributions = self.mix.distributions(draft_CU, said.soft_CU, said.soft_normal_C)
            found = self.mix.terms(distributions, draft_CU, label_C)
            added = {name: term * drafted_C if name in RENORMALISED else term for name, term in found.items()}
            loss_C = loss_C + self.mix.total(added)
        with torch.no_grad():
            p_CU = (said.own_CU - said.normal_C[:, None]).exp()
            alpha_C = torch.minimum(p_CU, draft_CU.softmax(-1)).sum(-1)
            agreement_C = (self.net.ids_U[own_best_C] == said.best_C) * (pass_C == 0)
        alphas = {f"alpha_{j + 1}": alpha_C * (pass_C == j) for j in range(1, self.passes)}
        return {
            "loss": loss_C,
            "ce": ce_C.detach() * (pass_C == 0),
            "alpha": alpha_C * (pass_C == 0),
            "agreement": agreement_C.float(),
            **alphas,
            **of_first(added, pass_C == 0),
        }


class Eagle3Student(nn.Module):
    """The network, unrolled over its own outputs, and the loss of every pass."""

    def __init__(self, draft: Eagle3Net, config: Eagle3Config, objective: ObjectiveConfig) -> None:
        super().__init__()
        self.draft, self._config, self._objective = draft, config, objective
        self._mix = Mix.of(objective, kl=0.0)
        loss = DraftVocabularyLoss(draft, config.passes, config.ce, self._mix)
        self.head = ChunkedLoss(draft.lm_head, loss, chunk=objective.chunk)

    def forward(self, batch: Batch, teacher_output: Eagle3TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = self.draft.unroll(
            self.draft.fuse(teacher_output.features_RSF),
            teacher_output.embeds_RSH,
            batch["positions"],
            batch["documents"],
            self._config.passes,
        )
        guess_PH, at_P, place_P2 = compared(outputs, batch)
        label_P, pass_P = place_P2.unbind(-1)
        place_P2 = torch.stack([self._drafted(label_P), pass_P], 1)
        hidden_PH = self.draft.head_input(guess_PH)
        share_P = shares(place_P2, hidden_PH, self.head, batch, self._config, self._objective)
        at_P, hidden_PH, place_P2, share_P = in_text_order(at_P, hidden_PH, place_P2, share_P)
        teacher = WholeTeacher.of(
            teacher_output.hidden_RSH.flatten(0, 1),
            teacher_output.head_VH,
            at_P,
            ids_U=self.draft.ids_U,
            mix=self._mix,
        )
        loss, terms = self.head(hidden_PH, place_P2, teacher, share_P)
        if not terms:
            return loss, {}
        return loss, per_label(terms | {"loss": loss.detach()}, pass_P, batch)

    def _drafted(self, label_P: Tensor) -> Tensor:
        """Target ids as places in the draft vocabulary, UNKNOWN where they cannot be drafted."""
        ids_U = self.draft.ids_U
        place_P = torch.searchsorted(ids_U, label_P.contiguous()).clamp_max(len(ids_U) - 1)
        return torch.where(ids_U[place_P] == label_P, place_P, UNKNOWN)


class Eagle3Objective:
    """Trains `draft` to have the distribution of the frozen `target` along its own drafts."""

    def __init__(
        self, draft: Eagle3Net, target: PreTrainedModel, config: Eagle3Config, objective: ObjectiveConfig, save: Save
    ) -> None:
        self.module: nn.Module = Eagle3Student(draft, config, objective)
        self._draft, self._target, self._save = draft, target, save
        self.features: FeatureSource = OnlineFeatures(target, (*draft.config.layers, LAST))

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Eagle3TeacherOutput:
        """The target's hidden states and the embeddings of the tokens behind them."""
        *fused, hidden_RSH = self.features(batch)
        target: Any = self._target
        embeds_RSH = target.get_input_embeddings()(batch["input_ids"].roll(-1, 1))
        head_VH = target.get_output_embeddings().weight
        return Eagle3TeacherOutput(torch.cat(fused, -1), embeds_RSH, hidden_RSH, head_VH)

    def export(self, folder: Path) -> None:
        """A drafter checkpoint, as `drafters/` writes and reads it."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def build(
    config: Eagle3Config, objective: ObjectiveConfig, target: PreTrainedModel, ids: Sequence[int], save: Save
) -> Eagle3Objective:
    """A fresh network for `target`, which is frozen here.

    Its head begins as the target's rows of the draft vocabulary `ids`, ascending target ids.

    Raises:
        RequestError: nothing would be learnt, or the target lacks a layer or has logits that are
            more than a projection.
    """
    check_objective(config, objective)
    check_plain_logits(target)
    target.requires_grad_(False).eval()
    layers = chosen_layers(config, target)
    draft = Eagle3Net.for_target(target, layers=layers, ids=ids, feature_norms=config.feature_norms)
    return Eagle3Objective(draft, target, config, objective, save)


def check_objective(config: Eagle3Config, objective: ObjectiveConfig) -> None:
    """Raise RequestError where both sections together teach nothing; see `check_terms`."""
    check_terms(objective, own={"eagle3.ce": config.ce}, places=config.passes)


def chosen_layers(config: Eagle3Config, target: PreTrainedModel) -> tuple[int, ...]:
    """The hidden states to fuse, the recipe's or those that serving engines take."""
    count = int(target.config.get_text_config(decoder=True).num_hidden_layers)
    layers = config.layers or fused_layers(count)
    if not all(0 <= layer <= count for layer in layers):
        raise RequestError(
            f"eagle3.layers is {list(layers)}; expected hidden states from 0 (the embedding) to "
            f"{count} (the last layer, behind its norm)"
        )
    if list(layers) != sorted(set(layers)):
        raise RequestError(
            f"eagle3.layers is {list(layers)}; expected three different hidden states, low to "
            "high: serving engines hand out each once and in this order"
        )
    return layers


def frequent_tokens(rows: PackedRows, size: int) -> list[int]:
    """The `size` most frequent tokens among the labels, ascending; of equals the lower id first.

    What is not among the labels at all fills up, lower ids first, so that there are always `size`.
    """
    counts_V = np.bincount(rows.ids_RS[rows.in_loss_RS], minlength=size)
    order = np.argsort(-counts_V, kind="stable")
    return sorted(int(token) for token in order[:size])


def run(*, eagle3: Eagle3Config, objective: ObjectiveConfig, model: ModelConfig, **given: Unpack[Given]) -> Outcome:
    """Train a drafter into `out/drafter`; terms of `objective` are added to those of `eagle3`.

    It is fresh, or the one that `model.start_from` names, with that one's draft vocabulary.
    """

    def make(target: Backbone, rows: Prepared) -> Eagle3Objective:
        ids = frequent_tokens(rows.train, min(eagle3.vocabulary, target.vocabulary))
        goal = build(eagle3, objective, target.model, ids, saver(target, "eagle3"))
        return warm_started(goal, model, target)

    return run_for_target(make, given)
