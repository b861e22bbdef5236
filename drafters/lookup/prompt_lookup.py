"""Prompt lookup decoding: copy what followed the last tokens earlier in the same text.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding): n-grams of up to 3 tokens, 10 tokens
copied, the first match. `transformers` looks for up to 2 and copies 10.

Where the host takes part in a step it has an index of every row, and a draft takes no more work in a
longer text. Steps of fixed shapes ask the host nothing, so there the device looks through the text: a few bytes for
each token, of whose keys and values the target's own call reads thousands.

The index is a table per length, on the host. A string of m tokens is numbered by where it ended first, and found by
the number of its last m - 1 tokens and the token in front of them. So a token adds one small entry for each length, a
search reads one of each, and neither takes more work in a longer text.

Read next: `lookup.py`.

Shapes: B rows, K drafted tokens, L tokens of history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import DrafterConfig, check_shortest, check_values
from ..record import Corpora
from .lookup import ChainLookup, best_match, copy_after, suffix_run

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone


def from_config(config: DrafterConfig, target: Backbone, _corpora: Corpora) -> PromptLookup:
    """From the recipe's section: it needs nothing but the prompt."""
    return PromptLookup(
        draft_length=config.lookup.tokens,
        longest=config.lookup.longest,
        latest=config.lookup.latest,
        device=target.device,
    )


class PromptLookup(ChainLookup):
    """Copies from prompt and answer so far."""

    family = "prompt-lookup"

    def __init__(
        self,
        *,
        draft_length: int = 10,
        longest: int = 3,
        shortest: int = 1,
        latest: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """`longest`, `shortest`: tokens that have to match; `latest`: of equal matches the last.

        Raises:
            RequestError: a value that no recipe may have, or no match may be.
        """
        check_values("lookup", draft_length=draft_length, longest=longest, latest=latest)
        check_shortest(shortest, longest)
        super().__init__(draft_length, device)
        self.longest, self.shortest, self.latest = longest, shortest, latest

    def reset(self, prompts: Sequence[Sequence[int]], room: int, *, static: bool = False) -> None:
        """Start new rows. `room`: tokens that may follow the longest prompt."""
        super().reset(prompts, room, static=static)
        indexed = [] if static else prompts
        self._rows = [OwnGrams(prompt, longest=self.longest, latest=self.latest) for prompt in indexed]

    def find(self) -> tuple[Tensor, Tensor]:
        """What followed the longest earlier match: tokens [B, K], how many [B]."""
        return self._searched() if self._static else self._indexed()

    def _indexed(self) -> tuple[Tensor, Tensor]:
        for row, tokens in zip(self._rows, self._history.unread([len(row.tokens) for row in self._rows])):
            row.extend(tokens)
        found = [row.following(self.shortest, self.draft_length) for row in self._rows]
        padded = [[*tokens, *[-1] * (self.draft_length - len(tokens))] for tokens in found]
        counts = [len(tokens) for tokens in found]
        return torch.tensor(padded, device=self._device), torch.tensor(counts, device=self._device)

    def _searched(self) -> tuple[Tensor, Tensor]:
        history = self._history
        run_BL = suffix_run(history.tokens_BL, history.recent(self.longest))
        at_L = torch.arange(run_BL.shape[1], device=run_BL.device)
        # the suffix itself is no match: a token has to follow
        earlier_BL = at_L < history.lengths_B[:, None]
        match_B = best_match(run_BL, earlier_BL, shortest=self.shortest, latest=self.latest)
        return copy_after(history.tokens_BL, match_B, self.draft_length, history.lengths_B + 1)


_NONE = -1
"""Number of the string without tokens."""


class OwnGrams:
    """A text, and its strings of 1 to `longest` tokens that have a token behind them."""

    def __init__(self, tokens: Iterable[int], *, longest: int, latest: bool) -> None:
        """`latest`: of equal strings the last one is found, else the first."""
        self.tokens: list[int] = []
        self._latest = latest
        self._numbers: list[dict[tuple[int, int], int]] = [{} for _ in range(longest)]
        self._last: list[dict[int, int]] = [{} for _ in range(longest)]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Write on. The strings at the end so far have a token behind them from now on."""
        for token in tokens:
            end, number = len(self.tokens) - 1, _NONE
            for back in range(min(len(self._numbers), len(self.tokens))):
                number = self._numbers[back].setdefault((number, self.tokens[end - back]), end)
                if self._latest:
                    self._last[back][number] = end
            self.tokens.append(token)

    def following(self, shortest: int, count: int) -> list[int]:
        """Up to `count` tokens behind the longest end of the text that stood before, of `shortest` tokens at least."""
        end = number = _NONE
        for back in range(min(len(self._numbers), len(self.tokens))):
            found = self._numbers[back].get((number, self.tokens[-1 - back]))
            if found is None:
                break
            number = found
            if back + 1 >= shortest:
                end = self._last[back][number] if self._latest else number
        return [] if end == _NONE else self.tokens[end + 1 : end + 1 + count]
