"""The best static tree for a budget of nodes, and the best budget for a measured machine.

What a tree is worth follows from how often the candidate of every rank was the right one at every
depth; what it costs follows from the measured time of a verify call. The search runs on the host, before decoding.
Read next: `tree/build.py`, which makes a tree of the paths found here.

Shapes: D depths, R ranks among the candidates of a depth. A path is the rank of the candidate at
every depth, from the top; the root is the empty path and never listed. `nodes` counts the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]


@dataclass(frozen=True)
class TreePlan:
    """A tree and what it promises.

    Attributes:
        paths: the tree, shallow paths first, for `tree_of_paths`.
        nodes: its size, the root included.
        expected: drafted tokens accepted per verify call, without the bonus.
        speedup: tokens per second over decoding one token at a time.
    """

    paths: tuple[Path, ...]
    nodes: int
    expected: float
    speedup: float


def acceptance_of(hits_DR: NDArray, trials_D: NDArray) -> NDArray[np.float64]:
    """How often the candidate of rank r was the accepted one at depth d. float64 [D, R].

    Args:
        hits_DR: how often it was, counts of shape [D, R].
        trials_D: how often depth d was put to the test, its parent being accepted, shape [D].

    Returns:
        hits / trials; 0 for a depth that was never tested, because nothing speaks for it.

    Raises:
        ValueError: shapes that do not fit, or more hits at a depth than trials.
    """
    hits_DR, trials_D = np.asarray(hits_DR, float), np.asarray(trials_D, float)
    if hits_DR.ndim != 2 or trials_D.shape != hits_DR.shape[:1]:
        raise ValueError(f"hits have shape {hits_DR.shape} and trials {trials_D.shape}; expected [D, R] and [D]")
    if (hits_DR < 0).any() or (hits_DR.sum(1) > trials_D).any():
        raise ValueError("a trial has at most one accepted candidate: more hits than trials")
    return hits_DR / np.maximum(trials_D, 1)[:, None]


def expected_tokens(paths: Sequence[Sequence[int]], acceptance: NDArray) -> float:
    """Drafted tokens that a verify call accepts on average, without the bonus.

    A node is accepted with the product of the acceptances along its path, so the sum over all
    nodes is the expected depth reached (Medusa, arXiv 2401.10774, section 2.3.3).

    Args:
        paths: the nodes of the tree but the root; every prefix of a path is in it.
        acceptance: float [D, R], see `acceptance_of`; Sequoia's vector is the case of equal rows.

    Raises:
        ValueError: `acceptance` is no such table, or a path leaves it.
    """
    a_DR = _checked(acceptance)
    for path in paths:
        inside = len(path) <= a_DR.shape[0] and all(0 <= rank < a_DR.shape[1] for rank in path)
        if not inside:
            raise ValueError(f"path {tuple(path)} leaves the measured acceptance {a_DR.shape}")
    return float(sum(a_DR[range(len(path)), list(path)].prod() for path in paths))


def best_tree_greedy(acceptance: NDArray, nodes: int) -> list[Path]:
    """The tree of at most `nodes` nodes that accepts most: always add the likeliest path.

    Medusa's construction (arXiv 2401.10774, section 2.3.3). As no acceptance is above 1, a path
    is never likelier than its prefix: the paths taken are the likeliest of all, and no tree of
    this size is worth more. It is therefore always worth exactly what `best_tree_dp` finds, for
    every table; the trees may differ where paths are equally likely. Trees of growing budgets
    contain one another. Candidates that were never accepted are left out.

    A rank is passed over where a later one was accepted more often. That is right for top-k
    candidates; siblings drawn one after another need a table that falls with the rank.

    Args:
        acceptance: float [D, R], as for `expected_tokens`.
        nodes: the budget, the root included.

    Returns:
        Paths by (depth, path), at most `nodes - 1` of them.

    Raises:
        ValueError: `acceptance` is no table of disjoint events, or `nodes` is below 1.
    """
    return _ordered(path for path, _ in _likeliest(_checked(acceptance), _budget(nodes)))


def best_tree_dp(acceptance: NDArray, nodes: int) -> list[Path]:
    """The tree of at most `nodes` nodes that accepts most, by a dynamic programme.

    Over (nodes left, depth, rank), after Sequoia (Chen et al. 2024, arXiv 2402.12374):

        best(d, r, n) = max over m of  a[d, r] (1 + best(d + 1, 0, m - 1)) + best(d, r + 1, n - m)

    where m nodes go to the candidate of rank r and all below it; m = 0 leaves it out. Slower than
    `best_tree_greedy`, equal to it in value for every table, and the check on it; arguments, order
    and errors are the same.
    """
    a_DR, budget = _checked(acceptance), _budget(nodes)
    D, R = a_DR.shape
    best = np.zeros((D + 1, R + 1, budget + 1))
    spent = np.zeros((D, R, budget + 1), dtype=np.int64)
    for d, r in np.ndindex(D, R):
        depth, rank = D - 1 - d, R - 1 - r
        # worth of this candidate with m - 1 nodes below it
        own = np.concatenate([[0.0], a_DR[depth, rank] * (1 + best[depth + 1, 0, :budget])])
        for n in range(1, budget + 1):
            worth = own[: n + 1] + best[depth, rank + 1, n::-1]
            # the first maximum: nodes that add nothing are not taken
            spent[depth, rank, n] = worth.argmax()
            best[depth, rank, n] = worth.max()
    return _ordered(_traced(spent, (), budget))


def best_budget(
    acceptance: NDArray, curve: Mapping[int, float], *, draft_cost: float, budgets: Iterable[int] | None = None
) -> TreePlan:
    """The size of tree that decodes fastest: most (1 + expected) / (verify cost + draft cost).

    Sequoia's hardware-aware choice (Chen et al. 2024, arXiv 2402.12374), on the trees of
    `best_tree_greedy`. Of equally fast trees the smallest is taken.

    Args:
        acceptance: float [D, R], as for `expected_tokens`.
        curve: nodes of a verify call, the root included -> its time / time of a one-token call,
            as measured; linear in between.
        draft_cost: time to draft a tree / time of a one-token call.
        budgets: sizes to choose from; by default 2 and more, as far as `curve` was measured.

    Raises:
        ValueError: a budget, or the largest tree that the acceptances allow, was not measured;
            a time that is not positive; no budget at all; a table as in `best_tree_greedy`.
    """
    a_DR = _checked(acceptance)
    if not curve or min(curve.values()) <= 0 or draft_cost < 0:
        raise ValueError("verify costs must be positive and measured, draft_cost not negative")
    sizes = sorted(set(range(max(2, min(curve)), max(curve) + 1) if budgets is None else budgets))
    if not sizes:
        raise ValueError("no budget to choose from: a tree has at least 2 nodes")
    best: TreePlan | None = None
    taken = _likeliest(a_DR, _budget(sizes[-1]))
    for size in sizes:
        plan = _tree_plan(taken[: _budget(size)], _cost(curve, size, len(taken)) + draft_cost)
        if best is None or plan.speedup > best.speedup:
            best = plan
    assert best is not None
    return best


def _checked(acceptance: NDArray) -> NDArray[np.float64]:
    """The table as float64, checked."""
    a_DR = np.asarray(acceptance, dtype=np.float64)
    if a_DR.ndim != 2:
        raise ValueError(f"acceptance has shape {a_DR.shape}; expected [D, R]")
    # a NaN fails both comparisons; the slack is for sums of measured ratios
    if not ((a_DR >= 0).all() and (a_DR.sum(1) <= 1 + 1e-6).all()):
        raise ValueError(
            "the ranks of a depth are disjoint events: acceptances must lie in [0, 1] and add up "
            "to at most 1 at every depth"
        )
    return np.minimum(a_DR, 1.0)


def _budget(nodes: int) -> int:
    """Nodes without the root."""
    if nodes < 1:
        raise ValueError(f"a tree of {nodes} nodes: it needs at least its root")
    return nodes - 1


def _likeliest(a_DR: NDArray[np.float64], count: int) -> list[tuple[Path, float]]:
    """The likeliest paths, best first, with their products; a prefix before what it begins."""
    D, R = a_DR.shape
    # on ties the shallower path, so that what is taken is a tree
    heap: list[tuple[float, int, Path]] = [(-float(a_DR[0, rank]), 1, (rank,)) for rank in range(R if D else 0)]
    heapify(heap)
    taken: list[tuple[Path, float]] = []
    while heap and len(taken) < count:
        negative, depth, path = heappop(heap)
        if negative == 0:
            break
        taken.append((path, -negative))
        for rank in range(R if depth < D else 0):
            heappush(heap, (negative * float(a_DR[depth, rank]), depth + 1, (*path, rank)))
    return taken


def _traced(spent: NDArray[np.int64], prefix: Path, left: int) -> list[Path]:
    """The paths below `prefix` when `left` nodes are spent there as the programme decided."""
    paths: list[Path] = []
    if len(prefix) == len(spent):
        return paths
    for rank in range(spent.shape[1]):
        used = int(spent[len(prefix), rank, left])
        if used:
            path = (*prefix, rank)
            paths += [path, *_traced(spent, path, used - 1)]
        left -= used
    return paths


def _ordered(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (len(path), path))


def _cost(curve: Mapping[int, float], size: int, most: int) -> float:
    """Time of a verify call on a tree of `size` nodes, or of all that there are to have."""
    nodes, known = min(size, most + 1), sorted(curve)
    for asked in (size, nodes):
        if not known[0] <= asked <= known[-1]:
            raise ValueError(
                f"a verify call on {asked} nodes was not measured: the curve goes from {known[0]} to {known[-1]}"
            )
    return float(np.interp(nodes, known, [curve[each] for each in known]))


def _tree_plan(taken: Sequence[tuple[Path, float]], cost: float) -> TreePlan:
    expected = sum(product for _, product in taken)
    paths = tuple(_ordered(path for path, _ in taken))
    return TreePlan(paths, 1 + len(paths), expected, (1 + expected) / cost)
