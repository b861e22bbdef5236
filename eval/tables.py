"""Results as tables for the terminal, 80 columns wide.

Acceptance never stands without the audit's verdict. Read next: `evaluate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def show(results: dict[str, Any], console: Console) -> None:
    """Print acceptance, speed and the sweep; a row whose tau cannot be believed is named."""
    console.print(acceptance_table(results["rows"]))
    for row in results["rows"]:
        if row["flagged"]:
            console.print(
                f"T={row['temperature']:g}: the target's own text is degenerate (distinct-2 "
                f"{row['distinct_2']:.2f}, {row['loop_share']:.0%} in loops): do not believe tau"
            )
    console.print(speed_table(results["rows"]))
    if results["sweep"]:
        console.print(sweep_table(results["sweep"], results["rows"][0]["verdict"]))
        console.print(best_lengths(results["sweep"]))


def acceptance_table(rows: Sequence[dict[str, Any]]) -> Table:
    """tau and alpha with intervals, beside the share of looping text and the audit's verdict."""
    table = _table("Acceptance (95 % intervals)", "method", "T", "tau", "alpha", "loops", "audit")
    for row in rows:
        loops = f"{row['loop_share']:.0%}{' !' if row['flagged'] else ''}"
        table.add_row(
            row["method"], f"{row['temperature']:g}", interval(row["tau"]), interval(row["alpha"]),
            loops, row["verdict"],
        )  # fmt: skip
    return table


def speed_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Measured and predicted speed-up; c and c_v are the costs that the prediction rests on."""
    table = _table(
        "Speed against the autoregressive baseline", "method", "T", "measured", "predicted", "K",
        "c", "c_v",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["method"], f"{row['temperature']:g}", interval(row["speedup"]),
            f"{row['predicted_speedup']:.2f}", str(row["draft_length"]), f"{row['c']:.2f}",
            f"{row['c_v']:.2f}",
        )  # fmt: skip
    return table


def sweep_table(sweep: Sequence[dict[str, Any]], verdict: str) -> Table:
    """Acceptance and speed against the draft length, with the cost of its verify call."""
    table = _table(
        f"Draft length K at T=0 (audit: {verdict})", "K", "tau", "alpha", "c_v", "measured",
        "predicted",
    )  # fmt: skip
    for row in sweep:
        table.add_row(
            str(row["draft_length"]), interval(row["tau"]), interval(row["alpha"]),
            f"{row['c_v']:.2f}", interval(row["speedup"]), f"{row['predicted_speedup']:.2f}",
        )  # fmt: skip
    return table


def _table(title: str, *names: str) -> Table:
    """Columns that never break a number; a long name of a method is what gives way."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=name != "method", overflow="fold")
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
