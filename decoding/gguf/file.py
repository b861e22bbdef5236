"""What a GGUF file states of a model, and which tensors it holds; no weight is read.

The package `gguf` makes an array of every word of a vocabulary, seconds of work; here they are stepped over.
Read next: `model.py`, which has transformers make config, tokenizer and model of such a file.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import EnvironmentFailure, RequestError
from ...storage import sha256

SUFFIX = ".gguf"
ORIGIN = "draftsmith_gguf"
"""Entry of a config that was made from a GGUF file: the file's name, quantisation and checksum."""
TOKENS, TYPES, MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of stated values that have a width, as `struct` names them."""
_TEXT, _LIST = 8, 9
_VERSIONS = (2, 3)


class Held(NamedTuple):
    """One tensor: how many numbers, of which type, and where in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    bytes: int


@dataclass(frozen=True)
class GgufFile:
    """What a file states; of lists of texts there is the length alone."""

    path: Path
    fields: Mapping[str, Any]
    tensors: tuple[Held, ...]

    @property
    def architecture(self) -> str:
        """Name of the model's kind, the prefix of what is stated of it."""
        return str(self.fields["general.architecture"])

    def states(self, key: str) -> Any:
        """A value that is stated of the model's kind, such as `block_count`; None where there is none."""
        return self.fields.get(f"{self.architecture}.{key}")

    @property
    def quantisation(self) -> str:
        """How the weights are rounded: the file's own word, or the type that most of them have."""
        from gguf import LlamaFileType

        try:
            return LlamaFileType(self.fields["general.file_type"]).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except (KeyError, ValueError):
            held: dict[str, int] = {}
            for tensor in self.tensors:
                held[tensor.kind] = held.get(tensor.kind, 0) + prod(tensor.shape)
            return max(held, key=held.__getitem__)

    def texts(self, key: str) -> list[str]:
        """A list of texts, such as the tokens; read anew."""
        with self.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found: list[str] = _Reader(self.path, data, keep=key).head()[0][key]
        return found

    def origin(self) -> dict[str, str]:
        """What is kept of it in a config made from it."""
        return {"file": self.path.name, "quantisation": self.quantisation, "sha256": _checksum(*_version(self.path))}


def find_gguf(place: str) -> Path | None:
    """The GGUF file that a path leads to: itself, or the only one of a folder without a model of another form.

    Raises:
        RequestError: a folder holds several.
    """
    path = Path(place)
    if path.suffix.lower() == SUFFIX:
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(each for each in path.iterdir() if each.suffix.lower() == SUFFIX)
    if not found or any(path.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise RequestError(f"{path} holds {len(found)} GGUF files; name one of them, such as {found[0]}")
    return found[0]


def read_gguf(path: Path) -> GgufFile:
    """What a file states; read once.

    Raises:
        RequestError: it is damaged, cut short, of another version, one part of several, or of types not known here.
        EnvironmentFailure: the package `gguf` is not here.
    """
    if find_spec("gguf") is None:
        raise EnvironmentFailure(
            f"{path} is a GGUF file, and the package gguf, which knows its types, is not here: "
            "pip install 'draftsmith[gguf]'"
        )
    return _read(*_version(path))


def _version(path: Path) -> tuple[Path, int, int]:
    """A file as it is now, to know it again."""
    stat = path.stat()
    return path.resolve(), stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=8)
def _checksum(path: Path, _changed: int, _size: int) -> str:
    return sha256(path)


@lru_cache(maxsize=8)
def _read(path: Path, _changed: int, size: int) -> GgufFile:
    if size < 24:
        raise _cut_short(path, f"it has {size} bytes")
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        file = GgufFile(path, *_Reader(path, data).head())
    _check_whole(file, size)
    return file


