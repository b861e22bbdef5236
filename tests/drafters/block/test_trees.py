"""Trees of a block: the best paths of all, each ranked behind its own parent; leaves beside the likeliest chain."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import SharedStream
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.trees import TreeShape, grown, leaves
from draftsmith.errors import RequestError
from draftsmith.eval.measure.metrics import counts_of
from helpers.models.small_drafters import make_on_target
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3]]
V, K = 5, 3


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def logits_behind(seed: int) -> Tensor:
    """[K, V, V]: what is said at each depth behind each token."""
    return torch.randn(K, V, V, generator=torch.Generator().manual_seed(seed)) * 2


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    """The tokens from the root down to every node that is there, of a single row."""
    parents = proposal.tree.on(proposal.tokens_BN.device).parents_BN[0].tolist()
    tokens = proposal.tokens_BN[0].tolist()
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            found.append((*found[parents[node]], tokens[node]))
        else:
            found.append(())
    return [path for path in found if path]


@pytest.mark.parametrize("seed", range(6))
def test_a_grown_tree_has_the_likeliest_paths_of_all(seed: int) -> None:
    """Against all paths, each token's probability behind the one in front of it."""
    table = logits_behind(seed)
    logp = table.log_softmax(-1)
    root, nodes = 2, 11
    made = grown(torch.tensor([root]), lambda k, at_Bk: table[k][at_Bk], K, TreeShape(nodes, V))
    chances = {
        path: float(sum(logp[k][front, own] for k, (front, own) in enumerate(itertools.pairwise((root, *path)))))
        for depth in range(1, K + 1)
        for path in itertools.product(range(V), repeat=depth)
    }
    best = sorted(chances, key=lambda path: -chances[path])[: nodes - 1]
    assert made.sampling is DraftSampling.POINT_MASS
    assert set(paths_of(made)) == set(best)


@pytest.mark.parametrize("seed", range(6))
def test_leaves_stand_beside_the_likeliest_chain(seed: int) -> None:
    """What no slot knows of, a node off the chain, has no children."""
    table_KV = logits_behind(seed)[:, 0]
    made = leaves(torch.tensor([2]), lambda k, at_Bk: table_KV[k].expand(1, at_Bk.shape[1], -1), K, TreeShape(8, 3))
    chain = tuple(table_KV.argmax(-1).tolist())
    paths = paths_of(made)
    assert chain[:1] in paths
    assert all(path[:-1] == chain[: len(path) - 1] for path in paths)
    logp_KV = table_KV.log_softmax(-1)
    chances = {
        (*chain[:k], token): float(logp_KV[range(k), chain[:k]].sum() + logp_KV[k, token])
        for k in range(K)
        for token in table_KV[k].topk(3).indices.tolist()
    }
    assert set(paths) == set(sorted(chances, key=lambda path: -chances[path])[:7])


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_trees_change_no_text_and_are_accepted_at_least_as_often(family: str, target: Backbone) -> None:
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 40}
    plain = autoregressive(target, PROMPTS, **how)
    taus = []
    for settings in ({}, {"tree": TreeShape(13, 4)}):
        drafter = make_on_target(family, target, noise=0.02, **settings)
        for static in (False, True):
            done = generate(target, drafter, PROMPTS, static=static, **how)
            assert done.tokens == plain.tokens
        counts = counts_of(done.steps)
        taus.append(sum(each.emitted for each in counts) / sum(each.steps for each in counts))
    assert taus[1] >= taus[0]


@pytest.mark.parametrize("family", ["dflash", "dspark", "dflash2", "eagle", "mtp"])
@pytest.mark.parametrize("static", [False, True])
def test_a_tree_of_fewer_nodes_than_depths_is_no_deeper_than_it_has_nodes(
    static: bool, family: str, target: Backbone
) -> None:
    """The KV cache has slots for the nodes of a tree behind the longest text, and for no longer path."""
    tree = {"tree": TreeShape(2, 1)} if family.startswith("d") else {"tree": "dynamic", "top_k": 1, "nodes": 2}
    drafter = make_on_target(family, target, draft_length=6 if "top_k" in tree else None, **tree)
    assert (drafter.nodes, drafter.draft_length) == (2, 1)
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 12, "static": static}
    assert generate(target, drafter, PROMPTS, **how).tokens == autoregressive(target, PROMPTS, **how).tokens


@pytest.mark.parametrize("family", ["dspark", "dflash2"])
def test_a_grown_tree_ranks_children_behind_their_parents(family: str, target: Backbone) -> None:
    """The proposer hands the head, or the selector, the node's own token."""
    drafter = make_on_target(family, target, tree=TreeShape(7, 2))
    drafter.reset(PROMPTS[:1], 8)
    states = target.model(torch.tensor(PROMPTS[:1]), output_hidden_states=True).hidden_states
    with torch.inference_mode():
        drafter.begin([torch.cat([states[layer] for layer in drafter.layers], -1)[0].detach()])
        proposal = drafter.propose(torch.tensor([8]), Warper(1.0), SharedStream(0, 1))
        out_1KH = drafter._block(torch.tensor([8]))
        product_1KV = drafter.head.product(out_1KH)
        deep = [path for path in paths_of(proposal) if len(path) > 1]
        assert len(deep) > 1, "a tree of one level ranks no child"
        for path in deep:
            slot = len(path) - 1
            behind = drafter._behind(out_1KH[:, slot], product_1KV[:, slot], torch.tensor([path[-2]]))
            assert path[-1] in behind.topk(2).indices[0].tolist()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tree": TreeShape(50, 2)}, "drafter.block.nodes is 50, .* has 2 to 11 nodes"),
        ({"tree": TreeShape(4, 2), "factors": [0.5]}, "a tree of the likeliest tokens draws nothing"),
        ({"tree": TreeShape(4, 2), "least": 0.5}, "which ends chains, and drafter.block.tree is tree"),
    ],
)
def test_what_no_tree_can_be(settings: dict[str, Any], reason: str, target: Backbone) -> None:
    with pytest.raises(RequestError, match=reason):
        make_on_target("dspark", target, **settings)
