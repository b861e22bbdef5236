"""Where settings pay: crossings on known lines, and surfaces of a real pair; points by hand: `test_surface_points.py`."""

from __future__ import annotations

import math

import pytest
from conftest import make_drafter
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.grids import Grid
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.metrics import acceptance
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.rounds import decode
from draftsmith.eval.report.pays import in_words
from draftsmith.eval.tune.settings import Contender, DraftSetting, Prediction
from draftsmith.eval.tune.surfaces import Surface, by_size, measured_surfaces

REQUESTS = [Request(Prompt(str(n), "all", (), chat=False), [n + 1, n + 2, n + 3], n) for n in range(4)]


def surface(axis: str, *points: tuple[float, float]) -> Surface:
    return Surface("m", "m", axis, points)


@pytest.mark.parametrize(
    ("made", "crossings", "words"),
    [
        (surface("draft length", (1, 1.2), (2, 1.4), (4, 0.8)), [2 + 2 * 0.4 / 0.6], "pays up to draft length 3.33"),
        (surface("batch", (1, 0.8), (4, 1.2)), [2.0], "pays from batch 2"),
        (surface("temperature", (0, 1.5), (1, 1.1)), [], "pays at every temperature 0 to 1"),
        (surface("context", (32, 0.9), (512, 0.7)), [], "pays at no context 32 to 512"),
        (surface("nodes", (2, 0.9), (8, 1.1), (32, 0.9)), [4.0, 16.0], "passes 1 at nodes 4 and 16"),
    ],
)
def test_where_it_crosses_1(made: Surface, crossings: list[float], words: str) -> None:
    assert made.crossings() == pytest.approx(crossings)
    assert in_words(made.axis, made.points, made.crossings()) == words
    assert made.to_dict()["crosses_1_at"] == made.crossings()


def test_sizes_are_the_predictions(target: Backbone) -> None:
    """One surface per grid, each of its own settings; what is in no grid is in none."""
    grids = (
        Grid("eval.draft_length", (1, 2, 3), fixed={"drafter.policy": "sample"}),
        Grid("eval.draft_length", (1, 2, 3), fixed={"drafter.policy": "argmax"}, sampled=True),
        Grid("drafter.medusa.nodes", (2, 4, 8), chain=False),
    )
    contender = Contender("m", "M", grids, True, lambda _: make_drafter(target))
    settings = [(grid, size) for grid in grids for size in grid.sizes]
    predictions = [
        Prediction(DraftSetting(contender, grid.values(size)), 2.0, 3.0, 0.1, 1 + number / 10, None)
        for number, (grid, size) in enumerate(settings)
    ]
    tempered = {**grids[0].values(2), "drafter.temperature_factors": "[0.9]"}
    predictions += [Prediction(DraftSetting(contender, values), 2.0, 3.0, 0.1, 9.0, None) for values in ({}, tempered)]
    drawn, argmax, tree = by_size(predictions, 1.0)
    assert (drawn.label, drawn.axis) == ("M", "draft length")
    assert (argmax.label, argmax.points[0]) == ("M, likeliest tokens", (1.0, pytest.approx(1.3)))
    assert (tree.label, tree.axis, [x for x, _ in tree.points]) == ("M", "nodes", [2, 4, 8])
    assert all(speed < 9 for each in (drawn, argmax, tree) for _, speed in each.points)


@pytest.mark.slow
def test_a_real_pair(target: Backbone) -> None:
    config = EvalConfig(max_new_tokens=16, repeats=1)
    contender = Contender("d", "D", (), True, lambda _: make_drafter(target, draft_length=3))
    best = Prediction(DraftSetting(contender, {}), 2.5, 4.0, 1.0, 1.2, None)
    batch, context, temperature = measured_surfaces(target, [best], REQUESTS, config, 0.0)
    assert [x for x, _ in batch.points] == [1, 2, 4, 8]
    assert [x for x, _ in context.points] == [32, 128]  # no more fits in its 256 positions
    assert all(math.isfinite(y) and y > 0 for each in (batch, context, temperature) for _, y in each.points)
    # of one machine and batch, temperatures differ as tau does
    taus = []
    for T, _ in temperature.points:
        (run,) = decode(target, [(Arm("d", make_drafter(target, draft_length=3)), None)], REQUESTS, config, T)
        taus.append(acceptance(run.counts).tau.value)
    speeds = [y for _, y in temperature.points]
    assert [y / speeds[0] for y in speeds] == pytest.approx([each / taus[0] for each in taus], rel=1e-6)