class _Reader:
    """Reads the head of a file, one value after the other."""

    def __init__(self, path: Path, data: mmap.mmap, *, keep: str = "") -> None:
        self._path, self._data, self._at, self._keep = path, data, 0, keep

    def head(self) -> tuple[dict[str, Any], tuple[Held, ...]]:
        """What is stated, and the tensors."""
        try:
            return self._head()
        except (struct.error, MemoryError, OverflowError):
            raise _cut_short(self._path, "it ends inside what it states of the model") from None
        except UnicodeDecodeError as error:
            raise RequestError(f"{self._path} is damaged: a name in it is no text; {_ANEW}") from error

    def _head(self) -> tuple[dict[str, Any], tuple[Held, ...]]:
        if self._data[:4] != b"GGUF":
            raise RequestError(f"{self._path} is no GGUF file, whatever its name says: it begins with other bytes")
        self._at = 4
        version, tensors, fields = self._numbers("IQQ")
        if version not in _VERSIONS:
            raise RequestError(
                f"{self._path} is GGUF of version {version}; expected {' or '.join(map(str, _VERSIONS))}: "
                "make it anew by a newer llama.cpp"
            )
        stated: dict[str, Any] = {}
        for _ in range(fields):
            key = self._text()
            stated[key] = self._value(self._numbers("I")[0], key)
        listed = [self._tensor() for _ in range(tensors)]
        align = max(int(stated.get("general.alignment", 32)), 1)
        begin = -(-self._at // align) * align
        return stated, tuple(each._replace(start=begin + each.start) for each in listed)

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _text(self) -> str:
        return self._skip(self._numbers("Q")[0]).decode("utf-8")

    def _skip(self, length: int) -> bytes:
        begin = self._at
        if begin + length > len(self._data):
            raise struct.error
        self._at += length
        return self._data[begin : self._at]

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            raise RequestError(f"{self._path} is damaged: its {key:.80} has the unknown type {kind}; {_ANEW}")
        kind, count = self._numbers("IQ")
        if kind in _NUMBERS:
            return list(self._numbers(f"{count}{_NUMBERS[kind]}"))
        if kind == _TEXT and key != self._keep:
            for _ in range(count):
                self._step()
            return count
        return [self._value(kind, key) for _ in range(count)]

    def _step(self) -> None:
        """Leave a text out."""
        (length,) = self._numbers("Q")
        if self._at + length > len(self._data):
            raise struct.error
        self._at += length

    def _tensor(self) -> Held:
        """One entry of the list of tensors; `start` counts from their first byte."""
        name = self._text()
        (dimensions,) = self._numbers("I")
        shape = tuple(reversed(self._numbers(f"{dimensions}Q")))
        kind, start = self._numbers("IQ")
        known = _known(kind)
        if known is None:
            raise _unknown(self._path, name, kind)
        word, block, width = known
        return Held(name, shape, word, start, prod(shape) // block * width)


@lru_cache
def _known(kind: int) -> tuple[str, int, int] | None:
    """Name of a type, numbers and bytes of a block; None where the package cannot make numbers of it."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        found = GGMLQuantizationType(kind)
        block, width = GGML_QUANT_SIZES[found]
        dequantize(np.zeros((1, width), np.uint8), found)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return found.name, block, width


def _unknown(path: Path, name: str, kind: int) -> RequestError:
    from gguf import GGMLQuantizationType

    word = next((each.name for each in GGMLQuantizationType if each == kind), f"number {kind}")
    return RequestError(
        f"{path} holds {name:.80} in the type {word}, of which the installed package gguf makes no numbers; "
        "upgrade it (pip install -U gguf), or take a file of a common type, such as Q8_0 or Q4_K_M"
    )


def _check_whole(file: GgufFile, size: int) -> None:
    """Raise RequestError where a file is not one whole model."""
    part = _PART.search(file.path.name)
    count = int(file.fields.get("split.count", 0) or 0) or (int(part[2]) if part else 1)
    if count > 1:
        which = part[1].lstrip("0") if part else str(int(file.fields.get("split.no", 0)) + 1)
        raise RequestError(
            f"{file.path} is part {which} of {count} of a model, and parts are not read; join them by llama.cpp's "
            f"own tool: llama-gguf-split --merge FIRST-PART {file.path.name.split('-0')[0]}{SUFFIX}"
        )
    if not isinstance(file.fields.get("general.architecture"), str):
        raise RequestError(f"{file.path} does not say which kind of model it is (general.architecture); {_ANEW}")
    end = max((each.start + each.bytes for each in file.tensors), default=0)
    if end == 0:
        raise RequestError(f"{file.path} holds no weights: a tokenizer alone, say; name the file of a whole model")
    if end > size:
        raise _cut_short(file.path, f"it has {size:,} bytes, and its tensors reach to {end:,}")


_ANEW = "fetch it again from where it was published"


def _cut_short(path: Path, why: str) -> RequestError:
    return RequestError(f"{path} is cut short: {why}; {_ANEW}")
