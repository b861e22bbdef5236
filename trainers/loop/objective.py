"""The interface of a method for the loop, and helpers that methods share.

An objective is an `nn.Module` around what is trained: its forward pass is the loss, so that
wrappers (DDP, DeepSpeed) see one ordinary forward and backward.
Read next: `target.py` and `distill.py`, the objectives; `loop.py`, which drives them.

Shapes: R rows, S tokens of a row, P labelled positions, H hidden size, D documents of like length, L tokens of the
longest of them, X tokens of any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...data.rows.packed import documents_by_length
from ...decoding.on_host import on_host, places, sent
from ...decoding.target.attention import OWN
from ...decoding.target.backbone import context_limits
from ...decoding.target.cut import passes_of_others
from ...decoding.target.hidden_states import decoder_of
from ...decoding.target.hub import load_config
from ...decoding.target.recurrence.scan import is_recurrent
from ...decoding.target.windows import Masks, Window, Windows
from ...drafters.block.model_spans import attending_by_spans, why_not_by_spans
from ...drafters.block.spans import first_seen, starts
from ...drafters.eagle.row_split import RowSplit
from ...drafters.eagle.static import Static, as_it_is
from ...drafters.folder import check_trainable_model
from ...errors import RequestError
from ..config import FROM_TARGET, LoopConfig, ModelConfig
from ..config import MASKED as MASKED
from .sharding import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = dict[str, Tensor]


class Objective(Protocol):
    """What a method supplies; everything else is the loop's."""

    module: nn.Module
    """Its forward takes (batch, teacher output) and returns the loss summed over labels, and the sums of all terms,
    each reported as a mean over all labels unless its own number of them is beside it (`sums.COUNT`)."""

    def prepare(self, batch: Batch) -> Any:
        """The frozen target's outputs for the batch (the teacher output); None without a target."""

    def export(self, folder: Path) -> None:
        """Write the trained model for use outside training."""

    def draft(self) -> nn.Module | None:
        """The module that drafts, for probes; None when the method trains no drafter."""


@runtime_checkable
class Stepwise(Protocol):
    """An objective whose loss changes from step to step."""

    def begin_step(self, step: int, seed: int) -> None:
        """Called before the step's first batch; `seed` differs from step to step, not between processes."""


@runtime_checkable
class Scheduled(Protocol):
    """An objective whose loss depends on the share of the run that is done."""

    def set_steps(self, steps: int) -> None:
        """Called once, with the number of steps of the whole run."""


@runtime_checkable
class CutsRows(Protocol):
    """An objective that can learn from a part of every row, while other processes learn from the rest."""

    def split_rows(self, split: RowSplit) -> None:
        """Called once, before the first batch, where several processes share each row."""


class RowWriter(Protocol):
    """Replaces a share of the rows by text that the models generate (`teacher/rollouts.py`)."""

    kept: Batch | None
    """The rows of the last time, which a resumed run may train on again."""

    def rewrite(self, batches: Sequence[Batch], indices: Sequence[int], step: int, seed: int) -> list[Batch]:
        """A step's micro-batches, rows replaced; `indices`: the rows' indices in the global batch."""

    def of_all(self, parts: Sequence[Batch]) -> Batch:
        """The rows of the global batch, from what every process has kept."""

    def recall(self, rows: Batch, rank: int, world: int) -> None:
        """Take this process's share of what `of_all` gave as kept."""


@runtime_checkable
class OnPolicy(Protocol):
    """An objective that can train on rows that the models generate themselves."""

    rollouts: RowWriter | None
    """None where the recipe asks for no such rows."""


