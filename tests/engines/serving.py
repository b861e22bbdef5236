"""vLLM's own HTTP server, started as a user starts it, by the Python of its environment.

`python -m vllm.entrypoints.openai.api_server` stands for `vllm serve`, which the CPU build's wheel cannot
start: its metadata has another name. Read next: `test_server.py`, which measures and audits it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.engine import INSIDE, PLACE

NAME = "tiny"
ROOM = 512
# nothing from the hub, no word to anybody, and cores that are shared with the tests
ALONE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(INSIDE),
}
MENDED = ("--worker-extension-cls", "mended.Mended")


@contextmanager
def serving(
    folder: Path, model: str, speculative: Mapping[str, Any] | None = None, more: tuple[str, ...] = MENDED
) -> Iterator[str]:
    """The address of a server of `model` in fp32; `more` words of its command line; its log lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    words = ["--model", model, "--served-model-name", NAME, "--port", str(port), "--dtype", "float32"]
    words += ["--max-model-len", str(ROOM), "--max-num-seqs", "16", "--enforce-eager", *more]
    words += [] if speculative is None else ["--speculative-config", json.dumps(speculative)]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(Path(PLACE) / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ALONE},
            start_new_session=True,  # its engine is a process of its own, and ends with it
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; raises RuntimeError with the end of its log if it ends before."""
    while True:
        try:
            urllib.request.urlopen(address).close()
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None:
                end = "\n".join(log.read_text().splitlines()[-30:])
                raise RuntimeError(f"the server ended; {log} ends with\n{end}") from None
            time.sleep(0.5)
        else:
            return
