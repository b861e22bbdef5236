"""The fingerprint of a target: the one of the records, whether its files lie in a folder or in the hub's cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from draftsmith.benchmarks.common.provenance import target_weights
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.eval.measure.environment import drafter_hash, target_hash

NAME = "org/model"


class Loaded:
    """What a fingerprint reads of a target."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name, self.revision = name, revision


def fingerprint(name: str, revision: str | None = None) -> str | None:
    return target_hash(Loaded(name, revision))  # type: ignore[arg-type]


def files_of(folder: Path, weights: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def cached(cache: Path, weights: bytes, *, named: str, commit: str = "c" * 40) -> None:
    """A revision in the hub's cache, whose weights are called by a checksum."""
    root = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for folder in (root / "refs", root / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for name, blob, content in (("config.json", "a" * 40, b"{}"), ("model.safetensors", named, weights)):
        (root / "blobs" / blob).write_bytes(content)
        (snapshot / name).symlink_to(root / "blobs" / blob)


def test_it_is_the_one_that_records_name() -> None:
    assert fingerprint(embedded_target()) == target_weights("tiny").sha256


def test_a_target_of_the_hub_has_that_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache names weights by their checksum, so that nobody reads gigabytes for it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    same = drafter_hash(files_of(tmp_path / "folder", b"weights"))
    cached(tmp_path / "cache", b"weights", named=hashlib.sha256(b"weights").hexdigest())
    assert fingerprint(NAME) == fingerprint(NAME, "c" * 40) == same
    cached(tmp_path / "cache", b"never read", named=hashlib.sha256(b"others").hexdigest(), commit="d" * 40)
    assert fingerprint(NAME) == drafter_hash(files_of(tmp_path / "others", b"others")) != same
    assert fingerprint(NAME, "c" * 40) == same


def test_files_are_read_once_for_each_load(tmp_path: Path) -> None:
    """What changes them later has not changed what was loaded."""
    folder = files_of(tmp_path / "folder", b"a")
    loaded = Loaded(str(folder))
    first = target_hash(loaded)  # type: ignore[arg-type]
    (folder / "model.safetensors").write_bytes(b"b")
    assert target_hash(loaded) == first  # type: ignore[arg-type]
    assert fingerprint(str(folder)) != first


@pytest.mark.parametrize("name", ["random", "no name / of a hub?"])
def test_what_was_made_in_memory_has_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fingerprint(name) is None
