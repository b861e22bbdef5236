"""Plots of the report as inline SVG: colours from the page's style, so light and dark both work.

Lines differ in mark and style, not in colour alone. Read next: `report.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe-Ito colours, apart for every kind of colour vision; the page lightens them in the dark
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_INK, _GRID = "#808080", "#c8c8c8"
_VARIABLES = {
    **{colour: f"var(--plot-{n + 1})" for n, colour in enumerate(_COLOURS)},
    _INK: "var(--soft)",
    _GRID: "var(--line)",
}
_MARKS = ("o", "s", "^", "D")
_LINES = ("-", "--", "-.", ":")
_LONGEST_LABEL = 32

Point = tuple[float, float | None, float | None, float | None]


def acceptance_by_depth(rows: Sequence[dict[str, Any]]) -> Markup:
    """Conditional acceptance at each depth, with intervals."""
    figure, axes = _axes("depth of the drafted token", "accepted, given the ones before")
    for number, row in enumerate(rows):
        # side by side, or intervals of equal methods would hide each other
        shift = 0.06 * (number - (len(rows) - 1) / 2)
        points = [(d + 1 + shift, *v) for d, v in enumerate(row["n_alpha"])]
        _errorbar(axes, points, f"{row['method']}, T = {row['temperature']:g}", number)
    axes.set_ylim(-0.02, 1.02)
    return _svg(figure, axes, "Acceptance by depth")


def sweep_acceptance(rows: Sequence[dict[str, Any]]) -> Markup:
    """tau against the draft length."""
    figure, axes = _axes("draft length K", "tau, tokens per target call")
    _errorbar(axes, [(row["draft_length"], *row["tau"]) for row in rows], "tau", 0)
    axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]))
    return _svg(figure, axes, "Acceptance against draft length")


def sweep_speed(rows: Sequence[dict[str, Any]]) -> Markup:
    """Measured and predicted speed-up against the draft length."""
    figure, axes = _axes("draft length K", "speed-up over plain decoding")
    _errorbar(axes, [(row["draft_length"], *row["speedup"]) for row in rows], "measured", 0)
    known = [row for row in rows if row["predicted_speedup"] is not None]
    axes.plot(
        [row["draft_length"] for row in known],
        [row["predicted_speedup"] for row in known],
        label="predicted",
        color=_COLOURS[1],
        marker=_MARKS[1],
        linestyle=_LINES[1],
        markersize=4,
    )
    axes.axhline(1, color=_INK, linewidth=0.8)
    return _svg(figure, axes, "Speed-up against draft length")


def uniformity(counts: Sequence[int]) -> Markup:
    """The Rosenblatt numbers of the real pair in bins; an exact decoder fills all alike."""
    figure, axes = _axes("u, the token's place in the target's own distribution", "tokens")
    expected = sum(counts) / len(counts)
    edges = [n / len(counts) for n in range(len(counts))]
    axes.bar(
        edges,
        counts,
        width=1 / len(counts),
        align="edge",
        color=_COLOURS[0],
        alpha=0.45,
        edgecolor=_COLOURS[0],
        linewidth=0.8,
        label="counted",
    )
    axes.axhline(expected, color=_COLOURS[1], linestyle="--", linewidth=1.4, label="expected")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.15 * max(*counts, 1))
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    return _svg(figure, axes, "Histogram of the audit")


def training(records: Sequence[dict[str, Any]]) -> Markup:
    """Loss over steps, and held-out loss."""
    figure, axes = _axes("step", "loss")
    kinds = (("train", "loss", "training"), ("validation", "validation_loss", "held out"))
    for number, (kind, key, label) in enumerate(kinds):
        points = [(r["step"], r[key]) for r in records if r["kind"] == kind and key in r]
        if points:
            axes.plot(
                *zip(*points),
                label=label,
                color=_COLOURS[number],
                linestyle=_LINES[number],
                marker=_MARKS[number] if len(points) < 20 else None,
                markersize=4,
            )
    return _svg(figure, axes, "Training")


def _axes(x: str, y: str) -> tuple[Any, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x, color=_INK, fontsize=9)
    axes.set_ylabel(y, color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_INK)
    return figure, axes


def _errorbar(axes: Axes, points: Sequence[Point], label: str, number: int) -> None:
    drawn = [p for p in points if p[1] is not None]
    if not drawn:
        return
    middle = [float(p[1] or 0) for p in drawn]
    low = [m - (p[2] if p[2] is not None else m) for m, p in zip(middle, drawn)]
    high = [(p[3] if p[3] is not None else m) - m for m, p in zip(middle, drawn)]
    look = number % 4
    axes.errorbar(
        [p[0] for p in drawn],
        middle,
        # a percentile interval may leave its own estimate outside by a rounding error
        yerr=[[max(0.0, each) for each in low], [max(0.0, each) for each in high]],
        label=_drawable(label),
        capsize=2.5,
        elinewidth=1,
        linewidth=1.5,
        markersize=4.5,
        color=_COLOURS[look],
        marker=_MARKS[look],
        linestyle=_LINES[look],
    )


def _drawable(label: str) -> str:
    """A short label in characters that the plots' font has, and no formula."""
    label = label.encode("latin-1", errors="replace").decode("latin-1")
    label = "".join(c if c.isprintable() else " " for c in label)
    if len(label) > _LONGEST_LABEL:
        label = f"{label[: _LONGEST_LABEL - 3]}..."
    return label.replace("$", r"\$")


def _legend(figure: Any, axes: Axes) -> None:
    """Above the axes, which keep their width; one series needs none."""
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) < 2:
        return
    columns = 3 if sum(map(len, labels)) < 50 else 1
    lines = -(-len(labels) // columns)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.075 * lines))
    axes.legend(
        frameon=False,
        labelcolor=_INK,
        fontsize=8.5,
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=2.4,
    ).set_in_layout(False)


def _svg(figure: Any, axes: Axes, title: str) -> Markup:
    import matplotlib as mpl

    _legend(figure, axes)
    # text as shapes: the page looks the same wherever it is opened; a fixed salt keeps ids stable
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": title}):
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return Markup(_inline(out.getvalue(), title))  # noqa: S704 - drawn here, labels are shapes


def _inline(text: str, title: str) -> str:
    """The drawing as part of a page: its own ids, the page's colours, a name for a reader."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    own = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
