"""Text that goes round in a loop: "the the the", or a line that is written again and again.

Read next: `eval/measure/metrics.py`, how much of a target's text does; `trainers/teacher/loops.py`, which trains a
model away from it.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 16
MIN_REPEATS = 3


def in_loop(text: Sequence[int]) -> list[bool]:
    """For each token, whether it stands in a stretch of at least three equal periods."""
    inside = [False] * len(text)
    for period in range(1, MAX_PERIOD + 1):
        start = 0
        for at in range(period, len(text) + 1):
            if at < len(text) and text[at] == text[at - period]:
                continue
            # text[start:at] repeats with this period
            if at - start >= MIN_REPEATS * period:
                inside[start:at] = [True] * (at - start)
            start = at - period + 1
    return inside
