"""One pass over the samples finds the labels that an SSM predicts; it is stored, and coverage is computed from it.

Read next: `coverage.py`, the definitions; `boost.py`.

Shapes: R samples, S tokens of a sample.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ...data.generate.continuations import Continuations
from ...data.rows.packed import PackedRows
from ...drafters.projection import Projection
from ...storage import derived_tensors, write_tensors, write_text
from ..labels import labelled
from ..loop.progress import records
from ..method_config import BoostConfig
from ..packed.passes import hidden_states
from .coverage import acceptance, left_share, matched, union_length

COVERAGE = "coverage.safetensors"
_ROWS = 32  # of a forward pass; fixed, so that no number depends on the processes


class Matches(NamedTuple):
    """Which labels an SSM predicts, bool [R, S] each."""

    train: Tensor
    validation: Tensor


def labels_of(rows: PackedRows) -> Tensor:
    """Which tokens are labels, bool [R, S]."""
    return torch.tensor(rows.in_loss_RS)


def stored_matches(folder: Path) -> Matches | None:
    """The matches of an earlier pass; None where there was none, or its file is damaged."""
    tensors = derived_tensors(folder / COVERAGE, dict.fromkeys(Matches._fields, (None, None)))
    return None if tensors is None else Matches(**tensors)


def measure_matches(
    model: Any, samples: Continuations, folder: Path, accelerator: Accelerator, *, chunk: int, vocabulary: int
) -> Matches:
    """Run `model` over all samples, store what it predicts, and return it on every process.

    `vocabulary`: the target's; rows that the model's projection has beyond it are never drafted.
    """
    projection = Projection.of(model).rows(slice(vocabulary))
    matches = Matches(
        *(_match_rows(model, projection, rows, accelerator, chunk) for rows in (samples.train, samples.validation))
    )
    if accelerator.is_main_process:
        write_tensors(folder / COVERAGE, matches._asdict())
    accelerator.wait_for_everyone()
    return matches


@torch.no_grad()
def _match_rows(model: Any, projection: Projection, rows: PackedRows, accelerator: Accelerator, chunk: int) -> Tensor:
    """bool [R, S]; processes take the batches in turn."""
    mine = []
    starts = range(0, len(rows), _ROWS)
    for start in starts[accelerator.process_index :: accelerator.num_processes]:
        numbers = range(start, min(start + _ROWS, len(rows)))
        batch = {name: t.to(accelerator.device) for name, t in rows.batch(numbers).items()}
        with torch.autocast(accelerator.device.type, enabled=False):
            hidden_PH, label_P = labelled(hidden_states(model, batch), batch)
            matched_P = matched(hidden_PH, projection, label_P, chunk)
        matched_RS = torch.zeros_like(batch["loss_mask"])
        matched_RS[:, 1:][batch["loss_mask"][:, 1:]] = matched_P
        mine.append((start, matched_RS.cpu()))
    parts = gather_object(mine) if accelerator.num_processes > 1 else mine
    return torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])])


def coverage_record(
    matches: Sequence[Matches], samples: Continuations, config: BoostConfig, *, draft: int
) -> dict[str, float]:
    """What the last of these SSMs covers, and all of them together.

    `covered` and `union` are shares of the held-out labels whose unit is foreseen, `train_...` of
    the training ones; `foreseen` and `union_foreseen` are tokens of a draft of `draft` tokens that
    the target would accept at temperature 0, the mean over held-out positions.
    """
    values: dict[str, float] = {}
    for prefix, rows, each in (
        ("", samples.validation, [one.validation for one in matches]),
        ("train_", samples.train, [one.train for one in matches]),
    ):
        label_RS = labels_of(rows)
        accepted = [acceptance(one, label_RS, config) for one in each]
        values[f"{prefix}covered"] = 1 - left_share(accepted[-1:], label_RS)
        values[f"{prefix}union"] = 1 - left_share(accepted, label_RS)
        if not prefix:
            values["foreseen"] = union_length(each[-1:], label_RS, draft)
            values["union_foreseen"] = union_length(each, label_RS, draft)
    return values


def record_coverage(path: Path, number: int, values: dict[str, float]) -> None:
    """Add SSM `number`'s record to `metrics.jsonl`, in place of an earlier one of that SSM."""
    kept = [line for line, known in records(path) if (known["kind"], known["step"]) != ("coverage", number)]
    kept.append(json.dumps({"kind": "coverage", "step": number, **values}))
    write_text(path, "\n".join(kept) + "\n")


def coverage_line(number: int, count: int, values: dict[str, float], config: BoostConfig) -> str:
    """The record for people."""
    unit = "continuations" if config.unit == "sample" else "spans"
    length = f" of {config.match_tokens}" if config.match_tokens else ""
    return (
        f"SSM {number} of {count} covers {values['covered']:.1%} of the held-out {unit}{length}, "
        f"with those before it {values['union']:.1%} (training {values['train_covered']:.1%}, "
        f"{values['train_union']:.1%}); a draft foresees {values['foreseen']:.2f} tokens, "
        f"together {values['union_foreseen']:.2f}"
    )
