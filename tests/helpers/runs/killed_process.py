"""A command in a process of its own, started at once and free to be killed."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess

# a server that has torch imported already
_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(["draftsmith.data.generate.decoded", "draftsmith.drafters.registry"])


def start(words: list[str]) -> BaseProcess:
    """`draftsmith WORDS`, silent; its exit code is that of the command."""
    process = _SPAWN.Process(target=_run, args=(words,))
    process.start()
    return process


def _run(words: list[str]) -> None:
    from draftsmith.launch.cli import main

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)
    sys.exit(main(words))
