"""Train an EAGLE-3 drafter: fused hidden states in, several passes over its own outputs.

Li et al. 2025 (arXiv 2503.01840): no loss on features, only on laws, and training sees what
drafting will see. The target runs frozen in the same process. Order of the file, as in every
trainer: the module, the objective, set-up. Read next: `drafters/eagle_net3.py`, the network;
`eagle.py`, its predecessor.

Shapes: R rows, S tokens of a row, P positions that count over all passes, C positions of a chunk,
U tokens of the draft vocabulary, V of the target's, H hidden size, F numbers of the fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from ..data.prepare import Prepared
from ..data.rows import PackedRows
from ..decoding.backbone import Backbone
from ..drafters.eagle_net3 import Eagle3Net, Eagle3Shape, fused_layers
from ..errors import RequestError
from .config import Eagle3Config, ObjectiveConfig
from .eagle import compared, refuse_biased_head
from .frozen import Given, Save, run_for_target, saver
from .loop import Outcome
from .losses import ChunkedLoss, Teacher
from .objective import Batch, document_mask
from .sharding import standalone

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Lesson3(NamedTuple):
    """What the target says about a batch."""

    features_RSF: Tensor
    """The hidden states that are fused, side by side."""
    embeds_RSH: Tensor
    """Embedding of the token behind, x_{t+1}; garbage at the end of a row."""
    hidden_RSH: Tensor
    """What the target's output projection reads."""
    head_VH: Tensor
    """Its weight."""


class WholeTeacher(Teacher):
    """The target's logits over its whole vocabulary, however small the draft's is."""

    def logits(self, part: slice, _vocabulary: int) -> Tensor:
        """fp32 logits [C, V] of some positions."""
        return super().logits(part, len(self.weight_VH))


@dataclass(frozen=True)
class DraftVocabularyLoss:
    """- `decay`^j sum_u p~(u) log q(u) for pass j, p~ the target's law on the draft vocabulary.

    p~ is renormalised. As in the official code, positions at which the target's likeliest token
    cannot be drafted do not count. Reported: `alpha`, sum min(p, q) with p as it is, and
    `agreement` of the argmax, of the first pass; `alpha_j` of the j-th draft.
    """

    net: Eagle3Net
    decay: float
    passes: int

    def __call__(
        self, draft_CU: Tensor, target_CV: Tensor | None, pass_C: Tensor
    ) -> dict[str, Tensor]:
        """`pass_C`: which pass a position belongs to, in the place of a label."""
        if target_CV is None:
            raise ValueError("the loss of EAGLE-3 needs the target's logits")
        ids_U = self.net.ids_U
        best_C = target_CV.argmax(-1)
        log_q_CU = draft_CU.log_softmax(-1)
        own_CU = target_CV[:, ids_U]
        ce_C = -(own_CU.softmax(-1) * log_q_CU).nan_to_num(0.0).sum(-1) * self.net.t2d[best_C]
        with torch.no_grad():
            p_CU = (own_CU - target_CV.logsumexp(-1, keepdim=True)).exp()
            alpha_C = torch.minimum(p_CU, log_q_CU.exp()).sum(-1)
            agreement_C = (ids_U[draft_CU.argmax(-1)] == best_C) * (pass_C == 0)
        alphas = {f"alpha_{j + 1}": alpha_C * (pass_C == j) for j in range(1, self.passes)}
        return {
            "loss": ce_C * self.decay**pass_C, "ce": ce_C.detach() * (pass_C == 0),
            "alpha": alpha_C * (pass_C == 0), "agreement": agreement_C.float(), **alphas,
        }  # fmt: skip


class Eagle3Student(nn.Module):
    """The network, unrolled over its own outputs, and the loss of every pass."""

    def __init__(self, draft: Eagle3Net, config: Eagle3Config, *, chunk: int) -> None:
        super().__init__()
        self.draft, self._passes = draft, config.passes
        loss = DraftVocabularyLoss(draft, config.decay, config.passes)
        self.head = ChunkedLoss(draft.lm_head, loss, chunk=chunk)

    def forward(self, batch: Batch, lesson: Lesson3) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = self.draft.unroll(
            self.draft.fuse(lesson.features_RSF), lesson.embeds_RSH, batch["positions"],
            document_mask(batch["documents"]), self._passes,
        )  # fmt: skip
        guess_PH, true_PH, pass_P = compared(outputs, lesson.hidden_RSH, batch)
        teacher = WholeTeacher(true_PH, lesson.head_VH)
        return self.head(self.draft.norm(guess_PH), pass_P, teacher)


