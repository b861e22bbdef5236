"""What a number was measured on: versions and hardware, without anything private.

Read next: `evaluate.py`; `launch/verbs.py` prints the same block.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

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
