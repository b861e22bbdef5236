"""`--method` on the command line: every method from words to files, and what is refused."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from draftsmith.drafters.config import DrafterConfig, LookupOptions
from draftsmith.drafters.families import training_free
from draftsmith.eval.audit.enumeration import WARPERS, survey, survey_table
from draftsmith.eval.audit.plants import PLANTS
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.environment import drafter_hash
from draftsmith.eval.report.results import schema
from draftsmith.eval.report.tables import show
from draftsmith.launch.cli import main, split_overrides
from draftsmith.launch.measure.run import results_folder
from draftsmith.launch.methods import SKELETON, need_draft
from draftsmith.launch.requests import EvalRequest
from draftsmith.storage.identity import flat
from helpers.runs import small_run
from helpers.runs.small_flags import AUDIT
from rich.console import Console

Captured = pytest.CaptureFixture[str]
SMALL = [*["--eval.limit", "2", "--eval.max_new_tokens", "12", "--eval.sweep", "[]", "--eval.repeats", "1"], *AUDIT]
NINE = ["--drafter.lookup.tokens", "9"]
TEXT = "def area(self):\n    return self.width * self.height\n"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer_folder: Path) -> dict[str, str]:
    """A trained run, texts, a datastore of them, and one of another tokenizer."""
    place = tmp_path_factory.mktemp("methods")
    found = {name: str(place / name) for name in ("run", "store", "other")}
    found["texts"] = str(place / "texts.jsonl")
    recipe = str(small_run.write_recipe(place))
    assert main(["train", recipe, "--out", found["run"], "--loop.steps", "2"]) == 0
    rows = [{"text": f"# part {number}\n{TEXT}"} for number in range(4)]
    Path(found["texts"]).write_text("\n".join(map(json.dumps, rows)))
    build = ["datastore", "build", "--source", found["texts"], "--out"]
    assert main([*build, found["store"], "--target", "tiny"]) == 0
    assert main([*build, found["other"], "--target", str(chat_tokenizer_folder)]) == 0
    return found


def run(line: str, places: dict[str, str], *more: str) -> int:
    """A command made small; `{run}` and the like stand for places."""
    return main([*line.format(**places).split(), *SMALL, *more])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def results_of(folder: Path, names: list[str], verdict: str = "lossless") -> list[dict[str, Any]]:
    """The rows of results that fit the schema: one per method and temperature."""
    results = read(folder / "results.json")
    jsonschema.validate(results, schema())
    rows = results["rows"]
    assert [(row["method"], row["temperature"]) for row in rows] == [
        (name, temperature) for temperature in (0.0, 1.0) for name in names
    ]
    for row in rows:
        assert row["verdict"] == verdict
        assert all(each["verdict"] == verdict for each in row["categories"])
        assert (row["distance"] is None) == (verdict != "lossy")
        assert row["tau"][0] >= 1
    return rows


@pytest.mark.slow
@pytest.mark.run
def test_methods_without_a_drafter(places: dict[str, str], tmp_path: Path, capfd: Captured) -> None:
    """No run, no drafter: a row and an audit for each; tables fit a terminal of 80 columns."""
    out = tmp_path / "a[b]" / ("long" * 20)  # no markup, and not cut in two
    names = ["prompt-lookup", "ngram", "lookahead"]
    line = f"eval --target tiny --method {','.join(names)} --out {out} --drafter.ngram.documents 5"
    assert run(line, places) == 0
    results_of(out, names)
    for name in names:
        report = read(out / ("audit.json" if name == names[0] else f"audit-{name}.json"))
        assert report["verdict"] == "lossless"
        assert report["enumeration"]["sequences"] == 10_000
    message = capfd.readouterr().out.splitlines()
    acceptance = next(at for at, each in enumerate(message) if each.startswith("Acceptance"))
    table = message[acceptance : acceptance + 10]
    assert [each.split()[0] for each in table[4:]] == names * 2
    assert all(each.split()[-1] == "lossless" for each in table[4:])
    assert message[-1] == f"results: {out / 'results.json'}"
    assert all(len(each) <= 80 for each in message[:-1])


@pytest.fixture(scope="module")
def measured(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained pair with both methods that draft by it, beside one that needs none."""
    out = tmp_path_factory.mktemp("measured")
    method = "trained,adaptive-draft,prompt-lookup"
    line = f"eval {{run}} --method {method} --out {out} --samples 3"
    assert run(line, places, *NINE) == 0
    return out


def test_methods_of_a_run(measured: Path) -> None:
    rows = results_of(measured, ["draft model", "adaptive draft", "prompt-lookup"])
    assert [row["draft_length"] for row in rows[::3]] == [4, 4]
    assert sorted(path.name for path in measured.glob("audit*")) == [
        "audit-adaptive-draft.json",
        "audit-prompt-lookup.json",
        "audit.json",
    ]


