"""An engine of this process: vLLM's HTTP interface for hidden states, and its files, by the real target.

What it computes is the target's own; a `fault` spoils it in one of the ways that real engines do.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from draftsmith.decoding.backbone.hidden_states import last_norm
from draftsmith.trainers.loop.objective import Batch
from helpers.models.random_models import hidden_states
from helpers.servers.server_thread import answering
from safetensors.torch import save_file
from torch import Tensor

States = Callable[[Sequence[int]], Tensor]
"""Token ids to the states [T, N, H] of every layer, the last one in front of the norm."""


@cache
def norm_of(model: Any) -> Any:
    """The norm behind a model's last layer."""
    return last_norm(model.get_decoder())


def all_states(model: Any, batch: Batch) -> Tensor:
    """Every state of a batch of one row, [S, N, H], by the model itself."""
    before: list[Tensor] = []
    hook = norm_of(model).register_forward_pre_hook(lambda _module, given: before.append(given[0]))
    try:
        states = hidden_states(model.get_decoder(), batch)
    finally:
        hook.remove()
    return torch.stack([*states[:-1], before[-1]])[:, 0].transpose(0, 1)


def alone(model: Any) -> States:
    """A document by itself, as engines compute it."""

    def states(ids: Sequence[int]) -> Tensor:
        ids_1T = torch.tensor([list(ids)])
        positions = torch.arange(len(ids))[None]
        return all_states(model, {"input_ids": ids_1T, "documents": torch.zeros_like(ids_1T), "positions": positions})

    return states


@dataclass
class Answer:
    """What is about to be sent and written."""

    ids: list[int]
    states_TNH: Tensor
    body: dict[str, Any]
    status: int = 200
    written: bool = True
    tensors: dict[str, Tensor] = field(default_factory=dict)


Fault = Callable[["Engine", Answer], None]


