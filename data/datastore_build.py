"""Building a datastore: documents in shards, sorted suffixes, a folder that is whole or not there.

Read next: `datastore.py` for what a shard holds.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EnvironmentFailure, RequestError
from ..storage import MANIFEST, flush, sha256, staged_folder, write_text
from ..storage.formats import DATASTORE
from .datastore import read_manifest, shard_files, token_dtype

_PER_TOKEN = 48
"""Bytes of memory that sorting takes for a token of an id beyond 65,535; half of it for others."""
_LEAST = 16_000_000
_MOST = 2**29 - 1
"""Tokens whose bytes int32 still counts: sorting more takes twice the memory for each."""


def build_datastore(
    documents: Iterable[Sequence[int]],
    folder: Path,
    *,
    vocabulary: int,
    tokenizer: str,
    shard_tokens: int | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Write a datastore into a folder, which appears whole or not at all.

    Needs memory for one shard (up to 48 bytes per token of it), however large the corpus is. A look-up searches
    one shard after the other, so there should be one where memory allows.
    Documents are kept in their order; empty ones are skipped; one that does not fit into a shard
    is cut, and its pieces are documents of their own.

    Args:
        documents: token ids of each document, read once.
        folder: where to; must not exist yet, unless it is to be replaced.
        vocabulary: number of token ids; all ids are smaller.
        tokenizer: fingerprint of the tokenizer, compared again when the datastore is opened.
        shard_tokens: most tokens of a shard, separators included; None: what half of the free memory sorts.
        replace: a datastore that is there stays until the new one is whole.

    Returns:
        The manifest, as in `manifest.json`: `format`, `vocabulary`, `tokenizer`, `documents`,
        `tokens` (separators not counted) and `shards`, each with `documents`, `tokens` and the
        `sha256` of its two files.

    Raises:
        RequestError: the folder exists, the corpus is empty, or an id is outside the vocabulary.
        EnvironmentFailure: the package `pydivsufsort` is missing.
    """
    shard_tokens = sortable() if shard_tokens is None else shard_tokens
    _check_request(folder, vocabulary, shard_tokens, replace=replace)
    sort = _suffix_sorter()  # before hours may go into reading the corpus
    pieces = _pieces(documents, vocabulary, longest=shard_tokens - 1)
    with _not_there_yet(folder), staged_folder(folder, replace=replace) as staging:
        shards = [
            _write_shard(staging, number, tokens, sort, separator=vocabulary)
            for number, tokens in enumerate(_fill(pieces, shard_tokens, separator=vocabulary))
        ]
        if not shards:
            raise RequestError(
                "datastore: the corpus holds no token; expected at least one document that is not empty"
            )
        manifest = {
            "format": DATASTORE.number,
            "vocabulary": vocabulary,
            "tokenizer": tokenizer,
            "documents": sum(shard["documents"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "shards": shards,
        }
        write_text(staging / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def sortable() -> int:
    """Tokens of a shard that is sorted in half of the memory that is free now, from 16 to 537 million."""
    import psutil

    return min(max(_LEAST, int(psutil.virtual_memory().available) // (2 * _PER_TOKEN)), _MOST)


def _check_request(folder: Path, vocabulary: int, shard_tokens: int, *, replace: bool) -> None:
    if replace and (folder / MANIFEST).is_file():
        read_manifest(folder)  # nothing but a datastore is replaced by one
    elif folder.exists() or folder.is_symlink():
        raise _exists(folder)
    if not 1 <= vocabulary < 2**32:
        raise RequestError(f"datastore: vocabulary is {vocabulary}, expected 1 to {2**32 - 1} ids")
    if shard_tokens < 2:
        raise RequestError(f"datastore: shard_tokens is {shard_tokens}, expected at least 2: a token and a separator")


@contextmanager
def _not_there_yet(folder: Path) -> Iterator[None]:
    """RequestError where somebody else has written the folder meanwhile."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and folder.exists():
            raise _exists(folder) from error
        raise


def _exists(folder: Path) -> RequestError:
    return RequestError(f"datastore: {folder} exists already; name a new folder, or remove this one first")


def _suffix_sorter() -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Yuta Mori's divsufsort; it gets wide ids as big-endian bytes, which sort as the ids do."""
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise EnvironmentFailure(
            "building a datastore needs the package `pydivsufsort`: pip install pydivsufsort"
        ) from error
    return divsufsort


def _pieces(documents: Iterable[Sequence[int]], vocabulary: int, *, longest: int) -> Iterator[NDArray[Any]]:
    """Checked ids of each document, in pieces of at most `longest`."""
    for number, document in enumerate(documents, 1):
        ids = np.asarray(document)
        if not ids.size:
            continue
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(
                f"datastore: document {number} is an array of {ids.dtype} with {ids.ndim} axes, "
                "expected one sequence of whole numbers"
            )
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if wrong.size:
            raise RequestError(
                f"datastore: document {number} has token id {wrong[0]}, expected 0 to "
                f"{vocabulary - 1}; use the tokenizer that the vocabulary belongs to"
            )
        for at in range(0, len(ids), longest):
            yield ids[at : at + longest]


def _fill(pieces: Iterable[NDArray[Any]], shard_tokens: int, *, separator: int) -> Iterator[NDArray[Any]]:
    """The tokens of one shard after the other: whole pieces, a separator behind each."""
    dtype = token_dtype(separator)
    border = np.array([separator], dtype=dtype)
    parts: list[NDArray[Any]] = []
    used = 0
    for piece in pieces:
        if used + len(piece) + 1 > shard_tokens:
            yield np.concatenate(parts)
            parts, used = [], 0
        parts += [piece.astype(dtype), border]
        used += len(piece) + 1
    if parts:
        yield np.concatenate(parts)


def _write_shard(
    folder: Path, number: int, tokens: NDArray[Any], sort: Callable[[NDArray[Any]], NDArray[Any]], *, separator: int
) -> dict[str, Any]:
    """Sort the suffixes and save both arrays. Returns the shard's record for the manifest."""
    documents = int((tokens == separator).sum())
    # the largest entry: all suffixes that begin with it stand at the end
    suffixes = sort(tokens)[: len(tokens) - documents]
    # divsufsort counts bytes, so it may answer in int64 where int32 holds every index
    index = np.int32 if len(tokens) <= np.iinfo(np.int32).max else np.int64
    files = shard_files(number)
    for name, array in zip(files, (tokens, suffixes.astype(index))):
        np.save(folder / name, array)
        flush(folder / name)
    return {"documents": documents, "tokens": len(suffixes), "sha256": {name: sha256(folder / name) for name in files}}
