"""What is counted along known texts is what drafting would have found there; the tree made of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.build import tree_of_paths
from draftsmith.decoding.tree.search import best_tree_greedy, expected_tokens
from draftsmith.drafters.eagle.proposer import EAGLE_1_TREE
from draftsmith.drafters.heads.medusa import default_paths
from draftsmith.errors import DataError
from draftsmith.eval.measure.metrics import tau
from draftsmith.eval.measure.tree_choice import (
    Ranks,
    Speed,
    WrittenText,
    acceptance_for,
    best_of_size,
    fastest,
    measure_ranks,
    measure_speed,
    without_gaps,
)
from helpers.models.small_drafters import FAMILIES as ON_TARGET
from helpers.models.small_drafters import make_on_target as make

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3], [8]]
GREEDY = Warper(0.0)
FAMILIES = [
    family for family in ON_TARGET if family not in ("dflash", "dflash2", "dspark", "peagle")
]  # those draft no trees


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def texts_of(target: Backbone, prompts: Sequence[list[int]] = PROMPTS, count: int = 24) -> list:
    done = autoregressive(target, prompts, warper=GREEDY, max_new_tokens=count)
    return [WrittenText(*pair) for pair in zip(prompts, done.tokens, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_known_text_is_looked_along_as_drafting_goes(family: str, target: Backbone) -> None:
    """The candidates of every depth, the text going on with what was drafted above."""
    depth = 4
    paths = [[0] * d for d in range(1, depth + 1)] + [[0] * d + [1] for d in range(depth)]
    drafter = make(family, target, paths=paths)
    ranks = tree_of_paths(paths)
    for prompt in ([7, 3, 50, 2, 9, 9, 1], [4, 4]):
        *before, root = prompt
        states = target.model(torch.tensor([before]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in drafter.layers], -1)
        drafter.reset([before], 30)
        drafter.begin([features])
        proposal = drafter.propose(torch.tensor([root]), GREEDY, Uniforms(0, [0], "cpu"))
        tokens = proposal.tokens_BN[0].tolist()
        first = [n for n, rank in enumerate(ranks.ranks) if rank == 0]  # the root and the chain
        second = [n for n, rank in enumerate(ranks.ranks) if rank == 1]
        text = torch.tensor([*before, *(tokens[n] for n in first)])
        states = target.model(text[None], output_hidden_states=True).hidden_states
        known = torch.cat([states[layer][0] for layer in drafter.layers], -1)
        result = list(drafter.teacher_forced(known, text, depth))
        assert [len(each) for each in result] == [len(text) - 1 - d for d in range(1, depth + 1)]
        for d, logits in enumerate(result):
            best = logits[len(before) - 1].topk(2).indices.tolist()
            assert best == [tokens[first[d + 1]], tokens[second[d]]]


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_a_walk_by_hand(family: str, target: Backbone) -> None:
    drafter, texts, ranks = make(family, target), texts_of(target), 3
    result = measure_ranks(target, drafter, texts, depth=3, ranks=ranks)
    hits, trials = np.zeros((3, ranks)), np.zeros(3)
    for text in texts:
        tokens = [*text.prompt, *text.answer]
        states = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in drafter.layers], -1)
        distributions = list(drafter.teacher_forced(features, torch.tensor(tokens), 3))
        for root in range(len(text.prompt), len(tokens)):
            for d in range(3):
                if root + d + 1 >= len(tokens):
                    break
                order = distributions[d][root - 1].argsort(descending=True).tolist()
                rank = order.index(tokens[root + d + 1])
                trials[d] += 1
                if rank >= ranks:
                    break
                hits[d, rank] += 1
    np.testing.assert_array_equal(result.hits_DR, hits)
    np.testing.assert_array_equal(result.trials_D, trials)
    np.testing.assert_allclose(result.acceptance, hits / trials[:, None])
    assert (np.diff(result.falling, axis=1) <= 1e-12).all()
    np.testing.assert_allclose(result.falling.sum(1), result.acceptance.sum(1))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_first_depth_is_what_decoding_accepts(family: str, target: Backbone) -> None:
    """Step by step: accepted exactly where the right token was among the candidates."""
    drafter = make(family, target, noise=0.02, paths=[[0], [1], [2]])
    log = generate(target, drafter, PROMPTS, warper=GREEDY, max_new_tokens=40).steps
    steps = 0
    for row, text in enumerate(texts_of(target, count=40)):
        tokens = torch.tensor([*text.prompt, *text.answer])
        states = target.model(tokens[None], output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in drafter.layers], -1)
        (logits,) = drafter.teacher_forced(features, tokens, 1)
        root = len(text.prompt)
        for accepted, whole in zip(
            log.accepted_TB[:, row], log.running_TB[:, row] & ~log.truncated_TB[:, row], strict=True
        ):
            if whole:
                right = int(tokens[root + 1]) in logits[root - 1].topk(3).indices.tolist()
                assert int(accepted) == right
                root += int(accepted) + 1
                steps += 1
    assert steps > 60


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nodes", [2, 7, 20, 26])
def test_no_tree_of_that_size_promises_more(family: str, nodes: int, target: Backbone) -> None:
    """Not the default, and not the other search's; and it can be drafted on."""
    drafter = make(family, target, noise=0.02)
    result = measure_ranks(target, drafter, texts_of(target), depth=5, ranks=10)
    chosen = best_of_size(drafter, result, nodes)
    assert chosen.nodes <= nodes
    assert chosen.tau == pytest.approx(best_of_size(drafter, result, nodes, "dp").tau)
    table = acceptance_for(drafter, result)
    default = EAGLE_1_TREE if family.startswith(("eagle", "mtp")) else default_paths(4, nodes)
    if len(default) + 1 == chosen.nodes and max(map(len, default)) <= len(table):
        assert chosen.default_tau == pytest.approx(1 + expected_tokens(default, table))
        assert chosen.tau >= chosen.default_tau - 1e-12
    elif family.startswith("eagle"):
        assert chosen.default_tau is None
    tuned = make(family, target, noise=0.02, paths=chosen.paths)
    assert tuned.nodes == chosen.nodes
    done = generate(target, tuned, PROMPTS, warper=GREEDY, max_new_tokens=16)
    assert done.tokens == autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=16).tokens


