"""The datastore of REST and suffix decoding: a token corpus with suffix arrays, on disk and memory-mapped.

`datastore_build.py` writes it shard by shard; `Datastore` finds what followed the end of a context
elsewhere in the corpus, and folds that into a trie of drafts (REST: He et al. 2023, arXiv
2311.08252). Reading maps the files, so a datastore may be larger than memory.
Read next: `datastore_build.py`.

In a shard every document is followed by a separator, the first id behind the vocabulary. It
sorts after all tokens and equals none, so no match runs across it; suffixes that begin with it
are left out, so there is one suffix per token.

Shapes: M continuations, L tokens of each.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decoding.random import salt_of
from ..errors import RequestError
from ..storage import MANIFEST, sha256
from ..storage.formats import DATASTORE


@dataclass(frozen=True)
class DatastoreShard:
    """Tokens with separators, and where its suffixes start, sorted; both mapped, not read."""

    tokens: np.memmap
    suffixes: np.memmap

    def window(self, at: int, size: int) -> list[int]:
        """The first `size` entries of the suffix at index `at` of the suffix array."""
        start = int(self.suffixes[at])
        if not 0 <= start < len(self.tokens):
            raise self._damaged(start)
        return self.tokens[start : start + size].tolist()

    def starts(self, index_M: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the suffixes at these indices of the suffix array begin, [M]."""
        starts_M = np.asarray(self.suffixes[index_M], dtype=np.int64)
        wrong_X = starts_M[(starts_M < 0) | (starts_M >= len(self.tokens))]
        if wrong_X.size:
            raise self._damaged(int(wrong_X[0]))
        return starts_M

    def _damaged(self, start: int) -> RequestError:
        return RequestError(
            f"datastore: a shard has a suffix at {start:,}, and {len(self.tokens):,} tokens; build the datastore again"
        )

    def first(self, sequence: Sequence[int], low: int = 0) -> int:
        """Index of the first suffix that is not smaller than `sequence`, looked for from `low`.

        Shorter windows at the end of the shard compare rightly: they end in a separator, and
        `sequence` has one, or something larger, only as its last element.
        """
        size = len(sequence)
        suffixes = range(len(self.suffixes))
        return bisect_left(suffixes, list(sequence), low, key=lambda at: self.window(at, size))


