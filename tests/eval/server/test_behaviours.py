"""Servers of many habits: a right one is never called wrong, and a wrong one never lossless.

`RIGHT_ONES` and `WRONG_ONES` behaviours are drawn by their numbers: a few under `make test`, the others behind `slow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.generate.server_request import ServerRequest
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.server.audit import ServerAudit, audit_server
from helpers.servers.cached_audits import judged_once
from helpers.servers.server_behaviours import FAULTS, RIGHT, Behaviour, Fault, Speaker
from helpers.servers.server_thread import answering

CONFIG = AuditConfig(tokens=500, prompts=4, max_new_tokens=16, batch=8)
FEW, SHARE = 8, 40  # behaviours under `make test`, and of each slow case
RIGHT_ONES, WRONG_ONES = 1000, 400


@pytest.fixture(scope="module", autouse=True)
def _once() -> Iterator[None]:
    with judged_once():
        yield


def audited(
    speaker: Speaker, asked: list[Request], out: Path, behaviour: Behaviour, fault: Fault = RIGHT
) -> ServerAudit:
    with answering(behaviour.serve(speaker, fault)) as server:
        request = ServerRequest(server.url, "small", 0.0, 0, 1.0, 16, 0, concurrency=4, retries=0, timeout=60.0)
        return audit_server(speaker.target, asked, request, CONFIG, out)


def test_the_target_wanders_and_ends(
    talking: Backbone, speaker: Speaker, asked: list[Request], tmp_path: Path
) -> None:
    """What the behaviours stand on: greedy texts of many tokens, some of which end by themselves, and so do sampled ones."""
    report = audited(speaker, asked, tmp_path, Behaviour())
    assert (report.verdict, report.missing) == ("lossless", [])
    greedy = [tokens for (_, _, warper, _, _), tokens in speaker._kept.items() if warper.greedy]
    assert all(len(set(tokens)) > len(tokens) // 3 for tokens in greedy)
    assert 0 < sum(tokens[-1] in talking.eos_ids for tokens in greedy if len(tokens) > 4) < len(greedy)
    assert report.sampled is not None


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_where_all_is_handed_out(
    speaker: Speaker, asked: list[Request], tmp_path: Path, name: str
) -> None:
    report = audited(speaker, asked, tmp_path, Behaviour(), FAULTS[name])
    if name == "cached answers":
        assert report.verdict == "undecided"
        assert "repeat others to the same prompt, word for word" in (report.why or "")
    else:
        assert report.verdict == "NOT lossless", report.text()


CHATS = {
    "completions": False,
    "ids": None,
    "logprobs": "none",
    "prompt_told": None,
}  # the least that a server can hand out
TEXTS = {"ids": None, "logprobs": "none"}


@pytest.mark.parametrize(
    ("habits", "words"),
    [
        (CHATS | {"thoughts": ("reasoning",)}, "thoughts or calls of tools stand apart"),
        (CHATS | {"thoughts": ("reasoning_details",)}, "thoughts or calls of tools stand apart"),
        (CHATS | {"calls": True}, "thoughts or calls of tools stand apart"),
        (TEXTS | {"text": "stripped"}, "white space at their ends"),
        (TEXTS | {"text": "in front"}, "something stands in front of them"),
        (TEXTS | {"text": "escaped"}, "characters are written otherwise"),
        (TEXTS | {"text": "no beginning"}, "their beginning is missing"),
        (TEXTS | {"text": "behind"}, "they go on behind the target's end"),
        (TEXTS | {"text": "behind", "stop": "o"}, "something stands behind them"),
        (TEXTS | {"text": "empty"}, "they are empty"),
        (TEXTS | {"stop": "a"}, "they end where the target goes on"),
        (CHATS | {"system": "be the fox"}, "answers are left out: the server's template"),
        (
            {"thoughts": ("reasoning",), "completions": False, "ids": "names", "apart_ids": False},
            "some of their tokens",
        ),
        ({"thoughts": ("reasoning",), "completions": False, "ids": "names", "usage": "none"}, "some of their tokens"),
        (
            {"thoughts": ("reasoning",), "completions": False, "apart_ids": False, "usage": "none"},
            "some of their tokens",
        ),
        ({"stop": "a"}, "answers were ended by 'a', which are no ends of the target"),
        ({"stop": "a", "stop_told": False}, "end where the target goes on, and the server does not say by what"),
        ({"end_told": False, "usage": "none"}, None),
        ({"end_told": False}, None),
        (
            {"end_told": False, "usage": "none", "stop": "a", "stop_told": False},
            "sampled answers do not say what ended",
        ),
        ({"logprobs": "zeros"}, None),
        ({"logprobs": "behind"}, None),
        ({"thoughts": ("reasoning",), "completions": False}, None),
        ({"refuses": ("min_p", "return_token_ids")}, "refuses to be told that min_p is off"),
        ({"cap": 5}, None),
        ({"ending": 3, "ids": "names"}, None),
    ],
)
def test_a_right_server_of_one_habit(
    speaker: Speaker, asked: list[Request], tmp_path: Path, habits: dict[str, Any], words: str | None
) -> None:
    report = audited(speaker, asked, tmp_path, Behaviour(**habits))
    assert report.verdict != "NOT lossless", report.text()
    assert report.failures == []
    if words is None:
        assert report.verdict == "lossless", report.text()
    else:
        assert any(words in note for note in report.missing), report.missing


@pytest.mark.parametrize(
    ("habits", "fault", "verdict", "why"),
    [
        (TEXTS, "second best", "NOT lossless", None),
        (TEXTS | {"text": "stripped"}, "second best", "NOT lossless", None),
        # of texts that begin otherwise nobody can say why
        (TEXTS, "another model", "undecided", "no greedy answer could be tested"),
        # a chat whose prompt is known by its number of tokens alone
        (CHATS, "second best", "undecided", "another template of the same length"),
        ({"refuses": ("repetition_penalty",)}, "too warm", "undecided", "refuses to be told that repetition_penalty"),
        ({"completions": False, "takes_ids": False}, "too warm", "NOT lossless", None),
        ({"logprobs": "zeros"}, "another model", "NOT lossless", None),
    ],
)
def test_a_wrong_server_of_one_habit(
    speaker: Speaker,
    asked: list[Request],
    tmp_path: Path,
    habits: dict[str, Any],
    fault: str,
    verdict: str,
    why: str | None,
) -> None:
    report = audited(speaker, asked, tmp_path, Behaviour(**habits), FAULTS[fault])
    assert report.verdict == verdict, report.text()
    assert why is None or why in (report.why or "")


def _shares(count: int) -> list[object]:
    slow = [pytest.param(range(at, min(at + SHARE, count)), marks=pytest.mark.slow) for at in range(FEW, count, SHARE)]
    return [range(FEW), *slow]


@pytest.mark.parametrize("numbers", _shares(RIGHT_ONES), ids=lambda each: f"{each.start}-{each.stop}")
def test_a_right_server_is_never_called_wrong(
    speaker: Speaker, asked: list[Request], tmp_path: Path, numbers: range
) -> None:
    found = {}
    for number in numbers:
        behaviour = Behaviour.drawn(number)
        report = audited(speaker, asked, tmp_path / str(number), behaviour)
        found[number] = report.verdict
        assert report.verdict != "NOT lossless", f"{number}: {behaviour}\n{report.text()}"
        assert (report.why is not None) == (report.verdict == "undecided")
    # nor is everything undecided
    assert {"lossless", "undecided"} <= set(found.values()), found


@pytest.mark.parametrize("numbers", _shares(WRONG_ONES), ids=lambda each: f"{each.start}-{each.stop}")
def test_a_wrong_server_never_passes(speaker: Speaker, asked: list[Request], tmp_path: Path, numbers: range) -> None:
    found = {}
    for number in numbers:
        name = list(FAULTS)[number % len(FAULTS)]
        behaviour = Behaviour.drawn(10_000 + number)
        report = audited(speaker, asked, tmp_path / str(number), behaviour, FAULTS[name])
        found[number] = report.verdict
        assert report.verdict != "lossless", f"{number}: {name}, {behaviour}\n{report.text()}"
    assert "NOT lossless" in found.values()
