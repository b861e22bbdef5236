"""Servers of many habits: a right one is never called wrong, and a wrong one never lossless.

`RIGHT_ONES` and `WRONG_ONES` behaviours are drawn by their numbers: a few under `make test`, the others behind `slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from answering import answering
from conftest import make_drafter
from draftsmith.data.generate.server_request import ServerRequest
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure.requests import Request, make_requests
from draftsmith.eval.server.audit import ServerAudit, audit_server
from server_behaviours import FAULTS, RIGHT, Behaviour, Fault, Speaker, talking_target

CONFIG = AuditConfig(tokens=500, prompts=4, max_new_tokens=16, batch=8)
FEW, SHARE = 24, 40  # behaviours under `make test`, and of each slow case
RIGHT_ONES, WRONG_ONES = 1000, 400


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return talking_target(tmp_path_factory.mktemp("talking") / "target")


@pytest.fixture(scope="module")
def speaker(target: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    other = talking_target(tmp_path_factory.mktemp("talking") / "other", seed=64)
    return Speaker(target, other, make_drafter(target, noise=0.05))


@pytest.fixture(scope="module")
def asked(target: Backbone) -> list[Request]:
    words = ["the quick brown fox", "a lazy dog answers", "yes, no, perhaps", "and a fox asks the dog"]
    prompts = [Prompt(str(n), "", (text,), chat=bool(n % 2)) for n, text in enumerate(words)]
    return make_requests(target, prompts, EvalConfig(), later_turns=False)


def audited(
    speaker: Speaker, asked: list[Request], out: Path, behaviour: Behaviour, fault: Fault = RIGHT
) -> ServerAudit:
    with answering(behaviour.serve(speaker, fault)) as server:
        request = ServerRequest(server.url, "small", 0.0, 0, 1.0, 16, 0, concurrency=4, retries=0, timeout=60.0)
        return audit_server(speaker.target, asked, request, CONFIG, out)


def test_the_target_wanders_and_ends(target: Backbone, speaker: Speaker, asked: list[Request], tmp_path: Path) -> None:
    """What the behaviours stand on: greedy texts of many tokens, some of which end by themselves, and so do sampled ones."""
    report = audited(speaker, asked, tmp_path, Behaviour())
    assert (report.verdict, report.missing) == ("lossless", [])
    greedy = [tokens for (_, _, warper, _, _), tokens in speaker._kept.items() if warper.greedy]
    assert all(len(set(tokens)) > len(tokens) // 3 for tokens in greedy)
    assert 0 < sum(tokens[-1] in target.eos_ids for tokens in greedy if len(tokens) > 4) < len(greedy)
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
