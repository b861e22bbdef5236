"""Held-out rows, the target's distribution on them, and the exact acceptance of a draft there.

What a step of speculative decoding accepts in the mean is sum_v min(p, q); where both distributions
are at hand it needs no decoding. Read next: `acceptance.py`, which sums it up.

Shapes: P labelled positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from draftsmith.benchmarks.common.acceptance import Sums
from draftsmith.data.rows.packed import PackedRows
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.projection import Projection
from draftsmith.trainers.labels import labelled
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.packed.passes import hidden_states

_BATCH = 16


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows, what the target says behind their beginnings, and its distribution on both."""

    prompts: list[list[int]]
    batches: dict[str, list[Batch]]
    """`text`: the rows; `words`: the target's own behind the prompts, at temperature 1."""
    distributions: dict[str, list[torch.Tensor]]
    """For each batch the target's distribution at its labels, [P, V]."""

    @classmethod
    def of(cls, target: Backbone, rows: PackedRows, *, limit: int, prompt_tokens: int, max_new_tokens: int) -> HeldOut:
        """`limit` rows spread over those held out, prompts from them, and the target's continuations."""
        chosen = [at * len(rows) // limit for at in range(min(limit, len(rows)))]
        whole = rows.batch(chosen)
        prompts = []
        for ids, documents in zip(whole["input_ids"], whole["documents"], strict=True):
            own = documents == documents[0]
            prompts.append(ids[own][:prompt_tokens].tolist())
        answers = autoregressive(
            target, prompts, warper=Warper(1.0), max_new_tokens=max_new_tokens, seed=11, eos_ids=target.eos_ids
        ).tokens
        both = list(zip(prompts, answers, strict=True))
        batches = {
            "text": [rows.batch(chosen[at : at + _BATCH]) for at in range(0, len(chosen), _BATCH)],
            "words": [continued(both[at : at + _BATCH]) for at in range(0, len(both), _BATCH)],
        }
        distributions = {name: [distribution(target.model, each) for each in own] for name, own in batches.items()}
        return cls(prompts, batches, distributions)

    def exact(self, model: Any) -> Sums:
        """Per row, sum_v min(p, q) over its labels, and how many there are: `text above`, `text below`, ..."""
        sums: Sums = {}
        for name, batches in self.batches.items():
            parts = [
                overlaps(model, batch, p_PV) for batch, p_PV in zip(batches, self.distributions[name], strict=True)
            ]
            for side, at in (("above", 0), ("below", 1)):
                sums[f"{name} {side}"] = [value for part in parts for value in part[at]]
        return sums


def continued(pairs: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """A batch of one document a row, whose labels are what stands behind the prompt."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    rows = len(pairs)
    batch = {
        "input_ids": torch.zeros(rows, length, dtype=torch.long),
        "loss_mask": torch.zeros(rows, length, dtype=torch.bool),
        "positions": torch.arange(length).repeat(rows, 1),
        "documents": torch.full((rows, length), -1),
    }
    for at, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        batch["input_ids"][at, :end] = torch.tensor([*prompt, *answer])
        batch["loss_mask"][at, len(prompt) : end] = True
        batch["documents"][at, :end] = 0
    return batch


@torch.no_grad()
def distribution(model: Any, batch: Batch) -> torch.Tensor:
    """softmax of the logits at the labelled positions, fp32 [P, V]."""
    hidden_PH, _ = labelled(hidden_states(model, batch), batch)
    return Projection.of(model).logits(hidden_PH).softmax(-1)


def overlaps(model: Any, batch: Batch, p_PV: torch.Tensor) -> tuple[list[float], list[int]]:
    """sum_v min(p, q) summed over each row's labels, and how many there are."""
    alpha_P = torch.minimum(p_PV, distribution(model, batch)).sum(-1)
    counts = batch["loss_mask"][:, 1:].sum(1).tolist()
    return [float(part.sum()) for part in alpha_P.split(counts)], counts
