"""What lies in a drafter's folder that others wrote: its config, and the headers of its weight files.

Nothing is run and no weight is read to know what a folder holds: a config that names classes (`auto_map`) names them
to others. Read next: `forms.py`, the forms that are told apart by this; `weights.py`, which reads the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import RequestError
from ...storage import tensor_heads
from ...storage.tensors import Head

REMEDY = "copy the drafter's folder again"
_NESTED = ("dflash_config", "eagle_config")
_PREFIX = re.compile(r"^(model|medusa_heads?)\.")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Files:
    """A folder's config and the names, kinds and shapes of its tensors."""

    folder: Path
    config: Mapping[str, Any]
    heads: Mapping[str, Head]
    """By their names without a `model.` or `medusa_heads.` in front."""
    stored: Mapping[str, tuple[Path, str]]
    """The same names -> the file, and the name there."""

    def word(self, *names: str, default: Any = None) -> Any:
        """The first of some words that the config says: on top, or in a method's own table; null says nothing."""
        tables = [self.config, *(self.config.get(name) for name in _NESTED)]
        found = (table.get(name) for name in names for table in tables if isinstance(table, Mapping))
        return next((value for value in found if value is not None), default)

    @cached_property
    def layer(self) -> Mapping[str, Any]:
        """Where the sizes of a layer are said: speculators has them in a table of their own."""
        own = self.config.get("transformer_layer_config")
        return own if isinstance(own, Mapping) else self.config

    @property
    def by_speculators(self) -> bool:
        """Whether the config is in the words of speculators."""
        return isinstance(self.config.get("speculators_model_type"), str)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; KeyError where there is none."""
        return self.heads[name].shape


def files_of(folder: Path) -> Files | None:
    """What a folder holds; None where it is no folder, or has no config that could be read.

    Raises:
        RequestError: its weights are damaged, or two files hold the same tensor.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, Mapping):
        return None
    heads: dict[str, Head] = {}
    stored: dict[str, tuple[Path, str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, head in tensor_heads(file, remedy=REMEDY).items():
            if name in heads:
                raise RequestError(f"{file} holds {name}, which {stored[name][0].name} beside it holds too: {REMEDY}")
            heads[name], stored[name] = head, (file, name)
    plain = {name: _PREFIX.sub("", name, count=1) for name in heads}
    if len({*plain.values()}) < len(plain):  # of two that differ by that alone neither is cut
        plain = {name: name for name in heads}
    return Files(
        folder,
        config,
        {plain[name]: head for name, head in heads.items()},
        {plain[name]: at for name, at in stored.items()},
    )


def check_no_pickles(files: Files) -> None:
    """Raise RequestError for a folder whose weights are pickles alone: to load one may run what it says."""
    found = sorted(path.name for kind in _PICKLES for path in files.folder.glob(kind))
    if files.heads or not found:
        return
    first = found[0]
    raise RequestError(
        f"{files.folder} holds its weights as a pickle ({', '.join(found[:3])}), which may run code when it is loaded "
        'and is not read here; convert it where you trust it, and name the folder again: python -c "import torch; '
        "from safetensors.torch import save_file; "
        f"save_file({{k: v.contiguous().clone() for k, v in torch.load('{first}', weights_only=True).items()}}, "
        "'model.safetensors')\""
    )
