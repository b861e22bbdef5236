"""How far what decodes is from the original target: its distribution and its loss on held-out text.

Methods such as Medusa-2 train the target together with its drafter. What decodes, and what the
audit compares with, is then the tuned target; how far that one is from the original is another
question, answered here (Cai et al. 2024, section 2.2.2: what L_LM is there for). The same holds for a target
whose weights were rounded when it was loaded.
Read next: `../report/report.py`, which shows them; `trainers/teacher/tuned.py`, which moves targets.

Shapes: P labelled tokens of a document, S all its tokens, C of a chunk, N hidden states of a token, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.rows.packed import PackedRows
from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.hidden_states import LAST, HiddenStates, decoder_of, layer_count, layers_of
from ...drafters.identity import TargetIdentity
from ...drafters.projection import Projection
from ...errors import RequestError
from .metrics import Interval, ratio

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
    states: dict[int, float]
    """Distance of a hidden state as a share of its length, by its number; the mean over tokens."""
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
            "states": {str(number): far for number, far in self.states.items()},
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
    numbers = _read_numbers(original)
    # of each row the five sums over its labels, then its tokens and the sums of each state's distance
    sums_RX = np.stack([_row_sums(original, tuned, rows, int(row), numbers) for row in chosen])
    labels_R, far_X = sums_RX[:, 0], sums_RX.sum(0)
    kl, before, after, same = (ratio(sums_RX[:, at], labels_R, seed=seed) for at in (1, 2, 3, 4))
    depth = layer_count(original.model)
    states = {depth if n == LAST else n: float(far_X[6 + at] / far_X[5]) for at, n in enumerate(numbers)}
    return Drift(TargetIdentity.of(original).name, int(labels_R.sum()), kl, before, after, same, states, change)


def _read_numbers(target: Backbone) -> tuple[int, ...]:
    """The states that drafters read by default: an early, a middle and a late one, and the last."""
    decoder, depth = decoder_of(target.model), layer_count(target.model)
    try:
        layers_of(decoder, depth)
    except RequestError:  # nothing can learn from the states between them there
        return (LAST,)
    return (*sorted({min(2, depth - 1), depth // 2, max(depth - 3, 0)}), LAST)


def _row_sums(original: Backbone, tuned: Backbone, rows: PackedRows, row: int, numbers: Sequence[int]) -> np.ndarray:
    """Sums over a row: labels, their KL, both losses and equal argmax; tokens, and their states' distances; fp64."""
    total_X = torch.zeros(6 + len(numbers), dtype=torch.float64)
    for ids_S, counts_S in _documents(rows, row):
        label_P = ids_S[1:][counts_S[1:]].to(tuned.device)
        total_X[0] += len(label_P)
        states = [_states(each, ids_S, numbers) for each in (original, tuned)]
        total_X[5] += len(ids_S)
        total_X[6:] += _distances(*states)
        hidden = [each[-1][:-1][counts_S[1:]] for each in states]
        for at in range(0, len(label_P), _CHUNK):
            part = slice(at, at + _CHUNK)
            p_CV, q_CV = (
                _log_probs(each, hidden_PH[part]) for each, hidden_PH in zip((original, tuned), hidden, strict=True)
            )
            total_X[1:5] += _chunk_sums(p_CV, q_CV.to(p_CV.device), label_P[part]).cpu()
    return total_X.numpy()


def _documents(rows: PackedRows, row: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids of each document of a packed row, and which of them count as labels, [S] each."""
    batch = {name: tensor[0] for name, tensor in rows.batch([row]).items()}
    for number in batch["documents"].unique():
        here_S = batch["documents"] == number
        if number >= 0 and bool(batch["loss_mask"][here_S].any()):
            yield batch["input_ids"][here_S], batch["loss_mask"][here_S]


def _states(target: Backbone, ids_S: Tensor, numbers: Sequence[int]) -> tuple[Tensor, ...]:
    """Some hidden states of a document, [S, H] each; the last one is what the output projection reads."""
    decoder = decoder_of(target.model)
    taken = HiddenStates(numbers, layer_count(target.model))
    with taken.taken_from(decoder):
        decoder(input_ids=ids_S[None].to(target.device), use_cache=False)
    return tuple(state_1SH[0] for state_1SH in taken.in_order)


def _distances(own: Sequence[Tensor], moved: Sequence[Tensor]) -> Tensor:
    """Over the tokens, the sum of each state's distance as a share of its length, fp64 [N]."""
    far = []
    for own_SH, moved_SH in zip(own, moved, strict=True):
        own_SH = own_SH.double()
        gap_SH = moved_SH.to(own_SH.device).double() - own_SH
        far.append((gap_SH.norm(dim=-1) / own_SH.norm(dim=-1).clamp_min(1e-9)).sum().cpu())
    return torch.stack(far)


def _log_probs(target: Backbone, hidden_CH: Tensor) -> Tensor:
    """Log-probabilities of the next token, fp32 [C, V]."""
    return Projection.of(target.model).logits(hidden_CH).log_softmax(-1)


def _chunk_sums(p_CV: Tensor, q_CV: Tensor, label_C: Tensor) -> Tensor:
    """Sums of KL(p || q), of both cross-entropies and of equal argmax, fp64 [4]; given as logarithms."""
    kl = F.kl_div(q_CV, p_CV, reduction="sum", log_target=True)
    losses = [F.nll_loss(each_CV, label_C.to(each_CV.device), reduction="sum") for each_CV in (p_CV, q_CV)]
    same = (p_CV.argmax(-1) == q_CV.argmax(-1)).sum().to(kl.dtype)
    return torch.stack([kl, *losses, same]).double()
