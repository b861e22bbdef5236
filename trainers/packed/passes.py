"""A model's pass over packed rows, no document seeing another: with a mask, by spans, or document by document.

Read next: `masks.py`, what a token may see; `lengths.py`, how long rows may be.

Shapes: R rows, S tokens of a row, H hidden size, D documents of like length, L tokens of the longest of them, X tokens
of any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data.rows.packed import documents_by_length
from ...decoding.backbone.attention import OWN
from ...decoding.backbone.cut import passes_of_others
from ...decoding.backbone.hidden_states import decoder_of
from ...decoding.backbone.recurrence.scan import is_recurrent
from ...decoding.backbone.windows import Masks, Windows
from ...decoding.on_host import on_host, places, sent
from ...drafters.layers.spans import attending_by_spans, why_not_by_spans
from ...drafters.layers.static import Static, as_it_is
from ...errors import RequestError
from ..config import MASKED as MASKED
from ..config import LoopConfig
from ..loop.objective import Batch
from ..loop.sharding import is_sharded
from .lengths import check_row_length
from .masks import row_masks, row_spans

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hidden_states(model: PreTrainedModel, batch: Batch, static: Static = as_it_is) -> Tensor:
    """Last hidden states [R, S, H], attention kept inside each document."""
    return last_states(decoder_of(model), batch, static)


def last_states(decoder: Any, batch: Batch, static: Static = as_it_is) -> Tensor:
    """The input of a model's output projection, [R, S, H]. Errors as for `over_rows`, and `check_one_pass`.

    Args:
        static: what compiles the pass over whole rows.
    """
    if static is not as_it_is:
        check_one_pass(decoder, batch["input_ids"].shape[1])
    last = static("the model's pass", _last)
    return over_rows(decoder, batch, lambda inputs: [last(decoder, inputs)])[0]


def _last(decoder: Any, inputs: dict[str, Any]) -> Tensor:
    states: Tensor = decoder(**inputs).last_hidden_state
    return states


def check_one_pass(decoder: Any, tokens: int) -> None:
    """Raise RequestError where a model that is to be compiled reads rows document by document."""
    if is_recurrent(decoder):
        raise RequestError(_no_fixed_shape(f"{type(decoder).__name__} has recurrent layers"))
    if way_through(decoder, tokens) is not PackingMode.MASK:
        raise RequestError(_no_fixed_shape(f"rows have {tokens} tokens, more than {MASKED}"))


def check_compiled_rows(loop: LoopConfig, tokens: int) -> None:
    """The same, as far as the recipe says it."""
    if loop.compile and tokens > MASKED:
        raise RequestError(_no_fixed_shape(f"rows have {tokens} tokens, more than {MASKED}"))


def _no_fixed_shape(why: str) -> str:
    return (
        f"loop.compile is on, and {why}: the model reads them document by document, and no two batches have the same "
        f"shapes. Leave loop.compile out, or take a model without recurrent layers and --data.sequence_length {MASKED}"
    )


def over_rows(decoder: Any, batch: Batch, run: Callable[[dict[str, Any]], Sequence[Tensor]]) -> list[Tensor]:
    """What `run` gives for packed rows, [R, S, H] each, no document seeing another.

    Args:
        run: called with the inputs of `decoder`, whatever it takes of its forward pass: once with all rows, or with
            documents of like length at a time (`way_through`). Then padding gets zeros.

    Raises:
        RequestError: the rows are longer than the decoder's context, or documents would have to run apart in
            a model that ZeRO-3 has cut into pieces.
    """
    ids_RS, documents_RS = batch["input_ids"], batch["documents"]
    named = "the length of a row (--data.sequence_length)"
    check_row_length(decoder.config, ids_RS.shape[1], type(decoder).__name__, named=named)
    way = way_through(decoder, ids_RS.shape[1])
    if way is PackingMode.MASK:
        masks = row_masks(decoder.config, documents_RS, batch["positions"])
        return list(run(_inputs(ids_RS, batch["positions"], masks)))
    if way is PackingMode.SPANS:
        with attending_by_spans(decoder):
            return list(run(_inputs(ids_RS, batch["positions"], row_spans(decoder.config, documents_RS))))
    if is_sharded(decoder):  # others take one pass
        raise RequestError(
            f"{type(decoder).__name__} has recurrent layers, which run document by document; processes have different "
            "numbers of these, and ZeRO-3 wants equal steps of all: use zero2 or less"
        )
    parts, slots = [], []
    groups = documents_by_length(on_host(documents_RS))
    others = passes_of_others(decoder, len(groups))
    for known_DL, real_DL in groups:
        slots_DL, real = sent(known_DL, ids_RS.device), places(real_DL, ids_RS.device)
        at_DL = torch.arange(slots_DL.shape[1], device=slots_DL.device).expand_as(slots_DL)
        parts.append([out_DLH[real] for out_DLH in run(_inputs(ids_RS.flatten()[slots_DL], at_DL, None))])
        slots.append(slots_DL[real])
    for _ in range(others):  # which wait for this process's share of the layers
        run(_inputs(ids_RS[:1, :1], torch.zeros_like(ids_RS[:1, :1]), None))
    return [_put_back(torch.cat(made), torch.cat(slots), ids_RS.shape) for made in zip(*parts, strict=True)]


class PackingMode(Enum):
    """How a model reads packed rows."""

    MASK = "one pass with a mask of rows by rows"
    SPANS = "one pass with spans for a mask"
    APART = "document by document"


def way_through(decoder: Any, tokens: int) -> PackingMode:
    """How rows of so many tokens go through a model.

    Long rows would need a large mask, so their documents go by the causal kernel, each from its start; by spans where
    that kernel would not do. A mask keeps nothing from a recurrent layer, whose documents always go apart. Processes
    make the passes of what ZeRO-3 has cut together, and would not have equally many documents: it takes one pass.
    """
    if is_recurrent(decoder):
        return PackingMode.APART
    if not are_long(tokens):
        return PackingMode.MASK
    spans = not why_not_by_spans(decoder)
    if is_sharded(decoder):
        return PackingMode.SPANS if spans else PackingMode.MASK
    return PackingMode.SPANS if spans and not _causal_alone(decoder, tokens) else PackingMode.APART


def _causal_alone(decoder: Any, tokens: int) -> bool:
    """Whether a document needs no mask: given none, `transformers` makes one of S x S for windows, and for scores that
    SDPA cannot compute (caps, sinks)."""
    windows = Windows.of(decoder.config.get_text_config(decoder=True))
    has_windows = windows is not None and windows.shortest < tokens
    return not has_windows and decoder.config._attn_implementation != OWN


def are_long(tokens: int) -> bool:
    """Whether no mask of rows by rows is made for rows of so many tokens, where one pass reads them without one."""
    return tokens > MASKED


def _inputs(ids: Tensor, positions: Tensor, mask: Masks | None) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}


def _put_back(states_XH: Tensor, slot_X: Tensor, shape: torch.Size) -> Tensor:
    """States of tokens in the slots of their rows, [R, S, H]; the others are zeros."""
    rows_XH = states_XH.new_zeros(shape.numel(), states_XH.shape[1])
    return rows_XH.index_copy(0, slot_X, states_XH).view(*shape, -1)
