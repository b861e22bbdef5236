"""The key-value cache: preallocated, ours, rolled back by a smaller length.

Tree rows are written after each row's own length; after acceptance the kept ones are gathered
forward. The KV cache is a `transformers` Cache, so any causal LM reads and writes it unchanged.
States of recurrent layers are kept beside keys and values, for the last tokens only.
Read next: `recurrence/recurrent.py`, those states; `backbone.py`.

Shapes: B rows, G key-value heads, L capacity in tokens, D head size, N new tokens per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .recurrence.recurrent import RecurrentStates

_LEAST_STEP = 128
"""Slots: what attention kernels go by at a time."""


class KVCache(Cache):
    """Keys and values [B, G, L, D] of every layer; slots after a row's length hold garbage."""

    def __init__(self, rows: int, capacity: int, *, static: bool = False, rollback: int = 1) -> None:
        """Room for `capacity` tokens per row.

        Args:
            static: every forward sees all slots, so that the host need not read the lengths. There are as many as
                `few_sizes` makes of `capacity`.
            rollback: of a model with recurrent layers, most nodes of a forward, and most tokens that a
                later one may begin behind its end; others can be rolled back to any length.
        """
        super().__init__(layers=[])
        self._states = RecurrentStates(rows, rollback)
        self._layer = (0, 0)
        self.rows, self.capacity, self.static = rows, few_sizes(capacity) if static else capacity, static
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._start = 0
        self._end = 0
        self._slots_BN: Tensor | None = None
        self._rows_B1 = torch.arange(rows)[:, None]
        self._row: int | None = None
        self.ragged = False
        """Whether the rows of the running forward may have different lengths."""

    def aim(self, lengths_B: Tensor, count: int) -> int:
        """Let the next forward write `count` tokens per row after `lengths_B`.

        Returns how many slots the forward will see.
        """
        self._row = None
        if self.static:
            self._start, self._end, self.ragged = self.capacity - count, self.capacity, True
        else:
            lengths = lengths_B.tolist()
            longest = max(lengths)
            self._start, self._end, self.ragged = longest, longest + count, min(lengths) != longest
        if self._end > self.capacity or self._start < 0:
            raise ValueError(f"{self._end} tokens in a KV cache of {self.capacity} slots")
        self._slots_BN = None
        if self.ragged:
            steps_N = torch.arange(count, device=lengths_B.device)
            self._slots_BN = lengths_B[:, None] + steps_N
        self._states.aim(lengths_B, count, check=not self.static)
        return self._end

    def aim_at_row(self, row: int, count: int) -> int:
        """Let the next forward hold that row alone, and write it from its first slot on."""
        self._row, self._start, self._end = row, 0, count
        self._states.aim_at_row(row, count)
        self.ragged, self._slots_BN = False, None
        if count > self.capacity:
            raise ValueError(f"{count} tokens in a KV cache of {self.capacity} slots")
        return count

    @property
    def row(self) -> int | None:
        """The only row of the running forward, as `aim_at_row` set it; None if all run."""
        return self._row

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention with the new tokens' keys and values [B, G, N, D]."""
        self._hold(layer_idx, key_states, value_states)
        return (self._write(self._keys[layer_idx], key_states), self._write(self._values[layer_idx], value_states))

    def stores(self, layer_idx: int, like_BNGD: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [B, G, L, D] of a layer, for a caller that writes them to `slots_of` by itself.

        `like_BNGD`: keys or values of some tokens, of which the shape and type of a new layer's are taken.
        """
        like_BGND = like_BNGD.transpose(1, 2)
        self._hold(layer_idx, like_BGND, like_BGND)
        return self._keys[layer_idx], self._values[layer_idx]

    def slots_of(self, device: torch.device) -> Tensor:
        """The slots of the running forward's tokens, int64 [B, N], where all rows run."""
        if self._slots_BN is None:
            alike_N = torch.arange(self._start, self._end, device=device)
            self._slots_BN = alike_N.expand(self.rows, -1)
        return self._slots_BN

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a convolution hands over its inputs at every call; ours keeps them, so it always does."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: a convolution is given its past by `update_conv_state`."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: a prompt begins without a state, and the nodes of a tree take theirs from `state_before`."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **how: Any) -> Tensor:
        """Called by a recurrent layer with its convolution's new inputs [B, C, N]; [B, C, K - 1 + N]."""
        self._layer = (layer_idx, state_idx)
        return self._states.convolved(self._layer, conv_states, how["conv_kernel_size"])

    def state_before(self, like: Tensor) -> Tensor:
        """The states [B, ...] that the running layer begins the running forward at, shaped as `like`."""
        return self._states.before(self._layer, like)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Called by a recurrent layer: with the states [B, N, ...] of all nodes, or a prompt's last [1, ...]."""
        prompt = self._row is not None
        states_BN = recurrent_states[:, None] if prompt else recurrent_states
        self._states.keep((layer_idx, state_idx), states_BN, first=self._end - 1 if prompt else 0)
        return recurrent_states

    def commit(self, lengths_B: Tensor, path_BD: Tensor) -> None:
        """Move the kept nodes of a tree after the root: slot `length + 1 + d` gets node path[d].

        Not needed for chains, whose nodes are in their slots already. After the end of the path (-1)
        slots keep their contents. Nodes ascend along a path, so everything is read before
        it is written over.
        """
        D = path_BD.shape[1]
        into_BD = lengths_B[:, None] + 1 + torch.arange(D, device=path_BD.device)
        from_BD = torch.where(path_BD >= 0, lengths_B[:, None] + path_BD, into_BD)
        self._states.commit(into_BD, from_BD)
        for store in (*self._keys.values(), *self._values.values()):
            self._put(store, into_BD, store.gather(2, _of_all(from_BD, store.shape[1], store.shape[3])))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots before the tokens of the running forward; models ask, ours pass positions."""
        return self._start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where the tokens of the running forward begin."""
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Slots in view, and the first of them; asked for where no mask is given."""
        return self._end, 0

    def _hold(self, layer_idx: int, key_BGND: Tensor, value_BGND: Tensor) -> None:
        """Make room for a layer where there is none."""
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._room(key_BGND)
            self._values[layer_idx] = self._room(value_BGND)

    def _room(self, states: Tensor) -> Tensor:
        _, heads, _, size = states.shape
        # zeros, not empty memory: masked slots are multiplied by 0, and NaN times 0 is NaN
        return states.new_zeros(self.rows, heads, self.capacity, size)

    def _write(self, store_BGLD: Tensor, new_BGND: Tensor) -> Tensor:
        if self._row is not None:
            store_BGLD = store_BGLD[self._row : self._row + 1]
        if self._slots_BN is None:
            store_BGLD[:, :, self._start : self._end] = new_BGND
        else:
            self._put(store_BGLD, self._slots_BN, new_BGND)
        return store_BGLD[:, :, : self._end]

    def _put(self, store_BGLD: Tensor, slots_BX: Tensor, new_BGXD: Tensor) -> None:
        """Write keys or values into slots of their rows."""
        if _scatters(store_BGLD):
            store_BGLD.scatter_(2, _of_all(slots_BX, *new_BGXD.shape[1::2]), new_BGXD)
        else:
            store_BGLD[self._rows_B1, :, slots_BX] = new_BGXD.transpose(1, 2)


def _scatters(store_BGLD: Tensor) -> bool:
    """Whether `scatter_` is the fast way: on a CPU it takes twenty times as long in half precision."""
    return store_BGLD.device.type != "cpu"


def few_sizes(slots: int) -> int:
    """`slots` rounded up: to a multiple of 128, and above 2,048 of a sixteenth of the next power of two.

    So requests of about one length have one shape of attention, and kernels are chosen and prepared once for it. It
    costs at most an eighth more slots.
    """
    step = max(_LEAST_STEP, (1 << (slots - 1).bit_length()) // 16)
    return -(-slots // step) * step


def _of_all(slot_BX: Tensor, heads: int, size: int) -> Tensor:
    """Slots as an index of keys or values, [B, G, X, D]."""
    return slot_BX[:, None, :, None].expand(-1, heads, -1, size)
