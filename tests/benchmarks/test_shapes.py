"""The shapes that families are compared in: block drafters as chains and as trees, each drafting the target's own."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from conftest import make_target
from draftsmith.benchmarks.common.shapes import DEPTH, FAMILIES, NODES, with_shapes
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.folder import save_heads
from helpers.models.small_drafters import small_block_net, small_dflash2_net, small_dspark_net

NETS = {
    "DFlash": small_block_net,
    "DFlash 2": partial(small_dflash2_net, candidates=16),
    "DSpark": partial(small_dspark_net, size=DEPTH),
}
GREEDY = Warper(0.0)


@pytest.mark.parametrize("name", NETS)
def test_block_drafters_draft_chains_and_trees(name: str, tmp_path: Path) -> None:
    (family,) = (each for each in FAMILIES if each.name == name)
    assert list(with_shapes(family, ["tree 20"]).shapes) == ["chain", "tree 20"]
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    net = NETS[name](target.model)
    save_heads(net, tmp_path / "drafter", target, family=type(net).family, settings=asdict(net.config))
    plain = autoregressive(target, [[1, 2, 3]], warper=GREEDY, max_new_tokens=12)
    for shape, load in family.shapes.items():
        drafter = load(tmp_path / "drafter", target)
        wanted = DEPTH + 1 if shape == "chain" else int(shape.removeprefix("tree "))
        assert drafter.nodes == wanted
        done = generate(target, drafter, [[1, 2, 3]], warper=GREEDY, max_new_tokens=12)
        assert done.tokens == plain.tokens
        assert done.nodes == wanted * done.target_calls
    assert list(family.shapes) == ["chain", *(f"tree {nodes}" for nodes in NODES)]
