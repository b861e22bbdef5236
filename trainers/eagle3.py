"""Train an EAGLE-3 drafter: fused hidden states in, several passes over its own outputs.

Li et al. 2025 (arXiv 2503.01840): no loss on features, only on distributions, and training sees what
drafting will see. The target runs frozen in the same process. Order of the file, as in every
trainer: what it requires and what is trained, the loss, the teacher's side, the run. Read next:
`drafters/eagle/net3.py`, the network; `eagle_common.py`, what is compared.

Shapes: R rows, S tokens of a row, P positions that count over all passes, C positions of a chunk,
U tokens of the draft vocabulary, V of the target's, H hidden size, F numbers of the fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..data.rows.packed import PackedRows
from ..data.rows.prepare import Prepared
from ..decoding.target.backbone import Backbone
from ..decoding.target.hidden_states import LAST
from ..drafters.eagle.net3 import Eagle3Net, fused_layers
from ..drafters.projection import Projection
from ..errors import RequestError
from .eagle_common import compared, in_text_order, of_first, per_label, shares
from .loop.loop import Outcome
from .loop.objective import Batch
from .loop.sharding import standalone
from .losses.chunked import ChunkedLoss, SharedTeacher
from .losses.mix import RENORMALISED, UNKNOWN, Mix
from .losses.soft_cross_entropy import soft_cross_entropy
from .losses.terms import check_terms
from .method_config import Eagle3Config
from .pruning.sizes import check_not_pruned
from .sections import MakeProbe, Run, Sections
from .student.warm_start import warm_started
from .teacher.features import FeatureSource, OnlineFeatures
from .teacher.frozen import Save, check_teacher, freeze, run_for_target, saver
from .teacher.output import TeacherOutput, next_embeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recipe(recipe: Sections) -> None:
    """Raise RequestError where `eagle3` and `objective` together teach nothing."""
    config = recipe.eagle3
    check_terms(recipe.objective, own={"eagle3.ce": config.ce}, positions=config.passes)
    check_not_pruned(recipe.model)


def check_target(recipe: Sections, target: PreTrainedModel) -> None:
    """Raise RequestError for logits that training cannot make, rows beyond the context, or
    hidden states that the target does not have."""
    check_teacher(recipe, target)
    chosen_layers(recipe.eagle3, target)


def student(recipe: Sections, target: PreTrainedModel, ids: Sequence[int] | None = None) -> Eagle3Net:
    """An untrained network for `target`; on the meta device its shapes alone.

    Its head begins as the target's rows of the draft vocabulary.

    Args:
        ids: the draft vocabulary, ascending target ids; None where its size alone matters.
    """
    config = recipe.eagle3
    return Eagle3Net.for_target(
        target,
        layers=chosen_layers(config, target),
        ids=range(draft_vocabulary(config, target)) if ids is None else ids,
        feature_norms=config.feature_norms,
    )


def draft_vocabulary(config: Eagle3Config, target: PreTrainedModel) -> int:
    """How many tokens can be drafted."""
    head: Any = target.get_output_embeddings()
    return min(config.vocabulary, len(head.weight))


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


class TargetLogits(NamedTuple):
    """The part of the target's logits at some positions that the loss needs; fp32."""

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
    """A teacher whose logits over the whole vocabulary are cut to what the draft vocabulary needs.

    Those logits cost most here: seven passes would make them seven times.
    """

    ids_U: Tensor
    mix: Mix

    def select(self, logits_XV: Tensor, _vocabulary: int) -> TargetLogits:
        return TargetLogits.of(logits_XV, self.ids_U, self.mix)


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

    def __call__(self, draft_CU: Tensor, target: TargetLogits, label_C2: Tensor) -> dict[str, Tensor]:
        """`label_C2`: label, as its index in the draft vocabulary, and pass of every position."""
        label_C, pass_C = label_C2.unbind(-1)
        drafted_C = self.net.t2d[target.best_C]
        ce_C, _, own_best_C = soft_cross_entropy(draft_CU, target.own_CU.softmax(-1))
        ce_C = ce_C * drafted_C
        loss_C = self.ce * ce_C
        added: dict[str, Tensor] = {}
        if self.mix.asked:
            distributions = self.mix.distributions(draft_CU, target.soft_CU, target.soft_normal_C)
            terms = self.mix.terms(distributions, draft_CU, label_C)
            added = {name: term * drafted_C if name in RENORMALISED else term for name, term in terms.items()}
            loss_C = loss_C + self.mix.total(added)
        with torch.no_grad():
            p_CU = (target.own_CU - target.normal_C[:, None]).exp()
            alpha_C = torch.minimum(p_CU, draft_CU.softmax(-1)).sum(-1)
            agreement_C = (self.net.ids_U[own_best_C] == target.best_C) * (pass_C == 0)
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

    def __init__(self, draft: Eagle3Net, target: Projection, recipe: Sections) -> None:
        super().__init__()
        config = recipe.eagle3
        self.draft, self._config, self._objective = draft, config, recipe.objective
        self._mix = Mix.of(recipe.objective, kl=0.0)
        loss = DraftVocabularyLoss(draft, config.passes, config.ce, self._mix)
        self.head = ChunkedLoss(draft.lm_head, loss, chunk=recipe.objective.chunk)
        # in a tuple it is no part of this module: the projection is the target's
        self._target = (target,)

    def forward(self, batch: Batch, teacher_output: TeacherOutput) -> tuple[Tensor, dict[str, Tensor]]:
        fused_RSF, embeds_RSH = teacher_output.fused_RSF, teacher_output.embeds_RSH
        assert fused_RSF is not None  # `Eagle3Objective.prepare` makes both
        assert embeds_RSH is not None
        outputs = self.draft.unroll(
            self.draft.fuse(fused_RSF),
            embeds_RSH,
            batch["positions"],
            batch["documents"],
            self._config.passes,
            recompute=self._config.recompute,
        )
        guess_PH, at_P, label_P2 = compared(outputs, batch)
        label_P, pass_P = label_P2.unbind(-1)
        label_P2 = torch.stack([self._drafted(label_P), pass_P], 1)
        hidden_PH = self.draft.head_input(guess_PH)
        share_P = shares(label_P2, hidden_PH, self.head, batch, self._config, self._objective)
        at_P, hidden_PH, label_P2, share_P = in_text_order(at_P, hidden_PH, label_P2, share_P)
        (target,) = self._target
        teacher = WholeTeacher.of(
            teacher_output.hidden_RSH.flatten(0, 1), target, at_P, ids_U=self.draft.ids_U, mix=self._mix
        )
        loss, terms = self.head(hidden_PH, label_P2, teacher, share_P)
        if not terms:
            return loss, {}
        return loss, per_label(terms | {"loss": loss.detach()}, pass_P, batch)

    def _drafted(self, label_P: Tensor) -> Tensor:
        """Target ids as indices into the draft vocabulary, UNKNOWN where they cannot be drafted."""
        ids_U = self.draft.ids_U
        index_P = torch.searchsorted(ids_U, label_P.contiguous()).clamp_max(len(ids_U) - 1)
        return torch.where(ids_U[index_P] == label_P, index_P, UNKNOWN)


