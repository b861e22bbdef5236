"""Every builder against a plain-Python one, row by row; and that none but tries waits for a device."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from draftsmith.decoding.proposal import DraftSampling, Proposal, Trials
from draftsmith.decoding.random import SharedStream
from draftsmith.decoding.rules.acceptance import accept_several
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.build import dynamic_tree, fill_choices, most_nodes, tree_of_paths, tree_of_tries
from draftsmith.decoding.tree.merge import Merged, compact, merge
from draftsmith.decoding.tree.tree import RowTrees, Tree
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Path = tuple[int, ...]
aten = torch.ops.aten
ROOT = 7


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a device: values read, sizes that depend on them."""

    WAITS = (
        aten._local_scalar_dense,
        aten.nonzero,
        aten.masked_select,
        aten.is_nonzero,
        aten.equal,
        aten.lift_fresh,
        aten._unique2,
        aten.repeat_interleave,
    )

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in self.WAITS, f"{func} waits for the device"
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            assert all(each is None or each.dtype != torch.bool for each in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x[0].item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: bool(x[0] > 1),
        lambda _: torch.tensor([1]),
    ],
)
def test_waiting_is_noticed(waits: Any) -> None:
    x = torch.arange(4)
    with NoWaiting(), pytest.raises(AssertionError):
        waits(x)


def rows_of(trees: RowTrees) -> Iterator[tuple[list[int], list[int]]]:
    """Parents of each row, and the nodes that it has; checks what is made of them against `Tree`."""
    made = trees.on(torch.device("cpu"))
    for row, parents in enumerate(trees.parents_BN.tolist()):
        there = [0, *(node for node in range(1, len(parents)) if parents[node] >= 0)]
        place = {node: index for index, node in enumerate(there)}
        plain = Tree((-1, *(place[parents[node]] for node in there[1:])))
        assert made.depths_BN[row, there].tolist() == list(plain.depths)
        assert plain.depth <= trees.depth
        assert torch.equal(made.ancestors_BNN[row][there][:, there], plain.ancestors_NN)
        # nobody looks at an absent node, and it looks at nobody
        assert made.ancestors_BNN[row].sum() == plain.ancestors_NN.sum() + len(parents) - len(there)
        for node, children in enumerate(made.children_BNC[row].tolist()):
            mine = plain.children[place[node]] if node in place else ()
            assert children == [there[c] for c in mine] + [-1] * (trees.width - len(mine))
        yield parents, there


def path_of(node: int, parents: list[int], labels: list[int]) -> Path:
    """Labels from below the root down to a node."""
    path: list[int] = []
    while node > 0:
        path.append(labels[node])
        node = parents[node]
    return tuple(reversed(path))


@st.composite
def path_lists(draw: st.DrawFn) -> list[Path]:
    paths: list[Path] = [()]
    for _ in range(draw(st.integers(0, 9))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 3)))
        if path not in paths and len(path) < 5:
            paths.append(path)
    return draw(st.permutations(paths[1:]))


