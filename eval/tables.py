"""Results as tables for the terminal, 80 columns wide.

Acceptance never stands without the audit's verdict. Read next: `evaluate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show(results: dict[str, Any], console: Console) -> None:
    """Print the methods table and the sweep."""
    console.print(methods_table(results["rows"]))
    for row in results["rows"]:
        if row["flagged"]:
            console.print(
                f"T={row['temperature']:g}: the target's own text is degenerate (distinct-2 "
                f"{row['distinct_2']:.2f}, {row['loop_share']:.0%} in loops): do not believe tau"
            )
    if results["sweep"]:
        console.print(sweep_table(results["sweep"], results["rows"][0]["verdict"]))
        console.print(best_lengths(results["sweep"]))


def methods_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="acceptance and speed (95 % intervals)", title_justify="left")
    for name in ("method", "T", "tau", "alpha", "speedup", "predicted", "degen.", "verdict"):
        table.add_column(name, overflow="fold")
    for row in rows:
        degenerate = f"{row['loop_share']:.0%}{' FLAG' if row['flagged'] else ''}"
        table.add_row(
            row["method"], f"{row['temperature']:g}", interval(row["tau"]), interval(row["alpha"]),
            interval(row["speedup"]), f"{row['predicted_speedup']:.2f}", degenerate,
            row["verdict"],
        )  # fmt: skip
    return table


def sweep_table(sweep: Sequence[dict[str, Any]], verdict: str) -> Table:
    table = Table(title=f"draft length K at T=0 (audit: {verdict})", title_justify="left")
    for name in ("K", "tau", "alpha", "c", "c_v", "predicted", "measured"):
        table.add_column(name)
    for row in sweep:
        table.add_row(
            str(row["draft_length"]), interval(row["tau"]), interval(row["alpha"]),
            f"{row['c']:.2f}", f"{row['c_v']:.2f}", f"{row['predicted_speedup']:.2f}",
            interval(row["speedup"]),
        )  # fmt: skip
    return table


def best_lengths(sweep: Sequence[dict[str, Any]]) -> str:
    """The best K by the speed model and by the clock."""
    predicted = max(sweep, key=lambda row: row["predicted_speedup"])["draft_length"]
    measured = max(sweep, key=lambda row: row["speedup"][0] or 0)["draft_length"]
    return f"best K: {predicted} predicted, {measured} measured"


def interval(value: Sequence[float | None]) -> str:
    """`1.72 [1.65, 1.79]`."""
    middle, low, high = value
    if middle is None:
        return "-"
    return f"{middle:.2f}" if low is None else f"{middle:.2f} [{low:.2f}, {high:.2f}]"
