"""Suffix decoding beside a trained drafter: every row's next draft comes from the one that promises more tokens.

The promises are the score of the suffix draft and the mean number of tokens of the trained drafter that were
accepted in this row so far. Both are known before the drafter draws: the choice depends on what is emitted and on
where earlier steps ended, and the output stays the target's own. To choose between two finished drafts by what
they drew would bias it.
A suffix draft is a point mass: beside tokens that are drawn from q it declares a q of one token, so that one rule
judges every row, and a row writes the same alone. Where no row wants the trained drafter, it does not run; what it
then has to know of the longer text it is told in steps of its own size.

Read next: `proposer.py`.

Shapes: B rows, N nodes of the proposal, D depths, E tokens of a piece, K = E - 1, Y numbers of a node, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...decoding.proposal import Committed, DraftSampling, FeatureProposer, Proposal, Proposer, pick
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ...decoding.tree.tree import RowTrees, chain
from ...errors import RequestError
from .proposer import Draft, SuffixDecoding


@runtime_checkable
class Skipping(Proposer, Protocol):
    """A trained drafter that can leave a step to another one."""

    skips: bool
    """Whether steps may be left out; set before `reset`."""

    @property
    def module(self) -> nn.Module:
        """What was trained."""

    def skip(self, last_B: Tensor) -> None:
        """In place of `propose`: read what is new up to `last_B`, and draft nothing."""


def can_skip(draft: Proposer) -> Skipping:
    """The drafter; RequestError where it cannot leave steps out."""
    if not isinstance(draft, Skipping):
        raise RequestError(
            f"suffix-hybrid leaves steps of its drafter out, and a drafter of family "
            f"{getattr(draft, 'family', type(draft).__name__)!r} has no way for that; expected a draft model of the "
            "target's tokenizer, heads, EAGLE, an MTP module or a block drafter: use --method trained"
        )
    return draft


class _Counted(Uniforms):
    """Random numbers of others, and how many were taken."""

    def __init__(self, source: Uniforms) -> None:
        self._source, self.taken = source, 0

    def take(self, count: int) -> Tensor:
        """The next `count` numbers of every row, [B, count]."""
        self.taken += count
        return self._source.take(count)


@dataclass
class _Habits:
    """What the trained drafter's first proposal says of all of its proposals."""

    sampling: DraftSampling
    numbers: int
    is_chain: bool
    width: int
    vocabulary: int | None


@dataclass
class _Record:
    """What was accepted of the trained drafter in a row; it begins as if half of one draft had been."""

    accepted: float
    steps: int = 1
    drafted: bool = field(default=False)
    """Whether it drafted the last step."""

    @property
    def mean(self) -> float:
        """Accepted tokens per step."""
        return self.accepted / self.steps


