"""Output of the commands: log level per process, tables, plain lines, broken pipes.

Names, paths and texts of strangers pass here on their way to a terminal, which obeys control
characters: they are written out (`printable`), and square brackets are no markup.
"""

from __future__ import annotations

import io
import logging
import os
import re
import select
import sys
from typing import TYPE_CHECKING, Any

from ..storage import is_first, rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

# C0 and C1 but for line end and tab; what turns the direction of a line; halves of a surrogate pair
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def printable(text: str) -> str:
    """`text` with control characters written out, as in \\x1b; nothing else is changed."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class PrintableRecord(logging.LogRecord):
    """A record of any library, its message as `printable` shows it: transformers has a handler of its own."""

    def getMessage(self) -> str:
        """The message with its arguments."""
        return printable(super().getMessage())


def log_to_screen() -> None:
    """Our own lines from the first process, warnings from every one."""
    prefix = f"[rank {rank()}] " if rank() else ""
    level = logging.INFO if is_first() else logging.WARNING
    logging.setLogRecordFactory(PrintableRecord)
    logging.basicConfig(level=logging.WARNING, format=f"{prefix}%(message)s", stream=sys.stderr)
    logging.getLogger("draftsmith").setLevel(level)
    # transformers imports torchao wherever there is one, and it tells of other machines' kernels
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of few letters shows the code of others
        sys.stdout.reconfigure(errors="backslashreplace")


def console() -> Console:
    """Console for tables; text is shown as it is, and BrokenPipeError reaches `main`."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - the error being handled; `main` knows the exit code

        def render(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for segment in super().render(*args, **kwargs):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return Plain(highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """A line on the standard output."""
    print(printable(text))  # noqa: T201


def nobody_reads() -> bool:
    """Whether the standard output is a pipe whose reader is gone, as `head` is; closes it then."""
    watch = select.poll()
    watch.register(1, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
        return False  # another pipe broke, which is a fault
    # or Python would complain of what is left when it flushes at its end
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True
