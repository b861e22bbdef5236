"""REST: retrieve continuations of the last tokens from a datastore, verify them as a trie.

He et al. 2023 (arXiv 2311.08252): suffixes of 16 down to 2 tokens, continuations of 10, the 64
likeliest nodes. The datastore is searched on the host, so a step waits for the device once.
Lossless at every temperature with one draw per node (sample-and-match).
Read next: `data/datastore.py`, which builds and searches; `../lookup/tries.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...decoding.proposal import Committed, Proposal
from ...decoding.random import Uniforms
from ...decoding.sampling import Warper
from ..config import check_shortest, check_values
from ..history import History
from ..lookup.tries import Store, check_ids, propose_tries


class Rest:
    """Drafts a trie of what followed the same tokens in the datastore."""

    family = "rest"
    replayable = False
    draft_steps = 0

    def __init__(
        self,
        store: Store,
        *,
        nodes: int = 65,
        longest: int = 16,
        shortest: int = 2,
        draft_length: int = 10,
        matches: int = 5000,
        device: torch.device | str = "cpu",
    ) -> None:
        """`nodes`: the root included; `matches`: continuations looked at, at most.

        Raises:
            RequestError: a value that no recipe may have, or no match may be.
        """
        check_values("rest", draft_length=draft_length, nodes=nodes, longest=longest)
        check_shortest(shortest, longest)
        self._store, self.nodes, self.draft_length = store, nodes, draft_length
        self.longest, self.shortest, self.matches = longest, shortest, matches
        self._device = device
        self._vocabulary: int | None = None

    def hold_to(self, vocabulary: int) -> None:
        """As of `decoding.proposal.Bounded`."""
        self._vocabulary = vocabulary

    def salt(self) -> int:
        """As of `decoding.proposal.Remembering`: the target may have written what is stored."""
        return self._store.salt

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self._history = History(prompts, room + self.draft_length + 2, self._device)

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The trie of every row; a row without a match has the root alone."""
        self._history.write_last(last_B)
        tries = [self._look_up(recent) for recent in self._history.recent(self.longest).tolist()]
        return propose_tries(last_B, tries, nodes=self.nodes, depth=self.draft_length)

    def observe(self, committed: Committed) -> None:
        """Continue after what was committed."""
        self._history.append(committed)

    def _look_up(self, recent: Sequence[int]) -> tuple[list[int], list[int]]:
        context = [token for token in reversed(recent) if token >= 0]
        matches = self._store.continuations(
            context, longest=self.longest, shortest=self.shortest, length=self.draft_length, limit=self.matches
        )
        if not len(matches):
            return [], []
        tokens, parents = self._store.trie(matches, self.nodes - 1)
        if self._vocabulary is not None:
            check_ids(tokens, self._vocabulary, "rest's datastore")
        return tokens, parents