class Datastore:
    """A datastore on disk, opened for look-ups; its arrays are mapped, never read whole.

    Args:
        folder: what `build_datastore` wrote.
        tokenizer: fingerprint that the corpus must have been made with; None accepts any.
        ids: a look-up that finds a token of this id or a larger one is refused; None for the datastore's own number.

    Raises:
        RequestError: the folder is no datastore, or of another format, or of another tokenizer,
            or its files do not have the sizes that the manifest names.
    """

    def __init__(self, folder: Path, *, tokenizer: str | None = None, ids: int | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        if tokenizer is not None and self.manifest["tokenizer"] != tokenizer:
            raise RequestError(
                f"datastore: {folder}: tokenizer is {self.manifest['tokenizer']!r}, expected "
                f"{tokenizer!r}; its ids mean other text: build it again with this tokenizer"
            )
        self.vocabulary: int = self.manifest["vocabulary"]
        self._ids = self.vocabulary if ids is None else min(ids, self.vocabulary)
        self.shards = [
            _open_shard(folder, number, record, separator=self.vocabulary)
            for number, record in enumerate(self.manifest["shards"])
        ]

    @cached_property
    def salt(self) -> int:
        """As of `decoding.proposal.Remembering`: of the checksums of all that it holds."""
        return salt_of(json.dumps(self.manifest, sort_keys=True).encode())

    def verify(self) -> None:
        """Read every file and compare its checksum.

        Raises:
            RequestError: a file is damaged or gone.
        """
        for number, record in enumerate(self.manifest["shards"]):
            for name in shard_files(number):
                path = self.folder / name
                if not path.is_file() or sha256(path) != record["sha256"][name]:
                    raise RequestError(
                        f"datastore: {path} does not match its checksum in {MANIFEST}; build the datastore again"
                    )

    def matches(self, suffix: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """Where the corpus has `suffix` inside a document: (shard, index of its first token).

        Up to `limit` matches, in the order of shards and then of their suffix arrays; if there are
        more, evenly spaced ones. Reads O(log n) windows of `len(suffix) + 1` tokens per shard.
        """
        spans = self._spans(_ids(suffix), self.vocabulary + 1)
        return [(number, start) for number, starts in enumerate(self._pick(spans, limit)) for start in starts.tolist()]

    def continuations(
        self, context: Sequence[int], *, longest: int = 16, shortest: int = 2, length: int = 10, limit: int = 5000
    ) -> NDArray[np.int64]:
        """What follows the longest end of `context` that the corpus has, at most `limit` times.

        The end has `longest` tokens if it occurs, otherwise one fewer, and so on down to
        `shortest`. Only matches that a token follows count, so that an end known merely from the
        last tokens of documents gives way to a shorter one. The order is that of `matches`.

        Returns:
            int64 [M, L] with L = `length`; -1 behind the end of a document, never in column 0.
            M is 0 if no end occurs.

        Raises:
            ValueError: not 1 <= shortest <= longest, or `length` or `limit` is below 1.
        """
        if not 1 <= shortest <= longest or length < 1 or limit < 1:
            raise ValueError(
                f"longest={longest}, shortest={shortest}, length={length}, limit={limit}: "
                "expected 1 <= shortest <= longest, and length and limit of at least 1"
            )
        size = self.longest_end(context, longest=longest, shortest=shortest)
        if not size:
            return np.empty((0, length), dtype=np.int64)
        query = _ids(context[-size:])
        picked = self._pick(self._spans(query, self.vocabulary), limit)
        return np.concatenate(
            [self._following(shard, starts + len(query), length) for shard, starts in zip(self.shards, picked)]
        )

    def longest_end(self, context: Sequence[int], *, longest: int, shortest: int) -> int:
        """Tokens of the longest end of `context` that the corpus has with a token behind it; 0 if none.

        Of `longest` tokens at most, and no fewer than `shortest`.
        """
        end = _ids(context[-longest:])
        # an end that occurs has all shorter ends occur with it, so bisection finds the longest
        sizes = range(shortest, len(end) + 1)
        longer = bisect_left(sizes, True, key=lambda size: not self._goes_on(end[-size:]))
        return sizes[longer - 1] if longer else 0

    def documents(self) -> Iterator[list[int]]:
        """The documents, in their order, read shard by shard."""
        for shard in self.shards:
            start = 0
            for end in np.flatnonzero(shard.tokens == self.vocabulary).tolist():
                yield shard.tokens[start:end].tolist()
                start = end + 1

    @staticmethod
    def trie(continuations: NDArray[np.int64], nodes: int) -> tuple[list[int], list[int]]:
        """The `nodes` most frequent prefixes of the continuations, as a tree of tokens.

        A prefix counts once for each row that begins with it. Equal counts: the shallower first,
        then the smaller tokens. No prefix is more frequent than its own prefixes, so what is kept
        is connected, and fewer nodes would give the beginning of the same lists.

        Args:
            continuations: int64 [M, L]; a row ends at its first -1.
            nodes: most nodes to keep.

        Returns:
            Token and parent of each node, the most frequent first; parents are indices into the
            same lists, smaller than the child's; -1 hangs at the root, the last known token.
        """
        token, parent, count = _prefixes(continuations)
        # prefixes come sorted by depth and then tokens, and a stable sort keeps that for ties
        kept = np.argsort(-count, kind="stable")[: max(nodes, 0)]
        new = np.full(len(count) + 1, -1, dtype=np.int64)  # one more, for the root's index -1
        new[kept] = np.arange(len(kept))
        return token[kept].tolist(), new[parent[kept]].tolist()

    def _goes_on(self, query: list[int]) -> bool:
        """Whether the corpus has `query` with a token behind it."""
        return any(low < high for low, high in self._spans(query, self.vocabulary))

    def _spans(self, query: list[int], above: int) -> Iterator[tuple[int, int]]:
        """For each shard the range of suffixes that begin with `query` and go on below `above`.

        With `above` the separator a token must follow; with one more, the document may also end.
        """
        # the separator is the vocabulary's first foreign id: it must not find itself
        foreign = any(not 0 <= token < self.vocabulary for token in query)
        for shard in self.shards:
            low = 0 if foreign else shard.first(query)
            yield low, low if foreign else shard.first([*query, above], low)

    def _pick(self, spans: Iterable[tuple[int, int]], limit: int) -> list[NDArray[np.int64]]:
        """For each shard the starts of the suffixes in its span; `limit` of all, evenly spaced."""
        low_high = np.array(list(spans), dtype=np.int64)
        behind = (low_high[:, 1] - low_high[:, 0]).cumsum()
        total = int(behind[-1])
        chosen = np.arange(total) if total <= limit else np.arange(limit) * total // limit
        parts = np.split(chosen, np.searchsorted(chosen, behind[:-1]))
        return [
            shard.starts(part + (high - end))
            for shard, part, high, end in zip(self.shards, parts, low_high[:, 1], behind)
        ]

    def _following(self, shard: DatastoreShard, starts_M: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The `length` tokens from each start on, -1 behind the end of the document. [M, L]."""
        # the last entry of a shard is a separator: clipping to it ends the row
        index_ML = np.minimum(starts_M[:, None] + np.arange(length), len(shard.tokens) - 1)
        tokens_ML = np.asarray(shard.tokens[index_ML], dtype=np.int64)
        foreign_X = tokens_ML[(tokens_ML >= self._ids) & (tokens_ML != self.vocabulary)]
        if foreign_X.size:
            raise RequestError(
                f"datastore: {self.folder} holds the token {foreign_X[0]}; expected ids below {self._ids}; build the "
                "datastore again"
            )
        tokens_ML[np.logical_or.accumulate(tokens_ML == self.vocabulary, axis=1)] = -1
        return tokens_ML


def _ids(tokens: Sequence[int]) -> list[int]:
    return [int(token) for token in tokens]


def _prefixes(rows_ML: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All distinct prefixes by depth and then tokens: last token, parent, number of rows."""
    base = int(rows_ML.max(initial=0)) + 1
    tokens, parents, counts = [], [], []
    row = np.arange(len(rows_ML))  # rows that have not ended
    node = np.full(len(rows_ML), -1, dtype=np.int64)  # their prefix so far; -1: the root
    size = 0
    for column in rows_ML.T:
        alive = column[row] >= 0
        row, node = row[alive], node[alive]
        # sorted by prefix and then token, hence by all tokens in turn
        key, inverse, count = np.unique((node + 1) * base + column[row], return_inverse=True, return_counts=True)
        tokens.append(key % base)
        parents.append(key // base - 1)
        counts.append(count.astype(np.int64))
        node = size + inverse
        size += len(key)
    empty = [np.empty(0, dtype=np.int64)]
    return (np.concatenate(tokens or empty), np.concatenate(parents or empty), np.concatenate(counts or empty))


def token_dtype(separator: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type that holds the separator, the largest entry."""
    return np.uint16 if separator <= np.iinfo(np.uint16).max else np.uint32


def shard_files(number: int) -> tuple[str, str]:
    """Names of a shard's tokens and suffixes."""
    return f"tokens-{number:05d}.npy", f"suffixes-{number:05d}.npy"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a datastore; RequestError where the folder is none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise RequestError(
            f"datastore: {folder} is no datastore: it has no {MANIFEST}; "
            "name a folder that `draftsmith datastore build` wrote"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"datastore: {path} cannot be read ({error}); build the datastore again") from error
    number = manifest.get("format") if isinstance(manifest, dict) else None
    DATASTORE.check(number, path, remedy="build the datastore again with this version")
    for field, kind in (("vocabulary", int), ("tokenizer", str), ("shards", list)):
        if type(manifest.get(field)) is not kind or not manifest[field]:
            raise RequestError(
                f"datastore: {path}: {field} is {manifest.get(field)!r}, expected "
                f"{kind.__name__}; build the datastore again"
            )
    if not 0 < manifest["vocabulary"] <= np.iinfo(np.uint32).max:
        raise RequestError(f"datastore: {path}: vocabulary is {manifest['vocabulary']}; build the datastore again")
    return manifest


def _open_shard(folder: Path, number: int, record: dict[str, Any], *, separator: int) -> DatastoreShard:
    """Map the arrays of a shard; their sizes must be those of the manifest."""
    names = shard_files(number)
    try:
        if not all((folder / name).is_file() for name in names):
            raise OSError("one of them is missing, or no file")
        tokens, suffixes = (_mapped(folder / name) for name in names)
        sizes = (record["tokens"] + record["documents"],), (record["tokens"],)
        if (tokens.shape, suffixes.shape) != sizes:
            raise ValueError("the arrays have other sizes than the manifest names")
        if tokens.dtype != token_dtype(separator) or suffixes.dtype not in (np.int32, np.int64):
            raise ValueError(f"the arrays are of {tokens.dtype} and {suffixes.dtype}")
        if not isinstance(record["sha256"], dict) or set(record["sha256"]) != set(names):
            raise ValueError("the manifest lacks its checksums")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"datastore: {folder}: shard {number} ({' and '.join(names)}) is damaged: {error}; "
            "build the datastore again"
        ) from error
    return DatastoreShard(tokens, suffixes)


def _mapped(path: Path) -> np.memmap:
    """The one array of a file; ValueError where it is no such file."""
    try:
        # not `load`, which opens archives too
        return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # what a damaged header makes numpy's parser raise is any kind of error
        (reason, *_) = str(error).splitlines() or [type(error).__name__]  # what follows speaks of numpy's own options
        raise ValueError(f"{path.name} is no array ({reason})") from error
