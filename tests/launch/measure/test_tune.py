"""`draftsmith tune`: predicted, measured, kept beside the drafter, and taken by the other commands."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.data.prompt_sets import stream_of
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.drafters.tuned_file import read_tuned, write_tuned
from draftsmith.eval.measure.environment import drafter_hash
from draftsmith.eval.measure.metrics import Interval
from draftsmith.eval.tune.race import Raced
from draftsmith.eval.tune.settings import CUT, Contender, DraftSetting, Prediction
from draftsmith.launch.check.early import named
from draftsmith.launch.cli import main
from draftsmith.launch.measure import contenders
from draftsmith.launch.measure.contenders import _that_fits, contenders_of, cuts
from draftsmith.launch.measure.tune import _config, _requests, accuracy_lines, best_of, sentence
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.requests import Pair, TuneRequest
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.shallow_target import SHALLOW

FEW = ["--limit", "8", "--eval.max_new_tokens", "12"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of untrained heads for four layers of the embedded target."""
    target = load_target(SHALLOW)
    saver(target, "medusa")(MedusaHeads.for_target(target.model, heads=4, shared_head=True), tmp_path / "run/drafter")
    (tmp_path / "run" / "run.yaml").write_text(
        load_recipe("medusa-tiny", [("data.limit_rows", "200"), ("target.path", SHALLOW)]).yaml()
    )
    return tmp_path / "run"


def test_a_drafter_and_a_method_without_one(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "_CUTS", (64, 512, 1 << 20))
    assert main(["tune", str(run), "--best", "2", "--no-surfaces", *FEW]) == 0
    printed = capfd.readouterr().out
    content = json.loads((run / "eval" / "tune.json").read_text())
    tuned = json.loads((run / "drafter" / "tuned.json").read_text())
    assert {each["method"] for each in content["measured"]} == {str(run / "drafter"), "prompt-lookup"}
    assert {each["settings"].get("drafter.medusa.nodes") for each in content["predicted"]} >= {"2", "8", "32"}
    assert content["sentence"] in " ".join(printed.split())
    of_heads = [each for each in content["predicted"] if each["method"] == str(run / "drafter")]
    whole = max((each for each in of_heads if CUT not in each["settings"]), key=lambda each: each["speedup"])
    cut = [each for each in of_heads if CUT in each["settings"]]
    assert [each["settings"] for each in cut] == [whole["settings"] | {CUT: size} for size in ("64", "512")]
    assert all(each["tau"] >= 1 for each in cut)
    assert "not audited" in printed
    assert re.search(r"predicted within 10% of measured: \d of 2 rows; off by ", " ".join(printed.split()))
    assert "by cost, at the tau of the measured prompts: predicted within 10% of" in " ".join(printed.split())
    assert {each["axis"] for each in content["surfaces"]} == {"draft length", "nodes"}
    free = next(each for each in content["measured"] if each["method"] == "prompt-lookup")
    flags = [f"--method {free['method']}", *(f"--{name} {value}" for name, value in free["settings"].items())]
    assert (f"prompt-lookup is used as it was tuned by: {' '.join(flags)}" in printed) is (free["measured"][1] > 1)
    for each in content["measured"]:
        assert each["predicted_over_measured"] == pytest.approx(each["speedup"] / each["measured"][0])
        tau = each["measured_tau"][0] / each["tau"]
        assert each["predicted_at_tau"] == pytest.approx(each["speedup"] * tau)
    evens = {each["method"]: each for each in content["pays_from"]}
    assert evens.keys() == {each["method"] for each in content["measured"]}
    for each in evens.values():
        assert f"{each['label']}: {each['words']}" in printed
        assert each["target_call_seconds"] == content["target_call_seconds"] > 0
    assert tuned["pays_from"] == evens[str(run / "drafter")]["factor"]
    assert tuned["verdict"] == "not audited"
    assert tuned["target_sha256"] == content["target_sha256"] == drafter_hash(Path(SHALLOW))
    best = next(each for each in content["measured"] if each["method"] == str(run / "drafter"))
    assert tuned["speedup"] == best["measured"]
    # what is slower, beyond its interval, is not kept
    slower = best["measured"][2] < 1
    assert read_tuned(run / "drafter").values == ({} if slower else best["settings"])
    assert read_tuned(run / "drafter").plain is slower


