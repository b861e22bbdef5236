"""A checkpoint is whole or it is not there, wherever the writer is cut."""

import os
import shutil
from pathlib import Path

import pytest
from draftsmith.errors import EnvironmentFailure
from draftsmith.storage import MANIFEST, fault, replace_folder
from draftsmith.trainers.loop import checkpoint
from safetensors import SafetensorError


class Cut(BaseException):
    """Stands for the kill: nothing in the writer may catch it."""


def filler(text: str):
    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)
        (folder / "trainer.json").write_text('{"step": 1}')

    return fill


@pytest.fixture
def cut_after(monkeypatch: pytest.MonkeyPatch):
    """Let the n-th file operation of the writer be the last thing that happens."""

    def arm(count: int) -> list[int]:
        left = [count]

        def counted(real):
            def call(*args, **kwargs):
                if left[0] == 0:
                    raise Cut
                left[0] -= 1
                return real(*args, **kwargs)

            return call

        monkeypatch.setattr(os, "fsync", counted(os.fsync))
        monkeypatch.setattr(Path, "rename", counted(Path.rename))
        monkeypatch.setattr(Path, "write_text", counted(Path.write_text))
        monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
        monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        return left

    return arm


def save(parent: Path, step: int) -> None:
    checkpoint.write(parent, f"step-{step:08d}", filler(f"weights {step}"))
    checkpoint.delete_older(parent, keep=1)


def save_steps(parent: Path, steps: range) -> None:
    for step in steps:
        save(parent, step)


def operations(tmp_path: Path, cut_after) -> int:
    left = cut_after(10_000)
    save(tmp_path / "count", 1)
    save(tmp_path / "count", 2)
    return 10_000 - left[0]


@pytest.mark.fault
def test_every_cut_of_a_save_leaves_a_complete_checkpoint(
    tmp_path: Path, cut_after, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context():
        count = operations(tmp_path, cut_after)
    assert count > 15
    for point in range(count):
        parent = tmp_path / f"cut-{point}"
        monkeypatch.undo()
        save(parent, 1)
        cut_after(point)
        with pytest.raises(Cut):
            save_steps(parent, range(2, 5))
        monkeypatch.undo()
        newest_folder = checkpoint.newest(parent)
        assert newest_folder is not None, f"nothing to resume from after a cut at operation {point}"
        step = int(newest_folder.name.removeprefix("step-"))
        assert (newest_folder / "model.safetensors").read_text() == f"weights {step}"
        save(parent, 9)  # and the next run cleans up and goes on
        assert not list(parent.glob(".staging*"))
        assert checkpoint.newest(parent) == parent / "step-00000009"


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "missing", "manifest", "no manifest"])
def test_damage_is_named_and_the_older_checkpoint_used(tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        checkpoint.write(tmp_path, f"step-{step:08d}", filler("some weights"))
    newest = tmp_path / "step-00000002"
    weights = newest / "model.safetensors"
    if damage == "cut":
        weights.write_text("some")
    elif damage == "empty":
        weights.write_text("")
    elif damage == "flip":
        weights.write_text("sOme weights")
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        (newest / MANIFEST).write_text("{")
    else:
        (newest / MANIFEST).unlink()
    assert fault(newest)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000001"


def test_a_full_disk_is_one_clear_message_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write(tmp_path, "step-00000001", filler("one"))

    def full(_place: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(EnvironmentFailure, match="No space left on device; .* MB are free"):
        checkpoint.write(tmp_path, "step-00000002", full)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000001"


def test_a_full_disk_beneath_safetensors_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written in Rust, and its errors are no `OSError`."""

    def full(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(EnvironmentFailure, match="run the same command again"):
        checkpoint.write(tmp_path, "step-00000002", full)
    replace_folder(tmp_path / "drafter", filler("one"))
    with pytest.raises(EnvironmentFailure, match="a disk is full .* run the same command again"):
        replace_folder(tmp_path / "drafter", full)
    assert (tmp_path / "drafter" / "model.safetensors").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]  # and the half is gone


def test_an_exported_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    for text in ("one", "two"):
        replace_folder(folder, filler(text))
        assert (folder / "model.safetensors").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_damaged_checkpoint_does_not_push_out_those_written_after_it(tmp_path: Path) -> None:
    """A run that passed it over is behind it again, and writes smaller numbers."""
    for step in (1, 9):
        checkpoint.write(tmp_path, f"step-{step:08d}", filler("some weights"))
    (tmp_path / "step-00000009" / "model.safetensors").write_text("sOme weights")
    for step in (2, 3):
        checkpoint.write(tmp_path, f"step-{step:08d}", filler("some weights"))
        checkpoint.delete_older(tmp_path, keep=1, than=f"step-{step:08d}")
        assert checkpoint.newest(tmp_path) == tmp_path / f"step-{step:08d}"


def test_the_one_just_written_counts_among_those_that_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        checkpoint.write(tmp_path, checkpoint.name_of(step), filler("some weights"))
    checkpoint.delete_older(tmp_path, keep=2, than=checkpoint.name_of(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]


def test_a_deletion_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.write(tmp_path, f"step-{step:08d}", filler("some weights"))
    (tmp_path / "step-00000001" / MANIFEST).unlink()
    checkpoint.delete_older(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_file_in_the_place_of_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(EnvironmentFailure, match=r"cannot write .*: Not a directory \(.*/checkpoints/"):
        checkpoint.write(tmp_path / "checkpoints", "step-00000001", filler("one"))
    assert (tmp_path / "checkpoints").read_text() == "mine"
