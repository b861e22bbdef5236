"""Names, sizes and numbers of the system just within and just beyond what is taken, and whose a launch is."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.storage import check_identity, writing
from draftsmith.storage.files import check_name, system_error
from draftsmith.storage.held import file_system, launch
from draftsmith.storage.identity import _HASH, _LONGEST
from draftsmith.storage.staging import this_host
from draftsmith.storage.tensors import derived_tensors, write_tensors


@pytest.mark.parametrize("name", ["a" * 200, "\u00e4" * 100, "a/" * 1997 + "a"])
def test_names_of_as_many_bytes_as_there_may_be(name: str) -> None:
    """200 in one name, whatever letters they are; 4,000 in all, of which five are in front of it."""
    check_name(Path("/new") / name)
    with pytest.raises(RequestError, match="expected names of at most 200, and 4,000 in all"):
        check_name(Path("/new") / f"{name}a")


def test_free_room_is_told_in_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7_400_000))
    with (
        pytest.raises(EnvironmentFailure, match=r"No space left on device; 7 MB are free\."),
        writing(tmp_path / "new"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_path_is_on_the_innermost_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"/": "ext4", "/data": "nfs4", "/data/own": "xfs", "/dat": "btrfs"}
    mounted = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounted)
    asked = ("/elsewhere", "/data/run", "/data/own/run", "/data", "/database")
    assert [file_system(Path(each)) for each in asked] == ["ext4", "nfs4", "xfs", "nfs4", "ext4"]


def test_a_launch_on_this_machine_is_one_by_whatever_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first process may be told the machine's own address, and the others another machine's."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    here = this_host()
    for address, host in (("localhost", here), ("127.0.0.1", here), ("::1", here), ("node-7", "node-7")):
        monkeypatch.setenv("MASTER_ADDR", address)
        assert launch() == f"{host}:29500"
    monkeypatch.delenv("MASTER_ADDR")
    assert launch() == f"{here}:29500"
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launch() == f"{here}:{os.getpid()}"


@pytest.mark.parametrize(
    ("expected", "fits"),
    [
        ({"a": (2, 3), "b": (4,)}, True),
        ({"a": (None, 3), "b": (None,)}, True),
        ({"a": (None, 4), "b": (4,)}, False),
        ({"a": (2, 3, None), "b": (4,)}, False),
        ({"a": (2, 3)}, False),
        ({"a": (2, 3), "b": (4,), "c": (1,)}, False),
    ],
)
def test_tensors_that_can_be_made_again_have_the_sizes_that_are_said(
    expected: dict[str, tuple[int | None, ...]], fits: bool, tmp_path: Path
) -> None:
    path = tmp_path / "made.safetensors"
    assert derived_tensors(path, expected) is None
    write_tensors(path, {"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    assert (derived_tensors(path, expected) is not None) is fits


@pytest.mark.parametrize(
    ("there", "shown"),
    [
        ("x" * _LONGEST, "x" * _LONGEST),
        ("x" * (_LONGEST + 1), "x" * _LONGEST + "..."),
        ("0123456789abcdef" * 4, "0123456789ab..."),
        ("0123456789ab", "0123456789ab"),
        ("", "empty"),
    ],
)
def test_values_that_differ_are_shown_up_to_a_length(there: str, shown: str, tmp_path: Path) -> None:
    """Of a hash the first twelve digits."""
    assert _HASH.fullmatch("0123456789abcdef" * 4)
    with pytest.raises(RequestError) as raised:
        check_identity(tmp_path, {"name": there}, {"name": "other"}, remedy="Go")
    assert str(raised.value) == f"{tmp_path} was made for something else: name is {shown} there and other here. Go"


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EDQUOT, "quota"), errno.EDQUOT),
        (OSError("without a number"), errno.EIO),
        (RuntimeError("tokenizers: No space left on device (os error 28)"), errno.ENOSPC),
        (RuntimeError("no number"), None),
        (RequestError("of somebody else's (os error 28)"), None),
    ],
)
def test_errors_of_the_system_have_a_number(error: Exception, number: int | None) -> None:
    assert system_error(error) == number


def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(EnvironmentFailure, match="a disk is full there"), writing(tmp_path / "new"):
            raise OSError(number, "full")
    with pytest.raises(EnvironmentFailure, match="cannot write .*: mend that, then"), writing(tmp_path / "new"):
        raise OSError("without a number")
