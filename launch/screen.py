"""Output of the commands: log level per process, tables, plain lines, broken pipes."""

from __future__ import annotations

import logging
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def log_to_screen() -> None:
    """Our own lines from the first process, warnings from every one."""
    rank = os.environ.get("RANK")
    prefix = f"[rank {rank}] " if rank else ""
    level = logging.INFO if rank in (None, "0") else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format=f"{prefix}%(message)s", stream=sys.stderr)
    logging.getLogger("draftsmith").setLevel(level)
    # transformers imports torchao wherever there is one, and it tells of other machines' kernels
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def console() -> Console:
    """Console for tables; lets BrokenPipeError reach `main`."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - the error being handled; `main` knows the exit code

    return Plain(highlight=False)


def say(text: str) -> None:
    """A line on the standard output."""
    print(text)  # noqa: T201


def nobody_reads() -> bool:
    """Whether the standard output is a pipe whose reader is gone, as `head` is; closes it then."""
    watch = select.poll()
    watch.register(1, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
        return False  # another pipe broke, which is a fault
    # or Python would complain of what is left when it flushes at its end
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True
