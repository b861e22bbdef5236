"""Strings of tokens with counts, in a tree that shares their beginnings: a suffix tree of bounded depth.

The strings are the windows of a text: the tokens from each position on, up to a depth. A string of tokens
then occurs as often in the text as windows begin with it. Edges hold runs of tokens, so that a window adds two
nodes at most, and removing one leaves the tree that would be there without it.
Read next: `index.py`, whose texts the windows are of.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

Window = tuple[int, ...]


_FEW = 32
"""Children of a node that are looked at one by one; of more a ranking is kept, once somebody asks for it."""
Ranked = tuple[int, int]
"""Less the count, and the token: sorted, the most frequent comes first, the lowest id of equals."""


class Node:
    """A run of tokens, how many windows have it behind the runs above, how many end with it, and what goes on."""

    __slots__ = ("_ranking", "children", "count", "ends", "label")

    def __init__(self, label: Window, count: int, ends: int, children: dict[int, Node]) -> None:
        self.label, self.count, self.ends, self.children = label, count, ends, children
        self._ranking: list[Ranked] | None = None

    def ranking(self) -> Sequence[Ranked]:
        """The children by count. Asking again costs nothing more, however many there are."""
        if self._ranking is not None:
            return self._ranking
        ranking = sorted((-child.count, token) for token, child in self.children.items())
        if len(ranking) > _FEW:
            self._ranking = ranking
        return ranking

    def counted(self, token: int, more: int) -> None:
        """Note that a child has `more` windows than the tree was told of; one that is new had none, one at 0 goes."""
        child = self.children[token]
        if self._ranking is not None:
            known = (-child.count, token)
            if child.count:
                del self._ranking[bisect_left(self._ranking, known)]
            if child.count + more:
                insort(self._ranking, (-child.count - more, token))
        child.count += more
        if not child.count:
            del self.children[token]


class Place(NamedTuple):
    """Where a string ends: in a node, behind the first `read` tokens of its run."""

    node: Node
    read: int

    @property
    def total(self) -> int:
        """In how many windows a token follows the string."""
        return self.node.count - (self.node.ends if self.read == len(self.node.label) else 0)

    def count(self, token: int) -> int:
        """In how many windows that token follows it."""
        if self.read < len(self.node.label):
            return self.node.count if self.node.label[self.read] == token else 0
        child = self.node.children.get(token)
        return 0 if child is None else child.count

    def ranking(self) -> Sequence[Ranked]:
        """The tokens that follow it, the most frequent first."""
        if self.read < len(self.node.label):
            return [(-self.node.count, self.node.label[self.read])]
        return self.node.ranking()

    def after(self, token: int) -> Place | None:
        """The place one token further, None if it never follows."""
        node, read = self
        if read < len(node.label):
            return Place(node, read + 1) if node.label[read] == token else None
        child = node.children.get(token)
        return None if child is None else Place(child, 1)


def longest_draft(depth: int, factor: float, *, stored: bool = False) -> int:
    """Tokens of the longest draft from strings of `depth` tokens, match included, `factor` per token of the match.

    `stored`: from a datastore too, where what follows a match has no bound.
    """
    if stored:
        return int(factor * (depth - 1))
    return max(min(int(factor * match), depth - match) for match in range(1, depth))


class WindowTree:
    """A multiset of windows. A node stands only where windows part or where one ends."""

    def __init__(self) -> None:
        self.root = Node((), 0, 0, {})

    def add(self, window: Window) -> None:
        """Put a window in once more."""
        node, at = self.root, 0
        node.count += 1
        while at < len(window):
            token = window[at]
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node(window[at:], 0, 0, {})
            shared = _shared(child.label, window, at)
            if shared < len(child.label):
                _split(child, shared)
            node.counted(token, 1)
            node, at = child, at + shared
        node.ends += 1

    def remove(self, window: Window) -> None:
        """Take a window out that was put in; one that was not is a ValueError."""
        path, at = [self.root], 0
        while at < len(window):
            child = path[-1].children.get(window[at])
            if child is None or window[at : at + len(child.label)] != child.label:
                raise ValueError(f"the window {window} is not in the tree")
            path.append(child)
            at += len(child.label)
        if not path[-1].ends:
            raise ValueError(f"no window of the tree ends as {window} does")
        path[-1].ends -= 1
        self.root.count -= 1
        last = self.root
        for child in path[1:]:
            last.counted(child.label[0], -1)
            if not child.count:  # nor has anything below it
                break
            last = child
        if last is not self.root:
            _join(last)

    def find(self, tokens: Sequence[int]) -> Place | None:
        """Where a string ends, None if no window begins with it."""
        node, at, size = self.root, 0, len(tokens)
        while at < size:
            child = node.children.get(tokens[at])
            if child is None:
                return None
            shared = _shared(child.label, tokens, at)
            if at + shared == size:
                return Place(child, shared)
            if shared < len(child.label):
                return None
            node, at = child, at + shared
        return Place(node, len(node.label))


def _shared(label: Window, tokens: Sequence[int], start: int) -> int:
    """How many tokens from `start` on are those of the label."""
    count = 0
    for own, other in zip(label, tokens[start : start + len(label)]):
        if own != other:
            break
        count += 1
    return count


def _split(node: Node, at: int) -> None:
    """Let a node end behind `at` tokens; the rest of its run goes into a child."""
    rest = Node(node.label[at:], node.count, node.ends, node.children)
    rest._ranking, node._ranking = node._ranking, None
    node.label, node.ends, node.children = node.label[:at], 0, {rest.label[0]: rest}


def _join(node: Node) -> None:
    """Take the only child into a node where no window ends."""
    if len(node.children) == 1 and not node.ends:
        (child,) = node.children.values()
        node.label, node.ends, node.children = node.label + child.label, child.ends, child.children
        node._ranking = child._ranking
