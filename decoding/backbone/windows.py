"""How far the layers of a model see: all of the text, its last tokens, or those of their own chunk.

A mask says which tokens belong to a node's past, or to its document. A layer with a window sees only the near ones
among them: the last W (Mistral, Gemma, gpt-oss), or those of the same chunk of C positions (Llama 4). Kinds of layers
are counted by `layer_types`, and a model that has them takes a mask for each kind. Read next: `backbone.py`, which
decodes; `trainers/packed/passes.py`, which trains.

Shapes: B rows, N tokens that look, T tokens that are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_SIZES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
"""Kinds of layers with a window, and the entry of a config that says how long it is."""
_ATTENTION = {FULL, *_SIZES}

Masks = Tensor | dict[str, Tensor | None]
"""What a decoder takes as `attention_mask`: one mask for all of its layers, or one for each kind of them.

Recurrent kinds have none: theirs would say which tokens are padding, and there is none.
"""


class Window(NamedTuple):
    """The tokens that a layer looks at, among those that it may see."""

    size: int
    in_chunks: bool = False
    """Positions of the same chunk, not the last ones."""

    def near(self, query_BN: Tensor, key_BT: Tensor) -> Tensor:
        """bool [B, 1, N, T], by positions in the text; what comes later is left to the mask."""
        # compared, not subtracted: no whole numbers for every pair of tokens
        if self.in_chunks:
            query_BN, key_BT = query_BN // self.size, key_BT // self.size
            return query_BN[:, None, :, None] == key_BT[:, None, None]
        return (query_BN - self.size)[:, None, :, None] < key_BT[:, None, None]

    def earliest(self, position: Tensor) -> Tensor:
        """The first position that a token at each position looks at; below 0 if it looks at the whole text."""
        return position - position % self.size if self.in_chunks else position - self.size + 1


@dataclass(frozen=True)
class Windows:
    """The windows of a model's layers.

    Attributes:
        kinds: kind of layer -> its window, None where it sees everything.
        by_kind: whether the decoder takes a mask for each kind; else all layers are of one.
    """

    kinds: Mapping[str, Window | None]
    by_kind: bool

    @classmethod
    def of(cls, config: Any) -> Windows | None:
        """The windows of a text model's config; None if every layer sees all of the text."""
        types = _types(config)
        kinds = {kind: _window(config, kind) for kind in (types or [SLIDING])}
        if types is None and not getattr(config, "use_sliding_window", True):
            return None
        return cls(kinds, types is not None) if any(kinds.values()) else None

    @property
    def shortest(self) -> int:
        """Tokens of a text up to which every layer sees all of it."""
        return min(window.size for window in self.kinds.values() if window is not None)

    def masks(self, mask: Tensor, query_BN: Tensor, key_BT: Tensor) -> Masks:
        """`mask`, bool and broadcast to [B, 1, N, T], as every kind of layer sees it.

        Args:
            query_BN: int64, positions of the tokens that look.
            key_BT: int64, positions of those that are looked at, where the mask lets them.
        """
        return self.each(lambda window: mask if window is None else mask & window.near(query_BN, key_BT))

    def each(self, make: Callable[[Window | None], Tensor]) -> Masks:
        """What `make` returns for the window of every kind of layer, in the form in which the decoder takes masks."""
        seen = {kind: make(window) for kind, window in self.kinds.items()}
        if not self.by_kind:
            return next(iter(seen.values()))
        return {kind: each if kind in _ATTENTION else None for kind, each in seen.items()}


def unknown_kinds(config: Any) -> list[str]:
    """Kinds of layers that keep something else than keys and values of the text."""
    return sorted(set(getattr(config, "layer_types", None) or []) - _ATTENTION)


def unsized_kind(config: Any) -> str | None:
    """The first kind of layer whose window's length the config does not name, and the entry that is missing."""
    for kind in _types(config) or []:
        if kind in _SIZES and _window(config, kind) is None:
            return f"{kind} layers, but its config names no {_SIZES[kind]}"
    return None


def _types(config: Any) -> list[str] | None:
    # a class without layer types of its own, as Mistral's, slides in all layers whatever they say
    types = config.layer_types if hasattr(type(config), "layer_types") else None
    return list(dict.fromkeys(types)) if types else None


def _window(config: Any, kind: str) -> Window | None:
    size = getattr(config, _SIZES[kind], None) if kind in _SIZES else None
    return None if size is None else Window(int(size), kind == CHUNKED)
