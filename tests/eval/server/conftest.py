"""Prompts for the small served target."""

from __future__ import annotations

import pytest
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.requests import Request, make_requests


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    asked = ["the quick brown fox", "a lazy dog answers", "yes, no, perhaps", "and a fox asks the dog"]
    return [Prompt(str(n), "chats" if n % 2 else "texts", (text,), chat=bool(n % 2)) for n, text in enumerate(asked)]


@pytest.fixture(scope="session")
def requests(served: Backbone, prompts: list[Prompt]) -> list[Request]:
    return make_requests(served, prompts, EvalConfig(), later_turns=False)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
