"""Hidden states of the frozen target for a batch: computed now, or read from a cache on disk.

Every `prepare` asks one of these sources. A source can be told what it will be asked next
(`expect`): the cache then reads and uploads in a thread, a GPU runs the target on a stream of its
own, both while the drafter steps; a CPU that computes them itself would gain nothing. What is
returned is the same with and without. Read next: `loop/feed.py`, how the loop looks ahead;
`data/features/store.py`, the cache.

Where a row is cut over processes, each has the states of its part alone (`FeatureSource.part`): a pass goes
through whole rows still, and what is stored is the part.

Shapes: R rows, S tokens of a row, or of its part where states are handed out or kept, H hidden size, N hidden states
that are asked for.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from ...data.features.shards import Encoded, FeatureDtype, decode, encode
from ...data.features.store import FeatureStore, row_keys
from ...decoding.backbone.cut import is_cut, team_of
from ...decoding.backbone.hidden_states import LAST, HiddenStates, decoder_of, layer_count
from ...decoding.backbone.lean.families import misfit_on_gpu
from ...decoding.backbone.lean.on_cuda import states_in_rows
from ...decoding.backbone.windows import Masks
from ..loop.objective import Batch
from ..packed.passes import over_rows
from .output import ALL, OwnPositions

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import DynamicCache, PreTrainedModel

Precision = Literal["fp32", "bf16", "fp16"]
PRODUCTS: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
Features = tuple[Tensor, ...]
"""One [R, S, H] in the target's dtype for each layer asked for; none needs a gradient."""


class FeatureSource(ABC):
    """Where an objective gets the hidden states of `layers` from (`decoding/backbone/hidden_states.py`)."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.looks_ahead = True
        """Whether `expect` may do anything."""
        self.part: OwnPositions = ALL
        """The positions of every row that are handed out."""
        self._expected: tuple[Batch, Callable[[], Features]] | None = None
        self._waited = 0.0

    def __call__(self, batch: Batch) -> Features:
        """The states of a batch, which may be the expected one."""
        if self._expected is None or self._expected[0] is not batch:
            return self.fetch(batch)
        (_, wait), self._expected = self._expected, None
        return wait()

    def expect(self, batch: Batch) -> None:
        """Begin to fetch a batch, whose states will be asked for by the same object."""
        if self.looks_ahead and (wait := self.start(batch)) is not None:
            self._expected = (batch, wait)

    def take_waited(self) -> float:
        """Seconds spent waiting for data, not for the target itself, since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def forget(self) -> None:
        """Let go of what is expected: it will not be asked for."""
        self._expected = None

    def close(self) -> None:
        """Forget what is expected, and leave no thread behind."""
        self.forget()

    @abstractmethod
    def fetch(self, batch: Batch) -> Features:
        """The states of a batch that nobody has announced."""

    @abstractmethod
    def start(self, batch: Batch) -> Callable[[], Features] | None:
        """Begin to fetch, and return what waits for the end; None where nothing is gained."""


class OnlineFeatures(FeatureSource):
    """The target runs in this process; the states of other layers than those asked for go."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int] = (LAST,)) -> None:
        super().__init__(layers)
        self.target: Any = target
        # one that moves has other states by the time they are used; the passes of one that is cut have to stand in
        # the same place of every process, among the sums over processes
        self.looks_ahead = not is_trained(target) and not is_cut(target)
        self.precision: Precision | None = None
        """Of the products of a forward pass; None: the target's own."""
        self.kv_cache: DynamicCache | None = None
        """Takes the keys and values of passes over rows, where it is set (`own_drafts/reading.py`)."""
        self._team = team_of(target)
        self._side: torch.cuda.Stream | None = None

    @torch.no_grad()
    def fetch(self, batch: Batch) -> Features:
        """One forward pass, in the precision that is set or the target's own, whatever autocast says outside.

        Of a target that a team of processes holds a pass for each of them: all take part in each, and keep the states
        of their own rows.
        """
        device = batch["input_ids"].device
        if self.target.device != device:
            self.target.to(device)
        if self._team is None:
            return self._pass(batch)
        own = torch.distributed.get_rank(self._team)
        found: Features = ()
        for rank, each in enumerate(of_all(batch, self._team)):
            states = self._pass(each)
            found = states if rank == own else found
        return found

    @torch.no_grad()
    def read_behind(self, inputs: dict[str, Any]) -> Tensor:
        """The last hidden states [R, N, H] of tokens behind others, whose keys and values `inputs` hold."""
        with self._precise(inputs["input_ids"].device):
            last: Tensor = decoder_of(self.target)(**inputs).last_hidden_state
        return last.to(self.target.dtype)

    def _precise(self, device: torch.device) -> torch.autocast:
        """The precision of the target's products, whatever autocast says outside."""
        mixed = None if self.precision in (None, "fp32") else PRODUCTS[self.precision]
        return torch.autocast(device.type, dtype=mixed, enabled=mixed is not None)

    def _pass(self, batch: Batch) -> Features:
        with self._precise(batch["input_ids"].device):
            states = states_of(decoder_of(self.target), batch, self.layers, self.kv_cache)
        held, dtype = self.part.held(batch["input_ids"].shape[1]), self.target.dtype
        if self.part.is_whole:
            return tuple(each.to(dtype) for each in states)
        # copied, or the states of whole rows would stay
        return tuple(each[:, held].to(dtype, copy=True) for each in states)

    def start(self, batch: Batch) -> Callable[[], Features] | None:
        """On a GPU the forward pass is put on a stream beside the one that the drafter is on."""
        device = batch["input_ids"].device
        if device.type != "cuda":
            return None
        self._side = self._side or torch.cuda.Stream(device)
        self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            states = self.fetch(batch)
            for tensor in batch.values():
                tensor.record_stream(self._side)
            ready = self._side.record_event()
        return partial(_handed_over, states, ready, device)


