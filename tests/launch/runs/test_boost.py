"""Boosted ensembles through the real command line: trained, decoded, killed, in two processes."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from draftsmith.data.generate import continuations
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model.ensemble import Ensemble
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers import boost
from draftsmith.trainers.loop.step import Steps
from faults.signalled import Stage, signalled
from helpers.models.shallow_target import SHALLOW
from helpers.reliability_tally import tally
from helpers.runs import killed_process, launcher
from helpers.runs.crashed_process import run
from helpers.runs.launcher import launched, train_each
from safetensors.torch import load_file

LAUNCHER = str(launcher.__file__)
COMMON = f"""\
method: boost
target: {{path: {SHALLOW}}}
data: {{limit_rows: 30, sequence_length: 64}}
model: {{layers: 1, hidden: 64, intermediate: 64, heads: 1, kv_heads: 1}}
optimizer: {{lr: 3e-3, warmup_steps: 2}}
loop: {{steps: 6, batch_rows: 8, micro_rows: 2, precision: fp32, validate_rows: 3, log_every: 1}}
checkpoint: {{every_steps: 3}}
probe: {{prompts: 1, max_new_tokens: 6}}
objective: {{chunk: 64}}
"""
BOOST = "members: 2, samples: 80, held_out: 6, prompt_tokens: 12, continuation: 8, stop_share: 0"
RECIPES = {
    "hard": f"boost: {{{BOOST}, match_tokens: 1, weights: hard}}\n",
    "soft": f"boost: {{{BOOST}, unit: sample}}\n",
    "together": f"boost: {{{BOOST}, weights: hard, order: side_by_side}}\n",
}
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
STAGES = {
    "continuations": Stage(continuations, "autoregressive", 2),
    "second SSM": Stage(Steps, "update", 9),
    "coverage": Stage(boost, "measure_matches"),
}


def write_recipe(folder: Path, name: str) -> str:
    (folder / f"{name}.yaml").write_text(f"name: {name}\n{RECIPES[name]}{COMMON}")
    return str(folder / f"{name}.yaml")


def tensors(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What a run is for, and what it goes on from; not what it may throw away."""
    kept = [
        *run.glob("drafter/*/model.safetensors"),
        *run.glob("ssm-*/coverage.safetensors"),
        *run.glob("continuations/*.safetensors"),
    ]
    assert len(kept) >= 6
    return {str(path.relative_to(run)): load_file(path) for path in kept}


def assert_same(left: Path, right: Path, tolerance: float = 0.0) -> None:
    mine, theirs = tensors(left), tensors(right)
    assert mine.keys() == theirs.keys()
    for name, own in mine.items():
        for key, tensor in own.items():
            other = theirs[name][key]
            if tolerance and tensor.is_floating_point():
                distance = (tensor.double() - other.double()).norm()
                assert distance <= tolerance * other.double().norm(), (name, key)
            else:
                assert torch.equal(tensor, other), (name, key)


def coverage(run: Path) -> list[dict]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "coverage"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every recipe in one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert train_each(str(folder), [write_recipe(folder, name) for name in RECIPES]) == 0
    return folder


@pytest.mark.one_in(3)
@pytest.mark.run
@pytest.mark.parametrize("name", list(RECIPES))
def test_an_ensemble_is_trained_and_decodes(name: str, alone: Path) -> None:
    run = alone / name
    found = coverage(run)
    assert [line["step"] for line in found] == [1, 2]
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    target = load_target(SHALLOW)
    drafter = load_drafter(run / "drafter", target)
    assert isinstance(drafter, Ensemble)
    assert len(drafter.members) == 2
    prompts, how = [[5, 6, 7], [40, 41]], {"warper": Warper(0.0), "max_new_tokens": 10}
    done = generate(target, drafter, prompts, **how)
    assert done.tokens == autoregressive(target, prompts, **how).tokens
    if name == "hard":  # each SSM is an ordinary run
        kinds = [json.loads(x)["kind"] for x in (run / "ssm-2/metrics.jsonl").open()]
        assert kinds == ["train"] * 6 + ["validation", "probe"]


