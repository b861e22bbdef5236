"""`draftsmith tree`: measured on held-out rows, written beside the drafter, decoded with on request."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.tree.build import tree_of_paths
from draftsmith.drafters.config import DrafterConfig, EagleOptions
from draftsmith.drafters.eagle.net import EagleNet, EagleShape
from draftsmith.drafters.heads.hydra import HydraHeads
from draftsmith.drafters.heads.medusa import default_paths
from draftsmith.drafters.identity import TargetIdentity
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.tree_file import read_tree, write_tree
from draftsmith.errors import RequestError
from draftsmith.launch.check.early import check_tree
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.requests import TreeRequest
from draftsmith.trainers.teacher.frozen import saver
from helpers.runs.small_flags import AUDIT

FEW = ["--texts", "3", "--eval.max_new_tokens", "24"]
SMALL = ["--eval.limit", "1", "--eval.max_new_tokens", "12", "--eval.repeats", "1", *AUDIT]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders of drafters for the embedded target, which say what it said one token before."""
    place = tmp_path_factory.mktemp("runs")
    target = load_target("tiny")
    eagle = EagleNet(EagleShape.of(target.model.config))
    with torch.no_grad():
        for name, weight in eagle.named_parameters():
            if name.startswith("fc") or name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        eagle.fc.weight[:, -eagle.config.hidden :] = torch.eye(eagle.config.hidden)
    heads = HydraHeads.for_target(target.model, heads=4, shared_head=True)
    source = place / "texts.jsonl"
    row = "import os\n\ndef f{0}(x):\n    for i in range({0}):\n        x += i\n    return x\n"
    rows = [{"text": row.format(n) * 4} for n in range(40)]
    source.write_text("\n".join(map(json.dumps, rows)))
    for family, module in (("hydra", heads), ("eagle", eagle)):
        saver(target, family)(module, place / family / "drafter")
        data = [("data.source", str(source)), ("data.validation_share", "0.3")]
        recipe = load_recipe(f"{family}-tiny", [*data, ("data.sequence_length", "128")])
        (place / family / "run.yaml").write_text(recipe.yaml())
    return place


