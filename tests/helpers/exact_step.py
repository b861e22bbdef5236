"""The exact distribution of what a step emits, for any rule: every draft, every coin, no sampling noise.

For every tuple of tokens that could have been drafted, the chance of each trial and of each extra
token is found by bisection over its own coin, the rule being a black box; summed up, that is the distribution
of the emitted tokens, continued by the target's own. Bisection stops at 2**-34 and distributions are fp32
(errors up to 1.3e-7 in 120 random cases), so `EXACT` covers rounding only. What bisection takes for
granted, a coin of its own for each trial, is tested with random coins. Wrong versions are planted
and must be seen.

Shapes: R rows, one per tuple of drafted tokens (B in the rules), N nodes, C trials of a node, X
contexts, Y random numbers of a step, V vocabulary, D depths, M drafts, K rows of a bisection. A
context is a path of tokens, numbered as in a heap: behind context x and token t is x V + t + 1.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch
from draftsmith.decoding.proposal import DraftSampling, Proposal, Trials
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.rules import acceptance
from draftsmith.decoding.rules.acceptance import Outcome, Rule
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import RowTrees, Tree
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

PLAIN, GREEDY = Warper(1.0), Warper(0.0)
HIGH = 1 - 2**-53  # the largest coin there is
EXACT = 1e-6
PAIR, FORK = Tree((-1, 0, 0)), Tree((-1, 0, 0, 1, 1, 2))
SAMPLED = st.sampled_from([DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT])
seeds = st.integers(0, 10**6)


@st.composite
def trees(pick: st.DrawFn, most: int = 5) -> Tree:
    size = pick(st.integers(1, most))
    return Tree((-1, *(pick(st.integers(0, node)) for node in range(size))))


often = st.sampled_from([True, True, True, False])
masks = st.lists(often, min_size=5, max_size=5).map(lambda there: [True, *there])


class Given(Uniforms):
    """Prescribed numbers."""

    def __init__(self, coins_RY: Tensor) -> None:
        self._coins_RY, self._at = coins_RY, 0

    def take(self, count: int) -> Tensor:
        self._at += count
        assert self._at <= self._coins_RY.shape[1]
        return self._coins_RY[:, self._at - count : self._at]


class World(NamedTuple):
    """A target and drafts whose next-token distributions depend on the whole path."""

    logits_XV: Tensor
    q_MXV: Tensor
    warper: Warper = PLAIN  # of the target; q is already what was drawn from


class Drafts(NamedTuple):
    """All that could have been drafted: a proposal with one row per tuple of tokens."""

    weight_R: Tensor  # probability of the row, fp64
    proposal: Proposal
    context_RN: Tensor
    logits_RNV: Tensor
    child_RNC: Tensor  # node of each trial, -1 behind the last
    coin_RNC: Tensor  # which random number of the step decides it
    warper: Warper = PLAIN


def world(seed: int, V: int, levels: int, drafts: int = 1, *, mild: bool = False) -> World:
    """Distributions mild, sharp and peaked, tokens of probability zero, contexts where p = q."""
    g = torch.Generator().manual_seed(seed)
    X = sum(V**level for level in range(levels))
    logits = torch.randn(drafts + 1, X, V, generator=g)
    if mild:
        return World(logits[0], logits[1:].softmax(-1))
    logits *= torch.tensor([1.0, 1.5, 8.0])[torch.randint(3, (drafts + 1, X, 1), generator=g)]
    hole = torch.rand(logits.shape, generator=g) < 0.2
    hole.scatter_(2, torch.randint(V, (drafts + 1, X, 1), generator=g), False)
    logits = logits.masked_fill(hole, -torch.inf)
    equal_X = torch.rand(X, generator=g) < 0.15
    logits[1:, equal_X] = logits[0, equal_X]
    return World(logits[0], logits[1:].softmax(-1))


def every_draw(
    of: World, tree: Tree, sampling: DraftSampling, there_N: list[bool] | None = None, *, per_row: bool = False
) -> Drafts:
    """Every tuple of tokens drawn by `sampling`; a child that nothing is left for is absent.

    `there_N` takes away further nodes, whatever is drawn; `per_row` gives each row its own tree.
    """
    V, N, q_XV = of.q_MXV.shape[2], len(tree), of.q_MXV[0].double()
    drafted = torch.tensor(list(itertools.product(range(V), repeat=N - 1)))
    tokens_RN = torch.cat([torch.arange(len(drafted))[:, None] % V, drafted], 1)
    context_RN, present_RN = torch.zeros_like(tokens_RN), torch.ones_like(tokens_RN) > 0
    weight_R = torch.ones(len(drafted), dtype=torch.float64)
    for parent, children in enumerate(tree.children):
        left_RV = q_XV[context_RN[:, parent]]
        for child in children:
            token_R1, total_R = tokens_RN[:, child, None], left_RV.sum(-1)
            here_R = present_RN[:, parent] & (total_R > 0) & (there_N is None or there_N[child])
            chance_R = left_RV.gather(1, token_R1)[:, 0] / total_R.clamp_min(1e-300)
            weight_R = weight_R * torch.where(here_R, chance_R, (token_R1[:, 0] == 0).double())
            present_RN[:, child] = here_R
            context_RN[:, child] = context_RN[:, parent] * V + token_R1[:, 0] + 1
            if sampling is DraftSampling.WITHOUT_REPLACEMENT:
                left_RV = torch.where(here_R[:, None], left_RV.scatter(1, token_R1, 0.0), left_RV)
    shape: Tree | RowTrees = tree
    if per_row:
        parents_RN = torch.where(present_RN, torch.tensor(tree.parents), -1)
        shape = RowTrees(parents_RN, depth=tree.depth, width=tree.width)
    present = None if per_row or bool(present_RN.all()) else present_RN
    proposal = Proposal(tokens_RN, shape, sampling, of.q_MXV[0][context_RN], present)
    wide = [[*each, *[-1] * (tree.width - len(each))] for each in tree.children]
    child_RNC = torch.tensor(wide).expand(len(drafted), -1, -1)
    here_RX = present_RN.gather(1, child_RNC.clamp_min(0).flatten(1))
    child_RNC = child_RNC.where(here_RX.view(child_RNC.shape), -1)
    logits_RNV = of.logits_XV[context_RN]
    found = Drafts(weight_R, proposal, context_RN, logits_RNV, child_RNC, child_RNC.clamp_min(0), of.warper)
    return chosen(found, weight_R.nonzero()[:, 0])


def every_merge(of: World, depth: int) -> Drafts:
    """Every tuple of the chains of several drafts, each row's merged into one tree."""
    M, _, V = of.q_MXV.shape
    N, rows = 1 + M * depth, []
    for drawn in itertools.product(range(V), repeat=M * depth):
        tokens, parents, contexts, weight, context = [drawn[0]], [-1], [0], 1.0, 0
        trials: list[list[tuple[int, int]]] = [[] for _ in range(N)]
        for step, token in enumerate(drawn):
            m, at = step // depth, (contexts.index(context) if step % depth else 0)
            weight *= float(of.q_MXV[m, contexts[at], token])
            context = contexts[at] * V + token + 1
            if context not in contexts:
                tokens, parents = [*tokens, token], [*parents, at]
                contexts.append(context)
            trials[at].append((contexts.index(context), m))
        if weight > 0:
            less = N - len(tokens)
            padded = [[*each, *[(-1, 0)] * (M - len(each))] for each in trials]
            columns = ([*tokens, *[0] * less], [*parents, *[-1] * less], [*contexts, *[0] * less])
            rows.append((weight, padded, *columns))
    weight_R, pairs_RNC2, tokens_RN, parents_RN, context_RN = map(torch.tensor, zip(*rows))
    child_RNC, draft_RNC = pairs_RNC2.unbind(-1)
    q_index_RNC = draft_RNC * N + torch.arange(N)[:, None]
    trials_R = Trials(of.q_MXV[:, context_RN].transpose(0, 1).flatten(1, 2), child_RNC, q_index_RNC)
    tree = RowTrees(parents_RN, depth=depth, width=M)
    proposal = Proposal(tokens_RN, tree, DraftSampling.SEVERAL, trials=trials_R)
    coin_RNC = (1 + torch.arange(N * M)).view(1, N, M).expand_as(child_RNC)
    logits_RNV = of.logits_XV[context_RN]
    return Drafts(weight_R.double(), proposal, context_RN, logits_RNV, child_RNC, coin_RNC, of.warper)