class StoredFeatures(FeatureSource):
    """States that were stored, or else are made and stored.

    What is used is what would be read back, so that a run does not depend on where a row came from.
    """

    made_ahead = False
    """Whether the reading thread makes what is not stored, or whoever asks for the batch does."""

    def __init__(self, layers: Sequence[int], dtype: torch.dtype, store: FeatureStore, stored: FeatureDtype) -> None:
        """`dtype`: of what is handed out, the target's; `stored`: of what is kept."""
        super().__init__(layers)
        self.dtype, self.store, self._stored_as = dtype, store, stored
        self._reader: ThreadPoolExecutor | None = None
        self._side: torch.cuda.Stream | None = None

    def fetch(self, batch: Batch) -> Features:
        """Read what is there, make the rest."""
        return self._whole(batch, self._timed(partial(self._read, batch)))

    def start(self, batch: Batch) -> Callable[[], Features]:
        """A thread reads and uploads; what it does not find is made there or later (`made_ahead`)."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="features")
        device = batch["input_ids"].device
        if device.type == "cuda":
            self._side = self._side or torch.cuda.Stream(device)
            # the batch itself may still be on its way to the device
            self._side.wait_stream(torch.cuda.current_stream(device))
        reading = self._reader.submit(self._read, batch, self._side)

        def wait() -> Features:
            return self._whole(batch, self._timed(reading.result))

        return wait

    def close(self) -> None:
        """Wait for the reader; the store stays open."""
        super().close()
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
            self._reader = None

    def kept(self, key: str, states_NSH: Tensor) -> Tensor:
        """Store what is handed out of a row's states [N, S, H], all of them; what would be read back."""
        held = self.part.held(states_NSH.shape[1])
        key, states_NSH = self._name(key, held), states_NSH[:, held]
        encoded = encode(states_NSH, self._stored_as)
        self.store.add(key, encoded)
        return decode(encoded, self.dtype)

    def _name(self, key: str, held: slice) -> str:
        """What a row's part is stored under; a whole row under its own key."""
        return key if self.part.is_whole else f"{key}-{held.start}-{held.stop}"

    def _stored(self, key: str, length: int) -> Encoded | None:
        """What is stored of a row of `length` tokens: its part, or that of the whole row."""
        if self.part.is_whole:
            return self.store.read(key)
        held = self.part.held(length)
        row = self.store.read(self._name(key, held), key)
        if row is None or row["states"].shape[1] == held.stop - held.start:
            return row
        return {name: each[:, held] for name, each in row.items()}

    def _timed(self, wait: Callable[[], _Read]) -> _Read:
        began = time.perf_counter()
        read = wait()
        self._waited += time.perf_counter() - began
        return read

    @torch.no_grad()
    def _read(self, batch: Batch, side: torch.cuda.Stream | None = None) -> _Read:
        """The rows of a batch that are stored, [N, S, H] each, decoded on the batch's device."""
        device = batch["input_ids"].device
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            keys = row_keys(batch)
            stored = [self._stored(key, batch["input_ids"].shape[1]) for key in keys]
            rows = [None if each is None else self._decoded(each, device) for each in stored]
            if self.made_ahead:
                self._make(batch, keys, rows)
            return _Read(keys, rows, None if side is None else side.record_event())

    @abstractmethod
    def _make(self, batch: Batch, keys: list[str], rows: list[Tensor | None]) -> None:
        """Make and keep the rows that are not stored: each None becomes states [N, S, H]."""

    def _decoded(self, row: Encoded, device: torch.device) -> Tensor:
        if device.type == "cuda":
            row = {name: t.pin_memory().to(device, non_blocking=True) for name, t in row.items()}
        return decode(row, self.dtype)

    @torch.no_grad()
    def _whole(self, batch: Batch, read: _Read) -> Features:
        device = batch["input_ids"].device
        stored = [each for each in read.rows if each is not None]
        if read.ready is not None:
            _handed_over(tuple(stored), read.ready, device)
        if not self.made_ahead:
            self._make(batch, read.keys, read.rows)
        return tuple(torch.stack([states for states in read.rows if states is not None], 1))


