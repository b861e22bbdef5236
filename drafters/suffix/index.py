"""What followed the end of a text where it stood before: in the same text, in earlier answers, in a datastore.

Every source answers by a `Match`, from which a draft reads on token by token, with counts (suffix decoding:
Oliaro et al. 2024, arXiv 2411.04975). No answer takes more work for a longer text: what is kept of a text are
its windows of `depth` tokens (`windows.py`), and a draft walks `depth` tokens at most.
Read next: `proposer.py`, which drafts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import merge
from threading import RLock
from typing import Protocol

import numpy as np

from ...decoding.random import salt_of
from ...decoding.request import whole, whole_numbers
from ...errors import RequestError
from ..lookup.tries import Store
from .windows import Place, WindowTree

_ANSWER = "a list of token ids, whole numbers from 0"


@dataclass(frozen=True)
class Match:
    """A string where it occurs: in a tree of windows, and in windows that still grow.

    Attributes:
        place: where it ends in the tree; None: nowhere.
        text: the text that still grows.
        ends: of its occurrences there the positions of what follows.
    """

    place: Place | None
    text: Sequence[int] = ()
    ends: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """How often a token followed."""
        return (0 if self.place is None else self.place.total) + sum(self._growing().values())

    def followers(self) -> Iterator[tuple[int, int]]:
        """The tokens that followed and how often each, the most frequent first, the lowest id of equals.

        Whoever takes the first few pays for no more, however many have followed.
        """
        growing, place = self._growing(), self.place
        ranking = () if place is None else place.ranking()
        indexed = (each for each in ranking if each[1] not in growing)
        both = sorted((-count - (place.count(token) if place else 0), token) for token, count in growing.items())
        return ((token, -less) for less, token in merge(indexed, both))

    def _growing(self) -> dict[int, int]:
        """What followed in the windows that still grow, of which there are fewer than `depth`."""
        return Counter(self.text[at] for at in self.ends if at < len(self.text))

    def after(self, token: int) -> Match:
        """The same string with one of its followers behind it."""
        ends = tuple(at + 1 for at in self.ends if at < len(self.text) and self.text[at] == token)
        return Match(self.place.after(token) if self.place else None, self.text, ends)


class TextSource(Protocol):
    """Somewhere to look for the end of a text."""

    def matches(self, text: Sequence[int]) -> Iterator[tuple[int, Match]]:
        """Ends of the text that occur with a token behind them, by length, the longest first."""


class OwnText:
    """A text that grows, with an index of itself."""

    def __init__(self, tokens: Iterable[int], depth: int) -> None:
        """`depth`: tokens of the longest string that is counted, what follows an end included."""
        self.tokens: list[int] = []
        self._depth, self._tree, self._indexed = depth, WindowTree(), 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Write on. Windows are put in when they are full; of the last ones `matches` takes care."""
        self.tokens += tokens
        while self._indexed + self._depth <= len(self.tokens):
            self._tree.add(tuple(self.tokens[self._indexed : self._indexed + self._depth]))
            self._indexed += 1

    def matches(self, text: Sequence[int]) -> Iterator[tuple[int, Match]]:
        """Ends of `text`, which is `tokens`, where they stand earlier in it."""
        for size in range(min(self._depth - 1, len(text) - 1), 0, -1):
            end = text[-size:]
            # an occurrence that a token follows begins before the end itself
            growing = range(self._indexed, len(text) - size)
            ends = tuple(at + size for at in growing if text[at : at + size] == end)
            place = self._tree.find(end)
            if place or ends:
                yield size, Match(place, self.tokens, ends)


