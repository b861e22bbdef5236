"""Spans of keys in place of a mask, in the layers of a `transformers` model.

Spans go where a model takes its mask, and its layers attend by a function that reads them (`transformers`' own way to
bring one), block by block. What attends to a block is what the model attends by anyway: windows are in the spans, and
caps, sinks and scales are the model's own. Read next: `spans.py`, the attention; `trainers/packed/passes.py`, which
reads packed rows so; `trainers/block/chain_spans.py`, text and masks of PARD.

Shapes: R rows, N queries of a row, Q query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from ...decoding.backbone.attention import NAME, OWN, grouped_attention, own_attention
from .spans import Spans

_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "draftsmith_spans": grouped_attention,
    "draftsmith_spans_eager": own_attention,
}
"""What attends by spans -> what it asks for each block."""
BY_SPANS = {"sdpa": "draftsmith_spans", NAME: "draftsmith_spans", OWN: "draftsmith_spans_eager"}
"""What a model attends by -> the same by spans."""


def why_not_by_spans(decoder: Any) -> str | None:
    """What keeps the layers of a decoder from attending by spans, as a sentence goes on; None: nothing does."""
    if not decoder._supports_attention_backend:
        return "attends by code of its own"
    found = decoder.config._attn_implementation
    return None if found in BY_SPANS else f"attends by {found!r}"


@contextmanager
def attending_by_spans(decoder: Any) -> Iterator[None]:
    """Let a decoder's layers take what `Spans` takes in place of a mask, as long as this lasts.

    Raises:
        ValueError: they cannot, which `why_not_by_spans` says.
    """
    if why := why_not_by_spans(decoder):
        raise ValueError(f"{type(decoder).__name__} {why}")
    with _attending_by(decoder.config, BY_SPANS[decoder.config._attn_implementation]):
        yield


def attending_as_now(decoder: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What a layer runs in, and what it runs in once more for its gradient, when `attending_by_spans` has ended."""
    return nullcontext(), _attending_by(decoder.config, decoder.config._attn_implementation)


@contextmanager
def _attending_by(config: Any, name: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def _registered(name: str) -> None:
    """Let models attend by `name`, a block at a time."""
    of_block = _FUNCTIONS[name]

    def attention(
        module: nn.Module,
        query_RQND: Tensor,
        key_RGND: Tensor,
        value_RGND: Tensor,
        attention_mask: Tensor,
        dropout: float = 0.0,
        **more: Any,
    ) -> tuple[Tensor, None]:
        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            return of_block(module, query, key, value, mask, dropout=dropout, **more)[0]

        # some families name the mask when they call, so its name is theirs
        spans = Spans(attention_mask)
        return spans.attend(query_RQND, key_RGND, value_RGND, attend, draws=dropout > 0), None

    AttentionInterface.register(name, attention)


for each in _FUNCTIONS:
    _registered(each)