class CachedFeatures(StoredFeatures):
    """States that were stored, or else computed row by row and stored.

    Row by row, because a row's neighbours may change the last bits of its states, and it has
    others when it is computed again.
    """

    def __init__(
        self, online: OnlineFeatures, store: FeatureStore, dtype: FeatureDtype, *, together: Accelerator | None = None
    ) -> None:
        """`together`: the processes that the target is cut over; None where each has all of it."""
        super().__init__(online.layers, online.target.dtype, store, dtype)
        self.online, self._together = online, together

    def _make(self, batch: Batch, keys: list[str], rows: list[Tensor | None]) -> None:
        missing = [r for r, row in enumerate(rows) if row is None]
        others = self._passes_of_others(len(missing))  # asked before any pass, in which processes meet as well
        for r in missing:
            rows[r] = self.kept(keys[r], self._computed(batch, r))
        for _ in range(others):
            self._computed(batch, 0)

    def _computed(self, batch: Batch, r: int) -> Tensor:
        """The states [N, S, H] of a row alone."""
        return torch.cat(self.online.fetch({name: t[r : r + 1] for name, t in batch.items()}))

    def _passes_of_others(self, own: int) -> int:
        """How many passes more than this process another one makes; a cut target needs equally many of all."""
        if self._together is None:
            return 0
        return max(gather_object([own])) - own


class _Read(NamedTuple):
    keys: list[str]
    rows: list[Tensor | None]
    ready: torch.cuda.Event | None
    """What the stream that will use the rows has to wait for."""


def _handed_over(states: Features, ready: torch.cuda.Event, device: torch.device) -> Features:
    """Tensors made on another stream, for use on the current one."""
    current = torch.cuda.current_stream(device)
    current.wait_event(ready)
    for tensor in states:
        # or their memory would be given away on the stream that made them, too early
        tensor.record_stream(current)
    return states


def is_trained(target: nn.Module) -> bool:
    """Whether any weight of it moves, so that its states are not the same at every step."""
    return any(parameter.requires_grad for parameter in target.parameters())


def of_all(batch: Batch, team: torch.distributed.ProcessGroup) -> list[Batch]:
    """The rows of every process of a team, which have the same shape in each: what a target's pass reads of them."""
    names = ("input_ids", "documents", "positions")
    own = torch.stack([batch[name].long() for name in names])
    found = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(team))]
    torch.distributed.all_gather(found, own, group=team)
    return [dict(zip(names, each, strict=True)) for each in found]


def states_of(decoder: Any, batch: Batch, layers: Sequence[int], kv_cache: DynamicCache | None = None) -> Features:
    """The hidden states [R, S, H] of some layers, attention kept inside each document.

    Args:
        kv_cache: takes the keys and values of all rows, which then go through in one pass.
    """

    def run(inputs: dict[str, Any]) -> Features:
        states = HiddenStates(layers, layer_count(decoder))
        if kv_cache is not None:
            inputs = inputs | {"past_key_values": kv_cache, "use_cache": True}
        elif _is_lean(decoder, inputs["attention_mask"]):
            states_in_rows(decoder, inputs, states)
            return states.in_order
        with states.taken_from(decoder):
            decoder(**inputs)
        return states.in_order

    return tuple(over_rows(decoder, batch, run))


def _is_lean(decoder: Any, mask: Masks | None) -> bool:
    """Whether fewer operations compute a pass: without gradients on a GPU, of masks that say what a token may see."""
    masks = mask.values() if isinstance(mask, dict) else [mask]
    return (
        decoder.device.type == "cuda"
        and not torch.is_grad_enabled()
        and all(each is None or each.dtype == torch.bool for each in masks)
        and misfit_on_gpu(decoder) is None
    )