@settings(deadline=None)
@given(path_lists())
def test_a_static_tree_has_the_nodes_of_its_paths(paths: list[Path]) -> None:
    choices = tree_of_paths(paths)
    parents, ranks = list(choices.tree.parents), list(choices.ranks)
    found = [path_of(node, parents, ranks) for node in range(len(choices.tree))]
    assert found == [(), *sorted(paths, key=lambda path: (len(path), path))]
    candidates = torch.randint(0, 50, (2, 4, 4))
    fill_choices(choices, torch.tensor([ROOT, ROOT]), candidates)  # keeps what must be copied
    root = torch.tensor([ROOT, ROOT + 1])
    with NoWaiting():
        tokens = fill_choices(choices, root, candidates)
    for row in range(2):
        expected = [candidates[row, len(path) - 1, path[-1]] for path in found[1:]]
        assert tokens[row].tolist() == [ROOT + row, *expected]


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        ([(0,), (0, 1, 2)], r"path \(0, 1, 2\) needs its prefix \(0, 1\)"),
        ([(1, 0)], r"path \(1, 0\) needs its prefix \(1,\)"),
        ([(0,), [0]], r"path \(0,\) is there twice"),
        ([()], "the root is always there"),
        ([(0,), (0, -1)], "expected ranks from 0 on"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths: list, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tree_of_paths(paths)


def test_candidates_that_do_not_reach_are_refused() -> None:
    choices, root = tree_of_paths([(0,), (2,), (0, 0)]), torch.tensor([ROOT])
    for depths, ranks in [(1, 3), (2, 2)]:
        with pytest.raises(ValueError, match="depth 2 and ranks up to 2"):
            fill_choices(choices, root, torch.zeros(1, depths, ranks, dtype=torch.long))


class Draft:
    """A table that gives every path its children; few values, so that paths are often equal."""

    def __init__(self, seed: int, children: int) -> None:
        self.seed, self.children = seed, children

    def distribution(self, row: int, path: Path) -> tuple[list[float], list[int]]:
        dice = random.Random(f"{self.seed} {row} {path}")
        values = [0.0, -0.5, -1.0, -1.0, -2.0, -float("inf")]
        logp = sorted(dice.choices(values, k=self.children), reverse=True)
        return logp, dice.sample(range(9), self.children)

    def tables(self, paths: list[list[Path]]) -> tuple[Tensor, Tensor]:
        found = [[self.distribution(row, path) for path in each] for row, each in enumerate(paths)]
        return (
            torch.tensor([[logp for logp, _ in each] for each in found]),
            torch.tensor([[tokens for _, tokens in each] for each in found]),
        )

    def grow(self, rows: int, top_k: int) -> "Growing":
        first = Draft(self.seed, top_k).tables([[()]] * rows)
        return Growing(self, (first[0][:, 0], first[1][:, 0]))


class Growing:
    """Runs a table as `expand`: it knows paths only by the slots it is told."""

    def __init__(self, draft: Draft, first: tuple[Tensor, Tensor]) -> None:
        self.draft, self.first = draft, first
        self.frontier: list[list[Path]] = [[()] for _ in first[0]]
        self.levels: list[int] = []

    def __call__(self, tokens: Tensor, slots: Tensor, level: int) -> tuple[Tensor, Tensor]:
        self.levels.append(level)
        self.frontier = [
            [(*before[slot], token) for token, slot in zip(*each)]
            for before, *each in zip(self.frontier, tokens.tolist(), slots.tolist())
        ]
        return self.draft.tables(self.frontier)


def plain_dynamic(draft: Draft, row: int, depth: int, top_k: int, nodes: int) -> list[Path]:
    """The paths kept, in the order of generation."""
    made: list[tuple[float, int, int, Path]] = []  # (-V, level, number, path)
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    for level in range(depth):
        last = []
        for worth, path in frontier:
            logp, tokens = (draft if level else Draft(draft.seed, top_k)).distribution(row, path)
            for each, token in zip(logp, tokens):
                last.append((worth - each, level, len(made) + len(last), (*path, token)))
        made += last
        frontier = [(each[0], each[3]) for each in sorted(last)[:top_k]]
    kept = sorted(sorted(made)[: nodes - 1], key=lambda each: each[2])
    return [each[3] for each in kept]


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(2, 16))
def test_a_dynamic_tree_keeps_the_most_confident(seed: int, depth: int, top_k: int, children: int, nodes: int) -> None:
    draft, rows = Draft(seed, children), 2
    growing = draft.grow(rows, top_k)
    tokens, trees = dynamic_tree(
        torch.full((rows,), ROOT), growing.first, growing, depth=depth, top_k=top_k, nodes=nodes
    )
    assert growing.levels == list(range(1, depth))
    assert tokens.shape == (rows, nodes) == trees.parents_BN.shape
    for row, (parents, there) in enumerate(rows_of(trees)):
        paths = plain_dynamic(draft, row, depth, top_k, nodes)
        place = {path: node for node, path in enumerate([(), *paths])}
        absent = [-1] * (nodes - len(place))
        # a prefix that was not kept would be missing here: the set is connected, ties or not
        assert parents == [-1, *(place[path[:-1]] for path in paths), *absent]
        assert tokens[row, : len(there)].tolist() == [ROOT, *(path[-1] for path in paths)]


