"""Checks of the weight files of a model's folder, before they are read.

Only whole safetensors files in the folder itself pass, and no model that is far larger than they are. A
pickle (a `.bin`) can run code when it is read, and is never read. Read next: `loading.py`, which
reads what passes here.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import RequestError
from ...storage import check_tensors, tensor_heads
from ..gguf.file import find_gguf
from ..gguf.model import check_held as check_gguf
from .hub import folder_or_name, loading_errors
from .quantised import quantisation_of

if TYPE_CHECKING:
    from torch import nn

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FRACTIONS = re.compile(r"F\d|BF")
_SHARD = re.compile(r"\w[\w.-]*\.safetensors")
_ODD = 2  # times what the weights hold: what is missing by less, transformers names to the tensor
_PACKED = 8  # weights of 4 bits in a number of 32


def check_weight_files(path: str) -> None:
    """Check the weight files of a model's folder; a hub name passes, because its files are not here yet.

    Raises:
        RequestError: a file is cut short, they are pickles, or the folder holds an adapter and no model.
    """
    folder = Path(folder_or_name(path))
    if not folder.is_dir():
        return
    if (folder / "adapter_config.json").is_file():
        raise RequestError(
            f"{folder} holds an adapter of peft (adapter_config.json): it names a model of its own, which would be "
            "loaded in place of this folder; name a folder with a whole model, the adapter merged into it or left out"
        )
    for file in weight_files(path, folder):
        check_tensors(file, remedy=f"copy the folder {folder} again or make it anew")


def weight_files(path: str, folder: Path) -> list[Path]:
    """The safetensors files of a folder, as its index lists them; empty where there are none.

    Raises:
        RequestError: there are pickles in place of them, or the index is damaged or leads elsewhere.
    """
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        with loading_errors("model", path, "config.json and safetensors weights"):
            return [folder / name for name in shards(json.loads((folder / INDEX).read_text(encoding="utf-8")))]
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise RequestError(_pickled(folder, pickles[0]))
    return []


def shards(index: Any) -> list[str]:
    """The files that an index lists.

    Raises:
        ValueError: it is no index, or names something else than safetensors files beside it.
    """
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{INDEX} lists no weights")
    names = sorted({str(name) for name in listed.values()})
    for name in names:
        if not _SHARD.fullmatch(name):
            raise ValueError(f"{INDEX} names {name:.80}; expected safetensors files beside it")
    return names


def check_held(model: nn.Module, path: str) -> None:
    """Refuse weights that are no fractions, and a config that describes far more of them: it would fill the memory.

    Args:
        model: what the config describes, in shapes alone.

    Raises:
        RequestError: it does.
    """
    folder = Path(folder_or_name(path))
    if (file := find_gguf(str(folder))) is not None:
        check_gguf(file, model)
        return
    files = weight_files(path, folder) if folder.is_dir() else []
    if not files:
        return
    remedy = f"copy the folder {folder} again or make it anew"
    heads = {name: head for file in files for name, head in tensor_heads(file, remedy=remedy).items()}
    named = {name: heads[name].kind for name, _ in model.named_parameters() if name in heads}
    quantised = quantisation_of(model.config) is not None
    odd = None if quantised else next((name for name, kind in named.items() if not _FRACTIONS.match(kind)), None)
    if odd is not None:
        raise RequestError(
            f"the weights of {path!r} hold {odd} as {named[odd]}; expected fractions (F32, F16, BF16), as of a "
            "model that is not quantised"
        )
    held = sum(math.prod(head.shape) for head in heads.values())
    described = sum(parameter.numel() for parameter in model.parameters())
    if described > _ODD * held * (_PACKED if quantised else 1):
        raise RequestError(
            f"the config.json of {path!r} describes a model of {described:,} numbers, and its weights hold {held:,}; "
            "its weights are of other sizes than its config.json says: take both from one place"
        )
    other = [] if quantised else _of_other_sizes(model, {name: head.shape for name, head in heads.items()})
    if other:
        raise RequestError(
            f"the weights of {path!r} hold {other[0]}, so its weights are of other sizes than its config.json says: "
            "take both from one place"
        )
    missing = [] if quantised else _missing(model, {name: math.prod(head.shape) for name, head in heads.items()})
    if missing:
        with loading_errors("model", path, "config.json and safetensors weights"):
            others = f" and {len(missing) - 1} others" * (len(missing) > 1)
            raise ValueError(f"its weights lack {missing[0]}{others}")


def _of_other_sizes(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """The weights that stand in the files under their own names with more or fewer numbers, with both shapes."""
    return [
        f"{name} as {list(shapes[name])} in place of {list(parameter.shape)}"
        for name, parameter in model.named_parameters()
        if name in shapes and math.prod(shapes[name]) != parameter.numel()
    ]


def _missing(model: Any, sizes: Mapping[str, int]) -> list[str]:
    """The model's weights that are surely in no file: transformers renames and joins some.

    The tensors from which it makes a weight have as many numbers as the weight. So a weight is not listed if the files
    have that many numbers left over under names that the model does not know.

    Args:
        sizes: numbers of every tensor of the files.
    """
    own = model.state_dict(keep_vars=True)
    left = sum(size for name, size in sizes.items() if name not in own)
    there = {id(tensor) for name, tensor in own.items() if name in sizes}  # by one of its names, if it has several
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    unasked = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    return sorted(
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in there
        and name not in tied
        and parameter.numel() > left
        and not any(pattern.search(name) for pattern in unasked)
    )


def _pickled(folder: Path, name: str) -> str:
    code = (
        "import sys; from transformers import AutoModelForCausalLM as Model; "
        "Model.from_pretrained(sys.argv[1], use_safetensors=False).save_pretrained(sys.argv[1])"
    )
    return (
        f"{folder} holds its weights as a pickle ({name}) and not as safetensors. A pickle can run code when it is "
        "read, and is never read here. Where you trust its origin, convert it once:\n"
        f'  python -c "{code}" {shlex.quote(str(folder))}'
    )
