"""A draft cut from its target: which layers stay is measured by acceptance, width by activations.

Layers are removed one at a time, each time the one that costs least alpha_hat on held-out text: the
mean over labelled positions of sum_v min(p, q), the acceptance rate of sampling at temperature 1
(Leviathan et al. 2023, theorem 3.5), teacher forced and exact. Compare Men et al. 2024
(arXiv 2403.03853), who rank layers once, by how much each changes its input. The measurements are kept
in `pruning.json`, so a resumed run does not search again. Read next: `pruning/width.py`.

Shapes: R rows, S tokens, P labelled positions, C positions of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from ...data.features.model_hash import model_hash
from ...data.rows.packed import PackedRows
from ...decoding.backbone.layers import with_layers
from ...errors import DataError
from ...storage import write_text
from ..config import ModelConfig
from ..labels import labelled
from ..loop.objective import Batch
from ..loop.order import RowOrder
from ..packed.passes import hidden_states
from .sizes import layers_kept, pruned_config
from .width import cut_width

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

MeasureAll = Callable[[Sequence[Sequence[int]]], list[float]]
"""alpha_hat of drafts, each given by the target's layers that it keeps."""


@dataclass(frozen=True)
class Round:
    """One step of the search: alpha_hat without each layer, and the layer that was removed."""

    removed: int
    alpha_hat: float
    without: dict[str, float]
    """Layer -> alpha_hat of the draft without it."""


def search_layers(measure_all: MeasureAll, count: int, keep: int) -> tuple[list[int], list[Round]]:
    """Remove layers one by one until `keep` of `count` are left: those, and each round's measurements.

    Of equally good ones the first is removed, so that the choice is the same every time.
    """
    kept, rounds = list(range(count)), []
    while len(kept) > keep:
        candidates = [[each for each in kept if each != layer] for layer in kept]
        alpha_hats = measure_all(candidates)
        best = max(range(len(kept)), key=alpha_hats.__getitem__)
        without = {str(layer): value for layer, value in zip(kept, alpha_hats, strict=True)}
        rounds.append(Round(kept[best], alpha_hats[best], without))
        _log.info(
            "pruning: layer %d removed, %d are left, alpha_hat %.4f", kept[best], len(kept) - 1, alpha_hats[best]
        )
        kept = candidates[best]
    return kept, rounds


class AcceptanceOf:
    """alpha_hat of the target with fewer layers, on the same held-out rows every time."""

    def __init__(self, target: PreTrainedModel, batches: Sequence[Batch], *, chunk: int) -> None:
        """`chunk`: positions whose distributions exist at the same time."""
        self._target, self._batches, self._chunk = target, batches, chunk
        self._hidden = [self._read(target, batch) for batch in batches]
        if not sum(map(len, self._hidden)):
            raise DataError(
                "the held-out rows that pruning measures on have no label; raise model.prune_rows, "
                "or look at the rows with `draftsmith inspect`"
            )

    @torch.no_grad()
    def __call__(self, layers: Sequence[int]) -> float:
        """The draft is the target with `layers` alone."""
        draft = with_layers(self._target, layers)
        total, count = 0.0, 0
        for batch, target_PH in zip(self._batches, self._hidden, strict=True):
            draft_PH = self._read(draft, batch)
            for at in range(0, len(draft_PH), self._chunk):
                part = slice(at, at + self._chunk)
                total += float(self._overlap(target_PH[part], draft_PH[part]).sum())
            count += len(draft_PH)
        return total / count

    @torch.no_grad()
    def _read(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        return labelled(hidden_states(model, batch), batch).hidden_PH

    def _overlap(self, target_CH: Tensor, draft_CH: Tensor) -> Tensor:
        """sum_v min(p, q) of each position, summed in fp64."""
        head = self._target.get_output_embeddings()
        p_CV, q_CV = (head(each).float().softmax(-1) for each in (target_CH, draft_CH))
        return torch.minimum(p_CV, q_CV).sum(-1).double()


def prune(
    model: ModelConfig, target: PreTrainedModel, rows: PackedRows, *, out: Path, seed: int, micro_rows: int, chunk: int
) -> PreTrainedModel:
    """A draft in fp32, its weights cut from the target's.

    Args:
        rows: held-out rows, of which a seeded choice of `model.prune_rows` is measured on.
        out: receives `pruning.json`.

    Raises:
        RequestError: the target cannot be cut to those sizes; the message says which.
        DataError: the held-out rows hold no label.
    """
    name = type(target).__name__
    keep = pruned_config(model, target.config, name).num_hidden_layers
    batches = _batches(rows, model.prune_rows, seed=seed, micro_rows=micro_rows, target=target)
    key = {
        "keep": keep,
        "keep_layers": model.keep_layers,
        "rows": [rows.fingerprint, model.prune_rows, seed],
        "target": model_hash(target),
    }
    kept = _layers(model, target, batches, key, keep=keep, out=out, chunk=chunk)
    return cut_width(target, pruned_config(model, target.config, name, kept), kept, batches)


def _layers(
    model: ModelConfig,
    target: PreTrainedModel,
    batches: Sequence[Batch],
    key: dict[str, Any],
    *,
    keep: int,
    out: Path,
    chunk: int,
) -> list[int]:
    """The layers to keep: those that the recipe names, or that this run has chosen before, or chooses now."""
    path, state = out / "pruning.json", PartialState()
    [known] = broadcast_object_list([_read_known(path, key)])
    if known is not None:
        return list(known)
    measure = AcceptanceOf(target, batches, chunk=chunk)
    named = layers_kept(model, target.config)
    if named is None:
        count = target.config.num_hidden_layers
        kept, rounds = search_layers(lambda each: _shared_out(measure, each), count, keep)
    else:
        kept, rounds = named, []
    alpha_hat = measure(kept)
    _log.info("pruning: layers %s are kept, alpha_hat %.4f untrained", kept, alpha_hat)
    if state.is_main_process:
        result = {"kept": kept, "alpha_hat": alpha_hat, "rounds": [asdict(each) for each in rounds]}
        write_text(path, json.dumps({**result, "key": key}, indent=1) + "\n")
    return kept


def _shared_out(measure: AcceptanceOf, candidates: Sequence[Sequence[int]]) -> list[float]:
    """alpha_hat of every candidate, on every process; each measures its share of them."""
    state = PartialState()
    mine = {
        number: measure(candidates[number])
        for number in range(state.process_index, len(candidates), state.num_processes)
    }
    alpha_hats = {number: value for part in gather_object([mine]) for number, value in part.items()}
    return [alpha_hats[number] for number in range(len(candidates))]


def _read_known(path: Path, key: dict[str, Any]) -> list[int] | None:
    """The layers chosen before this run was resumed; None without them, or where the key differs."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["kept"] if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _batches(rows: PackedRows, count: int, *, seed: int, micro_rows: int, target: PreTrainedModel) -> list[Batch]:
    # a seeded spread, as for validation: packing puts the longest documents first
    count = min(count, len(rows))
    chosen = RowOrder(len(rows), count, seed).step(0)
    parts = (chosen[at : at + micro_rows] for at in range(0, count, micro_rows))
    return [{name: each.to(target.device) for name, each in rows.batch(part).items()} for part in parts]