def test_of_equals_the_shallow_is_kept_and_then_the_first() -> None:
    """A draft that is certain of everything: every V is 0."""

    def certain(tokens: Tensor, _slots: Tensor, level: int) -> tuple[Tensor, Tensor]:
        children = torch.tensor([10 * level, 10 * level + 1]).expand(*tokens.shape, 2)
        return torch.zeros(children.shape, dtype=torch.float16), children

    first = (torch.zeros(1, 2, dtype=torch.float16), torch.tensor([[0, 1]]))
    tokens, trees = dynamic_tree(torch.tensor([ROOT]), first, certain, depth=3, top_k=2, nodes=5)
    assert tokens.tolist() == [[ROOT, 0, 1, 10, 11]]
    assert trees.parents_BN.tolist() == [[-1, 0, 0, 1, 1]]


def test_the_most_nodes_of_a_dynamic_tree_are_those_that_it_generates() -> None:
    def children(tokens: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        shape = (*tokens.shape, 3)
        return torch.full(shape, -1.0), torch.arange(3).expand(shape)

    for depth in (1, 2, 4):
        logp, first = children(torch.zeros(1, dtype=torch.long))
        _, tree = dynamic_tree(
            torch.zeros(1, dtype=torch.long), (logp, first), children, depth=depth, top_k=3, nodes=200
        )
        present = int((tree.parents_BN >= 0).sum()) + 1
        assert most_nodes(depth, 3) == present


def test_a_probability_rounded_above_one_does_not_lift_a_child_above_its_parent() -> None:
    def above_one(tokens: Tensor, _slots: Tensor, level: int) -> tuple[Tensor, Tensor]:
        return torch.full((1, 1, 1), 1e-3), tokens[:, :, None] + 1

    first = (torch.tensor([[-1.0]]), torch.tensor([[0]]))
    tokens, trees = dynamic_tree(torch.tensor([ROOT]), first, above_one, depth=4, top_k=1, nodes=3)
    assert tokens.tolist() == [[ROOT, 0, 1]]
    assert trees.parents_BN.tolist() == [[-1, 0, 1]]


def test_what_is_no_number_is_never_reached() -> None:
    """NaN counts as largest: it may push out its own parent, and must not hang below another."""

    def broken(tokens: Tensor, _slots: Tensor, level: int) -> tuple[Tensor, Tensor]:
        return torch.full((1, 2, 2), float("nan")), torch.full((1, 2, 2), 10 * level)

    first = (torch.tensor([[-1.0, -2.0]]), torch.tensor([[0, 1]]))
    _, trees = dynamic_tree(torch.tensor([ROOT]), first, broken, depth=2, top_k=2, nodes=5)
    assert trees.parents_BN.tolist() == [[-1, -1, -1, -1, -1]]


@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(0, 2, 4), (1, 3, 4), (1, 2, 1)])
def test_bounds_of_a_dynamic_tree(depth: int, top_k: int, nodes: int) -> None:
    first = (torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="expected at least 1, at least 2, and top_k"):
        dynamic_tree(torch.tensor([ROOT]), first, lambda *_: first, depth=depth, top_k=top_k, nodes=nodes)


@st.composite
def tries(draw: st.DrawFn, most: int, *, absent: bool = False) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree with its root; few tokens, so that paths are often equal."""
    tokens, parents = [ROOT], [-1]
    for _ in range(draw(st.integers(0, most))):
        above = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]
        parents.append(draw(st.sampled_from([*above, *([-1] if absent else [])])))
        tokens.append(draw(st.integers(0, 2)))
    return tokens, parents


@st.composite
def several(draw: st.DrawFn) -> list[tuple[Tensor, Tensor]]:
    """Drafts' tokens [2, N_m] and parents, [N_m] or [2, N_m] with absent nodes."""
    drafts = []
    for _ in range(draw(st.integers(1, 3))):
        tokens, parents = draw(tries(5))
        other = draw(tries(len(tokens) - 1, absent=True))
        if draw(st.booleans()):
            again = [ROOT, *(draw(st.integers(0, 2)) for _ in tokens[1:])]
            drafts.append((torch.tensor([tokens, again]), torch.tensor(parents)))
        else:
            missing = len(tokens) - len(other[0])
            rows = [tokens, other[0] + [0] * missing], [parents, other[1] + [-1] * missing]
            drafts.append((torch.tensor(rows[0]), torch.tensor(rows[1])))
    return drafts


