"""Suffix decoding: draft what most often followed the end of the text, as far as it is likely.

Oliaro et al. 2024 (arXiv 2411.04975). For every end of the text that stood somewhere before, the draft goes on
by the most frequent token, as long as the product of relative frequencies is not below a bound; a longer
match may draft more. The draft whose frequencies sum to the most is taken: that sum is how many tokens would
be accepted if the past foretold the future. A chain, or a tree of the likeliest strings.
The index is on the host, so a step waits for the device once. What is drafted depends on the texts alone: a point
mass at every temperature. Read next: `index.py`, where is looked; `hybrid.py`, beside a trained drafter.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ...decoding.proposal import Committed, Proposal
from ...decoding.random import Uniforms, salted
from ...decoding.sampling import Warper
from ...errors import RequestError
from ..config import check_values
from ..history import History
from ..lookup.tries import Store, check_ids, propose_chains, propose_tries
from .index import AnswerMemory, Match, OwnText, StoredTexts, TextSource
from .windows import longest_draft


class Draft(NamedTuple):
    """A chain or a tree, and how many of its tokens the counts expect to be accepted."""

    tokens: list[int]
    parents: list[int]
    score: float


NOTHING = Draft([], [], 0.0)


class SuffixDecoding:
    """Copies what most often followed the end of the text: there, in earlier answers, in a datastore."""

    family = "suffix"
    replayable = False
    draft_steps = 0

    def __init__(
        self,
        *,
        draft_length: int = 16,
        nodes: int | None = None,
        depth: int = 24,
        factor: float = 1.0,
        least: float = 0.1,
        memory: AnswerMemory | None = None,
        store: Store | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`nodes`: of a tree, the root included; None drafts a chain.

        `depth`: tokens of a match and what follows it, together, in a text or a memory, of a match in a datastore;
        `factor`: drafted tokens at most, per token of the match; `least`: probability of the least likely string
        that is drafted. `draft_length` comes down to the longest that these allow. `memory` takes in the answers of
        earlier calls, when the next one begins, and may be shared by drafters of several threads; `store` is a
        datastore of this tokenizer.

        Raises:
            RequestError: a value that no recipe may have, no token that can be drafted, or a memory of another depth.
        """
        check_values("suffix", draft_length=draft_length, nodes=nodes, depth=depth, factor=factor, least=least)
        longest = longest_draft(depth, factor, stored=store is not None)
        if longest < 1:
            raise RequestError(
                f"suffix decoding is to draft up to {draft_length} tokens, {factor:g} for each of a match, by strings "
                f"of {depth}, which drafts none; expected at least 1: raise drafter.suffix.factor"
            )
        draft_length = min(draft_length, longest)
        if memory is not None and memory.depth != depth:
            raise RequestError(f"the memory holds strings of {memory.depth} tokens; expected {depth}, as the drafter")
        self.draft_length, self.depth, self.factor, self.least = draft_length, depth, factor, least
        self.branching = nodes is not None
        self.nodes = draft_length + 1 if nodes is None else nodes
        self.memory, self._device = memory, device
        self._shared: list[TextSource] = [] if memory is None else [memory]
        if store is not None:
            self._shared.append(StoredTexts(store, longest=depth - 1, length=draft_length))
        self._salt = 0 if store is None else store.salt
        self._begun = False
        self._vocabulary: int | None = None

    def hold_to(self, vocabulary: int) -> None:
        """As of `decoding.proposal.Bounded`."""
        self._vocabulary = vocabulary

    def salt(self) -> int:
        """As of `decoding.proposal.Remembering`; 0 where the request's own text alone is searched."""
        own = 0 if self.memory is None else self.memory.salt()
        return salted(own, self._salt)

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self.remember()
        self._history = History(prompts, room + self.draft_length + 2, self._device)
        self._rows = [OwnText(prompt, self.depth) for prompt in prompts]
        self._starts = [len(prompt) for prompt in prompts]
        self._drafts = [NOTHING] * len(prompts)
        self.new: list[int] = []
        """Tokens that every row had got since the look-up before the last one; none for rows that have ended."""
        self._begun = False

    def remember(self) -> None:
        """Take the answers of the last rows into the memory; `reset` does so too.

        Not before all of them are done, so that a row does not depend on its neighbours.
        """
        if self.memory is None or not self._begun:
            return
        self._read()
        with self.memory.lock:  # the answers of a batch stand side by side
            for row, start in zip(self._rows, self._starts):
                self.memory.add(row.tokens[start:])
        self._begun = False

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The draft of every row; a row without a match has the root alone."""
        drafts = self.look_up(last_B)
        if self.branching:
            tries = [(draft.tokens, draft.parents) for draft in drafts]
            return propose_tries(last_B, tries, nodes=self.nodes, depth=self.draft_length)
        return propose_chains(last_B, [draft.tokens for draft in drafts], coins=self.nodes)

    def look_up(self, last_B: Tensor) -> list[Draft]:
        """The draft of every row after its last emitted token, and its score."""
        self._history.write_last(last_B)
        self._begun = True
        self.new = self._read()
        # all rows of a step see the same answers, whatever other threads finish meanwhile
        with nullcontext() if self.memory is None else self.memory.lock:
            for number, new in enumerate(self.new):
                # a row without a new token has ended, and must not widen the others' calls
                self._drafts[number] = self._draft(self._rows[number]) if new else NOTHING
        return self._drafts

    def observe(self, committed: Committed) -> None:
        """Continue after what was committed."""
        self._history.append(committed)

    def _read(self) -> list[int]:
        """Copy what the rows have written since to the host; how many tokens that are."""
        unread = self._history.unread([len(row.tokens) for row in self._rows])
        for row, tokens in zip(self._rows, unread):
            row.extend(tokens)
        return [len(tokens) for tokens in unread]

    def _draft(self, row: OwnText) -> Draft:
        best = NOTHING
        sources: list[TextSource] = [row, *self._shared]
        for source in sources:
            for size, match in source.matches(row.tokens):
                most = min(self.nodes - 1, int(self.factor * size))
                # no draft scores more than it has tokens, and shorter matches draft fewer
                if most <= best.score:
                    break
                draft = self._grow(match, most)
                if draft.score > best.score:
                    best = draft
        if self._shared and self._vocabulary is not None:
            check_ids(best.tokens, self._vocabulary, "suffix decoding's memory or datastore")
        return best

    def _grow(self, match: Match, most: int) -> Draft:
        if self.branching:
            return likeliest_tree(match, most, self.draft_length, self.least)
        return likeliest_chain(match, most, self.least)


def likeliest_chain(match: Match, most: int, least: float) -> Draft:
    """After every token the most frequent one, the lowest id of equals, down to a probability of `least`."""
    tokens: list[int] = []
    probability, score = 1.0, 0.0
    while len(tokens) < most:
        best = next(match.followers(), None)
        if best is None:
            break
        token, count = best
        probability *= count / match.total
        if probability < least:
            break
        tokens.append(token)
        score += probability
        match = match.after(token)
    return Draft(tokens, list(range(-1, len(tokens) - 1)), score)


def likeliest_tree(match: Match, most: int, deepest: int, least: float) -> Draft:
    """The `most` likeliest strings that are not below `least`: shorter, then lower ones of equals.

    No string is likelier than its beginning, so what is taken is a tree.
    """
    tokens: list[int] = []
    parents: list[int] = []
    score = 0.0
    waiting: list[tuple[float, int, tuple[int, ...], int, Match]] = []

    def open_up(probability: float, path: tuple[int, ...], node: int, match: Match) -> None:
        total = match.total
        # siblings behind those that there is room for are never taken
        for token, count in islice(match.followers(), most - len(tokens)):
            likely = probability * (count / total)
            if likely < least:
                break
            heappush(waiting, (-likely, len(path), (*path, token), node, match))

    open_up(1.0, (), -1, match)
    while waiting and len(tokens) < most:
        negative, _, path, parent, above = heappop(waiting)
        tokens.append(path[-1])
        parents.append(parent)
        score -= negative
        if len(path) < deepest:
            open_up(-negative, path, len(tokens) - 1, above.after(path[-1]))
    return Draft(tokens, parents, score)
