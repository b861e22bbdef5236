"""The audit of a server: honest ones pass, with a drafter and without; broken ones do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_drafter
from draftsmith.data.generate.server_request import ServerRequest
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.eval.audit.plants import PLANTS
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.server.audit import ServerAudit, audit_server
from helpers.servers.served_target import Engine, ServedTarget, serving, without

CONFIG = AuditConfig(tokens=1_500, prompts=4, max_new_tokens=48, batch=8)


def audited(
    server: ServedTarget, served: Backbone, requests: list[Request], out: Path, config: AuditConfig = CONFIG
) -> ServerAudit:
    asked = ServerRequest(
        server.url, "small", 0.0, 0, 1.0, config.max_new_tokens, 0, concurrency=4, retries=0, timeout=60.0
    )
    report = audit_server(served, requests, asked, config, out)
    json.dumps(report.to_dict(), allow_nan=False)
    return report


@pytest.mark.parametrize("drafted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_honest_server_is_lossless(
    served: Backbone, requests: list[Request], tmp_path: Path, *, drafted: bool
) -> None:
    with serving(Engine(served, make_drafter(served, noise=0.05) if drafted else None)) as server:
        report = audited(server, served, requests, tmp_path)
    assert (report.verdict, report.failures, report.missing) == ("lossless", [], [])
    assert report.greedy is not None
    assert report.greedy.argmax == report.greedy.tokens == 4 * 48
    assert report.sampled is not None
    assert report.sampled.tested.rosenblatt.tokens >= 1_500
    assert report.sampled.nats == pytest.approx(report.sampled.expected_nats, abs=0.2)
    assert report.precision.tokens > 0
    assert report.precision.rms < 1e-5 < report.precision.rounding_rms
    assert server.asked[-1]["top_k"] == -1
    assert "p = " in report.text()


def test_a_wrong_greedy_token_is_found(served: Backbone, requests: list[Request], tmp_path: Path) -> None:
    """One of 29 tokens is the second best; what is sampled is right, and little of it is asked for."""
    few = CONFIG.model_copy(update={"tokens": 500})
    with serving(Engine(served, second_best=29)) as server:
        report = audited(server, served, requests, tmp_path, few)
    assert report.verdict == "NOT lossless"
    assert [each for each in report.failures if "greedy tokens are not the argmax" in each] == report.failures
    assert report.greedy is not None
    assert report.greedy.bugs == 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["heat", "rule"])
def test_a_wrong_distribution_is_found(served: Backbone, requests: list[Request], tmp_path: Path, bug: str) -> None:
    """Slightly too warm, or a speculative rule that draws from p where it should draw from the rest."""
    broken = Engine(served, heat=1.2)
    if bug == "rule":
        broken = Engine(served, make_drafter(served, noise=0.1), rule=PLANTS["fresh-draw"].make_rule)
    with serving(broken) as server:
        report = audited(server, served, requests, tmp_path)
    assert report.verdict == "NOT lossless", report.text()
    assert report.greedy is not None
    assert report.greedy.bugs == 0
    assert report.sampled is not None
    assert not report.sampled.control.failures
    assert all("of the real pair" in each for each in report.failures)
    if bug == "heat":
        assert report.sampled.nats > report.sampled.expected_nats


def test_another_model_is_found_by_its_log_probabilities(
    served: Backbone, requests: list[Request], tmp_path: Path
) -> None:
    """Weights that are off by little: greedy text hardly differs, and the tests of few tokens see nothing."""
    other = make_drafter(served, noise=0.01).backbone
    other.tokenizer = served.tokenizer
    few = CONFIG.model_copy(update={"tokens": 500})
    with serving(Engine(other)) as server:
        report = audited(server, served, requests, tmp_path, few)
    assert report.verdict == "NOT lossless"
    assert any("its log-probabilities are" in each and "other weights" in each for each in report.failures)


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"top_p": 0.6}, {"min_p": 0.2}))],
)
def test_filters_are_modelled_and_their_breach_is_found(
    served: Backbone, requests: list[Request], tmp_path: Path, filters: dict[str, Any]
) -> None:
    filtered = CONFIG.model_copy(update={"tokens": 500, "prompts": 1, **filters})
    with serving(Engine(served)) as server:
        assert audited(server, served, requests, tmp_path / "honest", filtered).verdict == "lossless"
        assert filters.items() <= server.asked[-1].items()
    with serving(Engine(served, unfiltered=True)) as server:
        report = audited(server, served, requests, tmp_path / "ignores", filtered)
    assert report.verdict == "NOT lossless"
    assert any("tokens have no probability under the filters: answer" in each for each in report.failures)


@pytest.mark.parametrize(
    ("hands_out", "missing", "verdict"),
    [
        (without("ids"), [], "lossless"),
        (without("prompt ids"), ["takes no token ids"], "lossless"),
        (without("completions"), ["takes no token ids", "no endpoint for texts"], "lossless"),
        (without("off"), ["refuses to be told that repetition_penalty is off"], "lossless"),
        (without("logprobs", "ids"), ["hands out no token ids", "no log-probabilities"], "undecided"),
        (without("ids", "names"), ["hands out no token ids", "no log-probabilities"], "undecided"),
        (
            without("ids", "names", "prompt ids"),
            ["no token ids, so it renders", "hands out no", "no log"],
            "undecided",
        ),
        (without("logprobs"), ["bf16 is assumed"], "lossless"),
    ],
)
def test_what_a_server_keeps_to_itself_is_said(
    served: Backbone, requests: list[Request], tmp_path: Path, hands_out: list[str], missing: list[str], verdict: str
) -> None:
    few = CONFIG.model_copy(update={"tokens": 500, "prompts": 2, "max_new_tokens": 16})
    with serving(Engine(served), hands_out) as server:
        report = audited(server, served, requests, tmp_path, few)
    assert report.verdict == verdict
    assert len(report.missing) == len(missing)
    for found, words in zip(report.missing, missing, strict=True):
        assert words in found
    assert report.greedy is not None
    assert (report.greedy.tokens, report.greedy.bugs) == (2 * 16, 0)
    if verdict == "undecided":
        assert report.why == "T = 0 passes, and T > 0 could not be tested"
        assert report.sampled is None


def test_texts_alone_still_tell_a_wrong_token(served: Backbone, requests: list[Request], tmp_path: Path) -> None:
    with serving(Engine(served, second_best=29), without("ids", "names")) as server:
        report = audited(server, served, requests, tmp_path)
    assert report.verdict == "NOT lossless"
    assert report.greedy is not None
    # behind the first wrong token nothing is known, and one that is close may be bf16's rounding
    assert report.greedy.bugs >= 1
    assert report.greedy.tokens <= 4 * 4 * report.greedy.bugs + 48 * (4 - report.greedy.bugs)
    assert "the text is not that of the argmax" in report.failures[0]


def test_a_hidden_template_is_said(
    served: Backbone, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's template adds a system turn of its own: known prompts are judged, unknown ones left out."""

    def adding(tokenizer: Any, messages: list[dict[str, str]], **how: Any) -> str:
        return render(tokenizer, [{"role": "system", "content": "be the fox"}, *messages], **how)

    from helpers.servers import served_target

    render = served_target.render_chat
    monkeypatch.setattr(served_target, "render_chat", adding)
    few = CONFIG.model_copy(update={"tokens": 500, "max_new_tokens": 16})
    with serving(Engine(served), without("prompt ids")) as server:
        report = audited(server, served, requests, tmp_path / "told", few)
    assert report.verdict == "lossless"
    assert any("rendered by another template" in each for each in report.missing)
    with serving(Engine(served), without("prompt ids", "ids")) as server:
        report = audited(server, served, requests, tmp_path / "hidden", few)
    assert report.verdict == "lossless"
    assert any("answers are left out: the server's template" in each for each in report.missing)


