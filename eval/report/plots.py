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
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5d4a9c", "#333333")
_INK, _GRID = "#808080", "#c8c8c8"
_VARIABLES = {
    **{colour: f"var(--plot-{n + 1})" for n, colour in enumerate(_COLOURS)},
    _INK: "var(--soft)",
    _GRID: "var(--line)",
}
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")
_LONGEST_LABEL = 56
"""Characters; of a longer one the middle is left out, for names differ at both ends."""
LOGARITHMIC = ("nodes", "batch", "context")
"""Axes of surfaces that are drawn and read in logarithms."""
_WIDTH = 72  # characters of a legend's line

Point = tuple[float, float | None, float | None, float | None]


def acceptance_by_depth(rows: Sequence[dict[str, Any]]) -> Markup:
    """Conditional acceptance at each depth, with intervals: a panel per temperature, a colour per method."""
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    labels = dict(zip(methods, _told_apart(methods), strict=True))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure, panels = _panels(len(temperatures))
    for axes, temperature in zip(panels, temperatures, strict=True):
        for row in rows:
            if row["temperature"] == temperature:
                number = methods.index(str(row["method"]))
                # side by side, or intervals of equal methods would hide each other; nearest to their own depth
                shift = min(0.06, 0.6 / len(methods)) * (number - (len(methods) - 1) / 2)
                points = [(d + 1 + shift, *v) for d, v in enumerate(row["n_alpha"])]
                _errorbar(axes, points, labels[str(row["method"])], number)
        axes.set_ylim(-0.02, 1.02)
        axes.set_title(f"T = {temperature:g}", color=_INK, fontsize=9, loc="left")
        axes.set_ylabel("accepted", color=_INK, fontsize=9)
    panels[-1].set_xlabel("depth of the drafted token", color=_INK, fontsize=9)
    words = [_in_words(labels[str(row["method"])], row) for row in rows]
    return _svg(figure, panels, "Acceptance by depth", " ".join(words))


def speedups(rows: Sequence[dict[str, Any]]) -> Markup:
    """Speed-up over plain decoding with its interval, a line for each row in that order, a colour per temperature."""
    from matplotlib.ticker import MaxNLocator

    temperatures = sorted({row["temperature"] for row in rows})
    figure, (axes,) = _panels(1)
    figure.set_size_inches(6.6, 0.9 + 0.28 * len(rows))
    for at, row in enumerate(rows):
        value, low, high = row["speedup"]
        if value is None:
            continue
        number = temperatures.index(row["temperature"]) % len(_COLOURS)
        ends = [[max(0.0, value - (value if low is None else low))], [max(0.0, (high or value) - value)]]
        label = f"T = {row['temperature']:g}"
        first = label not in axes.get_legend_handles_labels()[1]
        look: dict[str, Any] = {
            "color": _COLOURS[number],
            "marker": _MARKS[number],
            "linestyle": "none",
            "markersize": 5,
        }
        axes.errorbar(value, at, xerr=ends, capsize=2.5, elinewidth=1.2, label=label if first else None, **look)
    labels = _told_apart([f"{row['label']}, T = {row['temperature']:g}" for row in rows])
    axes.set_yticks(range(len(rows)), [_drawable(label) for label in labels])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.axvline(1, color=_INK, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8))
    axes.grid(axis="x", color=_GRID, linewidth=0.7)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("times plain decoding", color=_INK, fontsize=9)
    words = [f"{label}: {row['speedup'][0]:.2f}." for label, row in zip(labels, rows) if row["speedup"][0] is not None]
    return _svg(figure, [axes], "Speed-up of each run", " ".join(words))


def _in_words(label: str, row: dict[str, Any]) -> str:
    """A line of the picture for those who do not see it; the table below has every figure."""
    known = [(depth, value) for depth, (value, *_) in enumerate(row["n_alpha"], 1) if value is not None]
    if not known:
        return f"{label} at T = {row['temperature']:g}: nothing was tested."
    (first, start), (last, end) = known[0], known[-1]
    return f"{label} at T = {row['temperature']:g}: {start:.2f} at depth {first}, {end:.2f} at depth {last}."


def sweep_acceptance(rows: Sequence[dict[str, Any]]) -> Markup:
    """tau against the draft length."""
    figure, panels = _axes("draft length K", "tau, tokens per target call")
    axes = panels[0]
    _errorbar(axes, [(row["draft_length"], *row["tau"]) for row in rows], "tau", 0)
    axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]))
    return _svg(figure, panels, "Acceptance against draft length")


def sweep_speed(rows: Sequence[dict[str, Any]]) -> Markup:
    """Measured and predicted speed-up against the draft length."""
    figure, panels = _axes("draft length K", "speed-up over plain decoding")
    axes = panels[0]
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
    return _svg(figure, panels, "Speed-up against draft length")