class Eagle3Objective:
    """Trains `draft` to have the law of the frozen `target` along its own drafts."""

    def __init__(
        self, draft: Eagle3Net, target: PreTrainedModel, config: Eagle3Config, save: Save, *,
        chunk: int,
    ) -> None:  # fmt: skip
        self.module: nn.Module = Eagle3Student(draft, config, chunk=chunk)
        self._draft, self._target, self._save = draft, target, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Lesson3:
        """The target's hidden states and the embeddings of the tokens behind them."""
        target: Any = self._target
        device = batch["input_ids"].device
        if target.device != device:
            target.to(device)
        states = target.get_decoder()(
            input_ids=batch["input_ids"], attention_mask=document_mask(batch["documents"]),
            position_ids=batch["positions"], use_cache=False, output_hidden_states=True,
        ).hidden_states  # fmt: skip
        features_RSF = torch.cat([states[layer] for layer in self._draft.config.layers], -1)
        embeds_RSH = target.get_input_embeddings()(batch["input_ids"].roll(-1, 1))
        head_VH = target.get_output_embeddings().weight
        return Lesson3(features_RSF, embeds_RSH, states[-1], head_VH)

    def export(self, folder: Path) -> None:
        """A drafter checkpoint, as `drafters/` writes and reads it."""
        self._save(standalone(self._draft), folder)

    def draft(self) -> nn.Module:
        return self._draft


def build(
    config: Eagle3Config, target: PreTrainedModel, ids: Sequence[int], save: Save, *,
    chunk: int = 256,
) -> Eagle3Objective:  # fmt: skip
    """A fresh network for `target`, which is frozen here.

    Its head begins as the target's rows of the draft vocabulary `ids`, ascending target ids.
    """
    refuse_biased_head(target)
    target.requires_grad_(False).eval()
    head: Any = target.get_output_embeddings()
    shape = Eagle3Shape.of(
        target.config, layers=chosen_layers(config, target), vocabulary=len(head.weight),
        draft_vocabulary=len(ids),
    )  # fmt: skip
    draft = Eagle3Net(shape, ids)
    with torch.no_grad():
        draft.lm_head.weight.copy_(head.weight[torch.tensor(list(ids), device=head.weight.device)])
    return Eagle3Objective(draft, target, config, save, chunk=chunk)


def chosen_layers(config: Eagle3Config, target: PreTrainedModel) -> tuple[int, ...]:
    """The hidden states to fuse, the recipe's or those that serving engines take."""
    count = int(target.config.get_text_config(decoder=True).num_hidden_layers)
    layers = config.layers or fused_layers(count)
    if not all(0 <= layer <= count for layer in layers):
        raise RequestError(
            f"eagle3.layers is {list(layers)}; expected hidden states from 0 (the embedding) to "
            f"{count} (the last layer, behind its norm)"
        )
    return layers


def frequent_tokens(rows: PackedRows, size: int) -> list[int]:
    """The `size` most frequent tokens among the labels, ascending; of equals the lower id first.

    What is not among the labels at all fills up, lower ids first, so that there are always `size`.
    """
    counts_V = np.bincount(rows.ids_RS[rows.in_loss_RS], minlength=size)
    order = np.argsort(-counts_V, kind="stable")
    return sorted(int(token) for token in order[:size])


def run(*, eagle3: Eagle3Config, objective: ObjectiveConfig, **given: Unpack[Given]) -> Outcome:
    """Train a drafter into `out/drafter`. Of `objective`, `chunk` alone is read."""

    def make(target: Backbone, rows: Prepared) -> Eagle3Objective:
        ids = frequent_tokens(rows.train, min(eagle3.vocabulary, target.vocabulary))
        return build(eagle3, target.model, ids, saver(target, "eagle3"), chunk=objective.chunk)

    return run_for_target(make, given)
