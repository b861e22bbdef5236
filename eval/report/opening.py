"""The first lines of a report: what pays, by how much, where it stops paying, and the verdict.

Read next: `report.py`, whose page begins with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

from .tables import interval, stand_in


def opening(rows: Sequence[dict[str, Any]], sweep: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each temperature, and one for the draft lengths that were tried; none without its verdict."""
    measured = [row for row in rows if not stand_in(row)]  # not the controls
    temperatures = sorted({row["temperature"] for row in measured})
    lines = [
        _at(temperature, [row for row in measured if row["temperature"] == temperature])
        for temperature in temperatures
    ]
    return [*lines, _lengths(measured[0]["method"], sweep)] if sweep else lines


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the highest speed-up; the first one where nothing was timed."""
    return max(rows, key=lambda row: row["speedup"][0] if _timed(row) else -1.0)


def _at(temperature: float, rows: Sequence[dict[str, Any]]) -> str:
    """What pays at a temperature, the fastest first."""
    ranked = sorted((row for row in rows if _timed(row)), key=lambda row: -row["speedup"][0])
    if not ranked:
        return f"T = {temperature:g}: {_named(rows[0])}; too little was timed to tell what pays."
    paying = [row for row in ranked if row["speedup"][1] > 1]
    slower = [row for row in ranked if row["speedup"][2] < 1]
    unclear = [row for row in ranked if row not in paying and row not in slower]
    parts = [
        f"{word} {', '.join(map(_named, group))}"
        for word, group in (("pays:", paying), ("not told apart from plain decoding:", unclear), ("slower:", slower))
        if group
    ]
    nothing = "" if paying else "nothing pays beyond its interval. "
    return f"T = {temperature:g}: {nothing}{'; '.join(parts)}."


def _named(row: dict[str, Any]) -> str:
    speed = f"{interval(row['speedup'])} times plain decoding" if _timed(row) else "no speed"
    return f"{row['method']} {speed} with {interval(row['tau'])} tokens per target call ({row['verdict']})"


def _timed(row: dict[str, Any]) -> bool:
    return not any(each is None or isnan(each) for each in row["speedup"])


def _lengths(method: str, sweep: Sequence[dict[str, Any]]) -> str:
    """At which draft lengths of those tried the first method pays."""
    paying = [row for row in sweep if _timed(row) and row["speedup"][0] > 1]
    tried = ", ".join(str(row["draft_length"]) for row in sweep)
    verdict = sweep[0]["verdict"]
    if not paying:
        return f"{method} at T = 0 is slower than plain decoding with every draft length tried, {tried} ({verdict})."
    best = max(paying, key=lambda row: row["speedup"][0])
    last = max(row["draft_length"] for row in paying)
    beyond = [row["draft_length"] for row in sweep if row["draft_length"] > last]
    end = f"pays up to {last}, and no longer at {beyond[0]}" if beyond else f"still pays at {last}, the longest tried"
    return (
        f"{method} at T = 0, draft lengths {tried}: fastest with {best['draft_length']} "
        f"({interval(best['speedup'])} times), {end} ({verdict})."
    )
