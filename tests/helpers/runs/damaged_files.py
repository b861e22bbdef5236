"""Kinds of damage that happen to files: copies that were cut short, full disks, wrong downloads."""

from __future__ import annotations

from pathlib import Path

KINDS = ["cut", "header cut", "empty", "noise"]


def damage(path: Path, kind: str) -> None:
    """Change a file that is whole."""
    whole = path.read_bytes()
    content = {"cut": whole[: len(whole) // 2], "header cut": whole[:20], "empty": b"", "noise": b"\xff<html>" * 100}[
        kind
    ]
    assert content != whole
    path.write_bytes(content)
