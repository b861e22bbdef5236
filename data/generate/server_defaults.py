"""A server's own sampling, switched off as far as it lets itself be told.

Engines fill in what a request leaves open from the target's generation_config.json: a top-k, penalties. What is drawn
then is another distribution than the one that was asked for. So every request says that they are off; a server that
refuses a name is told less, and what it was told is kept beside its answers.
Read next: `server_request.py`, the names; `server.py` and `eval/server/measure.py`, which ask so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from .answers import NoAnswer
from .server_request import LEVELS, OFF
from .transport import Refused

Result = TypeVar("Result")
_NOT_TAKEN = (400, 422)  # statuses by which a server says that it does not know a name


class Defaults:
    """What one server is told; found by the first request that it answers."""

    def __init__(self, settled: Callable[[tuple[str, ...]], None] = lambda _: None) -> None:
        """`settled` is called once, with the names that are told to be off."""
        self._level, self._known, self._settled = 0, False, settled

    @property
    def off(self) -> tuple[str, ...]:
        """The names that are told to be off."""
        return LEVELS[self._level]

    async def ask(self, attempt: Callable[[tuple[str, ...]], Awaitable[Result]]) -> Result:
        """The result of an attempt that says these names, or fewer if the server refuses them.

        Raises:
            Refused: however little is said, and what else an attempt raises.
        """
        level = self._level
        while True:
            try:
                result = await attempt(LEVELS[level])
            except Refused as refused:
                if refused.status not in _NOT_TAKEN or level == len(LEVELS) - 1:
                    raise
                if self._known and level >= self._level:
                    raise  # others were answered in this way: it is the request that is refused
                level = self._level if self._known else level + 1
                continue
            except NoAnswer:
                self._settle(level)
                raise
            self._settle(level)
            return result

    def _settle(self, level: int) -> None:
        if not self._known:
            self._known, self._level = True, level
            self._settled(self.off)


def left_on(off: tuple[str, ...]) -> str | None:
    """A sentence for what a server was not told to leave off; None where it is all off."""
    left = [name for name in OFF if name not in off]
    if not left:
        return None
    return (
        f"it refuses to be told that {', '.join(left)} {'is' if len(left) == 1 else 'are'} off: if it has such "
        "defaults of its own, its answers are not drawn from the distribution that was asked for"
    )


def filled_in(generation_config: Mapping[str, Any]) -> str | None:
    """A sentence for what servers fill in from a target's generation_config.json; None where that is nothing."""
    found = {name: generation_config.get(name) for name in OFF}
    on = {name: value for name, value in found.items() if value is not None and not _is_off(name, value)}
    if not on:
        return None
    listed = ", ".join(f"{name} = {value}" for name, value in on.items())
    return (
        f"the target's generation_config.json has {listed}, which servers fill in where a request leaves it open: "
        "here they are told that it is off, and users who say nothing get answers of another distribution"
    )


def _is_off(name: str, value: Any) -> bool:
    return value in ((0, -1) if name == "top_k" else (OFF[name],))
