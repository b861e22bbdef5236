"""What `eval --server` and `audit --server` ask for, and what becomes of each verdict; no server is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.data.generate.server_request import ServerRequest
from draftsmith.errors import DraftsmithError, EnvironmentFailure
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.server.measure import Load
from draftsmith.launch.check.server import NamedServer, check_server
from draftsmith.launch.measure import server as serving
from draftsmith.launch.requests import AuditRequest, EvalRequest


def named(target: str | None = "folder", **more: Any) -> NamedServer:
    recipe: Any = SimpleNamespace(
        eval=EvalConfig(prompts="own.jsonl", temperatures=[0.0], max_new_tokens=77, seed=3),
        audit=AuditConfig(max_new_tokens=55, seed=9),
        target=SimpleNamespace(revision=None),
        data=SimpleNamespace(template_values=None),
    )
    values = {"server": ServerRequest("http://own", "small", 0.0, 0, 1.0, 77, 3), "baseline": None, "promise": None}
    return NamedServer(**{**values, "recipe": recipe, "target": target, **more})  # type: ignore[arg-type]


class Planned:
    """The verdict of an audit, and what was planned and measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
        self.loads: list[Load] = []
        self.subjects: list[Any] = []
        self.results: list[dict[str, Any]] = []
        self.prompts: list[str] = []
        self.audits = 0
        report = SimpleNamespace(verdict=verdict, why="no ids", to_dict=dict, text=str)

        def audited(*_: Any) -> Any:
            self.audits += 1
            return report

        monkeypatch.setattr(serving, "_audit", audited)
        monkeypatch.setattr(serving, "_fitted", lambda _named, prompts, _config: (prompts, None))
        monkeypatch.setattr(serving, "prompts_of", self._prompts_of)
        monkeypatch.setattr(serving, "generation_settings", lambda *_, **__: {})
        monkeypatch.setattr(serving.measure, "plan", lambda _count, loads, *_, **__: self.loads.extend(loads) or [])
        monkeypatch.setattr(serving.measure, "measure_blocks", lambda *_: [])
        monkeypatch.setattr(
            serving, "server_rows", lambda _blocks, subject, _config: self.subjects.append(subject) or []
        )
        monkeypatch.setattr(serving, "environment", dict)
        monkeypatch.setattr(serving, "write_json", lambda _path, content: self.results.append(content))
        for name in ("show_server", "say_where", "repeat_of", "_keep"):
            monkeypatch.setattr(serving, name, lambda *_: None)

    def _prompts_of(self, config: EvalConfig, _data: Any) -> list[str]:
        self.prompts.append(config.prompts)
        return ["a"]


def evaluated(request: EvalRequest, own: NamedServer) -> None:
    serving.run_server_eval(request, [], own, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdict", "target", "audit", "shown", "said"),
    [
        ("lossless", "folder", True, "lossless", None),
        ("NOT lossless", "folder", True, "NOT lossless", None),
        ("undecided", "folder", True, "not audited", "the audit is undecided: no ids"),
        ("lossless", None, True, "not audited", "no --target is named"),
        ("lossless", "folder", False, "not audited", None),
    ],
)
def test_rows_have_the_verdict_of_the_audit_where_it_decides(
    verdict: str,
    target: str | None,
    shown: str,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    audit: bool,
) -> None:
    planned = Planned(monkeypatch, verdict)
    evaluated(EvalRequest(server="http://own", model="small", out=tmp_path, audit=audit), named(target))
    (subject,), (results,) = planned.subjects, planned.results
    assert subject.verdict == shown
    assert planned.audits == (audit and target is not None)
    notes = results["server"]["notes"]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]
    assert results["settings"]["sweep"] == [], "a server has no say in it"


@pytest.mark.parametrize(
    ("concurrency", "rate", "loads"),
    [
        ((), (), [Load(concurrency=1)]),
        ((1, 8), (), [Load(concurrency=1), Load(concurrency=8)]),
        ((), (2.5,), [Load(rate=2.5)]),
        ((4,), (0.5, 2.0), [Load(concurrency=4), Load(rate=0.5), Load(rate=2.0)]),
    ],
)
def test_loads_are_those_that_are_asked_for(
    concurrency: tuple[int, ...],
    rate: tuple[float, ...],
    loads: list[Load],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Planned(monkeypatch, "lossless")
    request = EvalRequest(server="http://own", model="small", out=tmp_path, concurrency=concurrency, rate=rate)
    evaluated(request, named())
    assert planned.loads == loads
    assert planned.prompts == ["own.jsonl"]
    request.prompts = "others.jsonl"
    evaluated(request, named())
    assert planned.prompts[1] == "others.jsonl"


@pytest.mark.parametrize(
    ("verdict", "error"), [("lossless", None), ("NOT lossless", DraftsmithError), ("undecided", EnvironmentFailure)]
)
def test_an_audit_ends_as_its_verdict_says(
    verdict: str, error: type[Exception] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Planned(monkeypatch, verdict)
    request = AuditRequest(server="http://own", model="small", out=tmp_path)
    if error is None:
        serving.run_server_audit(request, named(), SimpleNamespace())  # type: ignore[arg-type]
        return
    with pytest.raises(error) as found:
        serving.run_server_audit(request, named(), SimpleNamespace())  # type: ignore[arg-type]
    assert type(found.value) is error


def test_an_audit_asks_for_its_own_lengths_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ServerRequest] = []
    report = SimpleNamespace(verdict="lossless", to_dict=dict, text=str)
    monkeypatch.setattr(serving, "_target", lambda _named: None)
    monkeypatch.setattr(serving, "make_requests", lambda *_, **__: [])
    monkeypatch.setattr(serving, "prompts_of", lambda *_: [])
    monkeypatch.setattr(serving, "audit_server", lambda _t, _r, server, *_: asked.append(server) or report)
    console: Any = SimpleNamespace(print=lambda *_, **__: None)
    serving._audit(named(), EvalConfig(), tmp_path, console)
    assert [(each.max_new_tokens, each.seed, each.url) for each in asked] == [(55, 9, "http://own")]


@pytest.mark.parametrize(
    ("request_of", "numbers"),
    [
        (lambda own: EvalRequest(**own), (77, 3, 1)),
        (lambda own: EvalRequest(**own, concurrency=(4, 2)), (77, 3, 4)),
        (lambda own: EvalRequest(**own, rate=(0.5,), concurrency=(4,)), (77, 3, 256)),
        (lambda own: EvalRequest(**own, rate=(0.5,), concurrency=(300,)), (77, 3, 300)),
        (lambda own: AuditRequest(**own, target="tiny"), (55, 9, 8)),
    ],
)
def test_what_is_asked_of_a_server_is_its_own_command_s(request_of: Any, numbers: tuple[int, int, int]) -> None:
    """Length, seed, and most requests at a time, of a measurement and of an audit."""
    values = {"eval.max_new_tokens": "77", "eval.seed": "3", "audit.max_new_tokens": "55", "audit.seed": "9"}
    found = check_server(request_of({"server": "http://own", "model": "small"}), [*values.items()])
    assert found is not None
    assert (found.server.max_new_tokens, found.server.seed, found.server.concurrency) == numbers