def pick(proposal: Proposal, rows: Tensor) -> Proposal:
    """The proposal of some rows, in their order."""
    tree, trials = proposal.tree, proposal.trials
    if isinstance(tree, RowTrees):
        tree = RowTrees(tree.parents_BN[rows], depth=tree.depth, width=tree.width)
    if trials is not None:
        trials = Trials(trials.q_BXV[rows], trials.child_BNC[rows], trials.q_index_BNC[rows])
    q, present = (None if x is None else x[rows] for x in (proposal.q_BNV, proposal.present_BN))
    return replace(proposal, tokens_BN=proposal.tokens_BN[rows], tree=tree, q_BNV=q, present_BN=present, trials=trials)


def chosen(of: Drafts, rows: Tensor) -> Drafts:
    weight_R, proposal, *tensors, warper = of
    return Drafts(weight_R[rows], pick(proposal, rows), *(each[rows] for each in tensors), warper)


def run(rule: Rule, of: Drafts, rows: Tensor, coins_KY: Tensor) -> Outcome:
    return rule(of.logits_RNV[rows], pick(of.proposal, rows), of.warper, Given(coins_KY))


def last_node(found: Outcome) -> Tensor:
    """Where each row came to rest, [B, 1]."""
    return pad(found.path_BD, (1, 0)).gather(1, found.accepted_B[:, None])


