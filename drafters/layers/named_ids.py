"""Files that name the tokens that may be drafted: beside a draft model that was trained over them, or of a user's own.

A file is safetensors with `d2t`, as drafter folders have it, JSON with a list of ids, or text with one in a line. Read
next: `draft_vocabulary.py`, what becomes of them.

Shapes: U tokens of the draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import RequestError
from ...storage import read_tensors, write_tensors
from .draft_vocabulary import OFFSETS

FILE = "draft_vocabulary.safetensors"
"""Beside a draft model's weights: `transformers` would refuse them with one more tensor."""
SETTING = "draft_vocabulary"
"""Of such a folder's `config.json`: how many tokens the file names."""


def write_ids(folder: Path, ids_U: Tensor) -> None:
    """Write the ids of a draft model's draft vocabulary beside it."""
    ids_U = ids_U.cpu()
    write_tensors(folder / FILE, {OFFSETS: ids_U - torch.arange(len(ids_U))})


def read_ids(folder: Path, settings: Mapping[str, Any], vocabulary: int) -> list[int] | None:
    """Those that `write_ids` wrote; None where the settings of the folder speak of none.

    Raises:
        RequestError: the file is missing or damaged, or names other tokens than the target has.
    """
    if SETTING not in settings:
        return None
    found = _offsets_in(folder / FILE)
    if len(found) != settings[SETTING]:
        raise RequestError(
            f"{folder / FILE} names {len(found):,} tokens, and the config.json beside it says "
            f"{settings[SETTING]!r:.20}; copy the drafter's folder again or train it anew"
        )
    return checked(found, vocabulary, folder / FILE)


def ids_in(path: Path, vocabulary: int) -> list[int]:
    """The ids that a file names, or a drafter folder that has a draft vocabulary, ascending.

    Raises:
        RequestError: there is no such file, it names no ids, or others than the target's.
    """
    if path.is_dir():
        own = path / FILE
        path = own if own.is_file() else path / "model.safetensors"
    try:
        if path.suffix == ".safetensors":
            return checked(_offsets_in(path), vocabulary, path)
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"drafter.draft_vocabulary names {path}, which cannot be read ({type(error).__name__}: {error!s:.200}); "
            "expected a JSON list of token ids, a text with one in a line, or safetensors with d2t"
        ) from error
    return checked(found, vocabulary, path)


def checked(ids: Iterable[Any], vocabulary: int, where: str | Path) -> list[int]:
    """Ids as they were named, ascending.

    Raises:
        RequestError: none, one twice, or one that is no id of the target's.
    """
    found = list(ids)
    odd = [each for each in found if type(each) is not int or not 0 <= each < vocabulary]
    if odd or len(found) < 2 or len(set(found)) < len(found):
        what = f"has {odd[0]!r:.40}" if odd else f"names {len(set(found))} tokens in {len(found)} ids"
        raise RequestError(
            f"the draft vocabulary of {where} {what}; expected two ids or more, each once, from 0 to {vocabulary - 1} "
            "as the target has them"
        )
    return sorted(found)


def _offsets_in(path: Path) -> Sequence[int]:
    tensors = read_tensors(path, remedy="copy the file again, or leave drafter.draft_vocabulary out")
    offsets_U = tensors.get(OFFSETS)
    if offsets_U is None or offsets_U.dim() != 1 or offsets_U.is_floating_point():
        raise RequestError(
            f"{path} holds no {OFFSETS}, the offsets of a draft vocabulary: its drafter drafts all tokens; name a "
            "file of ids"
        )
    ids: list[int] = (offsets_U.long() + torch.arange(len(offsets_U))).tolist()
    return ids
