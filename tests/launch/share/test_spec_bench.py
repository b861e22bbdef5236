"""Answers as Spec-Bench's scripts read them, and theirs as our results: the same figures on both sides."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from statistics import mean
from typing import Any

import jsonschema
import pytest
from conftest import make_drafter, make_target
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.report.answers import as_lines
from draftsmith.eval.report.results import read_results, schema
from draftsmith.launch.cli import main

Captured = pytest.CaptureFixture[str]
CONFIG = EvalConfig(
    max_new_tokens=14, draft_length=3, sweep=[], repeats=2, temperatures=[0.0, 1.0], prompts="spec-bench"
)
TURNS = [("81", "writing", 0), ("81", "writing", 1), ("161", "rag", 0)]


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results and answers of a real evaluation: a question of two turns and one of one."""
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl\n"] * 5, 300)
    prompts = [(Prompt(name, category, ("", ""), chat=True), turn) for name, category, turn in TURNS]
    requests = [Request(prompt, [5 + at, 7, 11], at, turn) for at, (prompt, turn) in enumerate(prompts)]
    answers: list[dict[str, Any]] = []
    results = evaluate(
        target, [Arm("drafts (3)", make_drafter(target), "lossless")], requests, CONFIG, answers=answers
    )
    return json.loads(json.dumps(results)), answers


@pytest.fixture
def run(measured: tuple[dict[str, Any], list[dict[str, Any]]], tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(measured[0]))
    (folder / "answers.jsonl").write_text(as_lines(measured[1]))
    return folder


def by_their_arithmetic(path: Path, categories: set[str]) -> tuple[float, float]:
    """Tokens per second, the mean over questions, and the mean of all steps of all questions."""
    choices = [json.loads(line) for line in path.read_text().splitlines()]
    mine = [each["choices"][0] for each in choices if each["category"] in categories]
    speeds = [sum(each["new_tokens"]) / sum(each["wall_time"]) for each in mine]
    return mean(speeds), mean(length for each in mine for length in each["accept_lengths"])


