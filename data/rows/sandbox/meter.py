"""What a rendering of a chat template has done and made, against what it may.

Read next: `bounded.py`, which lets templates count; `bounded.py`, what an operation would make.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

# for messages of no length; templates of released models do hundreds of steps for a turn
_STEPS = 200_000
_STEPS_PER_CHARACTER = 200
# a step may compare or copy the longest text, which costs one step more for each so many characters
_PER_STEP = 256
_CHARACTERS = 2**20
_TIMES_GIVEN = 64


class TooMuchWork(Exception):  # noqa: N818 - a verdict on a template, not a failure of the program
    """A template asks for more steps, or for longer texts, than its bound."""


@dataclass
class WorkMeter:
    """One rendering: what it may do, and what it has done."""

    longest: int = 0
    """Characters of the longest text that it has met."""
    allowed_steps: int = _STEPS
    allowed_size: int = _CHARACTERS
    steps: int = 0
    written: int = 0
    _sizes: dict[int, tuple[Any, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Sequence[Any]) -> WorkMeter:
        """The bound of a template that is given these messages and tools."""
        meter = cls()
        size = sum(map(meter.size, given))
        meter.longest = max((meter.size(each) for part in given for each in part or ()), default=0)
        meter.allowed_steps += _STEPS_PER_CHARACTER * size
        meter.allowed_size += _TIMES_GIVEN * size
        return meter

    def work(self, times: int = 1, *, elements: int = 0) -> None:
        """Count steps; `elements` that one of them goes through cost one more each."""
        self.steps += times * (1 + self.longest // _PER_STEP) + elements
        if self.steps > self.allowed_steps:
            raise TooMuchWork("it does more steps than its messages can need: a loop or a recursion has no end")

    def check(self, size: float) -> None:
        """Raise TooMuchWork before something of that many characters is made."""
        if size == inf:
            raise TooMuchWork("it asks for a number or a width that no chat has")
        if size > self.allowed_size:
            raise TooMuchWork(f"it would make a value of {size:,.0f} characters; the limit is {self.allowed_size:,}")

    def made(self, value: Any) -> Any:
        """The same value, whose size counts from now on."""
        size = self.size(value)
        if size > self.longest:
            self.check(size)
            self.longest = size
        return value

    def write(self, characters: int) -> None:
        """Count text that the template has written."""
        self.written += characters
        if self.written > 16 * self.allowed_size:
            raise TooMuchWork(f"it writes more than {16 * self.allowed_size:,} characters")

    def size(self, value: Any) -> int:
        """Characters of a text, a number, or of all that is in a list or an object."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        if not isinstance(value, list | tuple | dict):
            return 0
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return self.holds(value, parts)

    def holds(self, value: Any, parts: Collection[Any]) -> int:
        """The size of a value that these are in; what is in it many times counts as often."""
        size = len(parts) + sum(map(self.size, parts))
        self._sizes[id(value)] = value, size  # with the value, or another one might get its id
        return size
