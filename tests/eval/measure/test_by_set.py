"""Results by prompt set: each set as it would be alone, the mean over sets and its interval, and what shows them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from conftest import make_drafter, make_target
from draftsmith.data.prompts import Prompt, fitting_ids
from draftsmith.data.rows.chats.spoken import Spoken
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.errors import RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure import requests
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.by_set import fields_by_set
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.metrics import mean_of_ratios, ratio
from draftsmith.eval.measure.requests import Request, batches, first_turns, in_turn, make_requests
from draftsmith.eval.measure.rounds import AllRounds
from draftsmith.eval.report.report import write_report
from draftsmith.eval.report.results import read_results, schema
from draftsmith.eval.report.tables import MEAN, sets_table
from helpers.runs.planned_runs import counts_of
from rich.console import Console

CONFIG = EvalConfig(max_new_tokens=12, sweep=[], repeats=1, batch=2, limit=None, temperatures=[1.0])
ACCEPTED = ("tau", "alpha", "alpha_hat", "n_alpha", "n_alpha_counts", "steps", "distinct_2", "loop_share")


def of(name: str | None, count: int, first: int) -> list[Request]:
    """Requests of a set, in streams of their own."""
    prompts = [Prompt(str(n), "all", ("",), chat=False, set=name) for n in range(count)]
    return [Request(each, [first + n, 7, 11], first * 256 + n) for n, each in enumerate(prompts)]


@pytest.fixture(scope="module")
def target() -> Backbone:
    made = make_target("qwen3")
    made.tokenizer = train_tokenizer(["abc def ghi jkl\n"] * 5, 300)
    return made


@pytest.fixture(scope="module")
def results(target: Backbone, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("prompts")
    for name in ("one", "two"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "a"}\n')
    config = CONFIG.model_copy(update={"prompts": f"{folder / 'one.jsonl'},{folder / 'two.jsonl'}"})
    arm = Arm("draft model", make_drafter(target), "lossless")
    return json.loads(json.dumps(evaluate(target, [arm], [*of("one", 3, 5), *of("two", 5, 20)], config)))


def test_a_set_is_measured_as_it_is_alone(target: Backbone, results: dict[str, Any]) -> None:
    """Neither its batches nor its random numbers depend on the other set, nor do those of a row without sets."""
    one, two = results["rows"][0]["sets"]
    assert [one["set"], two["set"]] == ["one", "two"]
    assert [one["requests"], two["requests"]] == [3, 5]
    assert Path(two["source"]).name == "two.jsonl"
    arm = Arm("draft model", make_drafter(target), "lossless")
    for found, asked in ((one, of("one", 3, 5)), (two, of(None, 5, 20))):
        alone = evaluate(target, [arm], asked, CONFIG)["rows"][0]
        assert "sets" not in alone
        assert "over_sets" not in alone
        assert {name: found[name] for name in ACCEPTED} == {name: alone[name] for name in ACCEPTED}
        assert found["speedup"][0] > 0


def test_the_mean_counts_each_set_alike(results: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema()).validate(results)
    row = results["rows"][0]
    assert row["over_sets"]["flagged"] is any(each["flagged"] for each in row["sets"])
    for name in ("tau", "alpha", "speedup"):
        middle, low, high = row["over_sets"][name]
        assert middle == pytest.approx(np.mean([each[name][0] for each in row["sets"]]))
        assert low <= middle <= high
    assert row["tau"][0] != pytest.approx(row["over_sets"]["tau"][0])  # which counts each token alike


def test_the_interval_of_the_mean() -> None:
    """Half as wide as of one set for four sets, and as wide as theory has it; none where a set has none."""
    rng = np.random.default_rng(0)
    sets = [(rng.normal(3 + n, 1, 400), np.ones(400)) for n in range(4)]
    found = mean_of_ratios(sets, seed=3)
    assert found.value == pytest.approx(np.mean([top.mean() for top, _ in sets]))
    assert found.high - found.low == pytest.approx(2 * 1.96 / np.sqrt(4 * 400), rel=0.1)
    # sets of one size and the same values: resampled alike, their mean would vary as one of them does
    twins = mean_of_ratios([sets[0]] * 4, seed=3)
    assert twins.high - twins.low == pytest.approx(found.high - found.low, rel=0.1)
    single = ratio(*sets[0], seed=3)
    assert twins.high - twins.low < 0.6 * (single.high - single.low)
    lonely = mean_of_ratios([sets[0], (np.array([4.0]), np.array([2.0]))])
    assert lonely.value == pytest.approx((sets[0][0].mean() + 2) / 2)
    assert lonely.to_list()[1:] == [None, None]
    assert mean_of_ratios([sets[0], (np.zeros(3), np.zeros(3))]).to_list() == [None, None, None]


def test_one_set_that_loops_makes_the_mean_doubtful() -> None:
    """Its tau is part of it; alpha is of what was accepted, not of what the distributions promised."""

    def run(*texts: list[int]) -> AllRounds:
        counts = [replace(counts_of(4, [2, 1]), alpha_hat_D=np.array([3.0, 3.0])) for _ in range(2)]
        return AllRounds(counts=counts, baseline_texts=list(texts))

    loops, plain = run([7] * 40), run(list(range(40)))
    for runs, flagged in (((plain, plain), False), ((loops, plain), True), ((plain, loops), True)):
        made = fields_by_set({name: ("file", 2, each) for name, each in zip("ab", runs, strict=True)}, 0, "lossless")
        assert made["over_sets"]["flagged"] is flagged
        assert made["over_sets"]["tau"][0] == 7 / 4
        assert made["over_sets"]["alpha"][0] == 3 / 6


def test_batches_end_with_their_set() -> None:
    both = [*of("one", 3, 5), *of("two", 3, 20)]
    assert [[each.ids[0] for each in part] for part in batches(both, 2)] == [[5, 6], [7], [20, 21], [22]]
    assert [len(part) for part in batches(of(None, 5, 1), 2)] == [2, 2, 1]


def test_what_stands_for_all_sets_is_of_each_in_turn() -> None:
    few = [*of("one", 1, 5), *of("two", 3, 20)]
    assert [each.ids[0] for each in in_turn(few)] == [5, 20, 21, 22]
    mixed = [*of("one", 3, 5), *of("two", 2, 20)]
    assert [ids[0] for ids in first_turns(mixed)] == [5, 20, 6, 21, 7]
    assert [each.number for each in in_turn(mixed)][:2] == [mixed[0].number, mixed[3].number]
    assert len(batches(in_turn(mixed), 5)) == 1
    assert in_turn(few[:1]) == few[:1]


def test_a_prompts_stream_is_that_of_any_selection(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_answer", lambda _target, ids, _config: Spoken(ids, [5], True))
    prompts = [Prompt(str(n), "all", (f"abc {n}",), chat=False, set="one", stream=512 * n + 256) for n in range(3)]
    assert [each.number for each in make_requests(target, prompts, CONFIG)] == [256, 768, 1280]
    assert [each.number for each in make_requests(target, prompts[2:], CONFIG)] == [1280]
    turns = [replace(prompts[1], turns=("abc", "def"))]
    assert [each.number for each in make_requests(target, turns, CONFIG)] == [768, 769]
    plain = [replace(each, stream=None) for each in prompts]
    assert [each.number for each in make_requests(target, plain[1:], CONFIG)] == [0, 1]


def test_a_set_that_does_not_fit_is_refused(chat_tokenizer_folder: Path) -> None:
    """A mean over sets without it would be another figure under the same name."""
    from draftsmith.decoding.backbone.hub import load_tokenizer

    tokenizer = load_tokenizer(str(chat_tokenizer_folder))
    short = [Prompt("1", "all", ("why",), chat=True, set="nq")]
    long = [Prompt(str(n), "all", ("why " * 90 * n,), chat=True, set="cnn-dm") for n in (1, 2)]
    with pytest.raises(RequestError, match=r"all 2 prompts of cnn-dm are longer .* or leave that set out$"):
        fitting_ids([*short, *long], tokenizer, 64)
    assert len(fitting_ids([*short, *long], tokenizer, 400)) == 2


def test_sets_are_shown(results: dict[str, Any], tmp_path: Path) -> None:
    """In the table, the page and its Markdown: each set and the mean, with intervals."""
    row = results["rows"][0]
    low = f"{row['over_sets']['tau'][1]:.2f}"
    console = Console(width=80, record=True)
    console.print(sets_table(results["rows"]), crop=False)
    printed = console.export_text()
    assert "By prompt set (audit: lossless)" in printed
    assert all(name in printed for name in ("one", "two", MEAN, low))
    results = copy.deepcopy(results)
    results["rows"][0]["sets"][1] |= {"flagged": True, "source": "<b>two</b>"}
    results["rows"][0]["over_sets"]["flagged"] = True
    (tmp_path / "results.json").write_text(json.dumps(results))
    page = write_report(tmp_path).read_text()
    assert '<table id="sets">' in page
    assert "&lt;b&gt;two&lt;/b&gt;" in page
    assert page.count("do not believe tau") == 2  # of the set, and of the mean that it is in
    markdown = (tmp_path / "report.md").read_text()
    assert "## By prompt set" in markdown
    assert f"| one | two | {MEAN} |" in markdown
    assert low in markdown
    del results["rows"][0]["over_sets"]["verdict"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(RequestError, match="acceptance with the verdict None"):
        read_results(tmp_path / "results.json")
