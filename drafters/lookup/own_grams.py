"""Where in a text that grows its last few tokens stood before: a table per length, on the host.

A string of m tokens is numbered by where it ended first, and found by the number of its last m - 1 tokens and the
token in front of them. So a token adds one small entry for each length, a search reads one of each, and neither takes
more work in a longer text. It serves where the host takes part in a step; steps that do without look through the text
on the device (`prompt_lookup.py`). Read next: `gram_index.py`, the same of a text that is known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable

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