class AnswerMemory:
    """Earlier answers, the last ones that fit into a number of tokens, with one index of all.

    Drafters of several threads may share one. Answers come in and go whole; who reads holds `lock` until the last
    `Match` has been read, as an answer that comes or goes in between would move what a match points at.
    """

    def __init__(self, *, tokens: int = 200_000, depth: int = 24) -> None:
        """`tokens`: most tokens of all answers together; the first answer goes first.

        Raises:
            RequestError: `tokens` is no whole number from 1, or `depth` none from 2.
        """
        self.limit = whole(tokens, "tokens of an AnswerMemory", least=1)
        self.depth = whole(depth, "depth of an AnswerMemory", least=2)
        self._tree, self._size = WindowTree(), 0
        self._answers: deque[list[int]] = deque()
        self._calls, self._trace = 0, b""
        self.lock = RLock()

    def __len__(self) -> int:
        return self._size

    @property
    def answers(self) -> list[list[int]]:
        """What it holds, the oldest first: the documents that `build_datastore` writes."""
        with self.lock:
            return [list(each) for each in self._answers]  # what a caller changes would not be found to forget

    def salt(self) -> int:
        """A number of its own for every call that drafts from this memory; 0 for the first one of an empty memory.

        It depends on all that was ever taken in, so that answers which come from elsewhere, as from a datastore that
        an earlier process has saved, are not met by the numbers that they were drawn with.
        """
        with self.lock:
            number, self._calls = self._calls, self._calls + 1
            if not (number or self._trace):
                return 0
            return salt_of(self._trace, number.to_bytes(8, "big"))

    def add(self, answer: Sequence[int]) -> None:
        """Take an answer in, its last tokens where it is too long; older ones make room.

        Raises:
            RequestError: it holds what is no token. Whose vocabulary its ids are from shows where they are drafted.
        """
        kept = whole_numbers(answer, "an answer for an AnswerMemory", _ANSWER)[-self.limit :]
        if not kept:
            return
        wrong = [token for token in (min(kept), max(kept)) if not 0 <= token < 2**63]
        if wrong:
            raise RequestError(f"an answer for an AnswerMemory holds {wrong[0]}; expected {_ANSWER}")
        made = np.array(kept, np.int64).tobytes()
        with self.lock:
            while self._size + len(kept) > self.limit:
                self._forget(self._answers.popleft())
            for window in self._windows(kept):
                self._tree.add(window)
            self._answers.append(kept)
            self._size += len(kept)
            self._trace = blake2b(self._trace + made, digest_size=16).digest()

    def matches(self, text: Sequence[int]) -> Iterator[tuple[int, Match]]:
        """Ends of `text` that stand in an answer."""
        for size in range(min(self.depth - 1, len(text)), 0, -1):
            place = self._tree.find(text[-size:])
            # the end of an answer is no match: a token has to follow
            if place and place.total:
                yield size, Match(place)

    def _forget(self, answer: Sequence[int]) -> None:
        for window in self._windows(answer):
            self._tree.remove(window)
        self._size -= len(answer)

    def _windows(self, text: Sequence[int]) -> Iterator[tuple[int, ...]]:
        return (tuple(text[at : at + self.depth]) for at in range(len(text)))


class StoredTexts:
    """A datastore as a source: of the longest end that it has, a bounded number of continuations."""

    def __init__(self, store: Store, *, longest: int, length: int, limit: int = 100) -> None:
        """`longest`: tokens of a match; `length`: of what follows; `limit`: places that are looked at."""
        self._store, self._longest, self._length, self._limit = store, longest, length, limit

    def matches(self, text: Sequence[int]) -> Iterator[tuple[int, Match]]:
        """The longest end of `text` alone: each one costs a search in the datastore."""
        recent = text[-self._longest :]
        size = self._store.longest_end(recent, longest=self._longest, shortest=1)
        if size:
            tree = WindowTree()
            how = {"longest": size, "shortest": size, "length": self._length, "limit": self._limit}
            found = self._store.continuations(recent, **how)
            for row in found.tolist():
                tree.add(tuple(row[: row.index(-1)] if -1 in row else row))
            yield size, Match(Place(tree.root, 0))
