"""`draftsmith compare`: several drafters and methods in one interleaved run, resumable, each with its verdict."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from draftsmith.data.prompt_rows import Prompt
from draftsmith.drafters.tuned_file import write_tuned
from draftsmith.eval.audit import audit as auditing
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.report.results import read_results
from draftsmith.launch.cli import main
from draftsmith.launch.measure import compare
from draftsmith.launch.measure.compare import _identity, _part, seen_in
from draftsmith.trainers.config import TargetConfig
from helpers.models.shallow_target import SHALLOW
from helpers.runs.heads_run import write_heads_run
from rich.console import Console

FEW = ["--eval.limit", "2", "--eval.max_new_tokens", "12", "--eval.repeats", "1", "--eval.temperatures", "0,1"]
FEW += [
    "--audit.tokens",
    "500",
    "--audit.sequences",
    "10000",
    "--audit.prompts",
    "2",
    "--audit.max_new_tokens",
    "16",
    "--audit.batch",
    "36",
]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs of untrained heads, one of them tuned, on rows that hold the prompts."""
    made = []
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "def add(a, b):\\n    return a + b\\n"}\n' * 3)
    for name, heads in (("two", 2), ("four", 4)):
        made.append(write_heads_run(tmp_path / name, heads, data__source=str(rows)))
    facts = {"temperature": 0.0, "batch": 1, "processor": "here"}
    write_tuned(made[0] / "drafter", {"drafter.medusa.nodes": "6"}, facts)
    return made


def compared(runs: list[Path], prompts: Path, out: Path, *more: str) -> int:
    words = ["compare", SHALLOW, "--drafters", *map(str, runs), "--method", "prompt-lookup"]
    return main([*words, "--prompts", str(prompts), "--out", str(out), *FEW, *more])