class SuffixHybrid:
    """Drafts by the suffix index where it promises more than the trained drafter keeps, by that one elsewhere."""

    family = "suffix-hybrid"
    replayable = False

    def __init__(self, draft: Proposer, suffix: SuffixDecoding) -> None:
        """`suffix` drafts chains, on the device of `draft`.

        Raises:
            RequestError: the drafter cannot leave out steps, or the suffix index drafts trees.
        """
        if suffix.branching:
            raise RequestError("suffix-hybrid drafts chains by the suffix index; leave drafter.suffix.nodes out")
        self.draft, self.suffix = can_skip(draft), suffix
        self.draft.skips = True

    @property
    def draft_length(self) -> int:
        """Depth of the deeper one's drafts."""
        return max(self.draft.draft_length, self.suffix.draft_length)

    @property
    def nodes(self) -> int:
        """Most nodes of a proposal, the root included."""
        return max(self.draft.nodes, self.suffix.nodes)

    @property
    def draft_steps(self) -> int:
        """Forward passes of the trained drafter where it drafts."""
        return self.draft.draft_steps

    @property
    def module(self) -> nn.Module:
        """What was trained."""
        return self.draft.module

    @property
    def weights_read(self) -> list[nn.Module]:
        """What a proposal of the trained drafter reads."""
        read: list[nn.Module] | None = getattr(self.draft, "weights_read", None)
        return [self.module] * self.draft_steps if read is None else read

    def hold_to(self, vocabulary: int) -> None:
        """As of the suffix index; the trained drafter's ids are the target's."""
        self.suffix.hold_to(vocabulary)

    def salt(self) -> int:
        """As of the suffix index, whose memory holds what earlier calls have written."""
        return self.suffix.salt()

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self.draft.reset(prompts, room, static=static)
        self.suffix.reset(prompts, room, static=static)
        self._static = static
        self._records = [_Record(self.draft.draft_length / 2) for _ in prompts]
        self._habits: _Habits | None = None

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        """Every row's draft by the one or the other."""
        drafts = self.suffix.look_up(last_B)
        by_suffix = self._choose(drafts, self.suffix.new)
        own = self._own_proposal(last_B, warper, uniforms, needed=not all(by_suffix))
        self._last_B = last_B.clone()
        self._longest = max((len(draft.tokens) for draft, chosen in zip(drafts, by_suffix) if chosen), default=0)
        chosen_B = torch.tensor(by_suffix, device=last_B.device)
        # what a trained drafter has written ahead is not what a suffix draft gets accepted
        most = self.draft.draft_length + 1
        self._first_B = torch.where(chosen_B & (own is not None), 1, most)
        self._drafted = own is not None
        chains = [draft.tokens if chosen else [] for draft, chosen in zip(drafts, by_suffix)]
        return self._merged(last_B, own, chains, chosen_B)

    def observe(self, committed: Committed) -> None:
        """Continue after what was committed."""
        self.suffix.observe(committed)
        steps = pieces(
            committed,
            self._last_B,
            first_B=self._first_B,
            most=self.draft.draft_length + 1,
            # on a CPU the rows' own counts end this earlier
            longest=self._longest + 1 if self._longest else 1,
            first=1 if self._drafted else self.draft.draft_length + 1,
            counted=not self._static,
        )
        for number, (piece, last_B) in enumerate(steps):
            if number:
                self.draft.skip(last_B)
            self.draft.observe(piece)

    def _choose(self, drafts: Sequence[Draft], new: Sequence[int]) -> list[bool]:
        """Which rows the suffix index drafts, by what is known before anything is drawn."""
        chosen = []
        for record, draft, emitted in zip(self._records, drafts, new):
            if record.drafted and emitted:
                record.accepted += emitted - 1
                record.steps += 1
            # a row that has ended wants nothing
            chosen.append(not emitted or draft.score > record.mean)
            record.drafted = not chosen[-1]
        return chosen

    def _own_proposal(self, last_B: Tensor, warper: Warper, uniforms: Uniforms, *, needed: bool) -> Proposal | None:
        """The trained drafter's, None where no row needs it; a step takes the same numbers either way."""
        if not needed and self._habits is not None:
            uniforms.take(self._habits.numbers)
            self.draft.skip(last_B)
            return None
        counted = _Counted(uniforms)
        own = self.draft.propose(last_B, warper, counted)
        if own.sampling is DraftSampling.SEVERAL:
            raise RequestError("suffix-hybrid cannot merge a tree of several drafts; use --method trained")
        if self._habits is None:
            vocabulary = None if own.q_BNV is None else own.q_BNV.shape[2]
            self._habits = _Habits(own.sampling, counted.taken, own.tree.is_chain, own.tree.width, vocabulary)
        return own

    def _merged(
        self, last_B: Tensor, own: Proposal | None, chains: Sequence[Sequence[int]], chosen_B: Tensor
    ) -> Proposal:
        """One proposal: a row has the trained drafter's nodes, or those of its chain."""
        habits = self._habits
        assert habits is not None
        B, N = len(chains), 1 + max(0 if own is None else len(own.tree) - 1, self._longest)
        padded = [[*tokens, *[0] * (N - 1 - len(tokens))] for tokens in chains]
        ahead_BN = torch.tensor([[*row, 0] for row in padded], dtype=torch.long, device=last_B.device)
        count_B = torch.tensor([len(tokens) for tokens in chains], device=last_B.device)
        at_N = torch.arange(N, device=last_B.device)
        chosen_B1 = chosen_B[:, None]
        tokens_BN = torch.cat([last_B[:, None], ahead_BN[:, :-1]], 1)
        present_BN = at_N <= count_B[:, None]
        parents_BN = torch.where(present_BN, at_N - 1, -1)
        q_BNV = None
        if habits.vocabulary is not None:
            # the child of every node of a chain, with certainty; rows of leaves are never read
            q_BNV = torch.zeros(B, N, habits.vocabulary, device=last_B.device)
            q_BNV.scatter_(2, ahead_BN[..., None], 1.0)
        if own is not None:
            X = len(own.tree)
            tokens_BN[:, :X] = torch.where(chosen_B1, tokens_BN[:, :X], own.tokens_BN)
            theirs_BX = torch.ones_like(own.tokens_BN, dtype=torch.bool) if own.present_BN is None else own.present_BN
            present_BN[:, :X] = torch.where(chosen_B1, present_BN[:, :X], theirs_BX)
            above_BX = own.tree.on(last_B.device).parents_BN
            parents_BN[:, :X] = torch.where(chosen_B1, parents_BN[:, :X], above_BX)
            if q_BNV is not None:
                assert own.q_BNV is not None
                q_BNV[:, :X] = torch.where(chosen_B1[..., None], q_BNV[:, :X], own.q_BNV)
        tree = chain(N - 1) if habits.is_chain else RowTrees(parents_BN, depth=self.draft_length, width=habits.width)
        return Proposal(tokens_BN, tree, habits.sampling, q_BNV, present_BN, coins=self.nodes)


