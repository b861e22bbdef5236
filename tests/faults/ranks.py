"""The processes of one run on this machine, joined over gloo without a launcher: free to be stopped and killed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# a server that has torch imported already
_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(["draftsmith.trainers.distill", "draftsmith.eval.measure.probe"])


def start(world: int, body: Callable[..., None], out: Path, *given: Any) -> list[BaseProcess]:
    """`body(out, *given)` in so many processes of one group; its error is in `out/error-RANK`."""
    port = free_port()
    team = [_SPAWN.Process(target=_rank, args=(rank, world, port, body, out, given)) for rank in range(world)]
    for process in team:
        process.start()
    return team


def run(world: int, body: Callable[..., None], out: Path, *given: Any) -> None:
    """`start`, to an end without errors."""
    team = start(world, body, out, *given)
    for process in team:
        process.join()
    told = "".join(error(out, rank) for rank in range(world))
    assert [process.exitcode for process in team] == [0] * world, told


def error(out: Path, rank: int) -> str:
    """What ended a process: type and message, and the traceback; empty where nothing did."""
    path = out / f"error-{rank}"
    return path.read_text() if path.is_file() else ""


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def _rank(rank: int, world: int, port: int, body: Callable[..., None], out: Path, given: tuple) -> None:
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in group.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"})
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)
    out.mkdir(parents=True, exist_ok=True)
    try:
        body(out, *given)
    except BaseException as fault:  # noqa: BLE001 - the parent reads it
        (out / f"error-{rank}").write_text(f"{type(fault).__name__}: {fault}\n{traceback.format_exc()}")
        sys.exit(getattr(fault, "exit_code", 1))
