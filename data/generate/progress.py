"""How far a generation is: a bar on a terminal, a key=value line every some seconds elsewhere.

Read next: `journal.py`, which tells it what is done; `trainers/loop/progress.py`, the same of a training run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ...bars import bar, is_watched

_EVERY = 15.0
"""Seconds between two lines."""
_log = logging.getLogger(__name__)


class Progress:
    """Counts rows of the journal, and shows them with their rate and the time left; close it at the end."""

    def __init__(self, total: int, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`total`: rows of the source; `done`: of them those that an earlier start has finished."""
        self._total, self._first, self._clock = total, done, clock
        self._done, self._counts = done, Counter[str]()
        self._began = self._said = clock()
        self._bar = bar(total=total, initial=done, unit="row", disable=not is_watched())

    def add(self, entry: Mapping[str, Any]) -> None:
        """Count a row that is written down: an entry of `Asker.entry`."""
        self._done += 1
        self._counts["rejected" if "rejected" in entry else "answered"] += 1
        self._counts.update({name: int(entry.get(name, 0)) for name in ("tokens", "cut")})
        self._bar.update()

    def tell(self, *, last: bool = False) -> None:
        """Show what is done, if the last line is some time ago."""
        now = self._clock()
        if not self._bar.disable:
            self._bar.set_postfix({name: self._counts[name] for name in ("rejected", "cut", "tokens")})
            return
        if self._done == self._first or (now - self._said < _EVERY and not last):
            return
        self._said, seconds = now, max(now - self._began, 1e-9)
        left = seconds / (self._done - self._first) * (self._total - self._done)
        _log.info(
            "row=%d/%d answered=%d rejected=%d cut=%d tokens=%d tokens_per_second=%.4g eta=%dm%02ds",
            self._done,
            self._total,
            *(self._counts[name] for name in ("answered", "rejected", "cut", "tokens")),
            self._counts["tokens"] / seconds,
            *divmod(int(left), 60),
        )

    def close(self) -> None:
        """The last line, and the bar is gone."""
        self.tell(last=True)
        self._bar.close()
