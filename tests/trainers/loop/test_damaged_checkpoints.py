"""Damage to each file of the newest checkpoint: named, and the next older one used, to the same bits."""

from __future__ import annotations

import logging
import shutil
from itertools import product
from pathlib import Path

import pytest
from faults import toy
from helpers.reliability_tally import tally
from helpers.runs.damaged_files import KINDS, damage

FILES = ["manifest.json", "model.safetensors", "optimizer-0.safetensors", "optimizer-0.json", "trainer.json"]
ALL = [*product([*KINDS, "flip", "missing"], FILES)]
# one for each file, and each kind once
FEW = [(kind, FILES[number % len(FILES)]) for number, kind in enumerate([*KINDS, "flip", "missing"])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    toy.run(toy.loop_in(out))
    return out


def spoil(path: Path, kind: str) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "flip":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        damage(path, kind)


def check_passed_over(kind: str, name: str, whole: Path, out: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(whole, out)
    newest = out / "checkpoints" / f"step-{toy.STEPS:08d}"
    spoil(newest / name, kind)
    with caplog.at_level(logging.INFO):
        toy.run(toy.loop_in(out))
    assert f"passing over the checkpoint {newest}" in caplog.text
    assert "step-00000010: step 10" in caplog.text
    assert toy.state_files(out) == toy.state_files(whole)
    assert toy.losses(out) == toy.losses(whole)


@pytest.mark.parametrize(("kind", "name"), FEW)
def test_a_damaged_file(kind: str, name: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_passed_over(kind, name, whole, tmp_path / "run", caplog)
    tally("damaged checkpoints", tried=1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [each for each in ALL if each not in FEW])
def test_every_damage_to_every_file(
    kind: str, name: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_passed_over(kind, name, whole, tmp_path / "run", caplog)
    tally("damaged checkpoints", tried=1)
