"""Files and folders that are whole or not there, what they were made for, and those tried before the work."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

import pytest
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.storage import (
    MANIFEST,
    check_identity,
    check_identity_file,
    delete_folder,
    delete_leftovers,
    fault,
    json_lines,
    replace_folder,
    staged_file,
    staged_folder,
    staging_of,
    try_lock,
    writable_folder,
    write_text,
    writing,
)
from draftsmith.storage import staging as staging_names
from draftsmith.storage.identity import flat


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


def test_only_a_line_end_ends_a_json_line(tmp_path: Path) -> None:
    values = [{"text": "a\u2028b\x85c\x1cd"}, {"text": "e"}]
    write_text(tmp_path / "lines", "\r\n\n".join(json.dumps(each, ensure_ascii=False) for each in values))
    assert list(json_lines(tmp_path / "lines")) == values


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "one")

    def fail() -> None:
        with staged_file(path) as staging:
            staging.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "one"
    assert leftovers(path.parent) == []


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_on_the_disk_before_it_appears(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append("flush") or fsync(handle))
    monkeypatch.setattr(Path, "replace", lambda self, to: seen.append("rename") or replace(self, to))
    with staged_file(tmp_path / "file", durable=durable) as staging:
        staging.write_text("whole")
    assert seen == ["flush"] * durable + ["rename"]


def test_a_folder_is_on_the_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then the manifest, then the lists of names, the rename, and the list that the rename changed."""
    seen: list[str] = []
    path, staging = tmp_path / "made", staging_of(tmp_path / "made")
    fsync, rename = os.fsync, Path.rename

    def recorded(handle: int) -> None:
        seen.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Path, "rename", lambda self, to: seen.append(f"to {to}") or rename(self, to))
    with staged_folder(path, manifest={"kind": "test"}) as folder:
        (folder / "below" / "deep").mkdir(parents=True)
        (folder / "below" / "deep" / "file").write_text("a")
        (folder / "top").write_text("b")
    files = [f"{staging}/below/deep/file", f"{staging}/top"]
    folders = [f"{staging}/below", f"{staging}/below/deep", f"{staging}"]
    assert seen == [*files, f"{staging}/{MANIFEST}", *folders, f"to {path}", f"{tmp_path}"]
    assert json.loads((path / MANIFEST).read_text())["kind"] == "test"
    assert fault(path) is None


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("mine")
    with pytest.raises(OSError), staged_folder(tmp_path / "made") as staging:  # noqa: PT011
        (staging / "file").write_text("other")
    assert (tmp_path / "made" / "file").read_text() == "mine"
    assert leftovers(tmp_path) == []


