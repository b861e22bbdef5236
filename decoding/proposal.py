"""A proposal: the candidate tree that a drafter hands to the verifier, and how its tokens were drawn.

How they were drawn (`DraftSampling`) decides which acceptance rule is lossless (`rules/choice.py`).
The protocol that every drafter follows is here too, and `Drafter`, which a drafter of one's own starts from.
Read next: `tree/tree.py`, what a tree is; `rules/acceptance.py`, the rules; `engine.py`, which calls drafters.

Shapes: B rows, N nodes of the candidate tree, the root included, X distributions, C trials of a node,
E tokens that a step can emit, D depths, V target vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import RequestError
from .random import Uniforms
from .sampling import Warper
from .tree.tree import AnyTree

_ROUNDING = 1e-3
"""By how much a sum of fp32 probabilities may miss 1."""


class DraftSampling(Enum):
    """How the tokens of a proposal were drawn."""

    POINT_MASS = "point mass"
    """Chosen without randomness, given the text before them."""
    IID = "independent draws"
    """Every child of a node ~ the node's q, independently."""
    WITHOUT_REPLACEMENT = "draws without replacement"
    """Siblings ~ q one after another, never the same twice."""
    SEVERAL = "independent draws from several distributions"
    """Every trial at a node ~ the q of the draft that made it, independently."""


@dataclass(frozen=True)
class Trials:
    """Which child each trial at a node drew, and from which distribution: needed for `DraftSampling.SEVERAL`.

    A tree merged from several drafts has one node where two drafts drew the same token, and two
    trials of it.

    Attributes:
        q_BXV: fp32, the distributions that children were drawn from, in any order.
        child_BNC: int64, the node that each trial drew, in the order of the trials; -1 after the last.
        q_index_BNC: int64, which of the X distributions the trial was drawn from.
    """

    q_BXV: Tensor
    child_BNC: Tensor
    q_index_BNC: Tensor


@dataclass(frozen=True)
class Proposal:
    """A candidate tree per row.

    Attributes:
        tokens_BN: int64; node 0 is the root, the last emitted token, not yet in the KV cache.
        tree: parents of the nodes, for all rows or per row; a parent stands before its children.
        sampling: how the tokens were drawn.
        q_BNV: fp32 over the full target vocabulary: row n is the distribution that the children of node n
            were really drawn from. None for POINT_MASS and SEVERAL; rows of leaves are never read.
        present_BN: bool, the candidates; others are computed but never accepted. None: all.
        trials: for SEVERAL, which draft drew which child.
        coins: random numbers that a rule takes in every step, at least one per node. Fixed by a
            drafter whose trees vary, so that a row's numbers do not depend on its neighbours.
    """

    tokens_BN: Tensor
    tree: AnyTree
    sampling: DraftSampling
    q_BNV: Tensor | None = None
    present_BN: Tensor | None = None
    trials: Trials | None = None
    coins: int = 0

    def take_coins(self, uniforms: Uniforms) -> Tensor:
        """A fresh number for every node, [B, N]; the root's is for the extra token."""
        nodes = len(self.tree)
        return uniforms.take(max(self.coins, nodes))[:, :nodes]


@dataclass(frozen=True)
class Committed:
    """What a step added to every row, as the drafter needs to know it.

    Attributes:
        tokens_BE: emitted tokens, accepted ones first, then the extra one; garbage after count_B.
        count_B: int64, tokens emitted by each row in this step; 0 for rows that are done.
        path_BD: int64, node kept at each depth; -1 after the accepted ones.
        logits_BNV: the target's logits at every node of the proposal.
        features_BNF: the target's hidden states there, where the drafter asked for some.
        is_chain: whether the proposal was a chain.
    """

    tokens_BE: Tensor
    count_B: Tensor
    path_BD: Tensor
    logits_BNV: Tensor
    features_BNF: Tensor | None = None
    is_chain: bool = False

    @property
    def kept_features_BEF(self) -> Tensor:
        """The hidden states of the root and of the nodes kept at each depth; garbage after count_B."""
        assert self.features_BNF is not None  # asked for by `layers`
        if self.is_chain:
            return self.features_BNF  # its nodes are kept in their order
        root_B1 = torch.zeros_like(self.path_BD[:, :1])
        node_BE = torch.cat([root_B1, self.path_BD.clamp_min(0)], 1)
        return pick(self.features_BNF, node_BE)


def check_proposal(
    proposal: Any, last_B: Tensor, vocabulary: int, drafter: object, *, draws: bool, reads: bool
) -> None:
    """Raise RequestError for what `propose` may not return.

    `draws`: whether tokens are drawn, so that the q of drawn drafts is needed; `reads`: whether the host may read
    values, for which it waits.
    """
    found = _misfit(proposal, last_B, vocabulary, draws=draws)
    if not found and reads:
        found = _wrong_ids(proposal.tokens_BN, last_B, vocabulary) or (_wrong_q(proposal) if draws else "")
    if found:
        raise RequestError(
            f"{type(drafter).__name__}.propose returned {found}; draftsmith.Proposal says what it holds"
        )


