"""HASS behind a finished EAGLE-1 on the command line: what is taken over, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from draftsmith.launch.cli import main
from helpers.models.small_drafters import change_target_of
from helpers.runs.small_flags import TRAINING
from safetensors.torch import load_file
from torch.testing import assert_close

STILL = ["--loop.steps", "1", "--optimizer.lr", "1e-12"]


@pytest.mark.run
@pytest.mark.slow
def test_hass_behind_eagle(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, hass = tmp_path / "eagle", tmp_path / "hass"
    drafter = str(first / "drafter")
    assert main(["train", "eagle-tiny", "--out", str(first), "--loop.steps", "2", *TRAINING]) == 0
    assert main(["check", "hass-tiny", "--data.limit_rows", "40", "--model.start_from", drafter]) == 0

    behind = ["train", "hass-tiny", *TRAINING, *STILL, "--model.start_from"]
    assert main([*behind, drafter, "--out", str(hass)]) == 0
    fresh = tmp_path / "fresh"
    assert main([*behind, "", "--out", str(fresh)]) == 0
    before, after, alone = (load_file(run / "drafter" / "model.safetensors") for run in (first, hass, fresh))
    for name, tensor in before.items():
        assert_close(after[name], tensor, rtol=0, atol=1e-9)
    assert max(float((alone[name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3
    # it is a value of the run: what a resume compares
    capfd.readouterr()
    assert main([*behind, "", "--out", str(hass)]) == 2
    assert "these values differ: model.start_from" in capfd.readouterr().err
    assert main([*behind, drafter, "--out", str(hass)]) == 0

    # refused with one message, by the pre-flight and by the run
    other = Path(shutil.copytree(first / "drafter", tmp_path / "other"))
    change_target_of(other, "tokenizer")
    refused = {
        "no drafter": ("hass-tiny", str(first), "holds no drafter"),
        "another family": ("medusa-tiny", drafter, "this run trains one of family 'medusa'"),
        "another target": ("hass-tiny", str(other), "(model.start_from) was made for target"),
    }
    assert (
        main(["train", "hass-tiny", *STILL, "--model.start_from", str(first), "--out", str(tmp_path / "early")]) == 2
    )
    assert not (tmp_path / "early" / "data.json").exists(), "rows were read, which may take hours"
    capfd.readouterr()
    for recipe, folder, reason in refused.values():
        named = ["--model.start_from", folder, "--out", str(tmp_path / "refused")]
        assert main(["train", recipe, *TRAINING, *STILL, *named]) == 2
        assert capfd.readouterr().err.count(reason) == 1
        assert main(["check", recipe, "--data.limit_rows", "40", *named]) == 2
        assert capfd.readouterr().err.count(reason) == 1
    status = json.loads((tmp_path / "refused" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
