"""The acceptance chart with many drafters: told apart, on one scale, the legend outside of the axes."""

from __future__ import annotations

import re
from typing import Any

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
