"""The acceptance chart with many drafters: told apart, on one scale, the legend outside of the axes.

Of every other chart: what is drawn, and where.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from draftsmith.eval.report import plots
from draftsmith.eval.report.plots import _errorbar, _told_apart, acceptance_by_depth


def rows(methods: int) -> list[dict[str, Any]]:
    return [
        {"method": f"drafter {m}", "temperature": t, "n_alpha": [[0.5, 0.4, 0.6], [0.4, 0.2, 0.6]]}
        for m in range(methods)
        for t in (0.0, 1.0)
    ]


def colours(svg: str) -> set[str]:
    return set(re.findall(r"stroke: (var\(--plot-\d\))", svg))


def test_eight_drafters_have_eight_colours() -> None:
    assert colours(acceptance_by_depth(rows(8))) == {f"var(--plot-{n})" for n in range(1, 9)}


def test_names_that_begin_alike_are_told_apart() -> None:
    """All have a line of the legend, however long their names are, and words for those who do not see it."""
    long = "EAGLE-3 of hub:somebody/EAGLE3-Llama-3.1-8B-Instruct-of-ShareGPT-and-UltraChat-200k"
    names = [f"{long}-v1", f"{long}-v2", f"{long[:30]}{long}-v1", "a $x$"]
    few = [{**rows(1)[0], "method": name} for name in names]
    short = _told_apart(names)
    assert len(set(short)) == 4
    assert all(len(each) <= 60 for each in short)
    assert short[0].startswith("EAGLE-3 of hub:somebody/E")
    assert [each.endswith(end) for each, end in zip(short, ("-v1", "-v2", "-v1 (2)"))] == [True] * 3
    svg = acceptance_by_depth(few)
    described = re.search(r"<desc>(.*?)</desc>", svg)
    assert described is not None
    assert described[1].count(" at T = 0: 0.50 at depth 1, 0.40 at depth 2.") == 4
    untested = {**few[3], "method": "<b>", "n_alpha": [[None] * 3]}
    assert "&lt;b&gt; at T = 0: nothing was tested." in acceptance_by_depth([untested])


def test_every_drafter_has_a_line_of_the_legend() -> None:
    """Also those whose names are alike for longer than a label is; a ninth differs from the first by its dashes."""

    def lines(methods: int) -> list[str]:
        names = [{**row, "method": f"{'x' * 90}{row['method']}{'y' * 90}"} for row in rows(methods)]
        drawn = acceptance_by_depth(names)
        legend = drawn[drawn.index('id="acceptance-by-depth-legend_1"') :]
        return re.findall(r'style="(fill: none; [^"]*stroke-width: 1.5[^"]*)"', legend)

    assert [(len(lines(n)), len(set(lines(n)))) for n in (3, 8, 9)] == [(3, 3), (8, 8), (9, 9)]


def test_a_drafter_keeps_its_colour_at_every_temperature() -> None:
    assert len(colours(acceptance_by_depth(rows(3)))) == 3


def test_the_picture_grows_with_panels_and_legend() -> None:
    """Nothing is laid over the curves: each line of the legend and each panel has room of its own."""

    def height(some: list[dict[str, Any]]) -> float:
        found = re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', acceptance_by_depth(some))
        assert found is not None
        return float(found[1])

    one_panel = [row for row in rows(3) if row["temperature"] == 0]
    assert height(one_panel) < height(rows(3)) < height(rows(8))


def test_the_ends_of_an_interval_are_drawn_where_they_are() -> None:
    drawn: dict[str, Any] = {}

    class Axes:
        def errorbar(self, *_: Any, yerr: Any, **__: Any) -> None:
            drawn["yerr"] = [[round(float(each), 6) for each in ends] for ends in yerr]

    _errorbar(Axes(), [(1, 0.5, 0.4, 0.8)], "a", 0)
    assert drawn["yerr"] == [[0.1], [0.3]]  # below and above


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plots, each of which returns its axes as they are before they become a picture."""
    monkeypatch.setattr(plots, "_svg", lambda _figure, panels, *_words: panels[0])
    return plots


