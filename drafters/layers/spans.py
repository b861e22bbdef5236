"""Attention where a query sees two spans of the keys at most: no mask of all queries by all keys.

Queries go in blocks over those keys alone that one of the block sees, with a mask of a block by these keys. For
the gradient a block is computed again from what it has read, so that of its scores and its mask nothing stays:
what a query takes is the same however long its row is, and keys that no query of a block sees cost no time. The
attention itself is whatever a model brings, so that caps, sinks and scales are the model's own.

In the layers of a `transformers` model spans go where the model takes its mask, and its layers attend by a function
that reads them (`transformers`' own way to bring one), block by block. What attends to a block is what the model
attends by anyway: windows are in the spans, and caps, sinks and scales are the model's own.
Shapes: R rows, N queries of a row, Q query heads, G key-value heads, D head size.

Read next: `../eagle/peagle.py` and `trainers/block/chain_spans.py`, which say what is seen.

Shapes: B rows, N queries of a row, L of a block, S keys of a row, T keys of a block, Q query heads, G key-value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from ...decoding.backbone.attention import NAME, OWN, grouped_attention, own_attention
from ...decoding.backbone.windows import Window
from ...decoding.on_host import on_host

BLOCK = 256
"""Queries that go together: their mask is the largest that there is, so many places for each key."""

_PIECE = 1024
"""Keys lie in pieces of so many: the gradient of a block's keys is as long as the pieces that it reads."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Queries [1, Q, L, D], keys and values [1, G, T, D] and a bool mask [1, 1, L, T] -> [1, L, Q, D]."""


class _Block(NamedTuple):
    """Queries of a row that go together."""

    at: int
    """Its number in the row."""
    keys: tuple[tuple[int, int, int], ...]
    """Of each kind of span that one of its queries has: the kind, the first key, and the one behind the last."""


class Spans:
    """What every query sees of the keys of its row, for every layer alike."""

    def __init__(self, seen_B1N4: Tensor) -> None:
        """The spans.

        Args:
            seen_B1N4: int64, of every query the first and the last key of a span, and of another; one whose last key
                is in front of its first is empty. No query has two that are empty, and no key is in one query's
                first span and another's second.
        """
        self._seen = seen_B1N4
        self._blocks = [_blocks(seen_N4) for seen_N4 in on_host(seen_B1N4)[:, 0]]

    def attend(
        self, query_BQND: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, attend: Attend, *, draws: bool = False
    ) -> Tensor:
        """Attention [B, N, Q, D].

        Args:
            attend: of one block.
            draws: whether it draws random numbers (dropout), which are to be the same when it is computed again.
        """
        outs = []
        rows = (each.split(1) for each in (query_BQND, key_BGSD, value_BGSD, self._seen))
        for query, key, value, seen, blocks in zip(*rows, self._blocks, strict=True):
            # gradients of parts that were split are put together once, not added up in full length
            queries, seen_blocks = query.split(BLOCK, 2), seen.split(BLOCK, 2)
            keys, values = key.split(_PIECE, 2), value.split(_PIECE, 2)
            for block in blocks:
                read = (attend, block.keys, queries[block.at], seen_blocks[block.at], keys, values)
                if torch.is_grad_enabled():
                    outs.append(checkpoint(_of_block, *read, use_reentrant=False, preserve_rng_state=draws))
                else:
                    outs.append(_of_block(*read))
        whole_1XQD = torch.cat(outs, 1)
        return whole_1XQD[0].unflatten(0, (len(self._blocks), -1))


def _of_block(
    attend: Attend,
    spans: Sequence[tuple[int, int, int]],
    query_1QLD: Tensor,
    seen_11L4: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> Tensor:
    """Attention of one block, [1, L, Q, D]; `keys` and `values`: the pieces of the whole row."""
    masks = []
    for kind, start, stop in spans:
        at_T = torch.arange(start, stop, device=seen_11L4.device)
        first_11L1, last_11L1 = seen_11L4[..., 2 * kind : 2 * kind + 2].split(1, -1)
        masks.append((at_T >= first_11L1) & (at_T <= last_11L1))
    key_1GTD, value_1GTD = (_joined([_cut(each, start, stop) for _, start, stop in spans]) for each in (keys, values))
    return attend(query_1QLD, key_1GTD, value_1GTD, torch.cat(masks, -1))


def _cut(pieces: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Keys or values from one on up to another, of a row that lies in pieces."""
    first = start // _PIECE
    joined = _joined(pieces[first : -(-stop // _PIECE)])
    return joined[:, :, start - first * _PIECE : stop - first * _PIECE]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


def _blocks(seen_N4: Tensor) -> list[_Block]:
    """The blocks of a row, by numbers that the host knows."""
    first_N2, last_N2 = seen_N4[:, 0::2], seen_N4[:, 1::2]
    empty_N2 = first_N2 > last_N2
    fill = (0, 0, 0, -len(seen_N4) % BLOCK)
    none = 1 << 40  # behind every key; `pad` takes its numbers through floats
    start_X2 = F.pad(first_N2.masked_fill(empty_N2, none), fill, value=none).unflatten(0, (-1, BLOCK)).amin(1)
    stop_X2 = F.pad((last_N2 + 1).masked_fill(empty_N2, 0), fill).unflatten(0, (-1, BLOCK)).amax(1)
    ranges = zip(start_X2.tolist(), stop_X2.tolist(), strict=True)
    return [
        _Block(
            at,
            tuple((kind, start, stop) for kind, (start, stop) in enumerate(zip(*both, strict=True)) if start < stop),
        )
        for at, both in enumerate(ranges)
    ]


def starts(documents_BS: Tensor) -> Tensor:
    """int64 [B, S]: where each token's document begins; neighbours with the same number are one."""
    is_first_BS = torch.zeros_like(documents_BS, dtype=torch.bool)
    is_first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return (torch.arange(documents_BS.shape[1], device=documents_BS.device) * is_first_BS).cummax(1).values


def first_seen(start_BN: Tensor, place_BN: Tensor, window: Window | None) -> Tensor:
    """int64 [B, N]: the first key of its document that a query sees, through the window of a layer if it has one.

    Args:
        start_BN: where its document begins.
        place_BN: where it stands in the row.
        window: the layer's.
    """
    if window is None:
        return start_BN
    return start_BN + window.earliest(place_BN - start_BN).clamp_min(0)


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
