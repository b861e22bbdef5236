"""What a number was measured on: versions and hardware, without anything private.

Read next: `evaluate.py`; `launch/verbs.py` prints the same block.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...decoding.gguf.file import find_gguf
from ...storage import is_first, sha256

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone


_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "deepspeed",
    "safetensors",
    "tokenizers",
    "numpy",
    "scipy",
)


def environment() -> dict[str, Any]:
    """Versions, processor, cores, memory, accelerators."""
    import psutil
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "devices": devices,
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_KINDS = ("config.json", "adapter_config.json", "*.safetensors")
_BLOB = re.compile(r"[0-9a-f]{64}")
_KNOWN: WeakKeyDictionary[Backbone, str | None] = WeakKeyDictionary()
"""Of each target that is loaded: its files are read once."""


def drafter_hash(folder: Path) -> str:
    """Of config and weights in a folder, members and adapters too: another draws other numbers."""
    if find_gguf(str(folder)) == folder:
        return sha256(folder)
    if not folder.is_dir():  # a name on the hub
        return hashlib.sha256(str(folder).encode()).hexdigest()
    files = sorted(path for kind in _KINDS for path in folder.rglob(kind))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        sums = list(threads.map(_checksum, files))
    listed = "".join(f"{path.relative_to(folder)} {each}\n" for path, each in zip(files, sums, strict=True))
    return hashlib.sha256(listed.encode()).hexdigest()


def target_hash(target: Backbone) -> str | None:
    """The same of the files that a target was loaded from.

    None for one that was made in memory, and in all processes of a launch but the first, which alone writes.
    """
    if target not in _KNOWN:
        folder = _folder_of(target)
        _KNOWN[target] = None if folder is None or not is_first() else drafter_hash(folder)
    return _KNOWN[target]


def _folder_of(target: Backbone) -> Path | None:
    """Where the files are: the target's own folder, or its revision in the hub's cache."""
    if Path(target.name).exists():
        return Path(target.name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(target.name, "config.json", revision=target.revision)
    except HFValidationError:  # no name on a hub either
        return None
    return Path(found).parent if isinstance(found, str) else None


def _checksum(path: Path) -> str:
    blob = path.resolve()
    in_cache = blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name)
    return blob.name if in_cache else sha256(path)