def test_the_prediction_counts_draft_steps(measured: Path) -> None:
    """Not tokens: prompt-lookup copies ten in one look, an adaptive draft stops before its most."""
    rows = read(measured / "results.json")["rows"]
    steps = {row["method"]: row["draft_steps"] for row in rows if row["temperature"] == 0}
    assert (steps["draft model"], steps["prompt-lookup"]) == (4, 1)
    assert 0 < steps["adaptive draft"] <= 8
    for row in rows:
        predicted = row["tau"][0] / (row["c_v"] + row["draft_steps"] * row["c"])
        assert row["predicted_speedup"] == pytest.approx(predicted, rel=1e-4)


def test_results_say_what_was_measured(
    measured: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, run_folder = read(measured / "results.json"), Path(places["run"])
    drafter = str(run_folder / "drafter")
    found = [(each["method"], each["path"]) for each in results["draft"]["loaded"]]
    assert found == [("draft model", drafter), ("adaptive draft", drafter)]
    assert {each["sha256"] for each in results["draft"]["loaded"]} == {drafter_hash(Path(drafter))}
    own = flat(DrafterConfig(lookup=LookupOptions(tokens=9)).model_dump(mode="json"))
    assert results["draft"]["settings"] == own
    train, again = map(shlex.split, results["repeat"])
    assert train == ["draftsmith", "train", f"{run_folder}/run.yaml", "--out", str(run_folder)]

    asked = []
    monkeypatch.setattr("draftsmith.launch.measure.run.run_eval", lambda *given: asked.append(given))
    assert again[0] == "draftsmith"
    assert main(again[1:]) == 0
    method = "trained,adaptive-draft,prompt-lookup"
    assert asked[0][0] == EvalRequest(run_folder, method=method, out=measured, samples=3)
    assert asked[0][1] == split_overrides([*SMALL, *NINE])[1]


def test_another_member_is_another_drafter(tmp_path: Path) -> None:
    (tmp_path / "ssm-1").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "ssm-1" / "model.safetensors").write_text("a")
    before = drafter_hash(tmp_path)
    assert drafter_hash(tmp_path) == before
    for name in ("model.safetensors", "config.json", "adapter_config.json"):
        (tmp_path / "ssm-1" / name).write_text("b")
        after = drafter_hash(tmp_path)
        assert after != before
        before = after


