"""What a node attends to: the mask that is kept and cut, for rows that are alike, against the words of its contract."""

import torch
from draftsmith.decoding.tree.tree import RowTrees, Tree, chain, tree_mask

FORK = Tree((-1, 0, 0, 1, 1, 2))


def seen(tree: Tree, past: int) -> list[list[bool]]:
    """Every slot of the past, and of the tree the node itself and its ancestors; found by walking up."""
    rows = []
    for node in range(len(tree)):
        path, at = {node}, node
        while tree.parents[at] >= 0:
            at = tree.parents[at]
            path.add(at)
        rows.append([True] * past + [other in path for other in range(len(tree))])
    return rows


def test_a_node_sees_the_past_its_ancestors_and_itself_at_every_length() -> None:
    """In any order of lengths, across the widths at which the kept mask is made anew."""
    for tree in (FORK, chain(4)):
        for past in (0, 300, 7, 249, 250, 251, 252, 2000, 506, 507, 0, 2):
            slots = past + len(tree)
            mask = tree_mask(tree.on(torch.device("cpu")), torch.tensor([past]), slots, ragged=False)
            assert mask is not None
            assert mask.shape == (1, 1, len(tree), slots)
            assert mask[0, 0].tolist() == seen(tree, past)


def test_rows_with_trees_of_their_own_see_their_own_nodes() -> None:
    trees = [Tree((-1, 0, 1, 1)), Tree((-1, 0, 0, 2))]
    both = RowTrees(torch.tensor([tree.parents for tree in trees]), depth=2, width=2)
    mask = tree_mask(both.on(torch.device("cpu")), torch.tensor([9, 9]), 13, ragged=False)
    assert mask is not None
    assert mask[:, 0].tolist() == [seen(tree, 9) for tree in trees]


def test_rows_of_different_lengths_see_no_slot_behind_their_own_nodes() -> None:
    """In fixed shapes more slots are in view than a row has filled; what they hold is from another step."""
    lengths = [3, 0, 9]
    for tree in (FORK, chain(4), chain(0)):
        mask = tree_mask(tree.on(torch.device("cpu")), torch.tensor(lengths), 20, ragged=True)
        assert mask is not None
        for row, past in enumerate(lengths):
            behind = [False] * (20 - past - len(tree))
            assert mask[row, 0].tolist() == [each + behind for each in seen(tree, past)]


def test_one_node_of_one_row_needs_no_mask() -> None:
    assert tree_mask(chain(0).on(torch.device("cpu")), torch.tensor([5]), 6, ragged=False) is None