def test_their_scripts_find_our_figures(run: Path, measured: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    out = run.parent / "out"
    assert main(["convert-results", str(run), "--out", str(out)]) == 0
    names = [f"{who}-temperature-{heat}.jsonl" for heat in ("0.0", "1.0") for who in ("drafts-3", "plain-decoding")]
    assert {path.name for path in out.iterdir()} == set(names)
    for row, name in zip(measured[0]["rows"], names[::2], strict=True):
        own = [each for each in measured[1] if each["method"] and each["temperature"] == row["temperature"]]
        lines = [json.loads(line) for line in (out / name).read_text().splitlines()]
        assert [(line["question_id"], line["category"], line["audit"]) for line in lines] == [
            (81, "writing", "lossless"),
            (161, "rag", "lossless"),
        ]
        first = lines[0]["choices"][0]
        assert first["new_tokens"] == [each["tokens"] for each in own[:2]]
        assert [len(lines[0]["choices"][0][of]) for of in ("turns", "decoding_steps", "wall_time")] == [2, 2, 2]
        speed, accepted = by_their_arithmetic(out / name, {"writing", "rag"})
        took = [own[0]["seconds"] + own[1]["seconds"], own[2]["seconds"]]
        wrote = [own[0]["tokens"] + own[1]["tokens"], own[2]["tokens"]]
        assert speed == pytest.approx(mean(w / t for w, t in zip(wrote, took, strict=True)))
        # every step, and every token but the three of the prefills
        assert accepted == pytest.approx((sum(wrote) - 3) / (row["steps"] + row["truncated_steps"]))
        # our rate is without the prompts' time, which theirs holds
        assert (sum(wrote) - 3) / row["tokens_per_second"] < sum(took)
    plain = [json.loads(line) for line in (out / names[1]).read_text().splitlines()]
    assert plain[0]["choices"][0]["accept_lengths"] == [1] * sum(plain[0]["choices"][0]["new_tokens"])
    assert plain[0]["choices"][0]["decoding_steps"] == plain[0]["choices"][0]["new_tokens"]


def test_the_answers_are_what_was_counted(measured: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    """Greedily both sides write the same; steps add up to the tokens behind the prefill's."""
    results, answers = measured
    plain, own = ([each for each in answers if (each["method"] is None) is kind] for kind in (True, False))
    assert len(plain) == len(own) == 6
    assert [each["text"] for each in plain[:3]] == [each["text"] for each in own[:3]]
    assert all(sum(each["steps"]) == each["tokens"] - 1 for each in answers)
    assert all(set(each["steps"]) == {1} for each in plain)
    assert any(max(each["steps"]) > 1 for each in own)


def test_there_and_back(run: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["convert-results", str(run), "--out", str(out)]) == 0
    own, plain = (str(out / f"{name}-temperature-0.0.jsonl") for name in ("drafts-3", "plain-decoding"))
    assert main(["convert-results", own, "--baseline", plain, "--target", "tiny", "--out", str(back)]) == 0
    [row] = read_results(back / "results.json")["rows"]
    assert (row["temperature"], row["verdict"], row["requests"], row["differing_rows"]) == (0.0, "not audited", 3, 0)
    speed, accepted = by_their_arithmetic(Path(own), {"writing", "rag"})
    assert row["tau"][0] == pytest.approx(accepted)
    assert [each["set"] for each in row["sets"]] == ["mt_bench", "rag"]


def question(number: int, category: str, steps: list[int], seconds: float, **other: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "turns": ["so it is"],
        "decoding_steps": [len(steps)],
        "new_tokens": [sum(steps)],
        "wall_time": [seconds],
        "accept_lengths": steps,
    }
    line = {"question_id": number, "category": category, "answer_id": "x", "model_id": "eagle-temperature-0.0"}
    return {**line, "choices": [choice | other], "tstamp": 0.0}


def written(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


THEIRS = (question(81, "math", [4, 2], 2.0), question(82, "coding", [3, 3], 1.0), question(161, "rag", [1, 2], 1.0))
PLAIN = [question(each["question_id"], each["category"], [1] * 4, 4.0) for each in THEIRS]


def test_theirs_as_a_table(tmp_path: Path, capsys: Captured) -> None:
    """Figures by hand; what their files do not hold is null, and said."""
    own, plain = written(tmp_path / "eagle.jsonl", *THEIRS), written(tmp_path / "plain.jsonl", *PLAIN)
    out = tmp_path / "out"
    assert main(["convert-results", own, "--baseline", plain, "--target", "vicuna_7b", "--out", str(out)]) == 0
    assert "alpha and acceptance by depth are left out" in capsys.readouterr().out
    results = read_results(out / "results.json")
    jsonschema.Draft202012Validator(schema()).validate(results)
    [row] = results["rows"]
    assert row["tau"][0] == 15 / 6
    assert row["tau_macro"][0] == pytest.approx((3 + 3 + 1.5) / 3)
    assert row["tokens_per_second"] == 15 / 4
    assert row["baseline_tokens_per_second"] == 1.0
    assert row["speedup"][0] == 15 / 4
    assert row["alpha"] == [None, None, None]
    assert row["n_alpha"] == []
    assert [(each["set"], each["tau"][0], each["speedup"][0]) for each in row["sets"]] == [
        ("mt_bench", 3.0, 4.0),
        ("rag", 1.5, 3.0),
    ]
    assert row["over_sets"]["tau"][0] == 2.25
    assert {row["verdict"], *(each["verdict"] for each in row["sets"])} == {"not audited"}
    assert main(["report", str(out), "--latex", "--markdown"]) == 0
    table = (out / "table.tex").read_text()
    assert r"vicuna\_7b & 0 & eagle-temperature-0.0 & 4.00 {\scriptsize [3.00, 6.00]} & 3.00" in table
    assert r"by others' answer files" in table
    assert "losslessness audit of every row: not audited" in table
    for page in ("report.html", "report.md"):
        text = (out / page).read_text()
        assert "no audit was made of what wrote them" in text
        assert "Acceptance by depth" not in text
        assert "eagle.jsonl" in text
        assert "tau is not quite what our count would be" in text


def test_without_plain_decoding_nothing_is_gained(tmp_path: Path, capsys: Captured) -> None:
    own = written(tmp_path / "eagle.jsonl", *THEIRS, question(90, "qa", [1], 1.0, turns=["ERROR"]))
    assert main(["convert-results", own, "--temperature", "1", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "No file of plain decoding was named" in printed
    assert "eagle.jsonl: 1 turns hold ERROR" in printed
    [row] = read_results(tmp_path / "out" / "results.json")["rows"]
    assert (row["temperature"], row["speedup"], row["tokens_per_second"]) == (1.0, [None] * 3, 16 / 5)
    assert main(["report", str(tmp_path / "out"), "--latex"]) == 0


def without(field: str) -> dict[str, Any]:
    line = copy.deepcopy(THEIRS[0])
    del line["choices"][0][field]
    return line


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        ([without("accept_lengths")], [], "eagle.jsonl:1 is no answer as Spec-Bench's scripts write it (no 'accept_l"),
        ([question(1, "qa", [1], 1.0, accept_lengths=["2"])], [], 'accept_lengths is ["2"]'),
        ([question(1, "qa", [1], 0.0)], [], "in a wall_time of 0.0 s"),
        (
            [THEIRS[0], THEIRS[0]],
            [],
            "eagle.jsonl:2 is no answer as Spec-Bench's scripts write it (question 81 stands",
        ),
        ([], [], "holds no answer"),
        ([{**THEIRS[0], "model_id": "eagle"}], [], "says the temperature; name it: --temperature 0"),
        (
            list(THEIRS[:2]),
            ["--baseline", "plain.jsonl"],
            "are not of the same questions: 161 is in one alone (2 and 3)",
        ),
        (list(THEIRS), ["--baseline", "gone.jsonl"], "there is no gone.jsonl"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    lines: list[dict[str, Any]],
    more: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("plain.jsonl"), *PLAIN)
    assert main(["convert-results", written(Path("eagle.jsonl"), *lines), *more, "--out", "out"]) == 2
    assert said in " ".join(capfd.readouterr().err.split())


def test_runs_that_say_too_little_are_refused(run: Path, capfd: Captured) -> None:
    path = run / "answers.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    words = ["convert-results", str(run), "--out", str(run / "out")]
    path.write_text(as_lines([{**each, "seconds": None} for each in lines]))
    assert main(words) == 2
    assert "measure again with --eval.batch 1" in capfd.readouterr().err
    path.write_text(as_lines(lines[:-1]))
    assert main(words) == 2
    assert "has 2 answers of drafts (3) at T = 1" in capfd.readouterr().err
    path.write_text(as_lines(lines) + "{}\n")
    assert main(words) == 2
    assert f"{path}:13 is damaged" in " ".join(capfd.readouterr().err.split())
    path.unlink()
    assert main(words) == 2
    assert "answers.jsonl is missing" in capfd.readouterr().err
