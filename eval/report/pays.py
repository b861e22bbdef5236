"""The report's section on tuning: `tune.json` as a table of predicted against measured, and where each setting pays.

Read next: `report.py`, whose page it stands in; `../tune/surfaces.py`, which made the surfaces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import RequestError
from . import plots
from .tables import accuracy


def read_tuning(path: Path) -> dict[str, Any] | None:
    """What `draftsmith tune` has left beside an evaluation; None where it has not run.

    Raises:
        RequestError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON ({error}): run `draftsmith tune` again, or move it away") from error
    return content


def tuning_shown(content: dict[str, Any]) -> dict[str, Any]:
    """What the templates show of it; plots beside the words, so that nobody has to read a line off one."""
    surfaces = [each for each in content.get("surfaces", []) if each["points"]]
    axes = list(dict.fromkeys(each["axis"] for each in surfaces))
    rows = content["measured"]
    return {
        **{name: content[name] for name in ("sentence", "temperature", "batch", "prompts", "verdict")},
        "rows": [row for row in rows if "label" in row],
        "accuracy": accuracy([(row["speedup"], row["measured"][0]) for row in rows]),
        "break_evens": content.get("pays_from", []),
        "surfaces": [_shown(each) for each in surfaces],
        "plots": [plots.surface(axis, [each for each in surfaces if each["axis"] == axis]) for axis in axes],
    }


def _shown(surface: dict[str, Any]) -> dict[str, Any]:
    best = max(surface["points"], key=lambda point: point[1])
    return {
        "label": surface["label"],
        "axis": surface["axis"],
        "best": best,
        "pays": in_words(surface["axis"], surface["points"], surface["crosses_1_at"]),
    }


def in_words(axis: str, points: Sequence[Sequence[float]], crossings: Sequence[float]) -> str:
    """Where a surface lies above 1, in words."""
    first, last = points[0], points[-1]
    span = f"{axis} {first[0]:g} to {last[0]:g}"
    if not crossings:
        return f"pays at every {span}" if first[1] >= 1 else f"pays at no {span}"
    places = " and ".join(f"{each:.3g}" for each in crossings)
    if len(crossings) > 1:
        return f"passes 1 at {axis} {places}"
    return f"pays up to {axis} {places}" if first[1] >= 1 else f"pays from {axis} {places}"
