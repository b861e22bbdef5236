"""What training costs: memory of the losses, and the parts of a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.benchmark_scripts import SCRIPTS, load

loss_memory, train_step = load("loss_memory"), load("train_step")


def test_losses_in_chunks_take_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes are counted, so a small size shows it; both variants have the same loss, or it stops."""
    words = ["--vocabulary", "6000", "--positions", "96", "--hidden", "16", "--chunk", "8"]
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["loss_memory.py", *words, "--out", str(out)])
    loss_memory.main()
    found = json.loads(out.read_text())
    assert list(found) == ["distill", "medusa", "eagle3"]
    logits = 4 * 96 * 6000 / 1e9
    # five heads, and seven steps over half of the vocabulary: what a plain loss has to hold
    assert found["medusa"]["plain_gb"] > 5 * logits
    assert found["eagle3"]["plain_gb"] > 7 * logits / 2
    for family, row in found.items():
        assert row["share"] <= 0.25, family
    printed = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in printed.splitlines()[-3:]] == list(found)


def test_peaks_are_those_of_live_tensors() -> None:
    def work() -> None:
        kept = torch.zeros(1000)
        for _ in range(3):
            torch.zeros(5000)
        del kept

    assert loss_memory.peak_bytes(work, "cpu") == pytest.approx(24_000, rel=0.02)


def test_a_plain_loss_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["loss_memory.py", "--positions", "1000000000"])
    with pytest.raises(SystemExit, match="take --positions"):
        loss_memory.main()


def test_losses_that_differ_are_no_comparison() -> None:
    rounds = [{name: {"gb": 1.0, "seconds": 1.0, "loss": loss} for name, loss in (("plain", 2.0), ("chunked", 2.01))}]
    with pytest.raises(SystemExit, match="the losses differ"):
        loss_memory.summary("medusa", rounds)


@pytest.mark.slow
@pytest.mark.run
def test_parts_of_a_step(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPTS / "train_step.py"), "--tiny", "--out", str(out)]
    done = subprocess.run(
        [*command, "--recipes", "distill-tiny,eagle-tiny,medusa2-tiny"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == train_step.NOTE
    found = json.loads(out.read_text())["results"]
    assert list(found) == ["distill-tiny", "eagle-tiny", "medusa2-tiny", "eagle-tiny, 9 layers"]
    for row in found.values():
        assert row["steps"] == 2
        assert 0 < row["tokens_per_second"][0] < 1e7
        assert row["mfu"][0] > 0
        assert 0 <= row["data_wait"][0] < 1
        assert 0 <= row["layers"][0] <= row["target"][0] < 1
    # a tuned target has no frozen part
    assert found["medusa2-tiny"]["operations"]["layers"] == 0
    tiny, deep = found["eagle-tiny"], found["eagle-tiny, 9 layers"]
    layers = target_operations(tokens=128, length=64)
    assert tiny["operations"]["layers"] == 20 * layers
    assert deep["operations"]["layers"] == 9 * layers
    # one layer, and twice that in its backward pass, beside the projections of draft and target
    counted = tiny["operations"]["projection"] / (2 * 208 * 4096)
    assert counted == int(counted)
    assert 0 < counted < 128
    rest = tiny["operations"]["step"] - 20 * layers - tiny["operations"]["projection"]
    layer = (layers - attention(128, 64)) + 2 * 128 * 416 * 208
    own = 3 * layer + 2 * tiny["operations"]["projection"]
    assert rest == pytest.approx(own, rel=0.05)


def attention(tokens: int, length: int) -> int:
    """Operations of a layer's attention: two products of 4 heads of 64."""
    return 4 * tokens * length * 4 * 64


def target_operations(*, tokens: int, length: int) -> int:
    """Operations of a layer of the embedded target, by hand."""
    products = 208 * 256 + 2 * 208 * 128 + 256 * 208 + 3 * 208 * 640
    return 2 * tokens * products + attention(tokens, length)


def test_recipes_are_those_that_train_a_drafter() -> None:
    found = train_step.families()
    assert {"distill-tiny", "eagle-tiny", "eagle3-tiny", "medusa-tiny", "hydra-tiny"} <= set(found)
    assert "target-tiny" not in found
