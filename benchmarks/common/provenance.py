"""Where a script's figures come from: its call, the commit, the machine, the weights.

Read next: `records.py`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.records import FOLDER, Record, Weights, write_record
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.eval.measure.environment import drafter_hash, environment

ONE_SEED = "what another seed changes, which `--seeds 0,1,2` measures"


def record_of(args: argparse.Namespace, **values: Any) -> Record:
    """A script's record: what it gives, and what can be read off the call and the machine."""
    machine = environment()
    versions = {"python": machine["python"], **{name: each for name, each in machine["versions"].items() if each}}
    seeds = getattr(args, "seeds", [])
    return Record.model_validate(
        {
            "origin": "measured",
            "command": call(),
            "commit": commit(),
            "date": date.today().isoformat(),
            "versions": versions,
            "hardware": hardware(machine),
            **({"needs": ["a CUDA device"]} if str(getattr(args, "device", "")).startswith("cuda") else {}),
            "seeds": len(seeds),
            "seed_values": seeds,
            **({"tells_apart": ONE_SEED} if len(seeds) == 1 else {}),
            **values,
        }
    )


def call() -> str:
    """The command that was typed, less where its record goes."""
    given, arguments = list(sys.argv[1:]), []
    while given:
        argument = given.pop(0)
        if argument == "--json":
            given.pop(0)
        elif not argument.startswith("--json="):
            arguments.append(argument)
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def commit() -> str:
    """The checkout's commit; "+" behind it says that files differ from it.

    Of a copy without its history the caller knows it, and says so in DRAFTSMITH_COMMIT.
    """
    here = FOLDER.parent
    if told := os.environ.get("DRAFTSMITH_COMMIT", ""):
        return told
    if shutil.which("git") is None:  # a machine that was lent, with a copy of the files
        return "unknown"
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def hardware(machine: Mapping[str, Any]) -> str:
    """Processor or devices, cores, threads, memory."""
    where = ", ".join(machine["devices"]) or machine["processor"]
    return f"{where}, {machine['cores']} cores, {machine['threads']} threads used, {machine['memory_gb']:.0f} GB"


def target_weights(path: str) -> Weights:
    """A target by the last part of its name and the hash of its config and weights."""
    folder = Path(embedded_target() if path == "tiny" else path)
    return Weights(name=folder.name, sha256=drafter_hash(folder))


def drafter_weights(folders: Mapping[str, Path]) -> list[Weights]:
    """Drafters by name, with the hashes of their folders."""
    return [Weights(name=name, sha256=drafter_hash(folder)) for name, folder in folders.items()]


def finish(record: Record, path: Path | None) -> None:
    """Write the record where `--json` asks for it."""
    if path is not None:
        write_record(path, record)
