"""A server whose texts end by themselves: its ends are judged and counted once, whether it says them or keeps them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import make_drafter
from draftsmith.data.generate.server_request import ServerRequest
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.server.audit import audit_server
from draftsmith.eval.server.measure import Load, measure_blocks, plan
from draftsmith.eval.server.rows import Subject, server_rows
from helpers.servers import served_target
from helpers.servers.served_target import Engine, serving


@pytest.fixture
def ending(served: Backbone, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Request]]:
    """A token that some prompts' answers come upon, made the end of text; and those prompts."""
    prompts = [[n, n + 7, n + 2] for n in range(5, 85)]
    drawn = autoregressive(served, prompts, warper=Warper(0.7), max_new_tokens=24).tokens
    (end, _), *_ = Counter(token for each in drawn for token in {*each[1:]} - {each[0]}).most_common()
    met = [prompt for prompt, each in zip(prompts, drawn, strict=True) if end in each[1:] and each[0] != end]
    monkeypatch.setattr(Backbone, "eos_ids", (end,))
    return end, [Request(Prompt(str(n), "all", ("",), chat=False), ids, n) for n, ids in enumerate(met[:4])]


@pytest.mark.parametrize("says_it", [True, False])
def test_an_honest_server_is_lossless_however_it_tells_an_end(
    served: Backbone,
    ending: tuple[int, list[Request]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    says_it: bool,
) -> None:
    end, requests = ending
    hand_out = served_target._Handler._hand_out
    ended: list[bool] = []

    def without_the_end(
        self: Any, choice: Any, body: Any, prompt: list[int], tokens: list[int], *, chat: bool
    ) -> None:
        ended.append(tokens[-1] == end)
        hand_out(self, choice, body, prompt, tokens[:-1] if ended[-1] and not says_it else tokens, chat=chat)

    monkeypatch.setattr(served_target._Handler, "_hand_out", without_the_end)
    config = AuditConfig(tokens=500, prompts=4, max_new_tokens=24, batch=8, temperature=0.7)
    with serving(Engine(served)) as server:
        asked = ServerRequest(server.url, "small", 0.0, 0, 1.0, 24, 0, concurrency=4, retries=0, timeout=60.0)
        report = audit_server(served, requests, asked, config, tmp_path)
    assert report.verdict == "lossless", report.text()
    assert sum(ended) > 1, "texts that end by themselves are what is tested"
    assert not all(ended)


def test_steps_and_tokens_of_answers_that_end_are_counted_up_to_their_end(
    served: Backbone, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that accepts several tokens in front of the end counts them, and what a draft held behind it does not."""
    config = EvalConfig(temperatures=[1.0], max_new_tokens=24)
    monkeypatch.setattr(Backbone, "eos_ids", tuple(range(40, 70)))
    engine = Engine(served, make_drafter(served, noise=0.02, draft_length=3))
    with serving(engine) as server:
        asked = ServerRequest(server.url, "small", 0.0, 0, 1.0, 24, 0, concurrency=2, retries=0, timeout=60.0)
        plans = plan(len(prompts), [Load(concurrency=2)], config.temperatures, requests=12)
        blocks = measure_blocks(prompts, plans, [asked], config, tmp_path)
    (row,) = server_rows(blocks, Subject("small", prompts), config)
    tokens = [each.tokens for block in blocks for each in block.own.exchanges]
    assert len(set(tokens)) > 2, "answers of unlike length"
    assert min(tokens) < 24
    assert row["server"]["own"]["tokens"] == sum(tokens)
    assert row["steps"] == sum(block.own.counted.steps for block in blocks if block.own.counted is not None)