def surface(axis: str, surfaces: Sequence[dict[str, Any]]) -> Markup:
    """Predicted speed-up against what `axis` names, a line per setting; 1 is plain decoding."""
    figure, panels = _axes(_drawable(axis), "speed-up over plain decoding")
    axes = panels[0]
    for number, each in enumerate(surfaces):
        look = number % len(_COLOURS)
        axes.plot(
            *zip(*each["points"]),
            label=_drawable(each["label"]),
            color=_COLOURS[look],
            marker=_MARKS[look],
            linestyle=_LINES[look % len(_LINES)],
            markersize=4,
        )
    if axis in LOGARITHMIC:
        _powers_of_two(axes, sorted({x for each in surfaces for x, _ in each["points"]}))
    if axis == "temperature":
        axes.set_xticks(sorted({x for each in surfaces for x, _ in each["points"]}))
    axes.axhline(1, color=_INK, linewidth=0.8)
    return _svg(figure, panels, f"Speed-up against {axis}")


def _powers_of_two(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{x:g}" for x in values])
    axes.minorticks_off()


def uniformity(counts: Sequence[int]) -> Markup:
    """The Rosenblatt numbers of the real pair in bins; an exact decoder fills all alike."""
    figure, panels = _axes("u, the token's position in the target's own distribution", "tokens")
    axes = panels[0]
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
    return _svg(figure, panels, "Histogram of the audit")


def training(records: Sequence[dict[str, Any]]) -> Markup:
    """Loss over steps, and held-out loss."""
    figure, panels = _axes("step", "loss")
    axes = panels[0]
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
    return _svg(figure, panels, "Training")


def _axes(x: str, y: str) -> tuple[Any, list[Axes]]:
    figure, (axes,) = _panels(1)
    axes.set_xlabel(x, color=_INK, fontsize=9)
    axes.set_ylabel(y, color=_INK, fontsize=9)
    return figure, [axes]


def _panels(count: int) -> tuple[Any, list[Axes]]:
    """Axes one above the other, on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 0.9 + 2.1 * count), layout="constrained")
    panels = list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])
    for axes in panels:
        _dress(axes)
    return figure, panels


def _dress(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_INK)


def _errorbar(axes: Axes, points: Sequence[Point], label: str, number: int) -> None:
    drawn = [p for p in points if p[1] is not None]
    if not drawn:
        return
    middle = [float(p[1] or 0) for p in drawn]
    low = [m - (p[2] if p[2] is not None else m) for m, p in zip(middle, drawn)]
    high = [(p[3] if p[3] is not None else m) - m for m, p in zip(middle, drawn)]
    look = number % len(_COLOURS)
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
        linestyle=_LINES[(look + number // len(_COLOURS)) % len(_LINES)],
    )


def _told_apart(names: Sequence[str]) -> list[str]:
    """Short labels of different names, which differ too."""
    made: list[str] = []
    for name in names:
        label, again = _short(name), 1
        while label in made:
            again += 1
            label = f"{_short(name)} ({again})"
        made.append(label)
    return made


def _short(label: str) -> str:
    """A short label in characters that the plots' font has."""
    label = label.encode("latin-1", errors="replace").decode("latin-1")
    label = "".join(c if c.isprintable() else " " for c in label)
    if len(label) > _LONGEST_LABEL:
        half = (_LONGEST_LABEL - 3) // 2
        label = f"{label[:half]}...{label[-half:]}"
    return label


def _drawable(label: str) -> str:
    """The same as no formula."""
    return _short(label).replace("$", r"\$")


def _legend(figure: Any, panels: Sequence[Axes]) -> None:
    """One for all panels, above them in as many lines as it takes; one series needs none."""
    labels = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if len(labels) < 2:
        return
    columns = max(1, _WIDTH // (max(map(len, labels)) + 8))  # characters, the mark and the gap among them
    lines = -(-len(labels) // columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * lines)
    figure.legend(
        labels.values(),
        labels.keys(),
        frameon=False,
        labelcolor=_INK,
        fontsize=8.5,
        ncols=columns,
        loc="outside upper left",
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=2.4,
    )


def _svg(figure: Any, panels: Sequence[Axes], title: str, words: str = "") -> Markup:
    import matplotlib as mpl

    _legend(figure, panels)
    # text as shapes: the page looks the same wherever it is opened; a fixed salt keeps ids stable
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": title}):
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return Markup(_inline(out.getvalue(), title, words))  # noqa: S704 - drawn here, labels are shapes


def _inline(text: str, title: str, words: str) -> str:
    """The drawing as part of a page: its own ids, the page's colours, a name and words for a reader."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    own = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    return re.sub(r"(<svg.*?>)", lambda tag: f"{tag[1]}<desc>{escape(words)}</desc>", text, count=1) if words else text
