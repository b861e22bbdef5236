"""The best tree against all trees there are, and the best budget against its own definition."""

import itertools

import numpy as np
import pytest
from draftsmith.decoding.tree.build import tree_of_paths
from draftsmith.decoding.tree.search import (
    TreePlan,
    acceptance_of,
    best_budget,
    best_tree_dp,
    best_tree_greedy,
    expected_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

Path = tuple[int, ...]
TREES: dict[tuple[int, int], list[frozenset[Path]]] = {}


def all_trees(depth: int, ranks: int) -> list[frozenset[Path]]:
    """Every set of paths that holds the prefixes of its paths."""
    if depth == 0:
        return [frozenset()]
    if (depth, ranks) not in TREES:
        below = all_trees(depth - 1, ranks)
        # each rank: left out, or taken with any tree below it
        options = [None, *below]
        TREES[depth, ranks] = [
            frozenset(
                path
                for rank, tree in enumerate(each)
                if tree is not None
                for path in [(rank,), *((rank, *rest) for rest in tree)]
            )
            for each in itertools.product(options, repeat=ranks)
        ]
    return TREES[depth, ranks]


@st.composite
def tables(draw: st.DrawFn, shapes: tuple = ((1, 3), (2, 2), (2, 3), (3, 2), (4, 1))) -> np.ndarray:
    """Acceptances in sixths: ties and zeros are frequent, sums of 1 occur, ranks need not fall."""
    depths, ranks = draw(st.sampled_from(shapes))
    rows = st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks).filter(lambda r: sum(r) <= 6)
    return np.array(draw(st.lists(rows, min_size=depths, max_size=depths))) / 6


def worth(tree: frozenset[Path], table: np.ndarray) -> float:
    total = 0.0
    for path in tree:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= table[depth, rank]
        total += product
    return total


@settings(deadline=None, max_examples=60)
@given(tables(), st.integers(1, 7))
def test_both_searches_find_what_no_tree_beats(table: np.ndarray, nodes: int) -> None:
    trees = [tree for tree in all_trees(*table.shape) if len(tree) < nodes]
    best = max(worth(tree, table) for tree in trees)
    for search in (best_tree_dp, best_tree_greedy):
        found = search(table, nodes)
        assert frozenset(found) in trees
        assert found == sorted(found, key=lambda path: (len(path), path))
        assert len(tree_of_paths(found).tree) <= nodes
        assert expected_tokens(found, table) == pytest.approx(best, abs=1e-12)
        # nothing is taken that is never accepted
        assert all(worth(frozenset([path]), table) > 0 for path in found)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 60))
def test_both_searches_agree_on_large_trees(seed: int, nodes: int) -> None:
    g = np.random.default_rng(seed)
    table = g.dirichlet(np.full(7, 0.5), size=4)[:, :6]
    by_dp, by_greedy = best_tree_dp(table, nodes), best_tree_greedy(table, nodes)
    assert len(by_dp) == len(by_greedy) == nodes - 1
    assert expected_tokens(by_dp, table) == pytest.approx(expected_tokens(by_greedy, table))
    assert set(best_tree_greedy(table, nodes - 1)) <= set(by_greedy)


def test_expected_tokens_is_the_mean_of_simulated_steps() -> None:
    g = np.random.default_rng(0)
    table = np.array([[0.5, 0.3], [0.4, 0.2], [0.6, 0.1]])
    paths = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    steps = 200_000
    # the rank of the right candidate at every depth; 2 where none is right
    right = np.stack([g.choice(3, steps, p=[*row, 1 - row.sum()]) for row in table], 1)
    accepted = sum((right[:, : len(path)] == path).all(1).astype(int) for path in paths)
    assert expected_tokens(paths, table) == pytest.approx(accepted.mean(), abs=0.01)


def test_sequoia_vector_is_the_case_of_equal_rows() -> None:
    """A chance of a for rank 0 alone: a chain, and the geometric sum."""
    table = np.tile([0.8, 0.0], (5, 1))
    found = best_tree_dp(table, 100)
    assert found == [(0,) * depth for depth in range(1, 6)]
    assert expected_tokens(found, table) == pytest.approx(sum(0.8**d for d in range(1, 6)))


