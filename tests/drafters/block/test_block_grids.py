"""What `draftsmith tune` tries of block drafters: every setting drafts, and as its grid says."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from conftest import make_target
from draftsmith.config import changed
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.family import _drafting as drafting
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.families import FAMILIES
from helpers.models.small_drafters import small_block_net, small_dflash2_net, small_dspark_net

NETS = {"dflash": small_block_net, "dspark": small_dspark_net, "dflash2": small_dflash2_net}


@pytest.mark.parametrize("family", NETS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_setting_that_suits_a_drafter_drafts(family: str, temperature: float) -> None:
    target = make_target("qwen3")
    net = NETS[family](target.model, **({"confidence": True} if family == "dspark" else {})).eval()
    settings = json.loads(json.dumps(asdict(net.config)))
    shapes = set()
    for grid in FAMILIES[family].grids:
        assert grid.suits(settings)
        for size in (grid.sizes[0], grid.sizes[-1]):
            values = grid.values(size)
            own: dict[str, Any] = {
                name.removeprefix("drafter.").replace(".", "_"): json.loads(value) if value.startswith("[") else value
                for name, value in values.items()
                if name.startswith("drafter.")
            }
            drafter = drafting(net, target, int(values["eval.draft_length"]), changed(DrafterConfig(), own))
            done = generate(target, drafter, [[1, 2, 3]], warper=Warper(temperature), max_new_tokens=8)
            assert len(done.tokens[0]) == 8
            assert drafter.nodes <= (size + 1 if grid.chain else size)
            shapes.add((drafter.kind, getattr(drafter, "least", 0.0)))
    assert shapes == {("chain", 0.0), ("dynamic", 0.0), ("chain", 0.4)}


def test_what_does_not_suit_is_left_out() -> None:
    """A block of one draft has no tree, few candidates no four children, and no head no confidence."""
    settings: dict[str, Any] = {"size": 5, "layout": "fill-in", "confidence": False}
    cases = {
        "dflash": (settings | {"size": 2}, ["drafter.block.nodes"]),
        "dflash2": (settings | {"candidates": 3}, ["drafter.block.nodes"]),
        "dspark": (settings, ["eval.draft_length"]),
    }
    for family, (own, left_out) in cases.items():
        assert [grid.value for grid in FAMILIES[family].grids if not grid.suits(own)] == left_out
