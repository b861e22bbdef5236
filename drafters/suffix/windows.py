"""Strings of tokens with counts, in a tree that shares their beginnings: a suffix tree of bounded depth.

The strings are the windows of a text: the tokens from each position on, up to a depth. A string of tokens
then occurs as often in the text as windows begin with it. Edges hold runs of tokens, so that a window adds two
nodes at most, and removing one leaves the tree that would be there without it.
Read next: `index.py`, whose texts the windows are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Window = tuple[int, ...]


class Node:
    """A run of tokens, how many windows have it behind the runs above, and what goes on."""

    __slots__ = ("children", "count", "label")

    def __init__(self, label: Window, count: int, children: dict[int, Node]) -> None:
        self.label, self.count, self.children = label, count, children


class Place(NamedTuple):
    """Where a string ends: in a node, behind the first `read` tokens of its run."""

    node: Node
    read: int

    def followers(self) -> dict[int, int]:
        """The tokens that follow the string, and in how many windows."""
        if self.read < len(self.node.label):
            return {self.node.label[self.read]: self.node.count}
        return {token: child.count for token, child in self.node.children.items()}

    def after(self, token: int) -> Place | None:
        """The place one token further, None if it never follows."""
        node, read = self
        if read < len(node.label):
            return Place(node, read + 1) if node.label[read] == token else None
        child = node.children.get(token)
        return None if child is None else Place(child, 1)


class WindowTree:
    """A multiset of windows. A node stands only where windows part or where one ends."""

    def __init__(self) -> None:
        self.root = Node((), 0, {})

    def add(self, window: Window) -> None:
        """Put a window in once more."""
        node, at = self.root, 0
        while at < len(window):
            child = node.children.get(window[at])
            if child is None:
                node.children[window[at]] = Node(window[at:], 1, {})
                return
            shared = _shared(child.label, window, at)
            if shared < len(child.label):
                _split(child, shared)
            child.count += 1
            node, at = child, at + shared

    def remove(self, window: Window) -> None:
        """Take a window out that was put in; one that was not is a ValueError."""
        path, at = [self.root], 0
        while at < len(window):
            child = path[-1].children.get(window[at])
            if child is None or window[at : at + len(child.label)] != child.label:
                raise ValueError(f"the window {window} is not in the tree")
            path.append(child)
            at += len(child.label)
        if len(path) > 1 and path[-1].count == sum(child.count for child in path[-1].children.values()):
            raise ValueError(f"no window of the tree ends as {window} does")
        last = self.root
        for child in path[1:]:
            child.count -= 1
            if not child.count:  # nor has anything below it
                del last.children[child.label[0]]
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
    rest = Node(node.label[at:], node.count, node.children)
    node.label, node.children = node.label[:at], {rest.label[0]: rest}


def _join(node: Node) -> None:
    """Take the only child into a node where no window ends."""
    if len(node.children) == 1:
        (child,) = node.children.values()
        if child.count == node.count:
            node.label, node.children = node.label + child.label, child.children
