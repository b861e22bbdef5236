"""Bars of progress: on a terminal and in a notebook, nothing elsewhere.

Read next: `eval/measure/rounds.py` and `trainers/loop/progress.py`, which show them.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def is_watched() -> bool:
    """Whether somebody sees a bar move: on a terminal, or below the cell of a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def bar(**how: Any) -> tqdm[Any]:
    """A bar that is gone when it is closed, made with tqdm's arguments; in a notebook of the notebook's own parts."""
    settings: dict[str, Any] = {"leave": False, "disable": not is_watched(), **how}
    if "ipykernel" in sys.modules:
        from tqdm.auto import tqdm as of_the_notebook

        return of_the_notebook(**settings)
    return tqdm(**settings)


def live(stage: str, total: int, unit: str) -> tqdm[Any]:
    """A line that is gone when its stage is done, with the time left; call `update` with how much was done."""
    return bar(total=total, desc=stage, unit=unit, dynamic_ncols=True)
