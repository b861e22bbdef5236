"""The shards of a feature cache: safetensors files of rows, and the index that finds a row in them.

A shard appears by one rename, its name carries the SHA-256 of its content and its header the rows
in it, so the index (`index-RANK.json`) can always be made anew from the shards. A shard that is
missing, cut or altered is named in the log and dropped.

Hidden states are kept as they are, in bf16, or in fp8 with a scale per token.

e4m3 holds 3 bits behind the point: a value comes back within 1/16 of itself, or within
scale / 1024 where it is smaller than scale / 64 (subnormal); the scale of a token in a layer is
its largest value / 448, so that nothing overflows (Micikevicius et al. 2022, arXiv 2209.05433).
Shapes: N hidden states of a row, S tokens, H hidden size.

Read next: `features/store.py`, which decides what is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...storage import delete_leftovers, sha256, staged_file, write_text

_log = logging.getLogger(__name__)


@dataclass
class Shard:
    """One file of rows. `used`: the request at which it was read last."""

    path: Path
    bytes: int
    rows: list[str]
    used: int = 0
    is_checked: bool = False


class Shards:
    """The shards of one folder, those of other processes too; any thread may read."""

    def __init__(self, folder: Path, identity: str, *, rank: int, world: int) -> None:
        """Take up what is there.

        Args:
            identity: hash of what the rows depend on; shards of another one are dropped.
            rank: of this process among the `world` that share the folder.
        """
        self.folder, self._identity, self._rank, self._world = folder, identity, rank, world
        self.lock = threading.RLock()
        self._shards: dict[str, Shard] = {}
        self._index: dict[str, tuple[str, int]] = {}
        self._number = 0
        for staging in folder.glob(f".staging-{rank:03d}-*"):
            staging.unlink()  # a kill's
        delete_leftovers(folder)
        self.scan(used=0)

    def __contains__(self, key: str) -> bool:
        return key in self._index

    @property
    def largest(self) -> int:
        """Bytes of the largest shard."""
        return max([shard.bytes for shard in self._shards.values()], default=0)

    def mine(self) -> list[Shard]:
        """The shards that this process may evict."""
        with self.lock:
            return [shard for shard in self._shards.values() if self._is_mine(shard)]

    def find(self, key: str) -> tuple[Shard, int] | None:
        """The shard that holds a row, and the row's index in it."""
        name, at = self._index.get(key, ("", 0))
        shard = self._shards.get(name)
        return None if shard is None else (shard, at)

    def read(self, shard: Shard, at: int) -> Encoded | None:
        """A row of a shard; None, and the shard dropped, where it is damaged."""
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

    def encode(self, rows: Mapping[str, Encoded]) -> bytes:
        """The content of a shard with these rows."""
        names = next(iter(rows.values())).keys()
        return save(
            {name: torch.stack([row[name] for row in rows.values()]) for name in names},
            {"identity": self._identity, "rows": json.dumps(list(rows))},
        )

    def write(self, content: bytes, rows: list[str], *, used: int) -> None:
        """Add a shard; OSError where it cannot be written."""
        self._number += 1
        checksum = hashlib.sha256(content).hexdigest()
        path = self.folder / f"{self._rank:03d}-{self._number:08d}-{checksum}.safetensors"
        own = self.folder / f".staging-{self._rank:03d}-{self._number:08d}"
        # not flushed: what a power cut tears fails its checksum, and is computed again
        with staged_file(path, staging=own, durable=False) as staging:
            staging.write_bytes(content)
        self._take(path, rows, used=used, is_checked=True)
        self._write_index()

    def forget(self, shard: Shard) -> None:
        """Delete a shard."""
        with self.lock:
            self._shards.pop(shard.path.name, None)
            for key in shard.rows:
                if self._index.get(key, ("",))[0] == shard.path.name:
                    del self._index[key]
            shard.path.unlink(missing_ok=True)

    def scan(self, *, used: int) -> None:
        """Take up the shards that are not known yet, from an index or from their headers."""
        listed: dict[str, list[str]] = {}
        new = [path for path in self.folder.glob("*.safetensors") if path.name not in self._shards]
        if not new:
            return
        for index in self.folder.glob("index-*.json"):
            try:
                record = json.loads(index.read_text(encoding="utf-8"))
                listed |= record["shards"] if record["identity"] == self._identity else {}
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("feature cache: %s is damaged (%s); made anew", index, error)
        for path in sorted(new, key=_read_at):
            try:
                rows = listed[path.name] if path.name in listed else self._header(path)
                self._take(path, rows, used=used, is_checked=False)
            except FileNotFoundError:
                continue  # another process has evicted it
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                self._drop(Shard(path, 0, []), str(error))
        numbers = [int(name[4:12]) for name in self._shards if self._is_mine(self._shards[name])]
        self._number = max([self._number, *numbers])

    def _header(self, path: Path) -> list[str]:
        with safe_open(path, "pt") as file:
            record = file.metadata() or {}
        if record["identity"] != self._identity:
            raise ValueError("it was made for something else")
        return list(json.loads(record["rows"]))

    def _write_index(self) -> None:
        mine = {name: each.rows for name, each in self._shards.items() if self._is_mine(each)}
        record = {"identity": self._identity, "shards": mine}
        write_text(self.folder / f"index-{self._rank:03d}.json", json.dumps(record) + "\n")

    def _take(self, path: Path, rows: list[str], *, used: int, is_checked: bool) -> None:
        size = path.stat().st_size
        self._shards[path.name] = Shard(path, size, rows, used, is_checked)
        self._index |= {key: (path.name, at) for at, key in enumerate(rows)}

    def _drop(self, shard: Shard, reason: str) -> None:
        _log.warning(
            "feature cache: shard %s is damaged (%s); its %d rows are computed again",
            shard.path,
            reason,
            len(shard.rows),
        )
        self.forget(shard)

    def _is_mine(self, shard: Shard) -> bool:
        return int(shard.path.name[:3]) % self._world == self._rank


def _checksum(path: Path) -> str:
    return path.stem.rsplit("-", 1)[-1]


def _read_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


FeatureDtype = Literal["fp32", "bf16", "fp8"]
Encoded = dict[str, Tensor]
"""`states` [N, S, H] and, for fp8 alone, `scales` fp32 [N, S]."""

_LARGEST = 448.0  # of e4m3
_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
_STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}


def token_bytes(layers: int, hidden: int, dtype: FeatureDtype) -> int:
    """Bytes of one token in `layers` hidden states."""
    return layers * (hidden * _BYTES[dtype] + (4 if dtype == "fp8" else 0))


def encode(states_NSH: Tensor, dtype: FeatureDtype) -> Encoded:
    """What is stored for one row, on the device that the states are on."""
    if dtype != "fp8":
        return {"states": states_NSH.to(_STORED[dtype])}
    wide_NSH = states_NSH.float()
    largest_NS = wide_NSH.abs().amax(-1)
    # a token of zeros has no scale; any will do
    scales_NS = torch.where(largest_NS > 0, largest_NS / _LARGEST, torch.ones_like(largest_NS))
    return {"states": (wide_NSH / scales_NS[..., None]).to(torch.float8_e4m3fn), "scales": scales_NS}


def decode(stored: Encoded, dtype: torch.dtype) -> Tensor:
    """The states [N, S, H] in `dtype`, the same bits whenever and wherever they are decoded."""
    if "scales" not in stored:
        return stored["states"].to(dtype)
    return (stored["states"].float() * stored["scales"][..., None]).to(dtype)
