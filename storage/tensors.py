"""Safetensors files: written whole, and each damaged one reported by the same message.

torch and safetensors are imported where they are used. Read next: `files.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import RequestError
from .files import staged_file

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a safetensors file at once; its folder is made."""
    from safetensors.torch import save_file

    with staged_file(path) as staging:
        save_file(dict(tensors), staging)


def read_tensors(path: Path, *, remedy: str, only: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Args:
        remedy: what to do where it cannot be read, the end of the message.
        only: says by its name whether a tensor is read; default: all.

    Raises:
        RequestError: it is missing or damaged.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    with _explain_damage(path, remedy):
        if only is None:
            return load_file(path)
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if only(name)}  # noqa: SIM118 - no mapping


def check_tensors(path: Path, *, remedy: str) -> None:
    """Raise RequestError where `read_tensors` would; the header alone is read."""
    from safetensors import safe_open

    # the header holds the file's length, so one that was cut shows here
    with _explain_damage(path, remedy), safe_open(path, "pt"):
        pass


class Head(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    kind: str
    """As safetensors write it: F32, BF16, I64."""
    shape: tuple[int, ...]


def tensor_heads(path: Path, *, remedy: str) -> dict[str, Head]:
    """Kind and shape of the tensors of a safetensors file; the header alone is read. Errors as for `read_tensors`."""
    from safetensors import safe_open

    with _explain_damage(path, remedy), safe_open(path, "np") as file:  # which asks for no torch
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return {name: Head(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


def derived_tensors(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, Tensor] | None:
    """The tensors of a file that can be made again: None where it has to be.

    A file that is there and damaged, or holds other tensors, is named in the log.

    Args:
        shapes: of the tensors that are expected, None being any size.
    """
    if not path.is_file():
        return None
    try:
        tensors = read_tensors(path, remedy="it is made anew")
    except RequestError as error:
        _log.warning("%s", error)
        return None
    held = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if held.keys() == shapes.keys() and all(_fits(held[name], shapes[name]) for name in shapes):
        return tensors
    _log.warning("%s holds %s, expected %s; it is made anew", path, held, dict(shapes))
    return None


def _fits(held: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(held) == len(expected) and all(
        wanted in (None, size) for size, wanted in zip(held, expected, strict=True)
    )


@contextlib.contextmanager
def _explain_damage(path: Path, remedy: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        if path.exists() and not path.is_file():  # of a pipe one would wait for ever
            raise OSError("it is no file")
        yield
    except (OSError, SafetensorError) as error:
        size = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
        raise RequestError(
            f"{path} ({size}) cannot be read: {error}. Expected a whole safetensors file: {remedy}"
        ) from error
