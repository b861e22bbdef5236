"""An event loop whose clock is the test's: nobody waits, and what is planned for second 7 happens at second 7."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class _Loop(asyncio.SelectorEventLoop):
    """Goes on to the next thing that is planned as soon as nothing is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0

    def time(self) -> float:
        return self._seconds

    def _run_once(self) -> None:
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self._seconds = max(self._seconds, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def now() -> float:
    """Seconds of the loop that runs."""
    return asyncio.get_running_loop().time()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, without waiting."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
