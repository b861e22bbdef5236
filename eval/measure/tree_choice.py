"""The best static tree for a drafter by its measured ranks, of a given size or of the fastest one.

How often each of a drafter's candidates is the right one is measured by depth, and by rank at that depth: the drafter
looks along texts that the target wrote, and the token that stands there is found among its candidates. Of candidates
that are chosen without randomness that is their acceptance, at every temperature that the texts were written at.
`decoding/tree/search.py` makes the best tree of it.
Shapes: S tokens of a text, X positions that have a token at a depth, D depths, R ranks, V vocabulary,
F numbers of the target's features.

Read next: `decoding/tree/search.py`, the search;
`launch/measure/tree.py`, the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.engine import autoregressive, generate
from ...decoding.proposal import Proposer, TeacherForced
from ...decoding.sampling import Warper
from ...decoding.tree.search import Path, acceptance_of, best_budget, best_tree_dp, best_tree_greedy, expected_tokens
from ...drafters.eagle.proposer import EAGLE_1_TREE, Eagle
from ...drafters.heads.medusa import HeadsOnTree, default_paths
from ...errors import DataError
from .rounds import AllRounds
from .speed import measure_costs
from .timing import enough_tokens

Search = Literal["greedy", "dp"]
_SIZES = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)  # nodes of the verify calls that are timed
_DRAFTED_FOR = 16  # tokens behind each of two texts, by which the cost of drafting is timed


@dataclass(frozen=True)
class Speed:
    """What calls take on this machine, in one-token calls of the target."""

    curve: dict[int, float]
    """By the nodes of a verify call, the root included."""
    draft_cost: float
    """Drafting once, on the drafter's default tree, in steps of plain decoding that ran in turn with it."""


@dataclass(frozen=True)
class Chosen:
    """A tree, and what it promises on texts like those it was measured on.

    Attributes:
        paths: shallow paths first, for `tree_of_paths`.
        tau: tokens per target call, bonus included, were depths independent of each other.
        default_tau: the same of the default tree of equal size; None where there is none.
        speedup: tokens per second over one token at a time, where the size was chosen by speed.
    """

    paths: tuple[Path, ...]
    tau: float
    default_tau: float | None
    speedup: float | None = None

    @property
    def nodes(self) -> int:
        """Its size, the root included."""
        return 1 + len(self.paths)


def best_of_size(drafter: Proposer, ranks: Ranks, nodes: int, search: Search = "greedy") -> Chosen:
    """The tree of at most `nodes` nodes that accepts most.

    Raises:
        DataError: no candidate was ever the right one.
    """
    table_DR = acceptance_for(drafter, ranks)
    paths = {"greedy": best_tree_greedy, "dp": best_tree_dp}[search](table_DR, nodes)
    return _chosen(drafter, table_DR, tuple(paths))


def fastest(drafter: Proposer, ranks: Ranks, speed: Speed) -> Chosen:
    """The size that decodes fastest, and its best tree; errors as for `best_of_size`."""
    table_DR = acceptance_for(drafter, ranks)
    plan = best_budget(table_DR, speed.curve, draft_cost=speed.draft_cost)
    return _chosen(drafter, table_DR, plan.paths, plan.speedup)


def acceptance_for(drafter: Proposer, ranks: Ranks) -> NDArray[np.float64]:
    """The table to search in, [D, R]: EAGLE's siblings are drawn in order, none can be left out."""
    return ranks.falling if isinstance(drafter, Eagle) else ranks.acceptance


def default_tree(drafter: Proposer, nodes: int) -> Sequence[Path] | None:
    """The tree of that size which is used where none is measured."""
    if isinstance(drafter, HeadsOnTree):
        sizes = drafter.heads.config
        return default_paths(sizes.heads, nodes, ranks=min(8, sizes.vocabulary))
    return EAGLE_1_TREE if nodes == 1 + len(EAGLE_1_TREE) else None


def measure_speed(target: Backbone, drafter: Proposer, texts: Sequence[WrittenText]) -> Speed:
    """Time verify calls of growing trees, and drafting, behind texts of the usual length."""
    longest = target.context - max(_SIZES) - 1
    context = min(longest, int(np.median([len(each.prompt) for each in texts])))
    drafted = [n - 1 for n in _SIZES if n > 1]
    read = [each for text in texts for each in text.prompt]
    costs = measure_costs(target, None, drafted, context=context, text=read)
    run, plain = AllRounds(), Warper(0.0)
    for text in texts[:2]:
        room = target.context - len(text.prompt) - drafter.draft_length
        tokens = min(enough_tokens(_DRAFTED_FOR, target.device), room)
        base = autoregressive(target, [text.prompt], warper=plain, max_new_tokens=tokens)
        own = generate(target, drafter, [text.prompt], warper=plain, max_new_tokens=tokens)
        run.add(base, own, first=True)
    return Speed({n: costs.verify(n) for n in _SIZES}, run.proposing_cost)


