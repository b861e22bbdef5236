"""A step as the engine replays it, for timing.

Read next: `eval/measure/timing.py`, which has it.
"""

from __future__ import annotations

from draftsmith.eval.measure.timing import recorded

__all__ = ["recorded"]