def distribution_of(draft: int, path: Path) -> list[float]:
    dice = random.Random(f"{draft} {path}")
    return [dice.random() for _ in range(3)]


def distributions_of(draft: int, tokens: Tensor, parents: Tensor) -> Tensor:
    """A draft's q of every node, by its path; of leaves not a number, as nobody may read it."""
    above = parents.expand_as(tokens).tolist()
    return torch.tensor(
        [
            [
                distribution_of(draft, path_of(node, mine, words)) if node in mine else [float("nan")] * 3
                for node in range(len(mine))
            ]
            for words, mine in zip(tokens.tolist(), above)
        ]
    )


def plain_merge(drafts: list[tuple[Tensor, Tensor]], row: int) -> dict[str, Any]:
    """Nodes by their path, the first of each; trials of each node, draft by draft."""
    node_of: dict[Path, int] = {(): 0}
    trials: dict[Path, list[tuple[Path, int]]] = {}
    number = 0
    for m, (tokens, parents) in enumerate(drafts):
        mine, words = parents.expand_as(tokens)[row].tolist(), tokens[row].tolist()
        for node in range(1, len(mine)):
            number += 1
            if mine[node] < 0:
                continue
            path = path_of(node, mine, words)
            node_of.setdefault(path, number)
            trials.setdefault(path[:-1], []).append((path, m))
    return {"node_of": node_of, "trials": trials}


def merged(drafts: list[tuple[Tensor, Tensor]]) -> Merged:
    plain = [plain_merge(drafts, row) for row in range(2)]
    fan = [sum(path[:-1] == above for path in each["node_of"] if path) for each in plain for above in each["trials"]]
    distributions = [distributions_of(m, *each) for m, each in enumerate(drafts)]
    root = torch.tensor([ROOT, ROOT + 1])
    with NoWaiting():
        return merge(
            root,
            *zip(*drafts),
            distributions,
            depth=max(len(path) for each in plain for path in each["node_of"]),
            width=max([1, *fan]),
        )


@settings(deadline=None, max_examples=150)
@given(several())
def test_merging_is_merging_by_path(drafts: list[tuple[Tensor, Tensor]]) -> None:
    found = merged(drafts)
    N = 1 + sum(tokens.shape[1] - 1 for tokens, _ in drafts)
    assert found.tokens_BN.shape == found.present_BN.shape == found.tree.parents_BN.shape == (2, N)
    for row, (parents, there) in enumerate(rows_of(found.tree)):
        node_of = plain_merge(drafts, row)["node_of"]
        assert found.present_BN[row].nonzero().flatten().tolist() == sorted(node_of.values())
        assert there == sorted(node_of.values())
        words = found.tokens_BN[row].tolist()
        assert words[0] == ROOT + row
        assert {path_of(node, parents, words): node for node in there} == node_of


@settings(deadline=None, max_examples=150)
@given(several())
def test_every_node_of_every_draft_is_a_trial_with_its_own_distribution(drafts: list[tuple[Tensor, Tensor]]) -> None:
    found = merged(drafts)
    trials, N = found.trials, found.tokens_BN.shape[1]
    assert trials is not None
    assert trials.q_BXV.shape == (2, sum(tokens.shape[1] for tokens, _ in drafts), 3)
    assert trials.child_BNC.shape == trials.q_index_BNC.shape == (2, N, N - 1)
    for row in range(2):
        plain = plain_merge(drafts, row)
        node_of = plain["node_of"]
        expected: list[list[int]] = [[] for _ in range(N)]
        made_by: list[list[int]] = [[] for _ in range(N)]
        for path, children in plain["trials"].items():
            expected[node_of[path]] = [node_of[child] for child, _ in children]
            made_by[node_of[path]] = [draft for _, draft in children]
        for node in range(N):
            rest = N - 1 - len(expected[node])
            assert trials.child_BNC[row, node].tolist() == expected[node] + [-1] * rest
        for path, node in node_of.items():
            distributions = trials.q_BXV[row, trials.q_index_BNC[row, node]]
            for distribution, draft in zip(distributions, made_by[node]):
                torch.testing.assert_close(distribution, torch.tensor(distribution_of(draft, path)))