def test_a_file_in_the_place_of_an_export_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / "drafter").write_text("mine")
    with pytest.raises(EnvironmentFailure, match="there is a file of that name; move it away"):
        replace_folder(tmp_path / "drafter", lambda folder: None)
    assert (tmp_path / "drafter").read_text() == "mine"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({"format": 1, "files": []}, "unreadable manifest"),
        ({"format": 1, "files": {"file": {"bytes": 1}}}, "unreadable manifest"),
        ({"format": 1, "files": {}}, "the manifest lists no file"),
        ({"format": 0, "files": {"file": {"bytes": 1, "sha256": ""}}}, "format 0, this version reads 1"),
        ([], "unreadable manifest"),
    ],
)
def test_a_manifest_that_says_nothing_is_a_fault(manifest: object, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert (fault(tmp_path) or "").startswith(reason)


def test_a_disk_that_is_full_and_one_that_is_not(tmp_path: Path) -> None:
    full, closed = (OSError(number, os.strerror(number), "file") for number in (errno.ENOSPC, errno.EROFS))

    def fail(error: OSError) -> None:
        with writing(tmp_path / "new", room="less", again="go on"):
            raise error

    with pytest.raises(
        EnvironmentFailure, match=r"No space left on device \(file\); \d+ MB are free.*: less, then go"
    ):
        fail(full)
    with pytest.raises(EnvironmentFailure, match=r"Read-only file system \(file\)\. .*: mend that, then go on"):
        fail(closed)
    with pytest.raises(KeyError), writing(tmp_path / "new"):
        raise KeyError


def test_an_identity_is_compared_field_by_field(tmp_path: Path) -> None:
    here = {"target": {"name": "tiny", "hash": "a" * 64}, "rows": (1, 2), "drafter": None}
    there = json.loads(json.dumps(here)) | {"sessions": 3}
    check_identity(tmp_path, there, here, remedy="name another")
    other = {"target": {"name": "tiny", "hash": "b" * 64}, "rows": [1, 3], "drafter": {"path": ""}}
    with pytest.raises(RequestError) as refused:
        check_identity(tmp_path, other, here, remedy="Name another.")
    assert str(refused.value) == (
        f"{tmp_path} was made for something else: target.hash is bbbbbbbbbbbb... there and aaaaaaaaaaaa... here; "
        "rows is [1, 3] there and [1, 2] here; drafter.path is empty there and None here. Name another."
    )


def test_what_an_identity_lacks_is_another_one(tmp_path: Path) -> None:
    """Of before the field, or of nothing: nobody knows what it was made for. More than is asked for may be there."""
    here = {"rows": 1, "precision": "fp32"}
    for there in ({"rows": 1}, {"precision": "fp32"}, {}):
        with pytest.raises(RequestError, match="was made for something else"):
            check_identity(tmp_path, there, here, remedy="name another")
    check_identity(tmp_path, here | {"more": 2}, here, remedy="name another")
    check_identity(tmp_path, {"rows": 1}, {"rows": 1, "precision": None}, remedy="name another")


def test_of_several_folders_moved_aside_the_newest_comes_back(tmp_path: Path) -> None:
    for number, (process, seconds) in enumerate(((4_000_001, 50), (4_000_003, 300), (4_000_002, 100))):
        folder = tmp_path / f".old-{staging_names.this_host()}-{process}-drafter"
        folder.mkdir()
        (folder / "which").write_text(str(number))
        os.utime(folder, (seconds, seconds))
    staging_names.restore_folder(tmp_path / "drafter")
    assert (tmp_path / "drafter" / "which").read_text() == "1"
    assert len([*tmp_path.glob(".old-*")]) == 2
    staging_names.restore_folder(tmp_path / "drafter")
    assert (tmp_path / "drafter" / "which").read_text() == "1", "what is there stays"


def test_flat() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "a.c": {}, "d": None}


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_an_identity_that_is_damaged(text: str, tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    assert not check_identity_file(path, {"rows": 1}, remedy="name another")
    path.write_text('{"rows": 1}')
    assert check_identity_file(path, {"rows": 1}, remedy="name another")
    path.write_text(text)
    with pytest.raises(RequestError, match="the file is damaged .*name another"):
        check_identity_file(path, {"rows": 1}, remedy="name another")


LONG = "a-training-job-with-a-long-name-worker"


@pytest.mark.parametrize(
    ("name", "boot", "mine"), [(f"{LONG}-0", "one", True), (f"{LONG}-1", "one", False), (f"{LONG}-0", "two", False)]
)
def test_another_machine_is_told_apart(
    name: str, boot: str, mine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the end of a long name too, and where the name is the same but process numbers are not."""

    def become(name: str, boot: str) -> str:
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        monkeypatch.setattr(staging_names, "_read", lambda path: boot)
        staging_names.this_host.cache_clear()
        return staging_names.this_host()

    left = tmp_path / f".staging-{become(f'{LONG}-0', 'one')}-99999999-file"
    left.touch()
    become(name, boot)
    delete_leftovers(tmp_path)
    monkeypatch.undo()
    staging_names.this_host.cache_clear()
    assert left.exists() != mine


def test_this_machine_says_where_process_numbers_hold() -> None:
    """The kernel names its start and the namespace of the numbers."""
    assert len(staging_names._read("/proc/sys/kernel/random/boot_id").strip()) == 36
    assert staging_names._read("/proc/self/ns/pid").startswith("pid:[")
    assert staging_names._read("/proc/nothing") == ""


def test_a_lock_that_smb_refuses_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> bool:
        def flock(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        with (tmp_path / "lock").open("ab") as file:
            return try_lock(file)

    assert not refuse(errno.EACCES)
    with pytest.raises(PermissionError):
        refuse(errno.EPERM)


def test_a_folder_that_cannot_be_deleted_yet_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps a file that is open somewhere, under another name, and so the folder."""
    with staged_folder(tmp_path / "made", manifest={}) as folder:
        (folder / "file").touch()

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(os, "rmdir", busy)
    delete_folder(tmp_path / "made")
    delete_leftovers(tmp_path)
    assert "cannot be deleted whole yet" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == leftovers(tmp_path) != []
    monkeypatch.undo()
    delete_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_many_differences_the_others_are_counted(tmp_path: Path) -> None:
    there, here = ({f"v{n}": n + by for n in range(8)} for by in (0, 1))
    with pytest.raises(RequestError) as caught:
        check_identity(tmp_path, there, here, remedy="go")
    assert str(caught.value).count(" there and ") == 6
    assert "; and 2 more" in str(caught.value)
