"""Results of a server as tables: what its users wait for, beside acceptance and speed.

Read next: `eval/server/rows.py`, which makes them; `tables.py`, what they share with our own decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .tables import MISSING, acceptance_table, degenerate, depth_table, interval, number, plain_table

WAITS = {"first": "first token", "per_token": "a token", "gap": "gap", "whole": "answer"}
"""Names in results and in tables."""


def show_server(results: dict[str, Any], console: Console) -> None:
    """Print acceptance, speed, waiting, and what has to be known of them."""
    rows = results["rows"]
    console.print(acceptance_table(rows), crop=False)
    console.print()
    if any(row["n_alpha"] for row in rows):
        console.print(depth_table(rows), crop=False)
        console.print()
    console.print(speed_table(rows), crop=False)
    console.print()
    console.print(waiting_table(rows), crop=False)
    console.print()
    doubts = [degenerate(row) for row in rows if row["flagged"]]
    for message in [*doubts, *notes(results)]:
        console.print(Text(f"! {message}", style="yellow"))


def speed_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tokens per second of all requests together, and how much less users wait per token."""
    cells = []
    for row in rows:
        own, base = row["server"]["own"], row["server"]["baseline"]
        cells.append(
            (
                Text(row["method"]),
                f"{row['temperature']:g}",
                _whole(own["tokens_per_second"]),
                MISSING if base is None else _whole(base["tokens_per_second"]),
                interval(row["speedup"]),
                number(row["predicted_speedup"]),
            )
        )
    columns = (
        ("method", ""),
        ("T", ""),
        ("speed", "tokens/s"),
        ("without", "tokens/s"),
        ("measured", "times"),
        ("predicted", "times"),
    )
    return plain_table("Speed, prompts included, over the same server without speculation", columns, cells)


def waiting_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Percentiles of what users wait, with speculation and without."""
    shown = waiting_rows(rows, ("p50", "p99"))  # all three would not fit the line
    cells: list[tuple[str | Text, ...]] = [(Text(name), *rest) for name, *rest in shown]
    columns = [("method", ""), ("T", ""), ("server", "")]
    columns += [(name, "p50 p99") for name in WAITS.values()]
    return plain_table("Waiting in ms", columns, cells)


def waiting_rows(
    rows: Sequence[dict[str, Any]], percentiles: Sequence[str] = ("p50", "p90", "p99")
) -> list[tuple[str, ...]]:
    """A line per row and server, times in ms; the report shows all percentiles."""
    lines = []
    for row in rows:
        for name, found in (("own", row["server"]["own"]), ("without", row["server"]["baseline"])):
            if found is not None:
                who = (row["method"], f"{row['temperature']:g}", name)
                lines.append((*who, *(_percentiles(found[wait], percentiles) for wait in WAITS)))
    return lines


def notes(results: Mapping[str, Any]) -> list[str]:
    """What a reader has to know of these figures; nothing of our own decoder's."""
    if results.get("server") is None:
        return []
    rows = results["rows"]
    promise = results["server"]["promise"]
    lines = [*results["server"]["notes"]]
    if promise is not None:
        lines.append(
            f"predicted at T = {promise['temperature']:g}, {promise['batch']} at a time: {promise['predicted']:.2f} "
            f"times plain decoding, measured there {number(promise['measured'])} ({promise['processor']})"
        )
    # what is so under every load is said once
    for note in dict.fromkeys(note for row in rows for note in row["server"]["notes"]):
        where = [row for row in rows if note in row["server"]["notes"]]
        named = "" if len(where) == len(rows) else f"{', '.join(row['method'] for row in where)}: "
        lines.append(named + note)
    return lines


def _whole(value: Sequence[float | None]) -> str:
    middle, low, high = value
    return number(middle, 0) if low is None else f"{number(middle, 0)} [{number(low, 0)}, {number(high, 0)}]"


def _percentiles(found: Mapping[str, Sequence[float | None]], names: Sequence[str]) -> str:
    values = [found[name][0] for name in names]
    return " ".join(number(None if value is None else 1e3 * value, 1) for value in values)
