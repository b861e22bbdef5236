"""Any function of yours as a drafter: tokens so far in, a guess out.

A guess is a point mass: sample-and-match needs no distribution of it, only that it does not depend on
the random numbers of the acceptance. Texts that the target has written do, for the seed that they were drawn with, so
a function that may know some draws from streams that no call has had. Read next: `tries.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...decoding.proposal import Committed, Proposal
from ...decoding.random import Uniforms, salt_of
from ...decoding.request import whole, whole_numbers
from ...decoding.sampling import Warper
from ...errors import RequestError
from ..history import History
from .tries import propose_tries

Guess = Sequence[int] | tuple[Sequence[int], Sequence[int]]
"""A chain of tokens, or tokens and parents of a tree (-1: after the last token)."""
_EXPECTED = "a list of token ids, [] for no draft, or a tuple of two lists, the tokens of a tree and their parents"


class CallableDrafter:
    """Calls `function(tokens)` for every row at every step, on the host."""

    family = "function"
    replayable = False
    draft_steps = 0

    def __init__(
        self,
        function: Callable[[list[int]], Guess],
        *,
        draft_length: int = 8,
        nodes: int = 0,
        vocabulary: int | None = None,
        remembers: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        """`draft_length`: deepest candidate; `nodes`: of a tree, by default those of a chain.

        `vocabulary`: ids that the function may give; by default, and at most, those of the target.

        `remembers`: whether the function may know texts that the target has written, as a cache of answers does. Above
        temperature 0 such calls write other text every time, whatever their seed. False: it guesses from the tokens
        that it is given alone, and the same seed writes the same text.

        Raises:
            RequestError: a number that is none, or too small for a draft.
        """
        if not callable(function):
            raise RequestError(f"the drafting function is {function!r:.80}; expected one that takes a list of tokens")
        self._function, self.draft_length = function, whole(draft_length, "draft_length", least=1)
        self.nodes = whole(nodes, "nodes", least=0) or self.draft_length + 1
        self._own = None if vocabulary is None else whole(vocabulary, "vocabulary", least=1)
        self._vocabulary, self._device, self._remembers = self._own, device, remembers

    def hold_to(self, vocabulary: int) -> None:
        """As of `decoding.proposal.Bounded`."""
        self._vocabulary = vocabulary if self._own is None else min(self._own, vocabulary)

    def salt(self) -> int:
        """As of `decoding.proposal.Remembering`: nobody knows with which numbers the function's texts were drawn."""
        return salt_of(secrets.token_bytes(16)) if self._remembers else 0

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        self._history = History(prompts, room + self.draft_length + 2, self._device)
        self._texts = [list(prompt) for prompt in prompts]

    def propose(self, last_B: Tensor, _warper: Warper, _uniforms: Uniforms) -> Proposal:
        """The function's guess for each row; a chain is cut at `draft_length`."""
        self._history.write_last(last_B)
        for text, new in zip(self._texts, self._history.unread([len(text) for text in self._texts])):
            text.extend(new)
        guesses = [self._ask(list(text)) for text in self._texts]
        return propose_tries(last_B, guesses, nodes=self.nodes, depth=self.draft_length)

    def observe(self, committed: Committed) -> None:
        """Continue after what was committed."""
        self._history.append(committed)

    def _ask(self, text: list[int]) -> tuple[list[int], list[int]]:
        guess = self._function(text)
        if isinstance(guess, tuple):
            if len(guess) != 2:
                raise RequestError(f"the drafting function gave a tuple of {len(guess)}; expected {_EXPECTED}")
            tokens, parents = _numbers(guess[0]), _numbers(guess[1])
        else:
            tokens = _numbers(guess)[: self.draft_length]
            parents = list(range(-1, len(tokens) - 1))
        self._check(tokens, parents)
        return tokens, parents

    def _check(self, tokens: list[int], parents: list[int]) -> None:
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise RequestError(
                    f"the drafting function gave node {node} the parent {parent}; expected -1 (the "
                    "last token) or a node before it"
                )
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        if len(tokens) != len(parents) or len(tokens) >= self.nodes:
            raise RequestError(
                f"the drafting function gave {len(tokens)} tokens and {len(parents)} parents; "
                f"expected as many of both, and at most {self.nodes - 1}"
            )
        if depths and max(depths) > self.draft_length:
            raise RequestError(
                f"the drafting function went {max(depths)} deep; expected at most draft_length, {self.draft_length}"
            )
        below = self._vocabulary
        wrong = [token for token in tokens if token < 0 or (below is not None and token >= below)]
        if wrong:
            last = "" if below is None else f" to {below - 1}"
            raise RequestError(
                f"the drafting function gave token id {wrong[0]}; expected 0{last}, ids of the target's vocabulary, "
                "and [] for no draft"
            )


def _numbers(given: object) -> list[int]:
    return whole_numbers(given, "what the drafting function gave", _EXPECTED)
