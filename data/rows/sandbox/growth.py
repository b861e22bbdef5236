"""How long a value an operation of a template would make, by arithmetic and before it is made.

Zero where the result is no longer than what goes in. Read next: `bounded.py`, which asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

Size = Callable[[Any], int]

# no number in a chat has more, and products of longer ones take their time
_DIGITS = 4300
# a width written into a format, or taken from an argument
_WIDTH = re.compile(r"%[^a-zA-Z%]*?(\*|\d{5})|\{[^{}]*:[^{}]*(\d{5}|\{)")
_PADDING = ("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice", "wordwrap")


def of_operator(operator: str, left: Any, right: Any, size: Size) -> float:
    """Of `left OPERATOR right`."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        return inf if bits > 3 * _DIGITS else 0
    if operator == "*":
        times = next((each for each in (left, right) if isinstance(each, int)), 0)
        repeated = left if times is right else right
        return max(times, 0) * (size(repeated) + 1)
    if operator == "%" and isinstance(left, str | bytes):
        return _of_format(str(left), right, size)
    return size(left) + size(right)


def of_method(call: Any, given: Sequence[Any], size: Size) -> float:
    """Of a call with the arguments `given`; methods of texts and numbers can make much of little."""
    method = getattr(call, "__wrapped__", call)  # the sandbox wraps `format`
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    return _of(name, [owner, *given], size) if isinstance(owner, str | bytes | int) else 0


def of_filter(name: str, given: Sequence[Any], size: Size) -> float:
    """Of a filter; the first of `given` is what stands before its bar."""
    if name == "join" and len(given) > 1:  # the other way round than the method
        return _of("join", [given[1], given[0]], size)
    if name in ("indent", "tojson"):
        widths = [each if isinstance(each, int) else size(each) for each in given[1:]]
        lines = str(given[0]).count("\n") + 1 if name == "indent" else size(given[0])
        return max(widths, default=0) * lines
    if name == "round":
        return inf if any(isinstance(each, int) and abs(each) > _DIGITS for each in given[1:]) else 0
    if name == "sum":  # of lists: each sum is a new list
        starts = any(isinstance(each, list | tuple) for each in given[1:])
        return len(given[0]) * size(given[0]) if starts and isinstance(given[0], list | tuple) else 0
    return _of(name, given, size)


def _of(name: str, given: Sequence[Any], size: Size) -> float:
    """Of what methods and filters of one name do alike; `given` begins with the text."""
    if name in _PADDING:
        return max((each for each in given[1:] if isinstance(each, int)), default=0)
    if name in ("format", "format_map"):
        return _of_format(str(given[0]), list(given[1:]), size)
    if name == "expandtabs":
        return size(given[0]) * max((each for each in given[1:] if isinstance(each, int)), default=8)
    if name == "translate":
        return size(given[0]) * max(map(size, given[1:]), default=0)
    if name == "replace" and len(given) > 2:
        text, old, new = given[:3]
        found = text.count(old) + (len(text) if not old else 0) if isinstance(old, type(text)) else 0
        return size(text) + found * size(new)
    if name == "join" and len(given) > 1 and isinstance(given[1], list | tuple):
        return size(given[0]) * len(given[1]) + size(given[1])
    return 0


def _of_format(text: str, given: Any, size: Size) -> float:
    """Every field may hold all that is given; a width that nobody could read is refused."""
    if _WIDTH.search(text):
        return inf
    return len(text) + (text.count("%") + text.count("{")) * size(given)