class Engine(ThreadingHTTPServer):
    """Serves one model; `fault` is asked about every answer to a completion."""

    daemon_threads = True

    def __init__(
        self,
        model: Any,
        shared: Path,
        layers: Sequence[int],
        *,
        name: str = "the-target",
        room: int = 4096,
        states: States | None = None,
        fault: Fault | None = None,
        fingerprint: str = "vllm-0.32.0-abc",
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.shared, self.layers = model, shared, list(layers)
        self.name, self.room, self.fault, self.fingerprint = name, room, fault, fingerprint
        self.states = states or alone(model)
        self.eos: set[int] = set()
        """Tokens behind which it writes no more."""
        self.asked: list[list[int]] = []
        self.lock, self.compute = threading.Lock(), threading.Lock()
        self.busy = self.busiest = 0
        self.delay, self.locks = 0.01, True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        served = {"id": self.server.name, "max_model_len": self.server.room}
        self._send(200, {"object": "list", "data": [served]})

    def do_POST(self) -> None:
        engine = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = body["prompt"]
        assert isinstance(ids, list)
        if len(ids) + body["max_tokens"] > engine.room:
            self._send(400, {"message": f"maximum context length is {engine.room} tokens"})
            return
        with engine.lock:
            number = len(engine.asked)
            engine.asked.append(ids)
            engine.busy += 1
            engine.busiest = max(engine.busiest, engine.busy)
        written = self._written(ids, body)
        answer = self._answer([*ids, *written[:-1]], bool(body.get("prompt_logprobs")))
        if body.get("kv_transfer_params", {}).get("include_output_tokens"):
            choice = answer.body["choices"][0]
            choice["prompt_token_ids"], choice["token_ids"] = ids, written
        path = engine.shared / f"{number}-{threading.get_ident()}.safetensors"
        answer.body["kv_transfer_params"] = {"hidden_states_path": str(path)}
        if engine.fault is not None:
            engine.fault(engine, answer)
        engine.shared.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock" if engine.locks else os.devnull, os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with engine.lock:
                engine.busy -= 1
            self._send(answer.status, answer.body)
            self.wfile.flush()
            self._write(path, answer)
        finally:
            os.close(lock)
        if answer.status != 200:
            Path(f"{path}.lock").unlink()

    def _written(self, ids: list[int], body: dict[str, Any]) -> list[int]:
        """What the model says behind the ids, token by token; nothing where its states alone are asked for."""
        engine = self.server
        written: list[int] = []
        if not body.get("kv_transfer_params", {}).get("include_output_tokens"):
            assert body["max_tokens"] == 1
            return written
        draws = torch.Generator().manual_seed(body["seed"])
        while len(written) < body["max_tokens"] and not set(written) & engine.eos:
            with engine.compute, torch.no_grad():
                last_H = norm_of(engine.model)(engine.states([*ids, *written])[-1, -1])
                logits_V = engine.model.get_output_embeddings()(last_H).float()
            greedy = not body["temperature"]
            law_V = torch.softmax(logits_V / (body["temperature"] or 1.0), -1)
            written.append(int(logits_V.argmax() if greedy else torch.multinomial(law_V, 1, generator=draws)))
        return written

    def _answer(self, ids: list[int], logprobs: bool) -> Answer:
        engine = self.server
        with engine.compute, torch.no_grad():
            states = engine.states(ids)
            normed = norm_of(engine.model)(states[:, -1])
            logits = engine.model.get_output_embeddings()(normed).float()
        choice: dict[str, Any] = {"prompt_token_ids": ids, "token_ids": [int(logits[-1].argmax())], "text": "x"}
        if logprobs:
            own = logits.log_softmax(-1)
            listed = [{str(token): {"logprob": float(own[t, token])}} for t, token in enumerate(ids[1:])]
            choice["prompt_logprobs"] = [None, *listed]
        body = {"choices": [choice], "system_fingerprint": engine.fingerprint}
        return Answer(ids, states[:, engine.layers], body)

    def _write(self, path: Path, answer: Answer) -> None:
        """Behind the answer, as the engine's writer does; whoever reads too early finds half a file."""
        if not answer.written or answer.status != 200:
            return
        path.write_bytes(b"\0" * 100)
        threading.Event().wait(self.server.delay)
        tensors = {"hidden_states": answer.states_TNH.contiguous(), "token_ids": torch.tensor(answer.ids)}
        save_file(tensors | answer.tensors, path)

    def _send(self, status: int, content: object) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def running(*given: Any, **how: Any) -> Iterator[Engine]:
    """An engine that answers until the block ends; arguments as for `Engine`."""
    with answering(Engine(*given, **how)) as engine:
        yield engine


# ---- faults ------------------------------------------------------------------------------------


def short(_engine: Engine, answer: Answer) -> None:
    """What the prefix cache holds is left out."""
    answer.states_TNH, answer.ids = answer.states_TNH[1:], answer.ids[1:]


def other_ids(_engine: Engine, answer: Answer) -> None:
    """The file of another request of the same length."""
    answer.ids = [*answer.ids[:-1], answer.ids[-1] + 1]


def other_prompt(_engine: Engine, answer: Answer) -> None:
    """Cut by truncate_prompt_tokens."""
    answer.body["choices"][0]["prompt_token_ids"] = answer.ids[:-1]


def early(engine: Engine, answer: Answer) -> None:
    """Every state one layer early."""
    answer.states_TNH = engine.states(answer.ids)[:, [each - 1 for each in engine.layers]]


def late(engine: Engine, answer: Answer) -> None:
    """Every state but the last one layer late."""
    count = max(engine.layers)
    answer.states_TNH = engine.states(answer.ids)[:, [min(count, each + 1) for each in engine.layers]]


def early_last(engine: Engine, answer: Answer) -> None:
    """The last layer's state is that of the layer before."""
    answer.states_TNH = answer.states_TNH.clone()
    answer.states_TNH[:, -1] = engine.states(answer.ids)[:, -2]


def normed(engine: Engine, answer: Answer) -> None:
    """The last state is handed out behind the norm."""
    answer.states_TNH = answer.states_TNH.clone()
    with torch.no_grad():
        answer.states_TNH[:, -1] = norm_of(engine.model)(answer.states_TNH[:, -1])


def not_finite(_engine: Engine, answer: Answer) -> None:
    """As float16 overflows."""
    answer.states_TNH = answer.states_TNH.clone()
    answer.states_TNH[0, 0, 0] = float("nan")


def patience(fault: str) -> float:
    """Seconds to wait for an answer, by the name of the server's fault: few where it is that none comes."""
    return 1.0 if no_file.__name__ in fault else 60.0


def no_file(_engine: Engine, answer: Answer) -> None:
    """The writer has failed."""
    answer.written = False


def refused(_engine: Engine, answer: Answer) -> None:
    """A bad request."""
    answer.status, answer.body = 400, {"message": "this model's maximum context length is 7 tokens"}


def broken(_engine: Engine, answer: Answer) -> None:
    """The engine's worker has died."""
    answer.status, answer.body = 500, {"message": "EngineDeadError"}


def another(_engine: Engine, answer: Answer) -> None:
    """Restarted as something else."""
    answer.body["system_fingerprint"] = "vllm-0.33.0-xyz"


def no_states(_engine: Engine, answer: Answer) -> None:
    """A server without the connector."""
    del answer.body["kv_transfer_params"]


def elsewhere(_engine: Engine, answer: Answer) -> None:
    """A path that is none of the shared folder's."""
    answer.body["kv_transfer_params"]["hidden_states_path"] = "/etc/hosts.safetensors"


def fewer_layers(_engine: Engine, answer: Answer) -> None:
    """Started for other layers."""
    answer.states_TNH = answer.states_TNH[:, 1:]