@settings(deadline=None, max_examples=150)
@given(several(), st.booleans())
def test_compact_trees_are_the_same_by_path(drafts: list[tuple[Tensor, Tensor]], static: bool) -> None:
    before = merged(drafts)
    after = compact(before, static=static)
    counts = [int(row.sum()) for row in before.present_BN]
    assert after.tokens_BN.shape[1] == (before.tokens_BN.shape[1] if static else max(counts))
    for row, count in enumerate(counts):
        assert by_path(after, row) == by_path(before, row)
        # whatever the other row has: a node's number says which random number decides on it
        assert after.present_BN[row].nonzero().flatten().tolist() == list(range(count))
        assert after.tree.on(torch.device("cpu")).depths_BN[row].max() <= before.tree.depth


def by_path(found: Merged, row: int) -> dict[Path, Any]:
    """What is tried below every path: the child's path, and the distribution that it was drawn from."""
    parents, words = found.tree.parents_BN[row].tolist(), found.tokens_BN[row].tolist()
    there = found.present_BN[row].nonzero().flatten().tolist()
    path_at = {node: path_of(node, parents, words) for node in there}
    trials = found.trials
    return {
        path: [
            (path_at[child], distribution, trials.q_BXV[row, distribution].tolist())
            for child, distribution in zip(
                trials.child_BNC[row, node].tolist(), trials.q_index_BNC[row, node].tolist()
            )
            if child >= 0
        ]
        for node, path in path_at.items()
    }


def test_equal_tokens_below_different_parents_are_different_nodes() -> None:
    left = (torch.tensor([[ROOT, 1, 2, 5]]), torch.tensor([-1, 0, 0, 1]))
    right = (torch.tensor([[ROOT, 2, 5, 5]]), torch.tensor([-1, 0, 1, 2]))
    found = merge(torch.tensor([ROOT]), *zip(left, right), None, depth=3, width=2)
    assert found.trials is None
    assert found.tree.parents_BN.tolist() == [[-1, 0, 0, 1, -1, 2, 5]]
    assert found.present_BN.tolist() == [[True, True, True, True, False, True, True]]


def test_what_cannot_be_merged_is_refused() -> None:
    root, tokens, parents = torch.tensor([ROOT]), torch.tensor([[ROOT, 1]]), torch.tensor([-1, 0])
    for drafts in [([], [], None), ([tokens], [], None), ([tokens], [parents], [])]:
        with pytest.raises(ValueError, match="drafts; expected the same number"):
            merge(root, *drafts, depth=1, width=1)


V, ROWS = 3, 60_000
PARENTS = (torch.tensor([-1, 0, 0, 1, 2]), torch.tensor([-1, 0, 1, 1]))


def emitted(*, probs_in_order: bool) -> tuple[Tensor, Tensor]:
    """Counts of the first two tokens by two merged drafts, and the distribution that they should have."""
    g = torch.Generator().manual_seed(4)
    p_VV, *q_MVV = (1.5 * torch.randn(3, V, V, generator=g)).softmax(-1)
    tokens = []
    for q_VV, parents in zip(q_MVV, PARENTS):
        drawn = torch.zeros(ROWS, len(parents), dtype=torch.long)
        for node in range(1, len(parents)):
            probs_BV = q_VV[drawn[:, parents[node]]]
            drawn[:, node] = torch.multinomial(probs_BV, 1, generator=g)[:, 0]
        tokens.append(drawn)
    q = [q_VV[drawn] for q_VV, drawn in zip(q_MVV, tokens)]
    found = merge(torch.zeros(ROWS, dtype=torch.long), tokens, PARENTS, q, depth=2, width=V)
    trials = found.trials
    if not probs_in_order:
        other = (trials.q_index_BNC + q[0].shape[1]) % trials.q_BXV.shape[1]
        trials = Trials(trials.q_BXV, trials.child_BNC, other)
    proposal = Proposal(found.tokens_BN, found.tree, DraftSampling.SEVERAL, None, found.present_BN, trials)
    logits = p_VV.log()[found.tokens_BN]
    step = accept_several(logits, proposal, Warper(1.0), SharedStream(5, ROWS))
    kept = found.tokens_BN.gather(1, step.path_BD.clamp_min(0))
    first = torch.where(step.accepted_B > 0, kept[:, 0], step.extra_B)
    second = torch.where(step.accepted_B > 1, kept[:, 1], step.extra_B)
    plain = torch.multinomial(p_VV[first], 1, generator=g)[:, 0]
    second = torch.where(step.accepted_B > 0, second, plain)
    distribution = (p_VV[0, :, None] * p_VV).double()
    return torch.bincount(first * V + second, minlength=V * V), ROWS * distribution.flatten()