def test_acceptance_is_hits_over_trials() -> None:
    found = acceptance_of(np.array([[5, 3], [1, 0], [0, 0]]), np.array([10, 4, 0]))
    np.testing.assert_array_equal(found, [[0.5, 0.3], [0.25, 0], [0, 0]])
    with pytest.raises(ValueError, match="more hits than trials"):
        acceptance_of(np.array([[6, 5]]), np.array([10]))
    with pytest.raises(ValueError, match=r"expected \[D, R\] and \[D\]"):
        acceptance_of(np.array([[6, 5]]), np.array([10, 10]))


@pytest.mark.parametrize("table", [[[0.6, 0.5]], [[-0.1, 0.5]], [[np.nan, 0.5]], [0.5, 0.2]])
def test_what_is_no_table_of_disjoint_events_is_refused(table: list) -> None:
    with pytest.raises(ValueError, match="disjoint events|shape"):
        best_tree_dp(np.array(table), 4)


def test_paths_and_budgets_that_cannot_be_are_refused() -> None:
    table = np.array([[0.6, 0.2]])
    for path in [(2,), (0, 0), (-1,)]:
        with pytest.raises(ValueError, match="leaves the measured"):
            expected_tokens([path], table)
    for search in (best_tree_dp, best_tree_greedy):
        assert search(table, 1) == []
        with pytest.raises(ValueError, match="at least its root"):
            search(table, 0)


CURVE = {1: 1.0, 4: 1.1, 16: 1.3, 32: 2.4}


@settings(deadline=None, max_examples=40)
@given(tables(((2, 2), (3, 3), (4, 2))), st.sampled_from([0.0, 0.1, 1.0]))
def test_best_budget_is_the_fastest_of_all(table: np.ndarray, draft_cost: float) -> None:
    plan = best_budget(table, CURVE, draft_cost=draft_cost)
    assert plan.nodes == 1 + len(plan.paths)
    assert plan.expected == pytest.approx(expected_tokens(plan.paths, table))
    fastest = []
    for budget in range(2, 33):
        tree = best_tree_dp(table, budget)
        cost = np.interp(1 + len(tree), list(CURVE), list(CURVE.values())) + draft_cost
        fastest.append((1 + expected_tokens(tree, table)) / cost)
    assert plan.speedup == pytest.approx(max(fastest))


def test_a_dearer_machine_wants_a_smaller_tree() -> None:
    table = np.tile([0.5, 0.2, 0.1, 0.05], (5, 1))
    flat = best_budget(table, {1: 1.0, 64: 1.0}, draft_cost=0.1)
    steep = best_budget(table, {64: 20.0, 1: 1.0}, draft_cost=0.1)
    assert flat.nodes == 64
    assert 1 < steep.nodes < 8
    assert steep.speedup < flat.speedup


def test_budgets_are_those_asked_for_and_measured() -> None:
    table = np.array([[0.5, 0.2]])
    free = {1: 1.0, 8: 1.0}
    assert best_budget(table, free, draft_cost=0, budgets=[2]) == TreePlan(((0,),), 2, 0.5, 1.5)
    # no tree of 8 nodes can be had of two candidates: three are paid for
    assert best_budget(table, {1: 1.0, 3: 2.0, 8: 9.0}, draft_cost=0, budgets=[8]).speedup == 0.85
    with pytest.raises(ValueError, match="9 nodes was not measured: the curve goes from 1 to 8"):
        best_budget(table, free, draft_cost=0, budgets=[2, 9])
    with pytest.raises(ValueError, match="3 nodes was not measured"):
        best_budget(table, {4: 1.0, 8: 1.0}, draft_cost=0)
    with pytest.raises(ValueError, match="no budget"):
        best_budget(table, {1: 1.0}, draft_cost=0)
    with pytest.raises(ValueError, match="positive and measured"):
        best_budget(table, {1: 0.0}, draft_cost=0)
