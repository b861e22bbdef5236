"""Datastores that somebody else has damaged, or is writing at the same time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.data.datastore import Datastore
from draftsmith.data.datastore_build import build_datastore
from draftsmith.errors import RequestError

DOCUMENTS = [[0, 1, 2, 0, 1], [2, 1, 0]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_datastore(DOCUMENTS, tmp_path / "store", vocabulary=3, tokenizer="abc")
    return tmp_path / "store"


def look_up(folder: Path, **how: Any) -> np.ndarray:
    return Datastore(folder, **how).continuations([2, 0], longest=2, shortest=1, length=3, limit=10)


def header_of(text: str) -> bytes:
    """An array's file with that header and nothing behind it."""
    body = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, np.zeros(8))
    return file.getvalue()


DAMAGED = {
    "empty": b"",
    "archive": archive(),
    "half an archive": b"PK\x03\x04",
    "words": b"hello",
    "claims too much": header_of("{'descr': '<i4', 'fortran_order': False, 'shape': (10000000000000000000000,)}"),
    "no header": header_of("{'descr': '<i4', 'fortran_order'"),
    "indented": header_of("   \t {"),
    "deep": header_of("-" * 60_000 + "1"),
}


@pytest.mark.parametrize("name", ["tokens-00000.npy", "suffixes-00000.npy"])
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_holds_no_array(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(RequestError, match=r"shard 0 .* is damaged: .*build the datastore again"):
        Datastore(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.astype(np.float64),
        lambda array: array.astype("S4"),
        lambda array: array.astype("datetime64[s]"),
        lambda array: array.astype(np.uint8),
        lambda array: array[None],
    ],
)
def test_suffixes_of_another_type(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    path = folder / "suffixes-00000.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(RequestError, match="shard 0 .* is damaged"):
        Datastore(folder)


@pytest.mark.parametrize("start", [-1_000_000, -1, 1_000_000])
def test_a_suffix_that_is_nowhere(folder: Path, start: int) -> None:
    path = folder / "suffixes-00000.npy"
    np.save(path, np.full_like(np.load(path), start))
    with pytest.raises(RequestError, match=f"a suffix at {start:,}, and 10 tokens"):
        look_up(folder)
    with pytest.raises(RequestError, match=f"a suffix at {start:,}, and 10 tokens"):
        Datastore(folder).shards[0].starts(np.array([0]))


def test_tokens_that_a_target_does_not_have(folder: Path) -> None:
    assert look_up(folder, ids=3).tolist() == look_up(folder).tolist() == [[1, -1, -1]]
    with pytest.raises(RequestError, match="holds the token 1; expected ids below 1"):
        look_up(folder, ids=1)


def test_checksums_that_are_no_names(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = list(manifest["shards"][0]["sha256"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RequestError, match="lacks its checksums"):
        Datastore(folder)


def test_a_link_that_leads_nowhere_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to(tmp_path / "gone")

    def documents() -> Any:
        raise AssertionError("the corpus is not to be read")
        yield

    with pytest.raises(RequestError, match="exists already; name a new folder"):
        build_datastore(documents(), tmp_path / "store", vocabulary=3, tokenizer="abc")


def test_a_folder_that_somebody_else_writes_meanwhile(tmp_path: Path) -> None:
    def documents() -> Any:
        yield [0, 1]
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "theirs").write_text("")

    with pytest.raises(RequestError, match="exists already; name a new folder"):
        build_datastore(documents(), tmp_path / "store", vocabulary=3, tokenizer="abc")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["theirs"]


def test_only_a_datastore_is_replaced(folder: Path) -> None:
    build_datastore([[1, 1]], folder, vocabulary=3, tokenizer="abc", replace=True)
    assert list(Datastore(folder).documents()) == [[1, 1]]
    build_datastore([[2, 1]], folder.with_name("new"), vocabulary=3, tokenizer="abc", replace=True)
    other = folder.with_name("other")
    other.mkdir()
    for manifest in (None, "{}"):
        if manifest is not None:
            (other / "manifest.json").write_text(manifest)
        with pytest.raises(RequestError):
            build_datastore([[1]], other, vocabulary=3, tokenizer="abc", replace=True)
    assert [path.name for path in other.iterdir()] == ["manifest.json"]
