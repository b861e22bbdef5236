"""Hidden states of the target on disk, under a hash of what a row holds, never more than a bound.

Rows that are lost are computed again, to the same numbers, because what is kept for a row depends
on nothing else. Whole shards are evicted, the one read longest ago first, but only such as have not
been read for `patience` requests: while an epoch asks for every row once, exchanging one row for
another saves nothing, and rows that find no room are computed again in every epoch instead (with
room for half of the rows half of them are found; by plain LRU it would be about a fifth, with more
writing). Read next: `features/shards.py`, the files; `features/shards.py`, the numbers;
`trainers/teacher/features.py`, who asks.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from ...decoding.on_host import on_host
from ...errors import EnvironmentFailure, RequestError
from ...storage import check_identity_file, try_lock, write_text, writing
from ...storage.formats import FEATURES
from .shards import Encoded, Shard, Shards

_log = logging.getLogger(__name__)

_SHARD_BYTES = 64_000_000  # enough to write in one go, little enough to check at the first look
_PARTS = 16  # a bound is cut into at least so many shards, or evicting one would empty it


def row_keys(batch: Mapping[str, Tensor]) -> list[str]:
    """A hash of each row of a batch, over all that its hidden states depend on."""
    parts = [on_host(batch[name]).long() for name in ("input_ids", "positions", "documents")]
    rows_R3S = torch.stack(parts, 1).numpy()
    return [hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=16).hexdigest() for row in rows_R3S]


class FeatureStore:
    """Encoded rows by key, never more than `max_bytes` of them on disk."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, object],
        *,
        max_bytes: int,
        row_bytes: int,
        patience: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Open or make the folder.

        Args:
            identity: what the stored states depend on, other than the row.
            max_bytes: of all processes' shards together.
            row_bytes: about what a row takes.
            patience: requests for rows that a shard must have gone unread to be evicted.
            rank: of this process among the `world` that share the folder.

        Raises:
            RequestError: the folder was made for another identity, another run uses it, or not
                even one row fits the bound. EnvironmentFailure: it cannot be written.
        """
        self.folder, self._patience, self._rank, self._world = folder, patience, rank, world
        self._identity = json.loads(json.dumps({"format": FEATURES.number, **identity}))
        self._max_bytes = max_bytes // world
        self._rows_per_shard = max(1, min(_SHARD_BYTES, self._max_bytes // _PARTS) // (row_bytes + 1))
        if row_bytes + 10_000 > self._max_bytes:
            raise RequestError(
                f"features.max_gb allows {self._max_bytes / 1e9:.3g} GB for each process, and the "
                f"features of one row take {row_bytes / 1e9:.3g} GB; raise it, or take features "
                "online"
            )
        self._buffer: dict[str, Encoded] = {}
        self._requests = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = self._hold()
            self._check_same()
            self._shards = Shards(folder, self._identity_hash, rank=rank, world=world)
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot use the feature cache {folder}: {error.strerror or error}; name another features.folder"
            ) from error
        self._make_room(0, patience=0)

    def read(self, *keys: str) -> Encoded | None:
        """A row as it was added, on the CPU; None where it is not kept. Any thread may call.

        Args:
            keys: of several that would do, the first that is kept is read.
        """
        with self._shards.lock:
            self._requests += 1
            for key in keys:
                if key in self._buffer:
                    return self._buffer[key]
            missing = not any(key in self._shards for key in keys)
            if missing and self._world > 1:
                self._shards.scan(used=self._requests)  # another process may have stored it
            found = (match for key in keys if (match := self._shards.find(key)) is not None)
            match = next(found, None)
            if match is None:
                return None
            match[0].used = self._requests
        return self._shards.read(*match)

    def add(self, key: str, row: Encoded) -> None:
        """Keep a row if there is, or can be made, room for it."""
        with self._shards.lock:
            if key in self._shards or key in self._buffer or not self._has_room():
                return
            self._buffer[key] = {name: tensor.cpu().contiguous() for name, tensor in row.items()}
            if len(self._buffer) >= self._rows_per_shard:
                self._publish()

    def close(self) -> None:
        """Write what is left, and let others use the folder."""
        with self._shards.lock:
            if self._buffer:
                self._publish()
            self._held.close()

    @property
    def bytes(self) -> int:
        """What this process's shards take on disk."""
        with self._shards.lock:
            return sum(shard.bytes for shard in self._shards.mine())

    def _publish(self) -> None:
        """Write the buffer as a shard, if there is room; it is empty afterwards either way."""
        rows, self._buffer = self._buffer, {}
        content = self._shards.encode(rows)
        if not self._make_room(len(content), patience=self._patience):
            return
        with writing(self.folder, room="make room or lower features.max_gb", again="go on with --resume auto"):
            self._shards.write(content, list(rows), used=self._requests)

    def _has_room(self) -> bool:
        """Whether what is buffered and a row more could be published."""
        waiting = sum(_size(row) for row in self._buffer.values())
        needed = max(waiting, self._shards.largest)
        return self.bytes + needed < self._max_bytes or bool(self._evictable(self._patience))

    def _make_room(self, need: int, *, patience: int) -> bool:
        """Evict until `need` more bytes fit; False, and nothing evicted, where that cannot be."""
        going, free = [], self._max_bytes - self.bytes - need
        for shard in self._evictable(patience):
            if free >= 0:
                break
            going.append(shard)
            free += shard.bytes
        if free < 0:
            return False
        for shard in going:
            self._shards.forget(shard)
        return True

    def _evictable(self, patience: int) -> list[Shard]:
        """Shards that may go, the one read longest ago first."""
        stale = (shard for shard in self._shards.mine() if self._requests - shard.used >= patience)
        return sorted(stale, key=lambda shard: shard.used)

    @property
    def _identity_hash(self) -> str:
        return hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()

    def _hold(self) -> IO[str]:
        """Lock this process's part of the folder; a kill unlocks it."""
        held = (self.folder / f"lock-{self._rank:03d}").open("w")
        if not try_lock(held):
            held.close()
            raise RequestError(
                f"the feature cache {self.folder} is used by another run; wait for it, or name another features.folder"
            )
        return held

    def _check_same(self) -> None:
        """Compare with what the folder was made for; a new folder is marked with ours."""
        path = self.folder / "identity.json"
        remedy = "Name another features.folder, or delete this one"
        if not check_identity_file(path, self._identity, remedy=remedy):
            write_text(path, json.dumps(self._identity, indent=1, sort_keys=True) + "\n")


def _size(row: Encoded) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in row.values())
