"""How far what decodes is from the original target: its distribution and its loss on held-out text.

Methods such as Medusa-2 train the target together with its drafter. What decodes, and what the
audit compares with, is then the tuned target; how far that one is from the original is another
question, answered here (Cai et al. 2024, section 2.2.2: what L_LM is there for). The same holds for a target
whose weights were rounded when it was loaded.
Read next: `../../report/report.py`, which shows them; `trainers/teacher/tuned.py`, which moves targets.

Shapes: P labelled tokens of a document, C of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....data.rows.packed import PackedRows
from ....decoding.target.backbone import Backbone
from ....decoding.target.hidden_states import decoder_of
from ....drafters.identity import TargetIdentity
from ....drafters.projection import Projection
from ..metrics import Interval, ratio

Change = Literal["tuned", "rounded"]
_CHUNK = 256  # positions whose full-vocabulary logits exist at the same time


@dataclass(frozen=True)
class Drift:
    """Distance of a tuned or quantised target from its original on held-out text, in nats per token."""

    original: str
    """The original's name."""
    tokens: int
    """Labels that were looked at."""
    kl: Interval
    """KL(p_original || p_tuned)."""
    loss_original: Interval
    loss_tuned: Interval
    same: Interval
    """Share of the labels for which both have the same most probable token."""
    change: Change = "tuned"

    def to_dict(self) -> dict[str, Any]:
        """As `target.drift` of `results.json`."""
        return {
            "original": self.original,
            "tokens": self.tokens,
            "kl": self.kl.to_list(),
            "loss_original": self.loss_original.to_list(),
            "loss_tuned": self.loss_tuned.to_list(),
            "same": self.same.to_list(),
            "change": self.change,
        }


@torch.no_grad()
def measure_drift(
    original: Backbone, tuned: Backbone, rows: PackedRows, *, count: int, seed: int = 0, change: Change = "tuned"
) -> Drift:
    """Read `count` of the held-out rows, chosen by `seed`, with both; intervals resample rows.

    Args:
        change: what made `tuned` of the original.
    """
    # packing puts the longest documents first, so the first rows are no sample
    chosen = np.random.default_rng(seed).permutation(len(rows))[:count]
    sums_R5 = np.stack([_row_sums(original, tuned, rows, int(row)) for row in chosen])
    labels_R = sums_R5[:, 0]
    kl, before, after, same = (ratio(sums_R5[:, at], labels_R, seed=seed) for at in (1, 2, 3, 4))
    return Drift(TargetIdentity.of(original).name, int(labels_R.sum()), kl, before, after, same, change)


def _row_sums(original: Backbone, tuned: Backbone, rows: PackedRows, row: int) -> np.ndarray:
    """Labels of a row, and over them the sums of KL, original loss, tuned loss and equal argmax; fp64 [5]."""
    total_5 = torch.zeros(5, dtype=torch.float64)
    for ids_S, counts_S in _documents(rows, row):
        label_P = ids_S[1:][counts_S[1:]].to(tuned.device)
        total_5[0] += len(label_P)
        hidden = [_states(each, ids_S)[:-1][counts_S[1:]] for each in (original, tuned)]
        for at in range(0, len(label_P), _CHUNK):
            part = slice(at, at + _CHUNK)
            p_CV, q_CV = (
                _log_probs(each, hidden_PH[part]) for each, hidden_PH in zip((original, tuned), hidden, strict=True)
            )
            total_5[1:] += _chunk_sums(p_CV, q_CV.to(p_CV.device), label_P[part]).cpu()
    return total_5.numpy()


def _documents(rows: PackedRows, row: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids of each document of a packed row, and which of them count as labels, [S] each."""
    batch = {name: tensor[0] for name, tensor in rows.batch([row]).items()}
    for number in batch["documents"].unique():
        here_S = batch["documents"] == number
        if number >= 0 and bool(batch["loss_mask"][here_S].any()):
            yield batch["input_ids"][here_S], batch["loss_mask"][here_S]


def _states(target: Backbone, ids_S: Tensor) -> Tensor:
    """What the output projection reads, [S, H]."""
    model: Any = target.model
    output = decoder_of(model)(input_ids=ids_S[None].to(target.device), use_cache=False)
    return output.last_hidden_state[0]


def _log_probs(target: Backbone, hidden_CH: Tensor) -> Tensor:
    """Log-probabilities of the next token, fp32 [C, V]."""
    return Projection.of(target.model).logits(hidden_CH).log_softmax(-1)


def _chunk_sums(p_CV: Tensor, q_CV: Tensor, label_C: Tensor) -> Tensor:
    """Sums of KL(p || q), of both cross-entropies and of equal argmax, fp64 [4]; given as logarithms."""
    kl = F.kl_div(q_CV, p_CV, reduction="sum", log_target=True)
    losses = [F.nll_loss(each_CV, label_C.to(each_CV.device), reduction="sum") for each_CV in (p_CV, q_CV)]
    same = (p_CV.argmax(-1) == q_CV.argmax(-1)).sum().to(kl.dtype)
    return torch.stack([kl, *losses, same]).double()