class SuffixFeatureHybrid(SuffixHybrid):
    """The same beside a drafter that reads hidden states of the target."""

    def __init__(self, draft: FeatureProposer, suffix: SuffixDecoding) -> None:
        """As for `SuffixHybrid`."""
        super().__init__(draft, suffix)
        self._reader = draft

    @property
    def layers(self) -> Sequence[int]:
        """Which of the target's hidden states the drafter reads."""
        return self._reader.layers

    def begin(self, features: Sequence[Tensor]) -> None:
        """Each row's features [S, F] of its prompt, for the drafter."""
        self._reader.begin(features)


def beside(draft: Proposer, suffix: SuffixDecoding) -> SuffixHybrid:
    """Both as one drafter; errors as for `SuffixHybrid`."""
    return SuffixFeatureHybrid(draft, suffix) if isinstance(draft, FeatureProposer) else SuffixHybrid(draft, suffix)


def pieces(
    committed: Committed, last_B: Tensor, *, first_B: Tensor, most: int, longest: int, first: int, counted: bool
) -> Iterator[tuple[Committed, Tensor]]:
    """What was committed as steps of up to `most` tokens, each on a chain of its own.

    Args:
        last_B: the last token emitted before.
        first_B: tokens of each row's first piece, at most.
        longest: tokens emitted by a row whose first piece has `first`, at most; the other rows' first
            piece is their last.
        counted: whether to stop where the rows have nothing left, which waits for the device.

    Yields:
        Each piece, and the last token emitted before it.
    """
    root_B1 = torch.zeros_like(committed.count_B)[:, None]
    node_BE = torch.cat([root_B1, committed.path_BD.clamp_min(0)], 1)
    done_B, room_B = torch.zeros_like(committed.count_B), first_B
    for number in range(1 + -(-max(0, longest - first) // most)):
        take_B = torch.minimum(committed.count_B - done_B, room_B).clamp_min(0)
        if counted and number and not int(take_B.max()):
            return
        yield _piece(committed, node_BE, done_B, take_B, most), last_B
        done_B = done_B + take_B
        newest_B = committed.tokens_BE.gather(1, (done_B - 1).clamp_min(0)[:, None])[:, 0]
        last_B = torch.where(take_B > 0, newest_B, last_B)
        room_B = torch.full_like(room_B, most)


def _piece(committed: Committed, node_BE: Tensor, done_B: Tensor, take_B: Tensor, most: int) -> Committed:
    """`take_B` tokens after the first `done_B`. A row that gets none is at its last accepted node, as before."""
    start_B = torch.where(take_B > 0, done_B, (committed.count_B - 1).clamp_min(0))
    at_E = torch.arange(most, device=start_B.device)
    from_BE = (start_B[:, None] + at_E).clamp_max(node_BE.shape[1] - 1)
    nodes_BE = node_BE.gather(1, from_BE)
    path_BK = torch.where(at_E[1:] < take_B[:, None], at_E[1:], -1)
    features_BNF = committed.features_BNF
    return Committed(
        committed.tokens_BE.gather(1, from_BE),
        take_B,
        path_BK,
        pick(committed.logits_BNV, nodes_BE),
        None if features_BNF is None else pick(features_BNF, nodes_BE),
        is_chain=True,
    )