def test_sizes_of_a_draft_vocabulary_are_at_most_half_of_what_is_drafted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contenders, "_CUTS", (64, 128, 512, 1 << 20))
    target, drafter = load_target(SHALLOW), run / "drafter"
    recipe = load_recipe("medusa-tiny", [("data.limit_rows", "200")]).recipe
    assert list(cuts(drafter, recipe, target)) == [64, 128, 512]
    asked = recipe.model_copy(update={"drafter": DrafterConfig(draft_vocabulary=100)})
    assert list(cuts(drafter, asked, target)) == []
    gone = recipe.data.model_copy(update={"source": str(tmp_path / "gone.jsonl")})
    assert list(cuts(drafter, recipe.model_copy(update={"data": gone}), target)) == []
    assert "no draft vocabulary is tried for" in caplog.text
    config = json.loads((drafter / "config.json").read_text())
    config["draftsmith"]["settings"]["draft_vocabulary"] = 300
    (drafter / "config.json").write_text(json.dumps(config))
    assert list(cuts(drafter, recipe, target)) == [64, 128]


@pytest.mark.slow
def test_where_it_pays_is_measured_and_said(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each surface by itself, and faster: `eval/tune/test_surfaces.py`."""
    assert main(["tune", str(run), "--method", "trained", "--best", "1", *FEW]) == 0
    printed = capfd.readouterr().out
    surfaces = json.loads((run / "eval" / "tune.json").read_text())["surfaces"]
    assert {each["axis"] for each in surfaces} == {"draft length", "nodes", "batch", "context", "temperature"}
    for each in surfaces:
        assert each["label"] in printed
        assert len(each["points"]) >= 2


def test_what_was_kept_is_taken_and_said(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_tuned(run / "drafter", {"drafter.medusa.nodes": "6"}, {"temperature": 0.0, "batch": 1, "processor": "here"})
    few = ["--no-audit", "--eval.limit", "1", "--eval.max_new_tokens", "12", "--eval.repeats", "1"]
    nodes = {}
    for name, flags in (("tuned", []), ("by hand", ["--drafter.medusa.nodes", "4"])):
        assert main(["eval", str(run), "--out", str(tmp_path / name), *few, *flags]) == 0
        printed = capfd.readouterr().out
        assert ("tuned for T = 0.0, batch 1, here: --drafter.medusa.nodes 6" in printed) is (name == "tuned")
        nodes[name] = json.loads((tmp_path / name / "results.json").read_text())["rows"][0]["nodes"]
    assert nodes == {"tuned": 6, "by hand": 4}


def test_an_export_asks_for_the_tuned_length(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_tuned(run / "drafter", {"eval.draft_length": "2"}, {})
    assert main(["export", str(run), "--out", str(tmp_path / "vllm")]) == 0
    assert '"num_speculative_tokens": 2' in capfd.readouterr().out


def test_the_second_set_is_not_tuned_on(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    second = ["--eval.second_prompts", "stdlib-second"]
    assert main(["tune", str(run), "--prompts", "stdlib-second", *second]) == 2
    assert "which tell whether a setting holds on prompts that nothing was chosen on" in capfd.readouterr().err
    assert main(["tune", str(run), "--prompts", "mbpp, stdlib-second", *second]) == 2
    assert "which tell whether a setting holds on prompts that nothing was chosen on" in capfd.readouterr().err


def test_several_sets_give_their_parts_in_turn(tmp_path: Path) -> None:
    """Of each as many, so that the first looks of the race are at all of them."""
    for name, column in (("gsm8k", "question"), ("aime", "problem")):
        rows = "".join(json.dumps({column: f"{name} {n}"}) + "\n" for n in range(30))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    words = f"gsm8k={tmp_path / 'gsm8k.jsonl'},aime={tmp_path / 'aime.jsonl'}"
    request, recipe = TuneRequest(prompts=words, limit=9), load_recipe("distill-tiny").recipe
    config = _config(request, recipe)
    target: Any = SimpleNamespace(tokenizer=load_tokenizer("tiny"))
    requests = _requests(request, recipe, target, config)
    assert [each.prompt.turns[0].split()[0] for each in requests] == ["gsm8k", "aime"] * 5
    assert [each.number for each in requests[::2]] == [stream_of("gsm8k", at) for at in (0, 6, 12, 18, 24)]
    assert _config(TuneRequest(limit=9), recipe).limit == 9


@pytest.mark.parametrize("verb", ["eval", "audit", "tune"])
def test_words_that_name_no_prompts_are_refused_before_anything_is_loaded(
    verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--target", "no-such-target", "--method", "prompt-lookup", "--prompts", "gsm8"]) == 2
    assert "did you mean gsm8k?" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "--batch is 0"),
        (["--batch", "8", "--limit", "32"], "--limit is 32; expected 64 or more"),
        (["--eval.draft_length", "3"], "--eval.draft_length is chosen by tune"),
        (["--eval.batch", "3"], "say --batch"),
        (["--eval.max_new_tokens", "11"], "prompt-lookup drafts up to 10 tokens"),
        (["--limit", "7"], "--limit is 7"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--method", "skeleton-of-thought"], "no setting of it to tune"),
        (["--method", "nope"], "no method is called 'nope'"),
        (["RUN"], "is named twice; expected each run once"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    flags: list[str], message: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(run), *(str(run) if each == "RUN" else each for each in flags)]) == 2
    assert message in capfd.readouterr().err


def prediction(name: str, speedup: float, pays_from: float | None = None) -> Prediction:
    contender = CONTENDERS[name.split()[0]]
    return Prediction(DraftSetting(contender, {"drafter.size": name}), 2.0, 5.0, 1.0, speedup, pays_from)


CONTENDERS = {name: Contender(name, name, (), True, lambda _: None) for name in "abc"}  # type: ignore[arg-type, return-value]


def test_every_method_is_measured_with_its_best() -> None:
    some = [prediction("a 1", 1.5), prediction("a 2", 1.6), prediction("b 1", 0.7), prediction("a 3", 1.4)]
    assert [each.speedup for each in best_of(some, 3)] == [1.6, 1.5, 0.7]
    assert [each.speedup for each in best_of(some, 1)] == [1.6, 0.7]


@pytest.mark.parametrize(
    ("interval", "pays_from", "expected"),
    [
        ((1.5, 1.4, 1.6), 0.5, "a, size a: 1.50 [1.40, 1.60] times plain decoding at T = 0, batch 1"),
        ((1.0, 0.9, 1.1), 0.9, "not told apart from plain decoding"),
        ((0.8, 0.7, 0.9), 2.0, "nothing beats plain decoding at T = 0, batch 1: a, size a comes nearest"),
        ((0.8, 0.7, 0.9), 2.0, "would pay from a target call 2.00 times the one measured"),
        ((0.8, 0.7, 0.9), None, "would pay at no cost of a target call"),
        ((0.95, 0.9, 0.99), 0.8, "from a target call 1.10 times the one measured"),
        ((2.3, math.nan, math.nan), 0.8, "too little was timed to tell"),
    ],
)
def test_one_sentence(interval: tuple[float, float, float], pays_from: float | None, expected: str) -> None:
    done = [Raced(prediction("a", 1.0, pays_from), Interval(*interval), Interval(2.0, 1.9, 2.1), 24)]
    assert expected in sentence(done, 0.0, 1)


def test_what_is_left_by_cost() -> None:
    """Of a prediction of 1.5 at tau 2 where 2.4 was met and 1.7 measured: 1.8 was to be expected of the costs."""
    foreseen = replace(prediction("a", 1.5), tau=2.0)
    met, unknown = (Interval(*[tau] * 3) for tau in (2.4, math.nan))
    found, nothing = (Raced(foreseen, Interval(1.7, 1.6, 1.8), tau, 24) for tau in (met, unknown))
    assert found.predicted_at_tau == pytest.approx(1.8)
    assert nothing.predicted_at_tau is None
    whole, by_cost = accuracy_lines([found, nothing])
    assert "off by -12, -12 %" in whole
    assert by_cost.startswith("by cost")
    assert "1 of 1 rows; off by +6, - %" in by_cost


def test_no_draft_is_tried_that_strings_do_not_allow() -> None:
    (suffix,) = FAMILIES["suffix"].grids
    for values, sizes in (
        ({}, (1, 2, 4, 6, 8, 12)),
        ({"suffix": {"depth": 8}}, (1, 2, 4)),
        ({"suffix": {"datastore": "store"}}, suffix.sizes),
    ):
        grid = _that_fits(suffix, FAMILIES["suffix"], None, DrafterConfig.model_validate(values))
        assert grid is not None
        assert grid.sizes == sizes


def test_two_drafters_of_a_family_are_told_apart(run: Path, tmp_path: Path) -> None:
    """And the recipe's own setting is tried where it stands in no grid."""
    shutil.copytree(run, tmp_path / "other")
    recipe = load_recipe("medusa-tiny", [("data.limit_rows", "200"), ("drafter.medusa.nodes", "9")])
    (run / "run.yaml").write_text(recipe.yaml())
    pairs = [named(Pair(folder), []) for folder in (run, tmp_path / "other")]
    target = load_target("tiny")
    first, second = contenders_of(pairs, target)
    assert (first.title, second.title) == ("medusa of run", "medusa of other")
    assert (first.own, second.own) == (True, False)  # 9 nodes, 20 nodes
    assert DraftSetting(first, {}).label == "medusa of run, as the recipe has it"
    assert max(first.grids[1].sizes) == 4  # no chain is longer than there are heads
    chained, _ = contenders_of(pairs, target, chains=True)
    assert chained.grids == [first.grids[1]]
    assert not chained.own  # it is a tree