@pytest.mark.run
def test_words_of_resume(alone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(alone / "hard.yaml"), str(alone / "hard")
    assert main(["train", recipe, "--out", out, "--resume", "never"]) == 2
    assert "holds SSMs and --resume is never" in capfd.readouterr().err
    place = str(alone / "hard" / "ssm-1" / "checkpoints" / "step-00000003")
    assert main(["train", recipe, "--out", out, "--resume", place]) == 2
    assert "has checkpoints of every SSM; use auto" in capfd.readouterr().err
    assert main(["train", recipe, "--out", out, "--optimizer.lr", "1"]) == 2
    assert "optimizer.lr" in capfd.readouterr().err


@pytest.mark.run
def test_ssms_without_checkpoints_are_of_their_recipe_still(
    alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints are deleted to save room; what they led to is no other recipe's work."""
    out = tmp_path / "run"
    shutil.copytree(alone / "hard", out)
    for place in (out / "ssm-1", out / "ssm-2"):
        shutil.rmtree(place / "checkpoints")
    words = ["train", str(alone / "hard.yaml"), "--out", str(out), "--optimizer.lr", "1"]
    assert main(words) == 2
    assert "these values differ: optimizer.lr" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.run
def test_continuations_are_shared_or_refused(alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A second run takes what the first one's target said; other wishes are named."""
    shared = str(alone / "hard" / "continuations")
    before = {path: path.stat().st_mtime_ns for path in Path(shared).iterdir()}
    words = ["train", str(alone / "soft.yaml"), "--boost.continuations", shared]
    assert main([*words, "--out", str(tmp_path / "a"), "--loop.steps", "1"]) == 0
    assert {path: path.stat().st_mtime_ns for path in before if path.suffix != ".json"} == {
        path: time for path, time in before.items() if path.suffix != ".json"
    }
    assert main([*words, "--out", str(tmp_path / "b"), "--boost.continuation", "7"]) == 2
    assert "was made for something else: tokens is " in capfd.readouterr().err


@pytest.mark.slow  # in one process every stage is killed in tests/trainers/test_boost.py
@pytest.mark.fault
def test_kills(alone: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments of a real run, from the continuations to the ensemble."""
    moments = random.Random(4)
    landed = 0
    for number in range(3):
        out, finished = tmp_path / f"run-{number}", False
        while not finished:
            process = killed_process.start(["train", str(alone / "hard.yaml"), "--out", str(out)])
            process.join(moments.uniform(0.3, 4) if landed < 2 * (number + 1) else None)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                landed += 1
            process.join()
            finished = process.exitcode == 0
            assert process.exitcode in (0, -signal.SIGKILL)
        assert_same(out, alone / "hard")
        assert coverage(out) == coverage(alone / "hard")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(("name", "stage"), itertools.product(SIGNALS, STAGES))
def test_a_signal_at_every_stage(name: str, stage: str, alone: Path, tmp_path: Path) -> None:
    """It ends the run, between rounds too, and the same command goes on to the same ensemble."""
    out = tmp_path / "run"
    words = ["train", str(alone / "hard.yaml"), "--out", str(out)]
    code = signalled(lambda: main(words), signal.Signals[name], STAGES[stage])
    status = json.loads((out / "status.json").read_text())
    # Ctrl-C outside of the steps leaves as Ctrl-C does everywhere
    outside = name == "SIGINT" and stage != "second SSM"
    assert (code, status["state"]) == ((130, "failed") if outside else (75, "stopped"))
    assert status["exit_code"] == code
    assert run(lambda: main(words)) == 0
    assert_same(out, alone / "hard")
    assert coverage(out) == coverage(alone / "hard")
    tally("signals", tried=1)


@pytest.mark.slow
@pytest.mark.run
@pytest.mark.parametrize("config", ["multi_cpu", "zero2"])
def test_two_processes_train_the_same(config: str, alone: Path, tmp_path: Path) -> None:
    """Shared-out continuations, weights and filters; rounding alone may differ."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    recipes = [write_recipe(tmp_path, name) for name in RECIPES]
    message = launched(config, LAUNCHER, str(tmp_path), *recipes)
    assert "2 processes: " in message
    for name in RECIPES:
        assert_same(tmp_path / name, alone / name, tolerance=1e-3)


@pytest.mark.parametrize("order", ["in_turn", "side_by_side"])
def test_row_tokens(order: str) -> None:
    """What the pre-flight counts with."""
    recipe = load_recipe("boost-tiny", [("boost.order", order)]).recipe
    assert recipe.row_tokens == 96
    assert load_recipe("distill-tiny").recipe.row_tokens == 256
