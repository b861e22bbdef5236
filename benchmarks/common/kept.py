"""Folders of kept results: what names mean in them, and that no later call mixes others in.

The scripts of `benchmarks/` that go on where they were cut find their results by name alone. Read
next: `eval/measure/environment.py`, what else a number hangs on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from draftsmith.storage import write_text

_UNSET = "not set"


def same_settings(folder: Path, given: Mapping[str, Any], *, free: Collection[str] = ()) -> None:
    """Write a call's settings into `folder/settings.json`, or hold them to those of the first call.

    Results from before there was such a file are taken for this call's.

    Args:
        given: a script's arguments by name, as argparse hands them out.
        free: names of those that may differ: they choose what is done, or name it in the folder.

    Raises:
        SystemExit: others are written there; the message names each.
    """
    path = folder / "settings.json"
    # as they are read back: paths are words, tuples lists
    given_settings = json.loads(json.dumps(_flat(given, {"out", *free}), default=str))
    if not path.is_file():
        write_text(path, json.dumps(given_settings, indent=1) + "\n")
        return
    standing = json.loads(path.read_text(encoding="utf-8"))
    differing = [
        f"{name}: {_shown(standing, name)} there, {_shown(given_settings, name)} asked for"
        for name in sorted({*standing, *given_settings})
        if standing.get(name, _UNSET) != given_settings.get(name, _UNSET)
    ]
    if differing:
        raise SystemExit(
            f"{folder} holds results of other settings ({path.name}): {'; '.join(differing)}. "
            "Name another --out, or remove this one"
        )


def file_name(name: str) -> str:
    """What a name is called in a folder."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def is_finished(run: Path) -> bool:
    """Whether a folder holds a training run that ended as it should."""
    status = run / "status.json"
    return status.is_file() and bool(json.loads(status.read_text())["state"] == "finished")


def _flat(given: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
    """By flag, and by flag and name where a flag collects values by name."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if name in without:
            continue
        if name == "set" or isinstance(value, dict):  # pairs: of one name the last counts
            flat |= {f"{flag} {key}": each for key, each in dict(value).items()}
        else:
            flat[flag] = value
    return flat


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else _UNSET
