"""Plots of the report as inline SVG, readable in light and dark and without colour.

Read next: `report.py`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# readable on white and on near-black, and apart for every kind of colour vision (Okabe-Ito)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_MARKS = ("o", "s", "^", "D")
_INK = "#808080"


def acceptance_by_depth(rows: Sequence[dict[str, Any]]) -> Markup:
    """Conditional acceptance at each depth, with intervals."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes("drafted token", "accepted, given the ones before")
    for number, row in enumerate(rows):
        points = [(d + 1, *v) for d, v in enumerate(row["n_alpha"]) if v[0] is not None]
        if points:
            _errorbar(axes, points, f"{row['method']}, T={row['temperature']:g}", number)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _svg(figure, axes, "Acceptance by depth")


def sweep(rows: Sequence[dict[str, Any]]) -> Markup:
    """Measured and predicted speed-up against the draft length."""
    figure, axes = _axes("draft length K", "speed-up over the baseline")
    _errorbar(axes, [(row["draft_length"], *row["speedup"]) for row in rows], "measured", 0)
    lengths = [row["draft_length"] for row in rows]
    predicted = [row["predicted_speedup"] for row in rows]
    axes.plot(lengths, predicted, linestyle="--", color=_COLOURS[1], marker="s", label="predicted")
    axes.axhline(1, color=_INK, linewidth=0.8)
    return _svg(figure, axes, "Speed-up against draft length")


def training(records: Sequence[dict[str, Any]]) -> Markup:
    """Loss over steps, and held-out loss."""
    figure, axes = _axes("step", "loss")
    kinds = (("train", "loss", "training"), ("validation", "validation_loss", "held out"))
    for number, (kind, key, label) in enumerate(kinds):
        points = [(r["step"], r[key]) for r in records if r["kind"] == kind and key in r]
        if points:
            axes.plot(
                *zip(*points), label=label, color=_COLOURS[number],
                marker=_MARKS[number] if len(points) < 20 else None,
            )  # fmt: skip
    return _svg(figure, axes, "Training")


def _axes(x: str, y: str) -> tuple[Any, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.tick_params(colors=_INK)
    axes.grid(alpha=0.25)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
    return figure, axes


def _errorbar(axes: Axes, points: Sequence[Sequence[Any]], label: str, number: int) -> None:
    x = [p[0] for p in points]
    middle = [p[1] for p in points]
    low = [p[1] - (p[2] if p[2] is not None else p[1]) for p in points]
    high = [(p[3] if p[3] is not None else p[1]) - p[1] for p in points]
    axes.errorbar(
        x, middle, yerr=[low, high], label=_drawable(label), capsize=3,
        color=_COLOURS[number % 4], marker=_MARKS[number % 4],
    )  # fmt: skip


def _drawable(label: str) -> str:
    """A label in characters that the plots' font has."""
    return label.encode("latin-1", errors="replace").decode("latin-1").replace("\0", " ")


def _svg(figure: Any, axes: Axes, title: str) -> Markup:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=_INK)
    import matplotlib as mpl

    # text as shapes: the page looks the same wherever it is opened; a fixed salt keeps ids stable
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": title}):
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    body = out.getvalue()
    body = body[body.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return Markup(body)  # noqa: S704 - drawn here; labels are turned into shapes