def test_the_promise_is_kept_where_depths_are_independent(target: Backbone) -> None:
    """tau on the texts that were measured, against the sum of products over the tree."""
    drafter = make("medusa", target, noise=0.02)
    result = measure_ranks(target, drafter, texts_of(target, count=60), depth=4, ranks=10)
    chosen = best_of_size(drafter, result, 20)
    tuned = make("medusa", target, noise=0.02, paths=chosen.paths)
    default = make("medusa", target, noise=0.02, nodes=chosen.nodes)
    taus = [
        tau([generate(target, each, PROMPTS, warper=GREEDY, max_new_tokens=60).steps]) for each in (tuned, default)
    ]
    assert taus[0] == pytest.approx(chosen.tau, rel=0.15)
    assert taus[0] > taus[1]


def table(hits: list[list[int]], trials: list[int]) -> Ranks:
    return Ranks(np.array(hits), np.array(trials))


def test_siblings_that_are_drawn_in_order_leave_no_gap(target: Backbone) -> None:
    """EAGLE's second child is the second draw, whatever the third was worth by chance."""
    result = table([[50, 5, 20], [30, 10, 10]], [100, 60])
    heads = best_of_size(make("medusa", target), result, 3)
    assert heads.paths == ((0,), (0, 0))
    assert best_of_size(make("medusa", target), result, 4).paths == ((0,), (2,), (0, 0))
    for search in ("greedy", "dp"):
        paths = best_of_size(make("eagle", target), result, 8, search).paths
        assert all((*path[:-1], path[-1] - 1) in paths for path in paths if path[-1])
    assert without_gaps([(1,), (4,), (4, 2), (4, 3), (4, 3, 1)]) == ((0,), (1,), (1, 0), (1, 1), (1, 1, 0))


def test_a_dearer_call_makes_a_smaller_tree(target: Backbone) -> None:
    drafter = make("medusa", target)
    result = table([[50, 20, 10], [50, 20, 10]], [100, 80])
    free = fastest(drafter, result, Speed({1: 1.0, 9: 1.0}, 0.1))
    dear = fastest(drafter, result, Speed({1: 1.0, 9: 5.0}, 0.1))
    assert free.nodes == 9
    assert dear.nodes < 4
    assert free.speedup == pytest.approx(free.tau / 1.1)
    assert dear.speedup < free.speedup
    speed = measure_speed(target, drafter, texts_of(target))
    assert speed.curve[1] == 1.0
    assert min(speed.curve) == 1
    assert max(speed.curve) == 64
    assert speed.draft_cost > 0
    assert 2 <= fastest(drafter, result, speed).nodes <= 64


def test_without_a_right_candidate_there_is_no_tree(target: Backbone) -> None:
    with pytest.raises(DataError, match="none of the drafter's candidates"):
        best_of_size(make("medusa", target), table([[0, 0]], [10]), 5)


def test_what_is_too_short_to_draft_behind_is_not_counted(target: Backbone) -> None:
    drafter = make("hydra", target)
    result = measure_ranks(target, drafter, [WrittenText([1, 2, 3], [4, 5])], depth=4, ranks=2)
    assert result.trials_D.tolist() == [1, 0, 0]
    assert best_tree_greedy(result.acceptance, 3) == best_tree_greedy(result.falling, 3)