@pytest.mark.parametrize("verb", ["eval", "audit"])
def test_a_folder_that_cannot_be_is_told_before_anything_is_loaded(
    verb: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.delattr("draftsmith.launch.measure.loaded.load_target")
    assert run(f"{verb} {{run}} --out {places['texts']}", places) == 2
    message = capfd.readouterr()
    assert f"{places['texts']} is a file" in message.err
    assert message.out == ""


def test_the_folder_of_a_pair_without_a_run() -> None:
    def where(**named: Any) -> str:
        return str(results_folder(EvalRequest(target="tiny", **named)))

    assert where(drafter="runs/k5/drafter") == "eval-k5-drafter"
    assert where(drafter="../int8/") == "eval-int8"
    assert where(method="prompt-lookup,ngram") == "eval-prompt-lookup-ngram"
    assert where(method="ngram", out=Path("there")) == "there"
    assert str(results_folder(EvalRequest(Path("runs/k5")))) == "runs/k5/eval"


def test_the_audit_leaves_an_adaptive_draft_its_longest(measured: Path) -> None:
    rows = read(measured / "results.json")["rows"]
    assert [row["draft_length"] for row in rows if row["method"] == "adaptive draft"] == [8, 8]


def test_samples(measured: Path) -> None:
    found = read(measured / "agreement.json")
    assert (found["samples"], found["temperature"], found["prompts"]) == (3, 1.0, 2)
    assert found["speculative"]
    assert [len(row["answers"]) for row in found["rows"]] == [3, 3]
    assert 0 <= found["agreement"][0] <= 1


@pytest.mark.slow
def test_retrieval(places: dict[str, str], tmp_path: Path, capfd: Captured) -> None:
    """`datastore build` says what to type next, which works and finds something."""
    out = tmp_path / "built"
    words = ["datastore", "build", "--source", "stdlib", "--limit", "3", "--out"]
    assert main([*words, str(out)]) == 0
    message = capfd.readouterr().out.splitlines()
    assert message[0].endswith("tokens of 3 texts in 1 shard")
    start, command = message[1].split(": draftsmith ")
    assert start == "next"
    line = command.replace("--method rest", "--method rest,llma")
    line += f" --drafter.llma.references {{texts}} --out {tmp_path}"
    assert run(line, places, "--drafter.llma.tokens", "10") == 0
    rows = results_of(tmp_path, ["rest", "llma"])
    assert all(row["mean_nodes"] > 1 for row in rows[:2])


@pytest.mark.slow
def test_a_lossy_rule_is_measured(places: dict[str, str], tmp_path: Path, capfd: Captured) -> None:
    """No failure, since it was asked for by name: its distance in place of a proof."""
    assert run(f"eval {{run}} --out {tmp_path}", places, "--eval.rule", "lossy-topk-match") == 0
    rows = results_of(tmp_path, ["draft model"], "lossy")
    assert all(row["rule"] == "lossy-topk-match" for row in rows)
    assert all(0.1 < row["distance"] <= 1 for row in rows)
    message = capfd.readouterr().out
    assert f"verdict: lossy (lossy-topk-match, distance {rows[0]['distance']:.3f})" in message
    assert "NOT lossless" not in message


def test_the_table_shows_the_distance_of_a_lossy_rule(measured: Path, capfd: Captured) -> None:
    results = read(measured / "results.json")
    for row in results["rows"]:
        row |= {"verdict": "lossy", "distance": 0.834}
    show(results, Console(width=80))
    shown = capfd.readouterr().out.count("lossy 0.83")
    assert shown == 2 * len(results["rows"]), "beside tau, and beside acceptance by depth"


@pytest.mark.slow
def test_a_lossy_rule_where_nothing_was_found(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "eval --target tiny --method prompt-lookup --no-audit"
    assert run(line, places, "--eval.rule", "lossy-typical") == 0
    assert read(tmp_path / "eval-prompt-lookup" / "results.json")["draft"]["loaded"] == []


@pytest.mark.slow
def test_skeleton_of_thought_has_no_acceptance(places: dict[str, str], tmp_path: Path, capfd: Captured) -> None:
    line = f"eval --target tiny --method {SKELETON} --out {tmp_path} --eval.min_p 0.9"
    assert run(line, places) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["skeleton.json"]
    found = read(tmp_path / "skeleton.json")
    assert [each["temperature"] for each in found] == [0.0, 1.0]
    assert not any(each["lossless"] for each in found)
    text, message = json.dumps(found).lower(), capfd.readouterr().out.lower()
    for word in ("tau", "alpha", "accept", "verdict"):
        assert f'"{word}' not in text
        assert f"{word} " not in message
    assert message.count("not lossless") == 2


@pytest.mark.slow
def test_determinism(places: dict[str, str], tmp_path: Path, capfd: Captured) -> None:
    assert run(f"audit {{run}} --determinism --out {tmp_path}", places) == 0
    assert read(tmp_path / "determinism.json")["passed"]
    assert not (tmp_path / "audit.json").exists()
    message = capfd.readouterr().out
    assert message.startswith("determinism at T = 0: passed")
    assert all(len(line) <= 80 for line in message.splitlines()[:-1])


@pytest.mark.slow
def test_survey() -> None:
    """Structure and table; its power is that of tests/eval/audit/test_audit.py with more sequences."""
    config = AuditConfig(sequences=10_000)
    found = survey(config, methods=["rest"])
    assert len(found["exact"]) == len(WARPERS)
    assert all(each["rows_alone"] and each["p_value"] > found["level"] for each in found["exact"])
    assert [each["plant"] for each in found["planted"]] == list(PLANTS)
    assert {each["rule"] for each in found["lossy"]} >= {"lossy-typical", "lossy-lenient"}
    json.dumps(found, allow_nan=False)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(survey_table(found), crop=False)
    lines = console.export_text().splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    first = [line.split()[0] for line in lines]
    assert first.count("planted:") == len(PLANTS)
    assert {"rest", "lossy-typical"} <= set(first)


def test_a_failed_probe_is_not_called_an_audit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Captured
) -> None:
    """A missed bug is a matter of power: exit code 5, with a message of its own."""
    found = {"passed": False, "sequences": 1, "level": 0.1, "exact": [], "planted": [], "lossy": []}
    monkeypatch.setattr("draftsmith.eval.audit.enumeration.survey", lambda _config: found)
    assert main(["audit", "--survey", "--out", str(tmp_path)]) == 5
    assert "the survey failed" in capfd.readouterr().err
    assert read(tmp_path / "survey.json") == found


TINY = "eval --target tiny --method "
REFUSED = [
    (TINY + "prompt-lokup", "no method is called 'prompt-lokup'; known: trained,"),
    (TINY + "ngram,", "no method is called ''"),
    (TINY + "ngram,rest,ngram", "--method names 'ngram' twice"),
    (TINY + "ngram," + SKELETON, "Run it alone"),
    (TINY + "trained", "--method trained needs a drafter: name its folder"),
    (TINY + "ngram,adaptive-draft", "needs a drafter"),
    (TINY + "rest", "expected --drafter.rest.datastore FOLDER"),
    (TINY + "rest --drafter.rest.datastore {run}", "is no datastore"),
    (TINY + "rest --drafter.rest.datastore {other}", "tokenizer"),
    (TINY + "llma", "expected --drafter.llma.references SOURCE"),
    (TINY + "llma --drafter.llma.references none.jsonl", "there is no 'none.jsonl'"),
    (TINY + "prompt-lookup --eval.rule lossy", "eval.rule"),
    (TINY + "prompt-lookup --eval.rule lossy-lenient", "needs a chain drawn from a draft's distribution"),
    (TINY + "prompt-lookup --samples 2 --eval.temperatures [0]", "a temperature above 0"),
    (TINY + "prompt-lookup --samples -2", "--samples is -2"),
    (TINY + SKELETON + " --samples 2", "--samples measures a speculative method"),
    ("eval --method prompt-lookup", "no target is named"),
    ("eval {run} --drafter nowhere", "nowhere holds no drafter"),
    ("audit --target tiny --method " + SKELETON, "is not lossless: there is nothing to audit"),
    ("audit --target tiny --method ngram --plant raw-q", "--plant takes the trained drafter"),
    ("audit {run} --method trained,ngram --plant raw-q", "--plant takes"),
    ("audit {run} --plant none", "no bug is called 'none'"),
    ("audit --target tiny --method prompt-lookup --decoder hf", "--decoder hf takes the trained"),
    ("audit --target tiny --method lookahead --determinism", "--determinism takes the trained"),
    ("audit {run} --method adaptive-draft --determinism", "--determinism takes the trained"),
    ("audit {run} --determinism --plant raw-q", "--plant and --determinism exclude each other"),
    ("audit {run} --survey", "leave out run"),
]


@pytest.mark.parametrize(("line", "reason"), REFUSED)
def test_refusals(line: str, reason: str, places: dict[str, str], tmp_path: Path, capfd: Captured) -> None:
    """One message, and nothing was computed or written before it."""
    assert run(f"{line} --out {tmp_path / 'out'}", places) == 2
    message = capfd.readouterr()
    assert message.err.startswith("draftsmith: ")
    assert len(message.err.splitlines()) == (2 if reason == "eval.rule" else 1)
    assert reason in message.err
    assert message.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--out", "{store}"], "exists already"),
        (["--out", "new", "--limit", "-1"], "--limit is -1"),
        (["--out", "new", "--shard-tokens", "1"], "shard_tokens is 1"),
        (["--out", "new", "--target", "nowhere"], "cannot load the tokenizer of 'nowhere'"),
        (["--out", "new", "--source", "none.jsonl"], "there is no 'none.jsonl'"),
    ],
)
def test_datastores_that_are_not_built(
    more: list[str],
    reason: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.format(**places) for word in more]
    source = [] if "--source" in more else ["--source", places["texts"]]
    before = sorted(Path(places["store"]).iterdir())
    assert main(["datastore", "build", *source, *words]) == 2
    message = capfd.readouterr()
    assert reason in message.err
    assert "Traceback" not in message.err
    assert list(tmp_path.iterdir()) == []
    assert sorted(Path(places["store"]).iterdir()) == before


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (
            [json.dumps({"text": TEXT}), "not json", '{"text": 5}'],
            0,
            "left out: rows.jsonl: 2 of 3 rows cannot be used",
        ),
        (["not json", '{"text": 5}'], 3, "rows.jsonl: 2 of 2 rows cannot be used"),
    ],
)
def test_rows_that_a_datastore_cannot_take_are_said(
    lines: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Captured,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(lines))
    assert main(["datastore", "build", "--source", "rows.jsonl", "--out", "store"]) == code
    message = "".join((*capfd.readouterr(), *caplog.messages))
    assert said in message
    assert "rows.jsonl:2: text is a number" in message or "rows.jsonl:3: text is a number" in message
    assert Path("store").exists() is (code == 0)


def test_help_and_typing_errors_do_not_wait_for_torch() -> None:
    code = """
import sys
from draftsmith.eval.report.tables import show
from draftsmith.launch.cli import main
for verb in ("eval", "audit", "datastore"):
    assert main([verb, "--help"]) == 0
for verb in ("eval", "audit"):
    assert main([verb, "--target", "tiny", "--method", "nope"]) == 2
assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    names = {word.rstrip(",;") for word in words}
    assert names >= {*need_draft(), *training_free()}
    assert f"{SKELETON}." in words
