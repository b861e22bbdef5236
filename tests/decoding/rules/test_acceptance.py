"""The rules: joint distribution against enumeration, the choice of the lossless one, the walk on trees."""

import pytest
import torch
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import SharedStream, Uniforms
from draftsmith.decoding.rules.acceptance import accept_greedy, accept_sampled
from draftsmith.decoding.rules.choice import rule_for
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import Tree, chain
from draftsmith.errors import RequestError
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    size = draw(st.integers(1, 9))
    return Tree((-1, *(draw(st.integers(0, node)) for node in range(size))))


@settings(deadline=None)
@given(trees())
def test_a_node_sees_exactly_its_ancestors(tree: Tree) -> None:
    for node in range(len(tree)):
        expected, at = set(), node
        while at >= 0:
            expected.add(at)
            at = tree.parents[at]
        assert set(tree.ancestors_NN[node].nonzero().flatten().tolist()) == expected
        assert tree.depths[node] == len(expected) - 1


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, -1), (-1, 2, 0)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="root|come before"):
        Tree(parents)


@settings(deadline=None, max_examples=60)
@given(trees(), st.integers(0, 10_000))
def test_greedy_walk_is_the_plain_walk(tree: Tree, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    B, V = 5, 3
    tokens = torch.randint(0, V, (B, len(tree)), generator=g)
    logits = torch.randn(B, len(tree), V, generator=g)
    proposal = Proposal(tokens, tree, DraftSampling.POINT_MASS)
    found = accept_greedy(logits, proposal, Warper(0.0), Uniforms(0, range(B), "cpu"))
    for row in range(B):
        path, at = [], 0
        while True:
            wanted = int(logits[row, at].argmax())
            hits = [c for c in tree.children[at] if tokens[row, c] == wanted]
            if not hits:
                break
            at = hits[0]
            path.append(at)
        assert found.accepted_B[row] == len(path)
        assert found.path_BD[row, : len(path)].tolist() == path
        assert found.extra_B[row] == wanted


@settings(deadline=None, max_examples=60)
@given(trees(), st.integers(0, 10_000))
def test_a_sampled_walk_counts_the_children_that_are_there(tree: Tree, seed: int) -> None:
    """Each distinct token of a reached node's children with its mass; the walk ends where none is the token drawn."""
    g = torch.Generator().manual_seed(seed)
    B, V = 5, 3
    tokens = torch.randint(0, V, (B, len(tree)), generator=g)
    present = torch.rand(B, len(tree), generator=g) < 0.7
    present[:, 0] = True
    logits, warper = torch.randn(B, len(tree), V, generator=g), Warper(0.9)
    candidates = Proposal(tokens, tree, DraftSampling.POINT_MASS, present_BN=present)
    found = accept_sampled(logits, candidates, warper, Uniforms(seed, range(B), "cpu"))
    p = warper(logits)
    for row in range(B):
        at = 0
        for depth in range(tree.depth):
            children = [node for node in tree.children[at] if present[row, node]]
            mass = sum(float(p[row, at, token]) for token in {int(tokens[row, node]) for node in children})
            assert found.tested_BD[row, depth] == bool(children)
            if children:  # where nothing is tested the chance counts nowhere
                assert float(found.alpha_hat_BD[row, depth]) == pytest.approx(mass, abs=1e-6)
            following = int(found.path_BD[row, depth])
            if following < 0:
                assert found.accepted_B[row] == depth
                assert not found.tested_BD[row, depth + 1 :].any()
                break
            twins = [node for node in children if tokens[row, node] == tokens[row, following]]
            assert following == twins[0]
            at = following
        assert int(found.extra_B[row]) not in [
            int(tokens[row, node]) for node in tree.children[at] if present[row, node]
        ]


@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 0, 1, 1, 2), (-1, 0, 1, 2)])
def test_sample_and_match_keeps_the_target_distribution_and_knows_its_chance(parents: tuple) -> None:
    tree, B, V = Tree(parents), 60_000, 4
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(1, len(tree), V, generator=g).expand(B, -1, -1)
    tokens = torch.randint(0, V, (1, len(tree)), generator=g).expand(B, -1)
    warper = Warper(0.9)
    stream = SharedStream(5, B)
    found = accept_sampled(logits, Proposal(tokens, tree, DraftSampling.POINT_MASS), warper, stream)
    at_root = torch.where(
        found.accepted_B > 0, tokens.gather(1, found.path_BD[:, :1].clamp_min(0)).squeeze(1), found.extra_B
    )
    frequency = torch.bincount(at_root, minlength=V) / B
    torch.testing.assert_close(frequency, warper(logits[0, 0]), atol=0.01, rtol=0)
    chance = found.alpha_hat_BD[:, 0].mean()
    assert abs((found.accepted_B > 0).float().mean() - chance) < 0.01


def proposal(sampling: DraftSampling, tree: Tree) -> Proposal:
    return Proposal(torch.zeros(1, len(tree), dtype=torch.long), tree, sampling)


def test_the_lossless_rule_is_chosen_by_the_declared_distribution() -> None:
    forked = Tree((-1, 0, 0))
    chosen = {
        (sampling, len(tree.children[0])): rule_for(proposal(sampling, tree), Warper(1.0)).__name__
        for sampling in DraftSampling
        for tree in (chain(2), forked)
    }
    assert chosen == {
        (DraftSampling.POINT_MASS, 1): "accept_sampled",
        (DraftSampling.POINT_MASS, 2): "accept_sampled",
        (DraftSampling.IID, 1): "accept_chain",
        (DraftSampling.IID, 2): "accept_tree",
        (DraftSampling.WITHOUT_REPLACEMENT, 1): "accept_chain",
        (DraftSampling.WITHOUT_REPLACEMENT, 2): "accept_tree",
        (DraftSampling.SEVERAL, 1): "accept_several",
        (DraftSampling.SEVERAL, 2): "accept_several",
    }
    for sampling in DraftSampling:
        assert rule_for(proposal(sampling, forked), Warper(0.0)) is accept_greedy


def test_a_rule_that_is_not_lossless_is_refused_and_the_right_one_named() -> None:
    with pytest.raises(RequestError, match="the lossless rule is 'rejection'"):
        rule_for(proposal(DraftSampling.IID, chain(2)), Warper(1.0), "sample-and-match")
    with pytest.raises(RequestError, match="no acceptance rule is called 'hope'.*lossy-typical"):
        rule_for(proposal(DraftSampling.IID, chain(2)), Warper(1.0), "hope")
    with pytest.raises(RequestError, match="needs a chain drawn from a draft's distribution"):
        rule_for(proposal(DraftSampling.POINT_MASS, chain(2)), Warper(1.0), "lossy-lenient")


def test_recipes_know_every_rule_by_name() -> None:
    from typing import get_args

    from draftsmith.decoding.rules.choice import LOSSLESS, LOSSY
    from draftsmith.eval.config import RuleName

    assert list(get_args(RuleName)) == [*LOSSLESS, *LOSSY]