def _misfit(proposal: Any, last_B: Tensor, vocabulary: int, *, draws: bool) -> str:
    """What is wrong with a proposal, as the end of a sentence; empty if nothing is."""
    if not isinstance(proposal, Proposal):
        return f"{_shown(proposal)}; expected a draftsmith.Proposal"
    if not isinstance(proposal.tree, AnyTree):
        return f"{_shown(proposal.tree)} as tree; expected draftsmith.chain(K) or a draftsmith.Tree"
    if not isinstance(proposal.sampling, DraftSampling):
        return f"{_shown(proposal.sampling)} as sampling; expected one of draftsmith.DraftSampling"
    tokens_BN, shape = proposal.tokens_BN, [len(last_B), len(proposal.tree)]
    if not isinstance(tokens_BN, Tensor) or list(tokens_BN.shape) != shape or tokens_BN.is_floating_point():
        return (
            f"{_shown(tokens_BN)} as tokens_BN; expected int64 of shape {shape}: a row for each of {shape[0]} texts, "
            f"a column for each of the tree's {shape[1]} nodes, the root included"
        )
    q_BNV, drawn = (
        proposal.q_BNV,
        draws and proposal.sampling in (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT),
    )
    if drawn and (not isinstance(q_BNV, Tensor) or list(q_BNV.shape) != [*shape, vocabulary]):
        return (
            f"{_shown(q_BNV)} as q_BNV; expected fp32 of shape {[*shape, vocabulary]}: for every node, leaves too, "
            "the distribution over the target's vocabulary that its children were drawn from"
        )
    return ""


def _wrong_ids(tokens_BN: Tensor, last_B: Tensor, vocabulary: int) -> str:
    low, high = (int(each) for each in tokens_BN.aminmax())
    if low < 0 or high >= vocabulary:
        return f"the token id {low if low < 0 else high}; expected ids of the target, 0 to {vocabulary - 1}"
    if not tokens_BN[:, 0].equal(last_B):
        return (
            f"{tokens_BN[:, 0].tolist()!r:.80} as the roots, tokens_BN[:, 0]; expected the last tokens that it was "
            f"given, {last_B.tolist()!r:.80}, with the drafts behind them"
        )
    return ""


def _wrong_q(proposal: Proposal) -> str:
    """What is wrong with the distributions that tokens are said to be drawn from; empty if nothing is."""
    q_BXV = proposal.q_BNV if proposal.trials is None else proposal.trials.q_BXV
    if q_BXV is None or proposal.sampling is DraftSampling.POINT_MASS:
        return ""
    sum_BX, least_BX = q_BXV.sum(-1), q_BXV.amin(-1)
    # a comparison with NaN is false
    wrong_BX = _drawn_from(proposal, q_BXV.shape[1]) & ~((sum_BX - 1).abs().le(_ROUNDING) & least_BX.ge(0))
    if not bool(wrong_BX.any()):
        return ""
    row, at = wrong_BX.nonzero()[0].tolist()
    name = "q_BNV" if proposal.trials is None else "trials.q_BXV"
    total, least = float(sum_BX[row, at]), float(least_BX[row, at])
    return (
        f"{name}[{row}, {at}] that sums to {total:.4g}, its least entry {least:.4g}; expected a "
        "distribution, the one that the children were drawn from: no entry below 0, none NaN, a sum of 1"
    )


def _drawn_from(proposal: Proposal, count: int) -> Tensor:
    """Which of `count` distributions a row a candidate was drawn from, bool [B, X]."""
    tokens_BN, trials, present_BN = proposal.tokens_BN, proposal.trials, proposal.present_BN
    child_BNC = proposal.tree.on(tokens_BN.device).children_BNC if trials is None else trials.child_BNC
    child_BX = child_BNC.expand(len(tokens_BN), -1, -1).flatten(1)
    tried_BX = child_BX >= 0
    if present_BN is not None:
        tried_BX = tried_BX & present_BN.gather(1, child_BX.clamp_min(0))
    if trials is None:
        return tried_BX.view(len(tokens_BN), *child_BNC.shape[1:]).any(-1)
    used_BX = torch.zeros(len(tokens_BN), count, dtype=torch.int64, device=tokens_BN.device)
    return used_BX.scatter_add_(1, trials.q_index_BNC.flatten(1).clamp_min(0), tried_BX.long()) > 0


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    return f"{value!r:.80}"


def pick(x_BNY: Tensor, at_BX: Tensor) -> Tensor:
    """What stands at some nodes, [B, X, Y]."""
    return x_BNY.gather(1, at_BX[..., None].expand(-1, -1, x_BNY.shape[2]))


