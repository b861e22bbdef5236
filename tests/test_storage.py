"""Folders that results go to, tried before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.storage import writable_folder


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new" / "deep"):
        assert writable_folder(path) == path
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name in ("file", "file/deep", "link"):
        with pytest.raises(RequestError, match="is a file; name another folder"):
            writable_folder(tmp_path / name)


def test_a_folder_that_nobody_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    # root may write everywhere but where there is no disk
    closed = Path("/proc") if os.access(tmp_path, os.W_OK) else tmp_path
    with pytest.raises(EnvironmentFailure, match=rf"cannot write to {closed}/new \(.*tried in"):
        writable_folder(closed / "new")
    tmp_path.chmod(0o700)
