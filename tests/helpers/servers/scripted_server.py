"""A small OpenAI-compatible server that answers, or misbehaves, as a script has it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from draftsmith.data.generate.server_request import ServerRequest

REQUEST = ServerRequest("", "some-model", 0.0, 0, 1.0, 40, 3, concurrency=4, retries=3, timeout=20.0, first_wait=0.01)

Answer = tuple[int, dict[str, str], bytes] | None
Script = Callable[["Server", dict[str, Any]], Answer]


class Server(ThreadingHTTPServer):
    """Answers as `script` says; None breaks the connection."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.lock = threading.Lock()
        self.busy = self.busiest = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body, _lower(self.headers)))
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        answer = self.server.script(self.server, body)
        with self.server.lock:
            self.server.busy -= 1
        if answer is None:
            self.close_connection = True
            return
        status, headers, content = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def completion(text: Any, *, chat: bool = True, reason: str | None = "stop", **more: Any) -> Answer:
    answer = {"message": {"role": "assistant", "content": text, **more}} if chat else {"text": text}
    content = {"choices": [{**answer, "finish_reason": reason}], "usage": {"completion_tokens": 5}}
    return 200, {}, json.dumps(content).encode()


def status(code: int, text: str = "busy", **headers: str) -> Answer:
    return code, {name.replace("_", "-"): value for name, value in headers.items()}, text.encode()


def in_turn(*answer: Answer) -> Script:
    """One after the other, the last one for ever."""
    return lambda server, _: answer[min(len(server.asked), len(answer)) - 1]