class Proposer(Protocol):
    """What the engine needs of a drafter."""

    @property
    def draft_length(self) -> int:
        """Depth of the deepest candidate."""

    @property
    def nodes(self) -> int:
        """Most nodes of a proposal, the root included."""

    @property
    def draft_steps(self) -> int:
        """Forward passes of a drafting model per target call, at most; 0 where there is none."""

    @property
    def replayable(self) -> bool:
        """Whether `propose` and `observe` can be recorded: no decision of the host, the same shapes always, and what
        one step leaves to the next written in place.
        """

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows: `prompts` without the first emitted token, `room` tokens may follow.

        `static`: never wait for the device, fixed shapes.
        """

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft after `last_B`, the last emitted token of every row."""

    def observe(self, committed: Committed) -> None:
        """Roll back what was rejected; drafting continues after what was committed."""


@runtime_checkable
class FeatureProposer(Proposer, Protocol):
    """A drafter that reads hidden states of the target."""

    @property
    def layers(self) -> Sequence[int]:
        """Which of the target's hidden states it reads (`backbone/hidden_states.py`)."""

    def begin(self, features: Sequence[Tensor]) -> None:
        """Called after `reset`: each row's features [S, F] of its prompt."""


@runtime_checkable
class Remembering(Protocol):
    """A drafter that drafts from what earlier calls have written: its own, or those that its texts are from.

    Those texts were drawn with random numbers. A call that took the same numbers again would judge drafts by coins
    that the drafts depend on, so its answers would not have the target's distribution. Nobody knows how given texts
    were made, so a hash of them (`random.salt_of`) salts the seed.
    """

    def salt(self) -> int:
        """Asked once for every call: a number that no call before has had which this one may draft from."""


@runtime_checkable
class Bounded(Protocol):
    """A drafter of ids that a caller gave, by a function or as texts, which nobody has held to the target's yet."""

    def hold_to(self, vocabulary: int) -> None:
        """Called before `reset`. A draft of an id from `vocabulary` on is a RequestError, which says whose it is."""


@runtime_checkable
class TeacherForced(FeatureProposer, Protocol):
    """A drafter that gives its logits along a known text; `draftsmith tree` measures acceptance with it."""

    def teacher_forced(self, features_SF: Tensor, tokens_S: Tensor, depth: int) -> Iterator[Tensor]:
        """fp32 logits [X, V], X = S - 1 - d, for depth d = 1, 2, ... up to `depth`, or as far as it drafts.

        Row t of depth d predicts token t + 1 + d, teacher-forced on the d - 1 tokens before it; the
        root is token t + 1.
        """


class Drafter(ABC):
    """What a drafter of one's own starts from: it has to write `propose` alone.

    Everything that decoding, measures and the audit ask of a drafter stands here, with a default for a chain that is
    drafted without a model, from nothing but the last token. A class attribute, a property or an assignment in
    `__init__` (which need not call this class) replaces a default.
    """

    draft_length: int = 4
    """Depth of the deepest candidate: tokens of a chain."""
    draft_steps: int = 0
    """Forward passes of a drafting model per target call, at most; 0 where there is none."""
    replayable: bool = False
    """Whether `propose` and `observe` can be recorded on a GPU: no decision of the host, the same shapes always, and
    what one step leaves to the next written in place."""
    layers: Sequence[int] = ()
    """Which hidden states of the target it reads, -1 the last; `begin` and `observe` are given them."""
    family: str = ""
    """The record in `FAMILIES` that it is of, if there is one; then its toy model is enumerated in the audit."""
    module: nn.Module | None = None
    """What drafts, for measures that count the bytes of its weights."""
    weights_read: Sequence[nn.Module] | None = None
    """What a proposal reads of weights, each as often as it is read; None: all of `module` in every draft step."""
    _nodes: int = 0

    def __repr__(self) -> str:
        """Its class and sizes: what a cell that ends with `fit` shows."""
        sizes = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("draft_length", "nodes", "draft_steps"))
        return f"<{type(self).__name__}: {sizes}>"

    @property
    def nodes(self) -> int:
        """Most nodes of a proposal, the root included; those of a chain unless they are set."""
        return self._nodes or self.draft_length + 1

    @nodes.setter
    def nodes(self, nodes: int) -> None:
        self._nodes = nodes

    @abstractmethod
    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Draft after `last_B`, the last emitted token of every row.

        Args:
            warper: turns logits into the distribution that is decoded; tokens that are drawn are drawn from it.
            uniforms: random numbers, one stream a row: `uniforms.take(K)` is [B, K]. Others would make a row depend
                on its neighbours.
        """

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:  # noqa: B027
        """Start new rows: `prompts` without the first emitted token, `room` tokens may follow.

        `static`: never wait for the device, fixed shapes.
        """

    def begin(self, features: Sequence[Tensor]) -> None:  # noqa: B027
        """Called after `reset`: each row's hidden states [S, F] of its prompt, `layers` side by side."""

    def observe(self, committed: Committed) -> None:  # noqa: B027
        """Called after every step with what was kept of it: roll back what was rejected."""

    def close(self) -> None:  # noqa: B027
        """Called when a probe has decoded with it: let go of what it holds."""
