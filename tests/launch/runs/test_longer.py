"""More steps for a run that was planned for fewer: exact where its steps were the same, refused with the way where not."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from draftsmith.errors import RequestError
from draftsmith.launch.check.resume import check_longer
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from helpers.runs.small_run import RECIPE, assert_same_weights, losses
from safetensors.torch import load_file

SHORT, LONG = 6, 8
WSD = "optimizer: {lr: 3e-3, warmup_steps: 2, schedule: wsd, decay_share: 0.5}"
TEXT = RECIPE.replace("optimizer: {lr: 3e-3, warmup_steps: 2}", WSD).replace(
    "every_steps: 3}", "every_steps: 2, keep: 9}"
)
LAST = f"checkpoints/step-{SHORT:08d}/model.safetensors"
Captured = pytest.CaptureFixture[str]


def words(place: Path, name: str, steps: int, *more: str) -> list[str]:
    return ["train", str(place / "small.yaml"), "--out", str(place / name), "--loop.steps", str(steps), *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 6 steps, whose rate decays behind the fourth, and one of 8."""
    folder = tmp_path_factory.mktemp("longer")
    (folder / "small.yaml").write_text(TEXT)
    assert main(words(folder, "short", SHORT)) == 0
    assert main(words(folder, "long", LONG)) == 0
    return folder


def stopped(place: Path, name: str, behind: int) -> Path:
    """The shorter run as if it had been stopped behind that step."""
    shutil.copytree(place / "short", place / name, ignore=shutil.ignore_patterns("drafter", "status.json"))
    for saved in (place / name / "checkpoints").iterdir():
        if int(saved.name.rpartition("-")[2]) > behind:
            shutil.rmtree(saved)
    return place / name


@pytest.mark.run
def test_before_its_decay_a_run_goes_on_as_one_that_was_planned_so_long(place: Path) -> None:
    saved = str(place / "short" / "checkpoints" / "step-00000004")
    stopped(place, "stopped", 4)
    assert main(words(place, "stopped", LONG)) == 0
    assert main(words(place, "elsewhere", LONG, "--resume", saved)) == 0
    for name in ("stopped", "elsewhere"):
        assert_same_weights(place / name, place / "long", LONG)
    assert losses(place / "stopped") == losses(place / "long")
    ended, passed = (load_file(place / name / LAST) for name in ("short", "long"))
    assert not all(bool((ended[name] == passed[name]).all()) for name in passed)  # the shorter one has decayed


@pytest.mark.run
def test_behind_it_the_message_names_the_way(place: Path, capfd: Captured) -> None:
    before = sorted(path.name for path in (place / "short").rglob("*"))
    assert main(words(place, "short", LONG)) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert (
        "step-00000006 is of a run of 6 steps, and loop.steps is 8 here: its learning rate has decayed since" in said
    )
    assert "A checkpoint from step 5 or before goes on exactly, by --resume PATH" in said
    assert f"with --model.start_from {place}/short/drafter and another --out" in said
    assert sorted(path.name for path in (place / "short").rglob("*")) == before


@pytest.mark.run
def test_what_changes_no_weight_may_change(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other probes are no measure of the same thing: none of before is the best."""
    out = stopped(place, "measured", 2)
    trainer = out / "checkpoints" / "step-00000002" / "trainer.json"
    assert json.loads(trainer.read_text())["best"] is None
    flags = ["--loop.validate_every", "3", "--loop.validate_rows", "2", "--probe.every_steps", "2"]
    with caplog.at_level(logging.INFO):
        assert main(words(place, "measured", SHORT, *flags)) == 0
        assert "choose the best anew" not in caplog.text
        shutil.rmtree(out / "checkpoints" / "step-00000006")
        assert main(words(place, "measured", SHORT, *flags, "--probe.draft_length", "2")) == 0
        assert "probes or held-out rows are others than before" in caplog.text
    mine, theirs = (
        load_file(each / "checkpoints" / "step-00000006" / "model.safetensors") for each in (out, place / "short")
    )
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)
    kinds = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kinds if line["kind"] == "validation"] == [3, 6]


@pytest.mark.parametrize(
    ("flags", "taken", "now", "reason"),
    [
        ({}, 4, 40, r"the learning rate \(cosine\) would have been another from step 3 on, and 4 are taken"),
        ({}, 3, 40, None),  # of the warm-up and the peak alone
        ({"optimizer.schedule": "linear"}, 8, 40, r"\(linear\) would have been another from step 3 on"),
        ({"optimizer.schedule": "constant"}, 20, 40, None),
        ({"optimizer.schedule": "constant"}, 10, 15, "a run is not made shorter"),
        ({"optimizer.schedule": "wsd"}, 16, 40, None),
        ({"optimizer.schedule": "wsd"}, 17, 40, "has decayed since step 16"),
        (
            {"optimizer.schedule": "constant", "objective.from_kl_share": "0.5", "objective.tv": "1"},
            5,
            40,
            "the weights of the loss move over a share of the steps",
        ),
    ],
)
def test_which_steps_are_those_of_a_longer_run(
    flags: dict[str, str], taken: int, now: int, reason: str | None, tmp_path: Path
) -> None:
    given = {"optimizer.schedule": "cosine", "optimizer.warmup_steps": "2", "optimizer.decay_share": "0.25"}
    given |= {"loop.steps": str(now)} | flags
    recipe = load_recipe("distill-tiny", list(given.items())).recipe
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{taken:08d}"
    there = {"loop.steps": 20}
    if reason is None:
        check_longer(checkpoint, there, recipe)
        return
    with pytest.raises(RequestError, match=reason) as no:
        check_longer(checkpoint, there, recipe)
    assert f"--model.start_from {tmp_path}/run/drafter and another --out" in str(no.value)
