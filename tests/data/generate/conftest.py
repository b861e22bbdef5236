"""A scripted server, and the tokenizer that all of this folder's tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.servers.scripted_server import Script, Server

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture
def serve() -> Iterator[Callable[[Script], Server]]:
    running: list[Server] = []

    def start(script: Script) -> Server:
        server = Server(script)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def tokenizer(chat_tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    from draftsmith.decoding.backbone.hub import load_tokenizer

    return load_tokenizer(str(chat_tokenizer_folder))