def test_all_in_one_table_and_what_is_not_alike_is_said(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out, enumerations = tmp_path / "rows.jsonl", tmp_path / "out", []
    real_enumerate = auditing.enumerate_decoding
    monkeypatch.setattr(
        auditing, "enumerate_decoding", lambda *a, **k: enumerations.append(a) or real_enumerate(*a, **k)
    )
    assert compared(runs, prompts, out) == 0
    assert len(enumerations) == 2  # one stands for both heads
    printed = " ".join(capfd.readouterr().out.split())
    results = read_results(out / "results.json")
    names = ["medusa of two", "medusa of four", "prompt-lookup"]
    assert [(row["method"], row["temperature"]) for row in results["rows"]] == [
        (name, temperature) for temperature in (0.0, 1.0) for name in names
    ]
    assert {row["verdict"] for row in results["rows"]} == {"lossless"}
    assert [row["nodes"] for row in results["rows"][:2]] == [6, 20]
    assert len({row["draft_length"] for row in results["rows"]}) > 1  # each drafts as it is set
    assert "two: tuned for T = 0.0, batch 1, here to tree of 6 nodes" in printed
    assert "! not tuned, so drafting as recipes have it: four" in printed
    assert "! 2 of 2 prompts stand in what two was trained on" in printed
    assert [each["path"] for each in results["draft"]["loaded"]] == [str(run / "drafter") for run in runs]
    assert results["repeat"][0].startswith(f"draftsmith compare {SHALLOW}")
    kept = (out / "answers.jsonl").read_text()
    written = Counter(json.loads(line)["method"] for line in kept.splitlines())
    assert written == dict.fromkeys([None, *names], 4)  # two prompts at two temperatures
    assert main(["report", str(out), "--markdown"]) == 0
    assert "medusa of four" in (out / "table.md").read_text()
    drawn = re.search(r'aria-label="Acceptance by depth".*?<desc>(.*?)</desc>', (out / "report.html").read_text())
    assert drawn is not None
    assert all(drawn[1].count(f"{name} at T = {heat}: ") == 1 for name in names for heat in (0, 1))

    # the same command takes what is there, and measures what is not
    (out / "temperature-1.json").unlink()
    (out / "audit-2.json").unlink()
    audits: list[object] = []
    real = compare.audit
    monkeypatch.setattr(compare, "audit", lambda *given, **how: audits.append(given[1]) or real(*given, **how))
    assert compared(runs, prompts, out) == 0
    again = read_results(out / "results.json")
    assert len(audits) == 1
    assert again["rows"][:3] == results["rows"][:3]
    anew = (out / "answers.jsonl").read_text().splitlines()
    assert (anew[:8], len(anew)) == (kept.splitlines()[:8], 16)
    assert [row["tau"] for row in again["rows"][3:]] == [row["tau"] for row in results["rows"][3:]]


def test_prompts_up_to_the_targets_context(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text keeps as many tokens as have room; with one more nothing begins, not even the audit."""
    room = 2048 - 14 - 10  # of the target's context, beside an answer and a draft
    for name, times in (("long", 1_000), ("short", 2)):
        line = {"text": f"# {name}\n" + "def add(a, b):\n    return a + b\n" * times}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "audit", lambda *_given, **_how: pytest.fail("audited"))
    words = ["compare", SHALLOW, "--method", "prompt-lookup", "--prompts", "short.jsonl,long.jsonl", *FEW[2:]]
    words += ["--eval.max_new_tokens", "14", "--eval.temperatures", "0"]
    assert main([*words, "--eval.prompt_tokens", str(room + 1)]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "the longest prompt has 2025 tokens; with an answer of 14 (eval.max_new_tokens) and a draft of 10" in said
    assert "does not fit the target's context of 2048; set --eval.prompt_tokens 2024 or less" in said
    assert main([*words, "--eval.prompt_tokens", str(room)]) == 2
    assert "an answer of 16 (audit.max_new_tokens)" in " ".join(capfd.readouterr().err.split())
    assert main([*words, "--eval.prompt_tokens", str(room), "--no-audit"]) == 0
    answers = [json.loads(line) for line in (tmp_path / "compare" / "answers.jsonl").read_text().splitlines()]
    assert [(each["set"], each["tokens"]) for each in answers] == [("short", 14), ("long", 14)] * 2


def test_a_prompt_is_answered_alike_in_any_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled too: neither other sets nor other prompts of its own move its random numbers, and sets keep their order."""
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k", "nq"):
        rows = [{"question": f"what is {n} and {name}?"} for n in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def answered(prompts: str, out: str, limit: int) -> dict[tuple[str, str, bool], tuple[object, ...]]:
        words = ["compare", SHALLOW, "--method", "prompt-lookup", "--prompts", prompts, "--out", out, "--no-audit"]
        words += ["--eval.limit", str(limit), "--eval.max_new_tokens", "14", "--eval.repeats", "1"]
        assert main([*words, "--eval.temperatures", "1"]) == 0
        lines = [json.loads(line) for line in (tmp_path / out / "answers.jsonl").read_text().splitlines()]
        return {(x["set"], x["id"], x["method"] is None): (x["text"], x["steps"]) for x in lines}

    both = answered("nq=nq.jsonl,gsm8k=gsm8k.jsonl", "both", 3)
    assert [key[:2] for key in both][:6] == [(name, str(n)) for name in ("nq", "gsm8k") for n in (1, 2, 3)]
    alone = answered("gsm8k=gsm8k.jsonl", "alone", 2)
    assert len(alone) == 4
    assert {key: both[key] for key in alone} == alone
    assert len({text for text, _ in both.values()}) > 6  # they were drawn, and not alike


def test_other_settings_are_another_comparison(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "rows.jsonl", tmp_path / "out"
    assert compared(runs[:1], prompts, out, "--no-audit", "--eval.temperatures", "0") == 0
    assert {row["verdict"] for row in read_results(out / "results.json")["rows"]} == {"not audited"}
    assert compared(runs[:1], prompts, out, "--no-audit", "--eval.temperatures", "0", "--eval.seed", "3") == 2
    assert "name another --out" in capfd.readouterr().err


def recipe(length: int, tokens: int = 500, name: str = "medusa", **target: Any) -> SimpleNamespace:
    drafter = SimpleNamespace(model_dump=lambda mode: {"name": name, "mode": mode})
    return SimpleNamespace(
        drafter=drafter,
        eval=EvalConfig(draft_length=length),
        audit=AuditConfig(tokens=tokens),
        target=TargetConfig(**target),
    )


def asked(*texts: list[int]) -> list[Request]:
    return [Request(Prompt(str(at), "all", ("",), chat=False), ids, at) for at, ids in enumerate(texts)]


SETTING: dict[str, Any] = {
    "recipes": [recipe(4), recipe(6)],
    "arms": {"medusa of a": "12", "medusa of b": "34"},
    "config": EvalConfig(),
    "requests": asked([1], [2, 3]),
    "target": "this",
    "machine": {"processor": "this", "threads": 2},
}


@pytest.mark.parametrize(
    "change",
    [
        {"recipes": [recipe(4), recipe(5)]},
        {"recipes": [recipe(6), recipe(4)]},
        {"recipes": [recipe(4), recipe(6, name="hydra")]},
        {"recipes": [recipe(4, tokens=600), recipe(6)]},
        {"arms": {"medusa of a": "12", "medusa of b": "35"}},
        {"arms": {"medusa of a": "12", "hydra of b": "34"}},
        {"config": EvalConfig(temperatures=[0.5])},
        {"config": EvalConfig(seed=3)},
        {"arms": {"medusa of b": "34", "medusa of a": "12"}},  # verdicts are kept by their places
        {"recipes": [recipe(4, dtype="bf16"), recipe(6, dtype="bf16")]},
        {"recipes": [recipe(4, quantization="int8"), recipe(6, quantization="int8")]},
        {"requests": asked([1], [2, 3], [4])},
        {"requests": asked([1], [2, 4])},
        {"target": "other"},
        {"machine": {"processor": "that", "threads": 2}},
        {"machine": {"processor": "this", "threads": 3}},
    ],
)
def test_what_a_comparison_hangs_on(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured with one thing otherwise, as the draft length of one of its drafters, is no part of it."""
    monkeypatch.setattr(compare, "target_hash", lambda target: f"hash of {target}")

    def identity(what: dict[str, Any]) -> dict[str, Any]:
        monkeypatch.setattr(compare, "environment", lambda: what["machine"])
        arms: Any = [SimpleNamespace(name=name, sha256=sha256) for name, sha256 in what["arms"].items()]
        pairs: Any = [SimpleNamespace(recipe=each) for each in what["recipes"]]
        return _identity(arms, pairs, what["target"], what["config"], what["requests"])

    unused = {"machine": SETTING["machine"] | {"cores": 1}, "config": EvalConfig(draft_length=9)}
    unused |= {"recipes": [recipe(4, path="elsewhere"), recipe(6)]}
    assert identity(SETTING | unused) == identity(SETTING)
    assert identity(SETTING | change) != identity(SETTING)


def test_each_temperature_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with its decimals; what is there is not measured again."""
    asked: list[list[float]] = []

    def evaluated(_target: Any, _arms: Any, _requests: Any, config: EvalConfig, **how: Any) -> dict[str, Any]:
        asked.append(config.temperatures)
        how["answers"].append({"text": "a"})
        return {"rows": [{"temperature": each} for each in config.temperatures]}

    monkeypatch.setattr(compare, "evaluate", evaluated)
    config, target = EvalConfig(temperatures=[0, 0.5, 0.25, 1]), cast(Any, None)

    def part(temperature: float) -> dict[str, Any]:
        return _part(target, [], [], config, temperature, tmp_path, Console(quiet=True))

    made = {each: part(each) for each in config.temperatures}
    assert asked == [[0], [0.5], [0.25], [1]]
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {f"temperature-{each}.json" for each in ("0", "0.5", "0.25", "1")}
    assert made[0.5] == {"rows": [{"temperature": 0.5}], "answers": [{"text": "a"}]}
    assert {each: part(each) for each in config.temperatures} == made
    assert len(asked) == 4


def test_a_method_around_a_drafter_stands_beside_it(runs: list[Path], tmp_path: Path) -> None:
    words = ["compare", SHALLOW, "--drafters", *map(str, runs), "--method", "prompt-lookup,suffix-hybrid", *FEW]
    few = ["--eval.temperatures", "0", "--no-audit", "--drafter.suffix.tokens", "4"]
    assert main([*words, *few, "--prompts", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]) == 0
    rows = read_results(tmp_path / "out" / "results.json")["rows"]
    assert [row["method"] for row in rows] == [
        "medusa of two",
        "suffix hybrid around two",
        "medusa of four",
        "suffix hybrid around four",
        "prompt-lookup",
    ]


def test_methods_draft_as_tune_found(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row of a method is its best; a flag of a drafter's puts tuned settings out of use, as elsewhere."""
    rows = [("prompt-lookup", {"drafter.lookup.tokens": "4"}), ("prompt-lookup", {"drafter.lookup.tokens": "9"})]
    content = {
        "measured": [{"method": name, "settings": each, "measured": [1.5, 1.2, 1.9]} for name, each in rows],
        "temperature": 0.0,
        "batch": 1,
        "environment": {"processor": "here"},
    }
    tuned, prompts, lengths = tmp_path / "tune.json", tmp_path / "rows.jsonl", []
    tuned.write_text(json.dumps(content))
    real = compare.evaluate
    monkeypatch.setattr(
        compare,
        "evaluate",
        lambda target, arms, *given, **how: (
            lengths.append(arms[-1].drafter.draft_length) or real(target, arms, *given, **how)
        ),
    )
    words = ["--tuned", str(tuned), "--no-audit", "--eval.temperatures", "0"]
    assert compared(runs[:1], prompts, tmp_path / "out", *words) == 0
    assert "prompt-lookup: tuned for T = 0.0, batch 1, here to copies at most 4 tokens" in " ".join(
        capfd.readouterr().out.split()
    )
    assert compared(runs[:1], prompts, tmp_path / "other", *words, "--drafter.lookup.tokens", "7") == 0
    assert lengths == [4, 7]
    tuned.write_text(
        json.dumps(content | {"measured": [{"method": "prompt-lookup", "settings": {"loop.steps": "4"}}]})
    )
    assert compared(runs[:1], prompts, tmp_path / "third", *words) == 2
    assert "tune.json" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "suffix-hybrid"], "--method names suffix-hybrid, which is made around a drafter"),
        (["--drafters", "a", "--tuned", "t.json"], "--tuned t.json is for methods without a drafter"),
        (["--method", "prompt-lookup", "--tuned", "gone.json"], "gone.json holds no measured settings"),
        ([], "nothing is named to compare"),
        (["--drafters", "a", "a"], "--drafters names a twice"),
        (["--method", "trained"], "--method names trained, which compare takes from no drafter by itself"),
        (["--drafters", "gone"], "gone"),
        (["--method", "prompt-lookup", "--prompts", "gone.jsonl"], "there is no prompt file gone.jsonl"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", SHALLOW, *words]) == 2
    assert said in capfd.readouterr().err


def test_prompts_are_found_in_rows_however_they_are_spelled(tmp_path: Path) -> None:
    prompts = [Prompt(str(n), "all", (text,), chat=True) for n, text in enumerate(['a \u2713\n"b"', "absent"])]
    for ascii in (True, False):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": f"so: {prompts[0].turns[0]}"}, ensure_ascii=ascii))
        assert seen_in(tmp_path / "rows.jsonl", prompts) == 1
    assert seen_in(tmp_path / "gone.jsonl", prompts) == 0


def test_prompts_are_counted_by_their_first_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four, one of which stands there twice; a later turn alone is none, and a file too large is not read."""
    turns = [("first one", "and then"), ("second one",), ("absent", "first one"), ("gone", "second one")]
    prompts = [Prompt(str(n), "all", each, chat=True) for n, each in enumerate(turns)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "first one"}\n' * 2 + '{"text": "the second one"}\n')
    monkeypatch.setattr(compare, "_MOST_READ", rows.stat().st_size)
    assert seen_in(rows, prompts) == 2
    monkeypatch.setattr(compare, "_MOST_READ", rows.stat().st_size - 1)
    assert seen_in(rows, prompts) == 0