def _chosen(
    drafter: Proposer, table_DR: NDArray[np.float64], paths: tuple[Path, ...], speedup: float | None = None
) -> Chosen:
    if not paths:
        raise DataError(
            "none of the drafter's candidates was ever the token that the target wrote: there is "
            "no tree to choose. Train longer, or measure on more --texts"
        )
    if isinstance(drafter, Eagle):
        paths = without_gaps(paths)
    usual = default_tree(drafter, 1 + len(paths))
    default_tau = None
    if usual is not None and _inside(usual, table_DR):
        default_tau = 1 + expected_tokens(usual, table_DR)
    return Chosen(paths, 1 + expected_tokens(paths, table_DR), default_tau, speedup)


def _inside(paths: Sequence[Path], table_DR: NDArray[np.float64]) -> bool:
    depths, ranks = table_DR.shape
    return all(len(path) <= depths and max(path) < ranks for path in paths)


def without_gaps(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The same tree with siblings numbered from 0 on, in their order.

    In a table that falls with the rank only equally good candidates are passed over: nothing is
    lost by taking the earlier one.
    """
    new: dict[Path, Path] = {(): ()}
    count: dict[Path, int] = {}
    for path in sorted(paths, key=lambda each: (len(each), each)):
        parent = path[:-1]
        new[path] = (*new[parent], count.get(parent, 0))
        count[parent] = count.get(parent, 0) + 1
    return tuple(sorted((each for each in new.values() if each), key=lambda p: (len(p), p)))


@dataclass(frozen=True)
class WrittenText:
    """Tokens that the target wrote behind a prompt."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Ranks:
    """What was counted.

    Attributes:
        hits_DR: how often the candidate of rank r was the token of depth d.
        trials_D: how often depth d came to the test: all tokens above were among the candidates.
    """

    hits_DR: NDArray[np.int64]
    trials_D: NDArray[np.int64]

    @property
    def acceptance(self) -> NDArray[np.float64]:
        """Hits over trials, [D, R]."""
        return acceptance_of(self.hits_DR, self.trials_D)

    @property
    def falling(self) -> NDArray[np.float64]:
        """The same, no rank above the one before it: for siblings that are drawn in order.

        The least-squares fit that falls (isotonic regression): ranks out of order by chance share
        what they have, and a depth keeps its sum.
        """
        rows = [isotonic_regression(row_R, increasing=False).x for row_R in self.acceptance]
        return np.stack(rows)


@torch.inference_mode()
def measure_ranks(
    target: Backbone, drafter: TeacherForced, texts: Sequence[WrittenText], *, depth: int, ranks: int
) -> Ranks:
    """Count over all positions of the answers at which a draft may begin.

    A draft begins behind any token of an answer, its root; depth d is the d-th token behind that.
    Of two equally likely candidates the drafter may take either; here both count as the first.

    Args:
        depth: depths to look at; heads have no more than there are of them.
        ranks: candidates of a depth.
    """
    hits_DR = np.zeros((depth, ranks), dtype=np.int64)
    trials_D = np.zeros(depth, dtype=np.int64)
    drafted = 0
    for text in texts:
        tokens_S = torch.tensor([*text.prompt, *text.answer], device=target.device)
        features_SF = states_along(target, drafter.layers, tokens_S)
        # position t stands for the draft whose root is token t + 1
        alive_X = torch.arange(len(tokens_S), device=target.device) >= len(text.prompt) - 1
        for d, logits_XV in enumerate(drafter.teacher_forced(features_SF, tokens_S, depth)):
            rank_X = _rank(logits_XV, tokens_S[d + 2 :])
            alive_X = alive_X[: len(rank_X)]
            trials_D[d] += int(alive_X.sum())
            alive_X = alive_X & (rank_X < ranks)
            hits_DR[d] += torch.bincount(rank_X[alive_X], minlength=ranks).cpu().numpy()
            drafted = max(drafted, d + 1)
    return Ranks(hits_DR[:drafted], trials_D[:drafted])


def states_along(target: Backbone, layers: Sequence[int], tokens_S: Tensor) -> Tensor:
    """The target's hidden states of some layers along a text, [S, F]."""
    features: list[Tensor] = []
    kv_cache = KVCache(1, len(tokens_S))
    target.prefill([tokens_S.tolist()], kv_cache, layers=layers, features=features)
    return features[0]


def _rank(logits_XV: Tensor, token_X: Tensor) -> Tensor:
    """How many candidates are likelier than the right one, int64 [X]."""
    own_X1 = logits_XV.gather(1, token_X[:, None])
    return (logits_XV > own_X1).sum(1)