def test_merged_draws_keep_the_target_distribution() -> None:
    counts, expected = emitted(probs_in_order=True)
    assert stats.chisquare(counts, expected * (ROWS / expected.sum())).pvalue > 1e-4


def test_a_trial_with_the_distribution_of_another_draft_is_caught() -> None:
    counts, expected = emitted(probs_in_order=False)
    assert stats.chisquare(counts, expected * (ROWS / expected.sum())).pvalue < 1e-9


def test_a_dynamic_tree_does_not_wait() -> None:
    def expand(tokens: Tensor, slots: Tensor, level: int) -> tuple[Tensor, Tensor]:
        logp = -(tokens[:, :, None] + slots[:, :, None] + torch.arange(3) + level).float()
        return logp, tokens[:, :, None] + torch.arange(3)

    first = (-torch.arange(3.0).expand(2, 3), torch.arange(3).expand(2, 3))
    root = torch.full((2,), ROOT)
    with NoWaiting():
        for nodes in (8, 60):
            _, trees = dynamic_tree(root, first, expand, depth=3, top_k=3, nodes=nodes)
            trees.on(root.device)


def test_nothing_is_read_where_there_is_nothing_to_read() -> None:
    """On tensors without values: also what a dispatcher does not see, such as `tolist`."""
    tokens = torch.zeros(2, 3, dtype=torch.long, device="meta")
    logp, q = torch.zeros(2, 3, device="meta"), torch.zeros(2, 3, 5, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        tokens.tolist()
    root, parents = tokens[:, 0], torch.zeros(3, dtype=torch.long, device="meta")
    fill_choices(tree_of_paths([(0,), (1,), (0, 2)]), root, tokens[:, None].expand(2, 2, 3))
    _, trees = dynamic_tree(root, (logp, tokens), lambda *_: (q, q.long()), depth=3, top_k=3, nodes=9)
    found = merge(root, [tokens] * 2, [parents] * 2, [q] * 2, depth=2, width=2)
    for each in (trees, found.tree):
        assert each.on(root.device).children_BNC.shape[:2] == each.parents_BN.shape


@settings(deadline=None, max_examples=60)
@given(st.lists(tries(6), min_size=1, max_size=3))
def test_tries_are_padded_to_one_size(rows: list[tuple[list[int], list[int]]]) -> None:
    tokens = [words[1:] for words, _ in rows]
    parents = [[parent - 1 for parent in above[1:]] for _, above in rows]
    depth = max(Tree(tuple(above)).depth for _, above in rows)
    root = torch.arange(len(rows))
    found, trees = tree_of_tries(root, tokens, parents, nodes=8, depth=max(1, depth))
    assert found.dtype == trees.parents_BN.dtype == torch.long
    for row, (above, there) in enumerate(rows_of(trees)):
        missing = 8 - len(rows[row][0])
        assert above == rows[row][1] + [-1] * missing
        assert found[row].tolist() == [row, *tokens[row], *[0] * missing]
        assert there == list(range(8 - missing))


@pytest.mark.parametrize(
    ("tokens", "parents", "complaint"),
    [
        ([[1, 2, 3, 4]], [[-1, -1, -1, -1]], "row 0 has 4 tokens .* at most 3"),
        ([[1, 2]], [[-1]], "row 0 has 2 tokens and 1 parents"),
        ([[1, 2, 3]], [[-1, 0, 1]], "row 0 has depth 3, the bound is 2"),
        ([[1, 2]], [[1, -1]], "must come before it"),
        ([[1], [2]], [[-1], [-1]], "for all 1 rows"),
    ],
)
def test_lists_that_are_no_trie_are_refused(tokens: list, parents: list, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tree_of_tries(torch.tensor([ROOT]), tokens, parents, nodes=4, depth=2)
