"""Prompts for the small served target, and a target whose text wanders and ends behind servers of many habits."""

from __future__ import annotations

import pytest
from conftest import make_drafter
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.requests import Request, make_requests
from helpers.servers.server_behaviours import Speaker, talking_target


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


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return talking_target(tmp_path_factory.mktemp("talking") / "target")


@pytest.fixture(scope="session")
def speaker(talking: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    other = talking_target(tmp_path_factory.mktemp("talking") / "other", seed=64)
    return Speaker(talking, other, make_drafter(talking, noise=0.05))


@pytest.fixture(scope="session")
def asked(talking: Backbone, prompts: list[Prompt]) -> list[Request]:
    return make_requests(talking, prompts, EvalConfig(), later_turns=False)