class Labelled(NamedTuple):
    """The hidden states that predict a label, and the labels."""

    hidden_PH: Tensor
    label_P: Tensor


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
    if goes_without_mask(decoder, tokens):
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
        run: called with the inputs of `decoder`, whatever it takes of its forward pass; once with all rows and a
            mask. Where that would be large (`goes_without_mask`), once with spans for a mask, or with documents of
            like length, each from its start, as also where a mask keeps nothing from a recurrent layer. Then padding
            gets zeros.

    Raises:
        RequestError: the rows are longer than the decoder's context, or documents would have to run apart in
            a model that ZeRO-3 has cut into pieces.
    """
    ids_RS, documents_RS = batch["input_ids"], batch["documents"]
    named = "the length of a row (--data.sequence_length)"
    check_row_length(decoder.config, ids_RS.shape[1], type(decoder).__name__, named=named)
    if not is_recurrent(decoder) and not goes_without_mask(decoder, ids_RS.shape[1]):
        masks = row_masks(decoder.config, documents_RS, batch["positions"])
        return list(run(_inputs(ids_RS, batch["positions"], masks)))
    if not is_recurrent(decoder) and _goes_by_spans(decoder, ids_RS.shape[1]):
        with attending_by_spans(decoder):
            return list(run(_inputs(ids_RS, batch["positions"], row_spans(decoder.config, documents_RS))))
    if is_sharded(decoder):  # one that could take a mask has taken it
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


def goes_without_mask(decoder: Any, tokens: int) -> bool:
    """Whether no S x S mask is made for rows of so many tokens; shorter rows take one pass with a mask.

    They run document by document, by the causal kernel, or in one pass by spans (`_goes_by_spans`). One that ZeRO-3
    has cut into pieces and that takes no spans keeps its mask: processes make their passes together there, and would
    not have equally many.
    """
    return are_long(tokens) and not (is_sharded(decoder) and why_not_by_spans(decoder))


def _goes_by_spans(decoder: Any, tokens: int) -> bool:
    """Whether long rows go by spans: where the causal kernel would not do.

    Given no mask, `transformers` makes one of S x S for windows and for scores that SDPA cannot compute (caps,
    sinks); and what ZeRO-3 has cut takes one pass.
    """
    windows = Windows.of(decoder.config.get_text_config(decoder=True))
    has_windows = windows is not None and windows.shortest < tokens
    only_own = decoder.config._attn_implementation == OWN
    return (has_windows or only_own or is_sharded(decoder)) and not why_not_by_spans(decoder)


def are_long(tokens: int) -> bool:
    """Whether no mask of rows by rows is made for rows of so many tokens, where one pass reads them without one."""
    return tokens > MASKED


def _inputs(ids: Tensor, positions: Tensor, mask: Masks | None) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}


def _put_back(states_XH: Tensor, slot_X: Tensor, shape: torch.Size) -> Tensor:
    """States of tokens in the slots of their rows, [R, S, H]; the others are zeros."""
    rows_XH = states_XH.new_zeros(shape.numel(), states_XH.shape[1])
    return rows_XH.index_copy(0, slot_X, states_XH).view(*shape, -1)


def check_row_length(config: Any, tokens: int, whose: str, *, named: str = "--data.sequence_length") -> None:
    """Raise RequestError for rows that are longer than a model's context.

    Args:
        config: the model's.
        tokens: the length of a row.
        whose: the model's name in the message, and the recipe field that names it.
        named: the name of the row's length in the message.
    """
    context, reason = min(context_limits(config.get_text_config(decoder=True)))
    if tokens > context:
        raise RequestError(
            f"{named} is {tokens}; the context of {whose} is {context} tokens{reason}. Lower "
            f"{named} to {context}, or take another model"
        )


def check_start_context(model: ModelConfig, tokens: int) -> None:
    """Raise RequestError for rows that are too long for the model of `start_from`; reads no weights.

    A draft that is cut from the target has the target's context.
    """
    given = model.start_from
    if given is not None and given != FROM_TARGET:
        check_trainable_model(given)
        check_row_length(load_config(given), tokens, f"model.start_from {given!r}")


def document_mask(documents_RS: Tensor) -> Tensor:
    """bool [R, 1, S, S], True where a token may attend: to itself and earlier tokens of its document."""
    S = documents_RS.shape[1]
    same_RSS = documents_RS[:, :, None] == documents_RS[:, None, :]
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=documents_RS.device).tril()
    # padding is document -1: it attends to padding only, and no row of the mask is empty
    return (same_RSS & causal_SS)[:, None]


def row_masks(config: Any, documents_RS: Tensor, positions_RS: Tensor) -> Masks:
    """`document_mask`, as each kind of layer of a model sees it: through its window, if it has one.

    Args:
        config: the model's.
        positions_RS: of every token in its document.
    """
    mask = document_mask(documents_RS)
    windows = Windows.of(config.get_text_config(decoder=True))
    if windows is None or documents_RS.shape[1] <= windows.shortest:
        return mask
    return windows.masks(mask, positions_RS, positions_RS)


def row_spans(config: Any, documents_RS: Tensor) -> Masks:
    """What `row_masks` says as spans, int64 [R, 1, S, 4] for each kind of layer; padding sees itself alone."""
    host_RS = on_host(documents_RS)
    index_RS = torch.arange(host_RS.shape[1]).expand_as(host_RS)
    start_RS = starts(host_RS).where(host_RS >= 0, index_RS)  # padding is document -1
    empty_RS2 = torch.tensor([1, 0]).expand(*host_RS.shape, 2)

    def through(window: Window | None) -> Tensor:
        near_RS = first_seen(start_RS, index_RS, window)
        seen_RS4 = torch.cat((near_RS[..., None], index_RS[..., None], empty_RS2), -1)
        return sent(seen_RS4[:, None], documents_RS.device)

    windows = Windows.of(config.get_text_config(decoder=True))
    return through(None) if windows is None else windows.each(through)


def labelled(hidden_RSH: Tensor, batch: Batch) -> Labelled:
    """Position t with the token at t + 1 as its label, where that token counts in the loss."""
    place = _labels_of(batch)
    return Labelled(hidden_RSH[:, :-1][place], batch["input_ids"][:, 1:][place])


def at_labels(value_RS: Tensor, batch: Batch) -> Tensor:
    """What a batch says of each of its tokens, at the labels alone, [P]."""
    return value_RS[:, 1:][_labels_of(batch)]


def label_shares(batch: Batch) -> Tensor | None:
    """The weight of each labelled position, fp32 [P], from the batch's `share`; None: all equal."""
    share_RS = batch.get("share")
    return None if share_RS is None else at_labels(share_RS, batch)


def _labels_of(batch: Batch) -> tuple[Tensor, ...]:
    """Rows and positions [P] in front of the tokens that count, found on the host, which need not wait for them."""
    return places(on_host(batch["loss_mask"])[:, 1:], batch["loss_mask"].device)
