"""How many experts a verify call reads: calls of real text, as chains and trees, and the record of a small try."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.benchmarks.common.neighbours import times_as_long
from draftsmith.benchmarks.common.records import read_record
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.experts import experts_of
from helpers.benchmark_scripts import load
from torch import nn

experts = load("experts")
SIZES = {"experts": 8, "chosen": 2, "hidden": 32, "width": 16, "layers": 2, "context": 40, "places": 3}
SIZED = argparse.Namespace(**SIZES, nodes=[1, 6, 20])


@pytest.fixture(scope="module")
def text() -> experts.Text:
    return experts.Text(SIZED.context, max(SIZED.nodes))


def test_a_chain_is_the_text_and_a_tree_has_the_text_in_it(text: experts.Text) -> None:
    place = text.places[1]
    for count in SIZED.nodes[1:]:
        line, tree = experts.shapes_of(count)
        assert text.tokens(place, line)[0].tolist() == text.ids[place : place + count]
        tokens = text.tokens(place, tree)[0].tolist()
        assert len(tokens) == count
        node = 0
        for depth in range(1, tree.tree.depth + 1):
            node = tree.tree.children[node][0]
            assert tokens[node] == text.ids[place + depth]
            if not tree.tree.children[node]:
                break
        for children in tree.tree.children:
            siblings = [tokens[child] for child in children]
            assert len(set(siblings)) == len(siblings)


def test_what_a_call_reads_is_what_the_text_s_own_pass_chooses(text: experts.Text) -> None:
    """Of the last tokens of a pass over prompt and call together."""
    model = experts.mixture(SIZED, text.vocabulary)
    calls = experts.Calls(model, text, SIZED)
    line = next(experts.shapes_of(6))
    found = experts.counts(calls, line)
    wanted = [
        np.mean(
            [len(set(each[-6:].flatten().tolist())) for each in chosen(model, text.ids[at - SIZED.context : at + 6])]
        )
        for at in calls.places
    ]
    assert found.tolist() == pytest.approx(wanted)


def chosen(model: Backbone, ids: list[int]) -> list[torch.Tensor]:
    """Of each layer, which experts every token of a text has."""
    seen: list[torch.Tensor] = []

    def hook(_part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        seen.extend(each for each in given if not each.is_floating_point())

    hooks = [part.register_forward_pre_hook(hook, with_kwargs=True) for _, part in experts_of(model.model)]
    with torch.inference_mode():
        model.model(torch.tensor([ids]), use_cache=False)
    for each in hooks:
        each.remove()
    assert len(seen) == SIZED.layers
    return seen


def test_a_small_try_from_calls_to_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "record.json"
    nodes = [str(count) for count in SIZED.nodes]
    monkeypatch.setattr(sys, "argv", ["experts.py", "--nodes", *nodes, "--rounds", "3", *words, "--json", str(out)])
    experts.main()
    rows = read_record(out).rows
    assert [(row["N"], row["shape"]) for row in rows] == [
        (1, "chain"),
        *((count, shape) for count in SIZED.nodes[1:] for shape in ("chain", "tree")),
    ]
    one, *others = rows
    assert (one["read"], one["share"], one["bytes_calls"], one["experts_calls"].value) == (2, 25, 1, 1)
    reads = [row["read"] for row in others]
    assert all(2 < read <= 8 for read in reads)
    assert reads[0] < reads[2]
    assert all(row["bytes_calls"] > 1 and row["dense_calls"].value > 0 for row in others)
    assert "| 20 | tree |" in capsys.readouterr().out


def test_a_ratio_is_that_of_neighbours() -> None:
    """A minute in which all takes ten times as long moves it by nothing."""
    over = [1.0, 1.1, 10.0, 11.0, 0.9]
    made = times_as_long([1.5 * each for each in over[:4]] + [1.8], over)
    assert made.value == pytest.approx(1.5)
    assert made.low == pytest.approx(1.5)
    assert made.high == pytest.approx(2.0)
    assert times_as_long(over, over).low is None