def hits(found: Outcome, child_BNC: Tensor) -> Tensor:
    """Whether each depth was accepted; tested are those and the next one, if it has a candidate."""
    depth_D = torch.arange(found.path_BD.shape[1])
    open_B1 = (acceptance.row_of(child_BNC, last_node(found)[:, 0]) >= 0).any(1, keepdim=True)
    right_BD = depth_D < found.accepted_B[:, None] + open_B1.long()
    assert torch.equal(found.tested_BD, right_BD), "tested where nothing stands, or not where it does"
    return depth_D < found.accepted_B[:, None]


def supremum(below, count: int) -> Tensor:
    """Where a test of numbers in [0, 1) turns from true to false, `count` of them at once."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(34):
        middle = (low + high) / 2
        yes = below(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return low.where(low > 1e-9, 0.0).where(low < 1 - 1e-9, 1.0)


def coins_to_reach(of: Drafts, more: int) -> Tensor:
    """Random numbers [R, N, Y] that lead to each node: 0 where a trial must pass, else `HIGH`."""
    R, N, C = of.child_RNC.shape
    numbers = N if of.proposal.trials is None else 1 + N * C
    coins = torch.full((R, N, numbers + more), HIGH, dtype=torch.float64)
    for parent, trial in itertools.product(range(N), reversed(range(C))):
        r = (of.child_RNC[:, parent, trial] >= 0).nonzero()[:, 0]
        child = of.child_RNC[r, parent, trial]
        coins[r, child] = coins[r, parent]
        coins[r, child, of.coin_RNC[r, parent, trial]] = 0.0
    return coins


def chances(rule: Rule, of: Drafts, reach_RNY: Tensor) -> Tensor:
    """Probability of each trial, once its node is reached and the trials before have failed."""
    r, n, c = at = (of.child_RNC >= 0).nonzero(as_tuple=True)
    child, coin, base = of.child_RNC[at][:, None], of.coin_RNC[at][:, None], reach_RNY[r, n]

    def accepted(u: Tensor) -> Tensor:
        return (run(rule, of, r, base.scatter(1, coin, u[:, None])).path_BD == child).any(1)

    return torch.zeros(of.child_RNC.shape).double().index_put(at, supremum(accepted, len(r)))


def rests(of: Drafts, chance_RNC: Tensor) -> Tensor:
    """Probability that a row is drawn and its walk ends at a node. [R, N]"""
    R, N, C = of.child_RNC.shape
    at_RN = torch.zeros(R, N, dtype=torch.float64)
    at_RN[:, 0] = of.weight_R / of.weight_R.sum()
    for parent, trial in itertools.product(range(N), range(C)):
        r = (of.child_RNC[:, parent, trial] >= 0).nonzero()[:, 0]
        passed = at_RN[r, parent] * chance_RNC[r, parent, trial]
        at_RN[r, of.child_RNC[r, parent, trial]] += passed
        at_RN[r, parent] -= passed
    return at_RN


class Step(NamedTuple):
    probs_X: Tensor  # of the emitted tokens, by context
    hit_D: Tensor  # probability to accept at each depth
    hat_D: Tensor  # the same by alpha_hat, where a test took place


def step_of(rule: Rule, of: Drafts, more: int = 0) -> Step:
    """The exact distribution of one step. With `more` numbers the very last is the extra token's."""
    V, D = of.logits_RNV.shape[2], of.proposal.tree.depth
    reach_RNY = coins_to_reach(of, more)
    rest_RN = rests(of, chances(rule, of, reach_RNY))
    r, n = (rest_RN > 1e-13).nonzero(as_tuple=True)
    weight_K1, base = rest_RN[r, n][:, None], reach_RNY[r, n]
    found = run(rule, of, r, base)
    assert torch.equal(last_node(found)[:, 0], n), "the walk is not the coins' own"
    hit_KD = hits(found, of.child_RNC[r])

    def up_to(u: Tensor) -> Tensor:
        coins = base.repeat_interleave(V - 1, 0)
        coins[:, -1 if more else 0] = u
        extra = run(rule, of, r.repeat_interleave(V - 1), coins).extra_B
        return extra <= torch.arange(V - 1).repeat(len(r))

    below = supremum(up_to, len(r) * (V - 1)).view(len(r), V - 1)
    probs_KV = torch.cat([below, torch.ones_like(weight_K1)], 1).diff(dim=1, prepend=0 * weight_K1)
    behind = of.context_RN[r, n][:, None] * V + torch.arange(V) + 1
    probs_X = torch.zeros(sum(V**level for level in range(D + 2)), dtype=torch.float64)
    probs_X.index_add_(0, behind.flatten(), (weight_K1 * probs_KV).flatten())
    hat_KD = found.tested_BD * found.alpha_hat_BD.double()
    return Step(probs_X, (weight_K1 * hit_KD).sum(0), (weight_K1 * hat_KD).sum(0))


def continued(probs_X: Tensor, of: World) -> Tensor:
    """Distribution of whole sequences: what stopped early goes on by the target's own distribution."""
    p_XV, probs_X = of.warper(of.logits_XV).double(), probs_X.clone()
    X, V = p_XV.shape
    for x in range(X):
        probs_X[x * V + 1 : x * V + V + 1] += probs_X[x] * p_XV[x] / p_XV[x].sum()
    return probs_X[X:]


def target_distribution(of: World) -> Tensor:
    start_X = torch.zeros(of.logits_XV.numel() + 1, dtype=torch.float64)
    start_X[0] = 1
    return continued(start_X, of)


def distance(probs_X: Tensor, of: World) -> float:
    """Total variation between the emitted sequences and the target's own."""
    return float((continued(probs_X, of) - target_distribution(of)).abs().sum()) / 2


def assert_lossless(rule: Rule, of: Drafts, truth: World) -> None:
    step = step_of(rule, of)
    assert distance(step.probs_X, truth) < EXACT
    torch.testing.assert_close(step.hat_D, step.hit_D, atol=EXACT, rtol=0)