def test_a_tree_is_measured_written_and_decoded_with(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "hydra"
    assert main(["tree", str(run), "--nodes", "9", *FEW]) == 0
    message = capsys.readouterr().out
    content = json.loads((run / "drafter" / "tree.json").read_text())
    assert f"tree: {run / 'drafter' / 'tree.json'}" in message
    assert message.startswith("Right candidates (not audited), on held-out")
    assert re.search(r"^9 nodes: .* \(not audited\)$", message, re.MULTILINE)
    assert content["verdict"] == "not audited"
    assert content["measured"]["on"] == f"held-out rows of {runs / 'texts.jsonl'}"
    assert content["measured"]["texts"] == 3
    assert content["measured"]["trials"][0] == content["measured"]["tokens"] - 3
    assert content["nodes"] == 9
    assert content["expected_tau"] >= content["default_expected_tau"] > 1
    paths = read_tree(run / "drafter" / "tree.json")
    assert paths == tuple(map(tuple, content["paths"]))
    assert main(["tree", str(run), "--nodes", "9", "--method", "dp", "--out", str(tmp_path / "dp.json"), *FEW]) == 0
    other = json.loads((tmp_path / "dp.json").read_text())
    assert other["expected_tau"] == pytest.approx(content["expected_tau"])

    target = load_target("tiny")
    for name, wanted in (
        ("default", default_paths(4, 20)),
        ("optimised", paths),
        (str(tmp_path / "dp.json"), read_tree(tmp_path / "dp.json")),
    ):
        drafter = load_drafter(run / "drafter", target, config=DrafterConfig(tree=name))
        assert drafter.choices == tree_of_paths(wanted)


@pytest.mark.slow
def test_the_fastest_size_of_eagles_tree(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured as a static tree, though the recipe decodes a chain; nothing is drawn out of order."""
    out = tmp_path / "tree.json"
    words = ["tree", str(runs / "eagle"), "--nodes", "auto", "--out", str(out), *FEW]
    assert main([*words, "--texts", "4", "--temperature", "0.8"]) == 0
    assert "times as fast as plain decoding" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content["measured"]["temperature"] == 0.8
    assert content["speed"]["verify"]["1"] == 1.0
    assert content["speed"]["predicted"] > 0
    paths = read_tree(out)
    assert all((*path[:-1], path[-1] - 1) in paths for path in paths if path[-1])
    target, config = load_target("tiny"), DrafterConfig(tree=str(out), eagle=EagleOptions(tree="static"))
    drafter = load_drafter(runs / "eagle" / "drafter", target, config=config)
    assert drafter.tree == tree_of_paths(paths).tree
    with pytest.raises(RequestError, match=r"eagle\.tree is chain.*--drafter\.eagle\.tree static"):
        load_drafter(runs / "eagle" / "drafter", target, config=DrafterConfig(tree=str(out)))


@pytest.mark.slow
def test_a_measured_tree_is_evaluated_and_audited(runs: Path, tmp_path: Path) -> None:
    run, tree = runs / "hydra", tmp_path / "six.json"
    assert main(["tree", str(run), "--nodes", "6", "--out", str(tree), *FEW]) == 0
    words = [str(run), "--drafter.tree", str(tree), "--out", str(tmp_path / "eval")]
    assert main(["eval", *words, *SMALL]) == 0
    rows = json.loads((tmp_path / "eval" / "results.json").read_text())["rows"]
    assert {(row["nodes"], row["verdict"]) for row in rows} == {(6, "lossless")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "1"], "--nodes is '1'; expected a number from 2 on, or auto"),
        (["--nodes", "many"], "--nodes is 'many'"),
        (["--depth", "0"], "--depth is 0"),
        (["--data.validation", "a.jsonl", "--eval.prompts", "a.jsonl"], "judged by"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", str(runs / "hydra"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("family", ["dflash", "dspark", "dflash2", "peagle"])
def test_a_drafter_that_has_no_static_tree_gets_none(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could be measured, and would never read the tree."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    identity = asdict(TargetIdentity.of(load_target("tiny")))
    entry = {"format": 1, "family": family, "target": identity, "settings": {}}
    (folder / "config.json").write_text(json.dumps({"draftsmith": entry}))
    (tmp_path / "run.yaml").write_text(load_recipe(f"{family}-tiny").yaml())
    assert main(["tree", str(tmp_path)]) == 2
    assert (
        f"is a drafter of family {family!r}, which drafts no static tree; expected one of medusa"
        in capsys.readouterr().err
    )
    assert not (folder / "tree.json").exists()


def test_what_is_no_tree_file_is_refused(runs: Path, tmp_path: Path) -> None:
    target, folder = load_target("tiny"), runs / "hydra" / "drafter"
    bad = tmp_path / "tree.json"

    def load() -> None:
        load_drafter(folder, target, config=DrafterConfig(tree=str(bad)))

    with pytest.raises(RequestError, match="there is no tree file.*draftsmith tree RUN"):
        load()
    for text in ("{", "[]", '{"format": 2}', '{"format": 1, "paths": [[1, 0]]}'):
        bad.write_text(text)
        with pytest.raises(RequestError, match="holds no tree"):
            load()
    write_tree(bad, [(0,) * depth for depth in range(1, 7)], {})
    with pytest.raises(RequestError, match="depth 6"):
        load()


@pytest.mark.parametrize(("family", "length", "expected"), [("hydra", 2, 2), ("hydra", 9, 4), ("eagle", 3, 3)])
def test_a_chain_by_name(family: str, length: int, expected: int, runs: Path) -> None:
    """The likeliest token at each depth, of heads as many as there are."""
    config = DrafterConfig(tree="chain", **({"eagle": EagleOptions(tree="static")} if family == "eagle" else {}))
    drafter = load_drafter(runs / family / "drafter", load_target("tiny"), draft_length=length, config=config)
    assert (drafter.nodes, drafter.draft_length) == (expected + 1, expected)


@pytest.mark.parametrize(("depth", "said"), [(0, "expected 1 or more"), (1_001, "at most 1,000"), (1_000, "no run")])
def test_a_tree_is_a_thousand_deep_at_most(depth: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        check_tree(TreeRequest(tmp_path, depth=depth), [])
