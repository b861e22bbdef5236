"""A static tree level by level, and the drawing of its nodes' children without replacement.

Read next: `eagle/proposer.py`, which drafts such trees; `decoding/tree/build.py`.

Shapes: B rows, K nodes of a level that have children, C children of a node, X children of the
level, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...decoding.tree.build import draw_siblings
from ...decoding.tree.tree import Tree


class Level(NamedTuple):
    """The nodes of one depth that have children, as tensors."""

    nodes_K: Tensor  # their numbers
    parents_K: Tensor  # index of each one's parent in the level before
    draw_KC: Tensor  # which random number each child takes; 0 where there is no child
    children_X: Tensor  # numbers of the children
    pick_X: Tensor  # index of each of them in [K, C], flattened


@lru_cache(maxsize=64)
def levels_of(tree: Tree, device: torch.device) -> tuple[Level, ...]:
    """The levels of a static tree; kept, as copying them would wait."""
    levels = []
    before: list[int] = []
    for depth in range(tree.depth):
        inner = [n for n, own in enumerate(tree.children) if own and tree.depths[n] == depth]
        parents = [before.index(tree.parents[n]) if before else 0 for n in inner]
        width = max(len(tree.children[n]) for n in inner)
        slots = [
            (child, at * width + rank) for at, n in enumerate(inner) for rank, child in enumerate(tree.children[n])
        ]
        draws = [[child - 1 for child in tree.children[n]] for n in inner]
        padded = [[*each, *[0] * (width - len(each))] for each in draws]
        lists = (inner, parents, padded, [child for child, _ in slots], [slot for _, slot in slots])
        levels.append(Level(*(torch.tensor(each, device=device) for each in lists)))
        before = inner
    return tuple(levels)


def draw_level(probs_BKV: Tensor, level: Level, random_BX: Tensor) -> tuple[Tensor, Tensor]:
    """The children of a level's nodes, one after another without replacement; and which are present. [B, X] each."""
    B, K, V = probs_BKV.shape
    C = level.draw_KC.shape[1]
    uniform_XC = random_BX[:, level.draw_KC.flatten()].reshape(B * K, C)
    # nodes with fewer children than others draw more than they take: the first draws are the same
    tokens_XC, there_XC = draw_siblings(probs_BKV.reshape(B * K, V), uniform_XC, replace=False)
    tokens_BX, there_BX = tokens_XC.reshape(B, K * C), there_XC.reshape(B, K * C)
    return tokens_BX[:, level.pick_X], there_BX[:, level.pick_X]