@pytest.mark.slow
def test_a_coarse_server_is_not_blamed(served: Backbone, requests: list[Request], tmp_path: Path) -> None:
    """In bf16: greedy tokens that are near-ties, and log-probabilities that are off by its rounding."""
    import copy

    import torch

    half = Backbone(copy.deepcopy(served.model).to(torch.bfloat16), name=served.name)
    with serving(Engine(half)) as server:
        report = audited(server, served, requests, tmp_path)
    assert report.verdict == "lossless", report.text()
    assert report.precision.rms is not None
    assert 0.3 < report.precision.rms / report.precision.rounding_rms < 3


def test_a_stopped_audit_goes_on(served: Backbone, requests: list[Request], tmp_path: Path) -> None:
    """What was answered is not asked for again, and the verdict's figures are those of an audit without a stop."""
    few = CONFIG.model_copy(update={"tokens": 500, "max_new_tokens": 16})
    with serving(Engine(served)) as server:
        server.fail_after = 20
        with pytest.raises(Exception, match="status 401"):
            audited(server, served, requests, tmp_path / "out", few)
        done = (tmp_path / "out" / "server-answers" / ".journal.jsonl").read_bytes().count(b"\n")
        before, server.fail_after = len(server.asked), None
        report = audited(server, served, requests, tmp_path / "out", few)
        again = len(server.asked) - before
        whole = audited(server, served, requests, tmp_path / "whole", few)
    assert done > 8
    assert again == 1 + 4 + 32 - done  # one request finds out what the server can
    assert replace(report, server="") == replace(whole, server="")