def points(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of what the legend names."""
    handles, labels = axes.get_legend_handles_labels()
    return {label: points(getattr(each, "lines", [each])[0]) for label, each in zip(labels, handles, strict=True)}


def bars(axes: Any, at: int = 0) -> list[list[float]]:
    """The ends of the error bars of a series, x and y of the lower and of the upper one."""
    (segments,) = axes.containers[at].lines[2]
    return [[round(float(x), 6) for x in ends.ravel()] for ends in segments.get_segments()]


def level(axes: Any) -> list[list[float]]:
    """The heights of the lines that go across."""
    return [list(map(float, each.get_ydata())) for each in axes.lines if list(each.get_xdata()) == [0, 1]]


def test_the_audits_histogram_is_held_to_the_same_count_in_every_bin(charts: Any) -> None:
    axes = charts.uniformity([10, 20, 30])
    assert level(axes) == [[20, 20]]  # 60 tokens in 3 bins
    assert [each.get_height() for each in axes.patches] == [10, 20, 30]
    assert [each.get_x() for each in axes.patches] == pytest.approx([0, 1 / 3, 2 / 3])
    assert [each.get_width() for each in axes.patches] == pytest.approx([1 / 3] * 3)
    assert axes.get_xlim() == (0, 1)
    assert axes.get_ylim() == pytest.approx((0, 34.5))
    assert charts.uniformity([0, 0]).get_ylim() == pytest.approx((0, 1.15))


def test_speed_ups_stand_in_their_rows_beside_plain_decoding(charts: Any) -> None:
    """The interval has its own ends; a row that could not be timed keeps its place, empty."""
    figures = [[1.5, 1.25, 2.0], [None] * 3, [0.75, None, None]]
    rows = [{"label": f"run {n}", "temperature": n % 2, "speedup": each} for n, each in enumerate(figures)]
    axes = charts.speedups(rows)
    assert [points(each.lines[0]) for each in axes.containers] == [[(1.5, 0)], [(0.75, 2)]]
    assert [bars(axes, at) for at in (0, 1)] == [[[1.25, 0, 2, 0]], [[0.75, 2, 0.75, 2]]]
    assert [each.get_text() for each in axes.get_yticklabels()] == ["run 0, T = 0", "run 1, T = 1", "run 2, T = 0"]
    assert axes.get_ylim() == (2.5, -0.5)  # the first on top
    (plain,) = (each for each in axes.lines if list(each.get_ydata()) == [0, 1])
    assert list(plain.get_xdata()) == [1, 1]


def test_a_sweep_is_drawn_against_its_draft_lengths(charts: Any) -> None:
    sweep = [
        {"draft_length": 2, "tau": [1.5, 1.25, 2], "speedup": [1.25, 1.0, 1.75], "predicted_speedup": 1.5},
        {"draft_length": 4, "tau": [2.5, 2.25, 3], "speedup": [0.75, 0.5, 1.0], "predicted_speedup": None},
        {"draft_length": 7, "tau": [3.5, 3.25, 4], "speedup": [0.5, 0.25, 0.75], "predicted_speedup": 0.25},
    ]
    tau, speed = charts.sweep_acceptance(sweep), charts.sweep_speed(sweep)
    assert lines(tau) == {"tau": [(2, 1.5), (4, 2.5), (7, 3.5)]}
    assert bars(tau) == [[2, 1.25, 2, 2], [4, 2.25, 4, 3], [7, 3.25, 7, 4]]
    assert tau.get_ylim()[0] == 1  # nothing is accepted
    assert lines(speed) == {"measured": [(2, 1.25), (4, 0.75), (7, 0.5)], "predicted": [(2, 1.5), (7, 0.25)]}
    assert bars(speed) == [[2, 1.0, 2, 1.75], [4, 0.5, 4, 1.0], [7, 0.25, 7, 0.75]]
    assert level(speed) == [[1, 1]]


@pytest.mark.parametrize(
    ("axis", "scale", "ticks"), [("batch", "log", [1, 2, 8]), ("temperature", "linear", [1, 2, 8])]
)
def test_a_surface_goes_through_its_points(charts: Any, axis: str, scale: str, ticks: list[float]) -> None:
    made = {"one": [(1, 1.5), (8, 0.5)], "two": [(1, 1.25), (2, 2.0)]}
    axes = charts.surface(axis, [{"label": label, "points": each} for label, each in made.items()])
    assert lines(axes) == made
    assert level(axes) == [[1, 1]]
    assert axes.get_xscale() == scale
    assert list(axes.get_xticks()) == ticks


def test_training_and_held_out_loss_stand_at_their_steps(charts: Any) -> None:
    records = [
        {"kind": "train", "step": 5, "loss": 3.0, "validation_loss": 9.0},
        {"kind": "validation", "step": 5, "validation_loss": 4.0, "loss": 9.0},
        {"kind": "train", "step": 10, "loss": 2.0},
        {"kind": "validation", "step": 10},
        {"kind": "end", "step": 11, "loss": 9.0},
    ]
    assert lines(charts.training(records)) == {"training": [(5, 3.0), (10, 2.0)], "held out": [(5, 4.0)]}