class Eagle3Objective:
    """Trains `draft` to have the distribution of the frozen `target` along its own drafts."""

    def __init__(self, recipe: Sections, draft: Eagle3Net, target: PreTrainedModel, save: Save) -> None:
        self.module: nn.Module = Eagle3Student(draft, Projection.of(freeze(target)), recipe)
        self.features: FeatureSource = OnlineFeatures(target, (*draft.config.layers, LAST))
        self._draft, self._target, self._save = draft, target, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> TeacherOutput:
        """The target's hidden states and the embeddings of the tokens behind them."""
        *fused, hidden_RSH = self.features(batch)
        return TeacherOutput(hidden_RSH, next_embeds(self._target, batch), torch.cat(fused, -1))

    def export(self, folder: Path) -> None:
        """Write a drafter folder."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def run(recipe: Sections, out: Path, resume: str = "auto", make_probe: MakeProbe | None = None) -> Outcome:
    """Train a drafter into `out/drafter`; terms of `objective` are added to those of `eagle3`.

    It is fresh, or the one that `model.start_from` names, with that one's draft vocabulary.
    """
    check_recipe(recipe)

    def build(target: Backbone, rows: Prepared) -> Eagle3Objective:
        ids = frequent_tokens(rows.train, min(recipe.eagle3.vocabulary, target.vocabulary))
        net = student(recipe, target.model, ids)
        objective = Eagle3Objective(recipe, net, target.model, saver(target, "eagle3"))
        return warm_started(objective, recipe, target)

    return run_for_target(build, Run(recipe, out, resume, make_probe), check_target=check_target)
