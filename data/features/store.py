"""Hidden states of the target on disk: safetensors shards, under a hash of what a row holds.

A shard appears by one rename, its name carries the SHA-256 of its content and its header the rows
in it, so the index (`index-RANK.json`) can always be made anew from the shards. A shard that is
missing, cut or altered is named in the log and dropped: its rows are computed again, to the same
numbers, because what is kept for a row depends on nothing else. The bound is kept at all times.
Whole shards are evicted, the one read longest ago first, but only such as have not been read for
`patience` requests: while an epoch asks for every row once, exchanging one row for another
saves nothing, and rows that find no room are computed again in every epoch instead (with room for
half of the rows half of them are found; by plain LRU it would be about a fifth, with more writing).
Read next: `features/codec.py`, the numbers; `trainers/teacher/features.py`, who asks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...errors import EnvironmentFailure, RequestError
from ...storage import check_identity_file, sha256, staged_file, try_lock, write_text, writing
from ...storage.formats import FEATURES
from .codec import Encoded

_log = logging.getLogger(__name__)

_SHARD_BYTES = 64_000_000  # enough to write in one go, little enough to check at the first look
_PARTS = 16  # a bound is cut into at least so many shards, or evicting one would empty it


@dataclass
class _Shard:
    path: Path
    bytes: int
    rows: list[str]
    used: int = 0
    is_checked: bool = False


def row_keys(batch: Mapping[str, Tensor]) -> list[str]:
    """A hash of each row of a batch, over all that its hidden states depend on."""
    parts = [batch[name].long() for name in ("input_ids", "positions", "documents")]
    rows_R3S = torch.stack(parts, 1).cpu().numpy()
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
        self._shards: dict[str, _Shard] = {}
        self._index: dict[str, tuple[str, int]] = {}
        self._buffer: dict[str, Encoded] = {}
        self._requests = self._number = 0
        self._lock = threading.RLock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = self._hold()
            self._check_same()
            for staging in folder.glob(f".staging-{rank:03d}-*"):
                staging.unlink()  # a kill's
            self._scan()
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot use the feature cache {folder}: {error.strerror or error}; name another features.folder"
            ) from error
        self._make_room(0, patience=0)

    # ---- what callers do --------------------------------------------------------------------

    def read(self, key: str) -> Encoded | None:
        """A row as it was added, on the CPU; None where it is not kept. Any thread may call."""
        with self._lock:
            self._requests += 1
            if key in self._buffer:
                return self._buffer[key]
            if key not in self._index and self._world > 1:
                self._scan()  # another process may have stored it
            name, at = self._index.get(key, ("", 0))
            shard = self._shards.get(name)
            if shard is None:
                return None
            shard.used = self._requests
        return self._read_shard(shard, at)

    def add(self, key: str, row: Encoded) -> None:
        """Keep a row if there is, or can be made, room for it."""
        with self._lock:
            if key in self._index or key in self._buffer or not self._has_room():
                return
            self._buffer[key] = {name: tensor.cpu().contiguous() for name, tensor in row.items()}
            if len(self._buffer) >= self._rows_per_shard:
                self._publish()

    def close(self) -> None:
        """Write what is left, and let others use the folder."""
        with self._lock:
            if self._buffer:
                self._publish()
            self._held.close()

    @property
    def bytes(self) -> int:
        """What this process's shards take on disk."""
        with self._lock:
            return sum(shard.bytes for shard in self._shards.values() if self._is_mine(shard))

    # ---- shards -------------------------------------------------------------------------------

    def _read_shard(self, shard: _Shard, at: int) -> Encoded | None:
        try:
            if not shard.is_checked:
                if sha256(shard.path) != _checksum(shard.path):
                    raise ValueError("its content has another checksum than its name")
                shard.is_checked = True
            os.utime(shard.path)  # the order of eviction outlives the run
            with safe_open(shard.path, "pt") as file:
                return {name: file.get_slice(name)[at : at + 1][0] for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            self._drop(shard, str(error))
            return None

    def _drop(self, shard: _Shard, reason: str) -> None:
        _log.warning(
            "feature cache: shard %s is damaged (%s); its %d rows are computed again",
            shard.path,
            reason,
            len(shard.rows),
        )
        self._forget(shard)

    def _forget(self, shard: _Shard) -> None:
        with self._lock:
            self._shards.pop(shard.path.name, None)
            for key in shard.rows:
                if self._index.get(key, ("",))[0] == shard.path.name:
                    del self._index[key]
            shard.path.unlink(missing_ok=True)

    def _publish(self) -> None:
        """Write the buffer as a shard, if there is room; it is empty afterwards either way."""
        rows, self._buffer = self._buffer, {}
        names = next(iter(rows.values())).keys()
        content = save(
            {name: torch.stack([row[name] for row in rows.values()]) for name in names},
            {"identity": self._identity_hash, "rows": json.dumps(list(rows))},
        )
        if not self._make_room(len(content), patience=self._patience):
            return
        self._number += 1
        sum_ = hashlib.sha256(content).hexdigest()
        path = self.folder / f"{self._rank:03d}-{self._number:08d}-{sum_}.safetensors"
        own = self.folder / f".staging-{self._rank:03d}-{self._number:08d}"
        with writing(self.folder, room="make room or lower features.max_gb", again="go on with --resume auto"):
            # not flushed: what a power cut tears fails its checksum, and is computed again
            with staged_file(path, staging=own, durable=False) as staging:
                staging.write_bytes(content)
            self._take(path, list(rows), used=self._requests, is_checked=True)
            self._write_index()

    def _take(self, path: Path, rows: list[str], *, used: int, is_checked: bool) -> None:
        size = path.stat().st_size
        self._shards[path.name] = _Shard(path, size, rows, used, is_checked)
        self._index |= {key: (path.name, at) for at, key in enumerate(rows)}

    # ---- the bound ----------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether what is buffered and a row more could be published."""
        waiting = sum(_size(row) for row in self._buffer.values())
        largest = max([shard.bytes for shard in self._shards.values()], default=0)
        return bool(
            self.bytes + max(waiting, largest) < self._max_bytes or next(iter(self._evictable(self._patience)), None)
        )

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
            self._forget(shard)
        return True

    def _evictable(self, patience: int) -> Iterable[_Shard]:
        mine = (shard for shard in list(self._shards.values()) if self._is_mine(shard))
        stale = (shard for shard in mine if self._requests - shard.used >= patience)
        return sorted(stale, key=lambda shard: shard.used)

    def _is_mine(self, shard: _Shard) -> bool:
        return int(shard.path.name[:3]) % self._world == self._rank

    # ---- opening ------------------------------------------------------------------------------

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

    def _scan(self) -> None:
        """Take up the shards that are not known yet, from an index or from their headers."""
        listed: dict[str, list[str]] = {}
        new = [path for path in self.folder.glob("*.safetensors") if path.name not in self._shards]
        if not new:
            return
        for index in self.folder.glob("index-*.json"):
            try:
                record = json.loads(index.read_text(encoding="utf-8"))
                listed |= record["shards"] if record["identity"] == self._identity_hash else {}
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("feature cache: %s is damaged (%s); made anew", index, error)
        for path in sorted(new, key=_read_at):
            try:
                rows = listed[path.name] if path.name in listed else self._header(path)
                self._take(path, rows, used=self._requests, is_checked=False)
            except FileNotFoundError:
                continue  # another process has evicted it
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                self._drop(_Shard(path, 0, []), str(error))
        numbers = [int(name[4:12]) for name in self._shards if self._is_mine(self._shards[name])]
        self._number = max([self._number, *numbers])

    def _header(self, path: Path) -> list[str]:
        with safe_open(path, "pt") as file:
            record = file.metadata() or {}
        if record["identity"] != self._identity_hash:
            raise ValueError("it was made for something else")
        return list(json.loads(record["rows"]))

    def _write_index(self) -> None:
        mine = {name: each.rows for name, each in self._shards.items() if self._is_mine(each)}
        record = {"identity": self._identity_hash, "shards": mine}
        write_text(self.folder / f"index-{self._rank:03d}.json", json.dumps(record) + "\n")


def _checksum(path: Path) -> str:
    return path.stem.rsplit("-", 1)[-1]


def _read_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(row: Encoded) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in row.values())
