"""The rules against the exact distribution of what a step emits: every draft, every coin, no sampling noise.

The harness, and what it takes for granted, is `tests/helpers/exact_step.py`.

Shapes: R rows, one per tuple of drafted tokens (B in the rules), N nodes, C trials of a node, X
contexts, Y random numbers of a step, V vocabulary, D depths, M drafts, K rows of a bisection. A
context is a path of tokens, numbered as in a heap: behind context x and token t is x V + t + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from draftsmith.decoding.proposal import DraftSampling, Proposal, Trials
from draftsmith.decoding.random import SharedStream, Uniforms
from draftsmith.decoding.rules import acceptance
from draftsmith.decoding.rules.acceptance import Outcome, Rule, accept_chain, accept_several, accept_tree
from draftsmith.decoding.rules.choice import LOSSLESS, LOSSY, is_lossy, rule_for
from draftsmith.decoding.rules.lossy import (
    close_match,
    lenient_rejection,
    minimum_block,
    topk_match,
    typical_acceptance,
)
from draftsmith.decoding.sampling import Warper, draw
from draftsmith.decoding.tree.tree import RowTrees, Tree, chain
from draftsmith.errors import RequestError
from helpers.exact_step import (
    EXACT,
    FORK,
    GREEDY,
    HIGH,
    PAIR,
    PLAIN,
    SAMPLED,
    Drafts,
    Given,
    World,
    assert_lossless,
    distance,
    every_draw,
    every_merge,
    hits,
    last_node,
    masks,
    often,
    pick,
    run,
    seeds,
    step_of,
    target_distribution,
    trees,
    world,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.nn.functional import pad

# -- lossless ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.sampled_from([3, 4]), seeds, masks)
def test_the_chain_rule_is_exact_however_short_a_row_is(length: int, V: int, seed: int, there) -> None:
    truth = world(seed, V, length + 1)
    assert_lossless(accept_chain, every_draw(truth, chain(length), DraftSampling.IID, there), truth)


@settings(deadline=None, max_examples=40)
@given(trees(), SAMPLED, seeds, st.booleans())
def test_the_tree_rule_is_exact(tree: Tree, sampling: DraftSampling, seed: int, per_row: bool) -> None:
    truth = world(seed, 3 if len(tree) > 5 else 4, tree.depth + 1)
    assert_lossless(accept_tree, every_draw(truth, tree, sampling, per_row=per_row), truth)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("there", [None, [True, True, False, True, True]])
def test_the_tree_rule_is_exact_for_the_third_sibling_and_the_fourth(seed: int, there) -> None:
    """With 5 tokens they are not certain yet, and mild distributions leave all that came before in reach."""
    truth = world(seed, 5, 2, mild=True)
    tree = Tree((-1, 0, 0, 0, 0)[: 5 if seed == 0 else 4])
    draws = every_draw(truth, tree, DraftSampling.WITHOUT_REPLACEMENT, there)
    assert_lossless(accept_tree, draws, truth)


@settings(deadline=None, max_examples=25)
@given(trees(4), SAMPLED, seeds, masks)
def test_the_tree_rule_is_exact_whatever_is_absent(tree: Tree, sampling: DraftSampling, seed: int, there) -> None:
    """A child may be absent in front of one that is there."""
    truth = world(seed, 3, tree.depth + 1)
    assert_lossless(accept_tree, every_draw(truth, tree, sampling, there), truth)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("drafts", "depth"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_several_drafts_are_exact(drafts: int, depth: int, seed: int) -> None:
    """Two drafts that drew the same token are among the tuples: one node, two trials."""
    truth = world(seed, 3, depth + 1, drafts)
    assert_lossless(accept_several, every_merge(truth, depth), truth)


WARPERS = [Warper(0.7), Warper(1.4, top_k=2), Warper(0.9, top_p=0.8)]
WARPED: dict[str, tuple[Rule, Callable[[World], Drafts], int]] = {
    "rejection": (accept_chain, lambda w: every_draw(w, chain(3), DraftSampling.IID), 4),
    "recursive-rejection": (accept_tree, lambda w: every_draw(w, FORK, DraftSampling.IID), 3),
    "without replacement": (accept_tree, lambda w: every_draw(w, FORK, DraftSampling.WITHOUT_REPLACEMENT), 3),
    "multi-step": (accept_several, lambda w: every_merge(w, 2), 3),
}


@pytest.mark.parametrize("warper", WARPERS, ids=["temperature", "top-k", "top-p"])
@pytest.mark.parametrize("name", WARPED)
def test_every_rule_is_exact_under_a_warper(name: str, warper: Warper) -> None:
    """Residual and bonus at every depth, the fourth included, are of the warped distribution."""
    rule, drafts, levels = WARPED[name]
    truth = world(8, 3, levels, 2, mild=True)._replace(warper=warper)
    assert_lossless(rule, drafts(truth), truth)


def in_sixths(seed: int, levels: int) -> World:
    """A target in multiples of 1/6, which a lattice of six coins per node holds exactly."""
    g = torch.Generator().manual_seed(seed)
    X = sum(3**level for level in range(levels))
    drawn_X6 = (torch.rand(X, 3, generator=g) ** 2 + 0.01).multinomial(6, True, generator=g)
    counts_XV = torch.zeros(X, 3).scatter_add(1, drawn_X6, torch.ones(X, 6))
    return World((counts_XV / 6).log(), torch.full((1, X, 3), 1 / 3))


@settings(deadline=None, max_examples=40)
@given(trees(), seeds, masks, st.booleans())
@example(PAIR, 0, [True] * 6, False)
def test_sample_and_match_is_exact_whatever_was_chosen(tree, seed: int, there, per_row) -> None:
    """Equal siblings and absent nodes among them."""
    truth = in_sixths(seed, tree.depth + 1)
    sixths = (torch.arange(6, dtype=torch.float64) + 0.5) / 6
    coins = torch.cartesian_prod(*[sixths] * len(tree))
    drafts = every_draw(truth, tree, DraftSampling.IID, there, per_row=per_row)
    rows = torch.tensor([seed % len(drafts.weight_R)]).expand(len(coins))
    found = run(acceptance.accept_sampled, drafts, rows, coins)
    at_R = drafts.context_RN[rows].gather(1, last_node(found))[:, 0] * 3 + found.extra_B + 1
    probs_X = torch.bincount(at_R, minlength=truth.logits_XV.numel() + 1) / float(len(coins))
    assert distance(probs_X.double(), truth) < EXACT
    hit_RD = hits(found, drafts.child_RNC[rows])
    hat_RD = found.tested_BD * found.alpha_hat_BD.double()
    torch.testing.assert_close(hat_RD.mean(0), hit_RD.double().mean(0), atol=EXACT, rtol=0)


@settings(deadline=None, max_examples=20)
@given(trees(4), seeds, masks, st.booleans())
def test_greedy_match_is_the_argmax_whatever_was_drafted(tree, seed: int, there, per_row) -> None:
    truth = world(seed, 3, tree.depth + 1)
    drafts = every_draw(truth, tree, DraftSampling.IID, there, per_row=per_row)
    tokens_RN = drafts.proposal.tokens_BN
    found = acceptance.accept_greedy(drafts.logits_RNV, drafts.proposal, GREEDY, Given(tokens_RN))
    for row, path in enumerate(found.path_BD.tolist()):
        path, context = [node for node in path if node >= 0], 0
        for token in [*tokens_RN[row, path].tolist(), int(found.extra_B[row])]:
            assert token == int(truth.logits_XV[context].argmax())
            context = context * 3 + token + 1
        left = drafts.child_RNC[row, path[-1] if path else 0]
        assert int(found.extra_B[row]) not in tokens_RN[row, left[left >= 0]], "stopped too early"
    hit_RD = hits(found, drafts.child_RNC)
    assert torch.equal(found.tested_BD * found.alpha_hat_BD, hit_RD.float())


@cache
def all_rules(mild: bool = False) -> dict[str, tuple[Rule, Drafts, World]]:
    """Every rule but the greedy one, with drafts that suit it."""
    one, two = world(5, 3, 3, mild=mild), world(6, 3, 3, 2, mild=mild)
    line = every_draw(one, chain(2), DraftSampling.IID)
    fork = every_draw(one, FORK, DraftSampling.IID, per_row=True)
    free = fork._replace(proposal=replace(fork.proposal, sampling=DraftSampling.POINT_MASS, q_BNV=None))
    without = every_draw(one, FORK, DraftSampling.WITHOUT_REPLACEMENT, per_row=True)
    return {
        "rejection": (accept_chain, line, one),
        "recursive-rejection": (accept_tree, fork, one),
        "without replacement": (accept_tree, without, one),
        "multi-step": (accept_several, every_merge(two, 2), two),
        "sample-and-match": (acceptance.accept_sampled, free, one),
        "lossy-typical": (typical_acceptance, free, one),
        "lossy-lenient": (lenient_rejection, line, one),
        "lossy-topk-match": (topk_match, free, one),
        "lossy-close-match": (close_match, free, one),
        "lossy-min-block": (minimum_block, free, one),
    }


RULES = list(all_rules())


class OneCoin(SharedStream):
    """A planted bug: every node of a step gets the same number."""

    def take(self, count: int) -> Tensor:
        return super().take(1).expand(-1, count)


def p_value(rule: Rule, of: Drafts, truth: World, stream: type[SharedStream]) -> float:
    """Chi-square of three-token sequences out of one step, drafts and coins being random."""
    rows, g = 200_000, torch.Generator().manual_seed(2)
    r = of.weight_R.multinomial(rows, True, generator=g)
    found = rule(of.logits_RNV[r], pick(of.proposal, r), PLAIN, stream(3, rows))
    at = of.context_RN[r].gather(1, last_node(found))[:, 0] * 3 + found.extra_B + 1
    p_XV, distribution = PLAIN(truth.logits_XV), target_distribution(truth)
    for u_R in torch.rand(2, rows, generator=g, dtype=torch.float64):
        next_R = at * 3 + draw(p_XV[at.clamp_max(len(p_XV) - 1)], u_R) + 1
        at = torch.where(at < len(p_XV), next_R, at)
    counts = torch.bincount(at - len(p_XV), minlength=len(distribution))
    return float(stats.chisquare(counts, distribution * rows).pvalue)


@pytest.mark.parametrize("name", RULES[:5])
def test_random_coins_give_the_same_distribution(name: str) -> None:
    """False alarm: 1e-4 per rule, were the seeds not fixed."""
    assert p_value(*all_rules(mild=True)[name], SharedStream) > 1e-4
    assert p_value(*all_rules(mild=True)[name], OneCoin) < 1e-9


# -- wrong versions must be seen ----------------------------------------------------------------


def misdeclared(truth: World, drawn: DraftSampling, declared: DraftSampling) -> Drafts:
    drafts = every_draw(truth, PAIR, drawn)
    return drafts._replace(proposal=replace(drafts.proposal, sampling=declared))


def likeliest(truth: World) -> Drafts:
    """The two likeliest children, declared as draws."""
    drafts = every_draw(truth, PAIR, DraftSampling.IID)
    top_R = (drafts.proposal.tokens_BN[:, 1:] == truth.q_MXV[0, 0].topk(2).indices).all(1)
    return drafts._replace(weight_R=top_R.double())


def sorted_siblings(truth: World) -> Drafts:
    """Two independent draws, the likelier one first."""
    drafts = every_draw(truth, PAIR, DraftSampling.IID)
    first_R, second_R = truth.q_MXV[0, 0][drafts.proposal.tokens_BN[:, 1:]].unbind(1)
    return drafts._replace(weight_R=drafts.weight_R * (1 + (first_R - second_R).sign()))


def fresh_draw(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
    found = accept_tree(logits_BNV, proposal, warper, uniforms)
    p_BV = acceptance.row_of(warper(logits_BNV), last_node(found)[:, 0])
    return found._replace(extra_B=draw(p_BV, uniforms.take(1)[:, 0]))


PLANTS = {
    "unconditional q": lambda w: (accept_tree, misdeclared(w, DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.IID)),
    "conditional q": lambda w: (accept_tree, misdeclared(w, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)),
    "top-k as sampled": lambda w: (accept_tree, likeliest(w)),
    "sorted siblings": lambda w: (accept_tree, sorted_siblings(w)),
    "fresh draw": lambda w: (fresh_draw, every_draw(w, PAIR, DraftSampling.IID), 1),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_wrong_version_is_seen(plant: str) -> None:
    """One node, V = 8, target N(0, 1.5^2), draft = target + N(0, 1), always a thousand times EXACT."""
    g, found = torch.Generator().manual_seed(4), []
    for _ in range(6):
        logits = 1.5 * torch.randn(9, 8, generator=g)
        truth = World(logits, (logits + torch.randn(9, 8, generator=g)).softmax(-1)[None])
        found.append(distance(step_of(*PLANTS[plant](truth)).probs_X, truth))
    assert min(found) > 1e-3
    assert sum(found) / len(found) > 0.03


# -- rows and their random numbers ----------------------------------------------------------------


def longer(proposal: Proposal, more: int) -> Proposal:
    """The same candidates in a tree with more nodes, all of them absent."""
    tree, trials, q_BNV = proposal.tree, proposal.trials, proposal.q_BNV
    present_BN = pad(torch.ones_like(proposal.tokens_BN) > 0, (0, more))
    if isinstance(tree, RowTrees):
        parents_BN = pad(tree.parents_BN, (0, more), value=-1)
        tree, present_BN = RowTrees(parents_BN, depth=tree.depth, width=tree.width), None
    else:
        tree = chain(len(tree) - 1 + more)
    if trials is not None:
        child_BNC = pad(trials.child_BNC, (0, 0, 0, more), value=-1)
        trials = Trials(trials.q_BXV, child_BNC, pad(trials.q_index_BNC, (0, 0, 0, more)))
    return replace(
        proposal,
        tokens_BN=pad(proposal.tokens_BN, (0, more)),
        tree=tree,
        trials=trials,
        present_BN=present_BN,
        q_BNV=None if q_BNV is None else pad(q_BNV, (0, 0, 0, more)),
    )


def assert_same(short: Outcome, long: Outcome) -> None:
    D = short.path_BD.shape[1]
    assert torch.equal(short.path_BD, long.path_BD[:, :D])
    assert torch.equal(short.accepted_B, long.accepted_B)
    assert torch.equal(short.extra_B, long.extra_B)
    assert torch.equal(short.tested_BD, long.tested_BD[:, :D])
    assert not long.tested_BD[:, D:].any()
    hat_BD, tested_BD = long.alpha_hat_BD[:, :D], short.tested_BD
    torch.testing.assert_close(short.alpha_hat_BD * tested_BD, hat_BD * tested_BD)


@pytest.mark.parametrize("name", RULES)
def test_a_row_does_not_feel_how_long_the_others_trees_are(name: str) -> None:
    """Two steps: the second one shows whether the first took as many numbers."""
    rule, drafts, _ = all_rules()[name]
    rows = torch.arange(0, len(drafts.weight_R), 3)
    proposal = replace(pick(drafts.proposal, rows), coins=40)
    logits_BNV = drafts.logits_RNV[rows]
    one, other = (Uniforms(1, range(len(rows)), "cpu") for _ in range(2))
    for _ in range(2):
        short = rule(logits_BNV, proposal, PLAIN, one)
        assert_same(short, rule(pad(logits_BNV, (0, 0, 0, 3)), longer(proposal, 3), PLAIN, other))


@pytest.mark.parametrize("name", RULES)
def test_a_row_alone_is_the_row_in_a_batch(name: str) -> None:
    rule, drafts, _ = all_rules()[name]
    requests = [11, 0, 7, 3, 20, 5]
    rows = torch.tensor([request % len(drafts.weight_R) for request in requests])
    shared = Uniforms(9, requests, "cpu")
    alone = [Uniforms(9, [request], "cpu") for request in requests]
    for _ in range(3):
        batch = rule(drafts.logits_RNV[rows], pick(drafts.proposal, rows), PLAIN, shared)
        for b, own in enumerate(alone):
            row = rows[b : b + 1]
            single = rule(drafts.logits_RNV[row], pick(drafts.proposal, row), PLAIN, own)
            assert_same(single, Outcome(*(each[b : b + 1] for each in batch)))


# -- corners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES[:5])
def test_what_the_target_cannot_say_is_never_emitted(name: str) -> None:
    """Padded vocabulary: logits of -inf, where the draft has mass; coins at both ends of [0, 1)."""
    rule, drafts, truth = all_rules()[name]
    logits_RNV = drafts.logits_RNV.clone()
    logits_RNV[..., 2] = -torch.inf
    logits_RNV[(logits_RNV == -torch.inf).all(-1)] = torch.tensor([0.0, 0.0, -torch.inf])
    p_RNV = PLAIN(logits_RNV)
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        ends = torch.randint(2, (len(logits_RNV), 40), generator=g).double() * HIGH
        found = rule(logits_RNV, drafts.proposal, PLAIN, Given(ends))
        at_R1 = last_node(found)
        p_RV = acceptance.row_of(p_RNV, at_R1[:, 0])
        assert bool((p_RV.gather(1, found.extra_B[:, None]) > 0).all())
        kept_R = drafts.proposal.tokens_BN.gather(1, at_R1)[found.accepted_B > 0]
        assert bool((kept_R < 2).all())


@pytest.mark.parametrize("name", [*RULES[:3], *RULES[4:]])
def test_an_absent_node_is_never_accepted(name: str) -> None:
    rule, drafts, _ = all_rules()[name]
    g = torch.Generator().manual_seed(1)
    for coin in (0.0, 0.3):
        present_RN = torch.rand(drafts.context_RN.shape, generator=g) < 0.6
        proposal = replace(drafts.proposal, present_BN=present_RN | (torch.arange(len(present_RN[0])) == 0))
        coins = torch.full((len(present_RN), 40), coin, dtype=torch.float64)
        path_RD = rule(drafts.logits_RNV, proposal, PLAIN, Given(coins)).path_BD
        assert bool((present_RN.gather(1, path_RD.clamp_min(0)) | (path_RD < 0)).all())


def of_distributions(p: list[float], q: list[float], levels: int = 2) -> World:
    """The same distributions in every context."""
    X = sum(len(p) ** level for level in range(levels))
    return World(torch.tensor([p] * X).log(), torch.tensor([[q] * X]))


PEAKED = [1 - 1e-7, 6e-8, 4e-8]


@pytest.mark.parametrize("sampling", [DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("p", [[0.2, 0.3, 0.5], [0.0, 0.3, 0.7], PEAKED, PEAKED[::-1]])
def test_a_peaked_draft_is_no_trouble(p: list[float], sampling: DraftSampling) -> None:
    """Three children, also where the draft has fewer tokens than the tree has places."""
    for q in (PEAKED, [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]):
        truth = of_distributions(p, q)
        assert_lossless(accept_tree, every_draw(truth, Tree((-1, 0, 0, 0)), sampling), truth)


def test_equal_distributions_accept_everything() -> None:
    truth = world(3, 3, 3)
    truth = World(truth.logits_XV, PLAIN(truth.logits_XV)[None])
    for rule, tree in ((accept_chain, chain(2)), (accept_tree, chain(2)), (accept_tree, FORK)):
        drafts = every_draw(truth, tree, DraftSampling.IID)
        coins = torch.full(drafts.context_RN.shape, HIGH, dtype=torch.float64)
        found = run(rule, drafts, torch.arange(len(coins)), coins)
        assert bool((found.accepted_B == 2).all())
        torch.testing.assert_close(found.alpha_hat_BD, torch.ones_like(found.alpha_hat_BD))


@pytest.mark.parametrize("rule", [accept_chain, accept_tree])
def test_a_residual_without_mass_leaves_the_target_distribution(rule: Rule) -> None:
    """q above p everywhere by rounding: even then a rejection emits a draw from p."""
    truth = of_distributions([0.25, 0.25, 0.5], [0.0] * 3)
    above_V = torch.nextafter(PLAIN(truth.logits_XV[0]), torch.ones(3))
    drafts = every_draw(World(truth.logits_XV, above_V.expand(1, 4, 3)), chain(1), DraftSampling.IID)
    coins = torch.full((8, 2), HIGH, dtype=torch.float64)
    coins[:, 0] = (torch.arange(8) + 0.5) / 8
    found = run(rule, drafts, torch.zeros(8, dtype=torch.long), coins)
    assert not found.accepted_B.any()
    assert torch.bincount(found.extra_B).tolist() == [2, 2, 4]


@pytest.mark.parametrize("sampling", [DraftSampling.IID, DraftSampling.POINT_MASS])
def test_a_step_without_a_candidate_is_a_plain_draw(sampling: DraftSampling) -> None:
    logits_BNV = torch.tensor([[[0.25, 0.25, 0.5]]]).log().expand(8, -1, -1)
    proposal = Proposal(torch.zeros(8, 1).long(), chain(0), sampling, torch.zeros(8, 1, 3))
    coins = ((torch.arange(8, dtype=torch.float64) + 0.5) / 8)[:, None]
    found = rule_for(proposal, PLAIN)(logits_BNV, proposal, PLAIN, Given(coins))
    assert torch.bincount(found.extra_B).tolist() == [2, 2, 4]
    assert found.path_BD.shape == found.tested_BD.shape == (8, 0)


# -- lossy ------------------------------------------------------------------------------------------


def medusa(p_NV: list[list[float]], tokens: list[int], tree: Tree, there: list[bool]) -> list[tuple]:
    """Score (length, log-likelihood) and path of every node all of whose path is accepted."""
    found: dict[int, tuple] = {0: (0, 0.0, [])}
    for node, parent in enumerate(tree.parents[1:], 1):
        p = p_NV[parent][tokens[node]]
        entropy = -sum(x * math.log(x) for x in p_NV[parent] if x > 0)
        if there[node] and parent in found and p > min(0.09, 0.3 * math.exp(-entropy)):
            length, log, path = found[parent]
            found[node] = (length + 1, log + math.log(p), [*path, node])
    return sorted(found.values(), key=lambda each: each[:2])


@settings(deadline=None, max_examples=60)
@given(trees(9), seeds, st.lists(often, min_size=9, max_size=9))
def test_typical_acceptance_is_medusas(tree: Tree, seed: int, there: list[bool]) -> None:
    g, N = torch.Generator().manual_seed(seed), len(tree)
    logits, tokens = 2 * torch.randn(4, N, 5, generator=g), torch.randint(5, (4, N), generator=g)
    there = [True, *there[: N - 1]]
    proposal = Proposal(tokens, tree, DraftSampling.POINT_MASS, present_BN=torch.tensor([there] * 4))
    found = typical_acceptance(logits, proposal, PLAIN, Given(tokens))
    for row, path in enumerate(found.path_BD.tolist()):
        path = [node for node in path if node >= 0]
        accepted = medusa(PLAIN(logits[row]).tolist(), tokens[row].tolist(), tree, there)
        (own,) = (each for each in accepted if each[2] == path)
        assert own[0] == accepted[-1][0] == found.accepted_B[row]
        assert own[1] >= accepted[-1][1] - 1e-5
        assert int(found.extra_B[row]) == int(logits[row, path[-1] if path else 0].argmax())


def test_typical_acceptance_tells_close_paths_apart() -> None:
    """Two paths of four tokens, the second one likelier by a factor of 1.0001."""
    tree, tokens = Tree((-1, 0, 1, 2, 3, 3)), torch.tensor([[0, 0, 0, 0, 0, 1]])
    p_NV = torch.tensor([[1.0, 0.0]] * 3 + [[0.499975, 0.500025]] + [[1.0, 0.0]] * 2)
    proposal = Proposal(tokens, tree, DraftSampling.POINT_MASS)
    found = typical_acceptance(p_NV.log()[None], proposal, PLAIN, Given(tokens))
    assert found.path_BD.tolist() == [[1, 2, 3, 5]]


def test_lossy_rules_meet_lossless_ones_at_their_limits() -> None:
    _, drafts, _ = all_rules(mild=True)["rejection"]
    args = (drafts.logits_RNV, drafts.proposal)
    coins = torch.rand(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    strict = lenient_rejection(*args, PLAIN, Given(coins), lenience=1.0)
    assert_same(strict, accept_chain(*args, PLAIN, Given(coins)))
    for warper in (PLAIN, GREEDY):
        first = topk_match(*args, warper, Given(coins), k=1)
        exact = close_match(*args, warper, Given(coins), epsilon=0)
        least = minimum_block(*args, warper, Given(coins), least=1)
        for each in (first, exact, least):
            assert_same(each, acceptance.accept_greedy(*args, GREEDY, Given(coins)))


@pytest.mark.parametrize("warper", [Warper(1.0, top_k=1), Warper(0.02), PLAIN])
def test_topk_match_never_takes_a_token_behind_the_kth(warper: Warper) -> None:
    """Also where the warper, or fp32, leaves fewer than k tokens a probability."""
    logits_BNV = torch.tensor([[[9.0, 5.0, 1.0]]]).expand(1, 2, 3)
    proposal = Proposal(torch.tensor([[0, 2]]), chain(1), DraftSampling.POINT_MASS)
    found = topk_match(logits_BNV, proposal, warper, Given(logits_BNV[0]), k=2)
    assert found.accepted_B.tolist() == [0]


def test_the_rules_of_blocks_by_hand() -> None:
    """The target says 3, 0, 5, 5; the block behind its token guesses 4, 0, 2 and 5."""
    logits_BNV = torch.eye(6)[[3, 0, 5, 5, 1]][None]
    proposal = Proposal(torch.tensor([[0, 4, 0, 2, 5]]), chain(4), DraftSampling.POINT_MASS)

    def accepted(rule: Rule, **how: int) -> tuple[int, int]:
        found = rule(logits_BNV, proposal, PLAIN, Given(logits_BNV[0]), **how)
        return int(found.accepted_B), int(found.extra_B)

    assert [accepted(close_match, epsilon=e) for e in range(4)] == [(0, 3), (2, 5), (2, 5), (4, 1)]
    assert [accepted(minimum_block, least=n) for n in range(1, 6)] == [(0, 3), (2, 5), (2, 5), (4, 1), (4, 1)]


@pytest.mark.parametrize(
    ("rule", "least"),
    [("typical", 0.4), ("lenient", 0.05), ("topk-match", 0.3), ("close-match", 0.3), ("min-block", 0.3)],
)
def test_lossy_rules_are_lossy(rule: str, least: float) -> None:
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    truth = of_distributions(p, q)
    step = step_of(LOSSY[f"lossy-{rule}"], every_draw(truth, chain(1), DraftSampling.IID))
    assert distance(step.probs_X, truth) > least


# -- the choice -------------------------------------------------------------------------------------


def right_name(sampling: DraftSampling, warper: Warper, *, is_chain: bool) -> str:
    if warper.greedy:
        return "greedy-match"
    by_sampling = {DraftSampling.POINT_MASS: "sample-and-match", DraftSampling.SEVERAL: "multi-step"}
    return by_sampling.get(sampling, "rejection" if is_chain else "recursive-rejection")


ROW_TREES = RowTrees(torch.tensor([[-1, 0]]), depth=1, width=1)
every_choice = [
    pytest.mark.parametrize("tree", [chain(2), FORK, ROW_TREES], ids=["chain", "tree", "row trees"]),
    pytest.mark.parametrize("sampling", DraftSampling),
    pytest.mark.parametrize("warper", [PLAIN, GREEDY], ids=["T=1", "T=0"]),
]


def blank(tree: Tree | RowTrees, sampling: DraftSampling) -> Proposal:
    q_BNV = None if sampling in (DraftSampling.POINT_MASS, DraftSampling.SEVERAL) else torch.ones(1, len(tree), 3) / 3
    return Proposal(torch.zeros(1, len(tree)).long(), tree, sampling, q_BNV)


def on_every_choice(test):
    for mark in every_choice:
        test = mark(test)
    return test


@on_every_choice
def test_the_lossless_rule_follows_the_distribution(tree, sampling: DraftSampling, warper: Warper) -> None:
    proposal, right = blank(tree, sampling), right_name(sampling, warper, is_chain=tree.is_chain)
    assert rule_for(proposal, warper) is rule_for(proposal, warper, right) is LOSSLESS[right]
    for name in LOSSLESS.keys() - {right}:
        with pytest.raises(RequestError, match=f"not made for .*{sampling.value}.* rule is '{right}'"):
            rule_for(proposal, warper, name)
    with pytest.raises(RequestError, match="no acceptance rule is called 'typical'"):
        rule_for(proposal, warper, "typical")


@on_every_choice
def test_lossy_rules_come_by_name_only(tree, sampling: DraftSampling, warper: Warper) -> None:
    proposal = blank(tree, sampling)
    assert not is_lossy(right_name(sampling, warper, is_chain=tree.is_chain))
    assert rule_for(proposal, warper) not in LOSSY.values()
    for name in LOSSY.keys() - {"lossy-lenient"}:
        assert is_lossy(name)
        assert rule_for(proposal, warper, name) is LOSSY[name]
    if warper.greedy:  # lenience gives nothing to distributions of one token
        assert rule_for(proposal, warper, "lossy-lenient") is acceptance.accept_greedy
    elif tree.is_chain and proposal.q_BNV is not None:
        assert rule_for(proposal, warper, "lossy-lenient") is lenient_rejection
    else:
        with pytest.raises(RequestError, match="'lossy-lenient' needs a chain drawn"):
            rule_for(proposal, warper, "lossy-lenient")
