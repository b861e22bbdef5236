"""llama.cpp's own server, started as a user starts it, and asked for greedy text by token ids.

Read next: `test_llama_cpp.py`, which converts drafters for it and serves them.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines.engine import MOST_TOKENS, PLACE
from engines.measured import Prompts
from engines.serving import free_port, wait_for
from torch import Tensor

SERVER = Path(PLACE) / "llama.cpp" / "build" / "bin" / "llama-server"


@dataclass(frozen=True)
class Drafted:
    """What the server wrote, and what it counts."""

    tokens: list[list[int]]
    drafted: int
    accepted: int


def converted(place: Path, *words: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields and tensors of the GGUF that the converter makes."""
    job = Path(__file__).with_name("llama_cpp_job.py")
    python, source = Path(PLACE) / "bin" / "python", Path(PLACE) / "llama.cpp"
    done = subprocess.run([python, job, source, place, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(place.with_suffix(".npz")) as tensors:
        found = {name: torch.from_numpy(tensors[name]) for name in tensors.files}
    return json.loads(place.with_suffix(".json").read_text()), found


@contextmanager
def llama_server(log: Path, model: Path, *words: str) -> Iterator[str]:
    """The address of a server of a GGUF file; `words` of its command line; what it prints goes to `log`."""
    port = free_port()
    command = [SERVER, "-m", model, "--port", str(port), "-c", "1024", "-np", "1", "-t", "2", "--offline", *words]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def answered(address: str, prompts: Prompts, most_tokens: int = MOST_TOKENS) -> Drafted:
    """All prompts at T = 0, one after another."""
    found = Drafted([], 0, 0)
    for prompt in prompts:
        # the end of text ends an answer here as there
        asked = {"prompt": list(prompt), "n_predict": most_tokens, "temperature": 0, "return_tokens": True}
        request = urllib.request.Request(
            f"{address}/completion",
            json.dumps({**asked, "cache_prompt": False}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            said = json.load(reply)
        timings = said["timings"]
        found = Drafted(
            [*found.tokens, said["tokens"]],
            found.drafted + timings.get("draft_n", 0),
            found.accepted + timings.get("draft_n_accepted", 0),
        )
    return found
