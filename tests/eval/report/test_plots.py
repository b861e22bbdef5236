"""The acceptance chart with many drafters: told apart, on one scale, the legend outside of the axes."""

from __future__ import annotations

import re
from typing import Any

from draftsmith.eval.report.plots import acceptance_by_depth


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
