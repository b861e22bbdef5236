"""What a folder was made for, compared field by field before anything is taken from it.

An identity is JSON: a name and a value for each thing that the folder's content depends on.
Read next: `data/features/store.py`, `data/generate/journal.py`, which each keep one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RequestError

_LONGEST = 80  # characters of a value that are shown
_MOST = 6  # values that are named
_HASH = re.compile(r"[0-9a-f]{32,}")  # its first characters tell it from another


def check_identity(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any], *, remedy: str) -> None:
    """Refuse a folder that was made for something else.

    Args:
        there: the identity that the folder keeps; fields beyond those of `here` may be
            anything.
        here: what it has to be.
        remedy: what to do where they differ, the end of the message.

    Raises:
        RequestError: they differ; each field that does is named with both values.
    """
    # through JSON and back, as the folder's values have been
    expected = flat(json.loads(json.dumps(here)))
    stored = flat({name: there[name] for name in here if name in there})
    other = [name for name in expected | stored if expected.get(name) != stored.get(name)]
    if not other:
        return
    listed = "; ".join(
        f"{name} is {_shown(stored, name)} there and {_shown(expected, name)} here" for name in other[:_MOST]
    )
    if len(other) > _MOST:
        listed += f"; and {len(other) - _MOST} more"
    raise RequestError(f"{folder} was made for something else: {listed}. {remedy}")


def check_identity_file(path: Path, here: Mapping[str, Any], *, remedy: str) -> bool:
    """Compare the identity that a folder keeps in the JSON file `path`, and say whether it has one.

    Raises:
        RequestError: it is another one, or the file is damaged.
    """
    if not path.is_file():
        return False
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(there, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path}: the file is damaged ({error}). {remedy}") from error
    check_identity(path.parent, there, here, remedy=remedy)
    return True


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested objects as one, names joined by dots; what is empty inside stays as it is."""
    if not isinstance(value, dict) or (name and not value):
        return {name: value}
    parts = (flat(each, f"{name}.{key}" if name else key) for key, each in value.items())
    return {key: each for part in parts for key, each in part.items()}


def _shown(fields: Mapping[str, Any], name: str) -> str:
    text = str(fields.get(name)) or "empty"
    longest = 12 if _HASH.fullmatch(text) else _LONGEST
    return text if len(text) <= longest else f"{text[:longest]}..."
