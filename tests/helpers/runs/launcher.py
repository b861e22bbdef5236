"""Real launches for tests: `accelerate launch` with the package's own configurations, on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import draftsmith

CONFIGS = Path(draftsmith.__file__).parent / "launch" / "configs"


def launched(config: str, *words: str, processes: int = 2) -> str:
    """What `accelerate launch` said; so many processes, or one with `cpu`."""
    done = ended(config, *words, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def ended(config: str, *words: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """`launched`, however it ends."""
    process = launching(config, *words, processes=processes, to=subprocess.PIPE)
    said, warned = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, said, warned)


def launching(
    config: str, *words: str, processes: int = 2, port: int | None = None, to: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """`accelerate launch` that has begun; what it says goes `to` pipes, which somebody has to read, or nowhere."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / f"{config}.yaml"),
        *(["--num_processes", str(processes)] if config != "cpu" else []),
        *(["--main_process_port", str(port)] if port is not None else []),
        *words,
    ]
    on_cpu = {"DS_ACCELERATOR": "cpu"} if config.startswith("zero") else {"ACCELERATE_USE_CPU": "true"}
    # DeepSpeed calls what torch is about to rename, hundreds of times
    environment = {**os.environ, **on_cpu, "PYTHONWARNINGS": "ignore::FutureWarning"}
    return subprocess.Popen(command, stdout=to, stderr=to, text=True, env=environment)


def train_each(folder: str, recipes: list[str]) -> int:
    """The body of a process that trains one recipe after another: a launch costs seconds."""
    from draftsmith.launch.cli import main

    for recipe in recipes:
        code = main(["train", recipe, "--out", f"{folder}/{Path(recipe).stem}"])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(train_each(sys.argv[1], sys.argv[2:]))
