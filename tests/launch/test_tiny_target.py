"""Making the embedded target: weights between, the asset's files, the card's figures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import rich
import torch
from conftest import make_target
from draftsmith.data.rows.sources import stdlib_texts
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_model, load_target
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.tiny_target import between, held_out_loss, install, keep_part, loop_share, texts
from draftsmith.launch.train import train
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from draftsmith.trainers.student.deeper import deepened

LAYERS = 3
LOOPS = 25
"""Per cent of its greedy text that may stand in loops."""
HELD_OUT = 2.61
"""Nats per token that the embedded target may lose on held-out text: what the one of 0.1.0 does."""
TEXTS = [f"def add_{n}(a, b):\n    return a + b + {n}\n" * 4 for n in range(24)]


@pytest.fixture(scope="module")
def second_stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `target-deep`, its sizes and texts small, with what is kept of it."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save_pretrained(folder / "first")
    sizes = ModelConfig(layers=2, hidden=32, heads=2, kv_heads=1, head_size=16, intermediate=32, max_positions=128)
    torch.manual_seed(0)
    fresh_model(sizes, vocabulary=len(tokenizer), eos=None).save_pretrained(folder / "first")
    for name, rows in (("train", TEXTS[:20]), ("held-out", TEXTS[20:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    values = {
        "model.start_from": folder / "first",
        "model.deepen_to": LAYERS,
        "tokenizer.path": folder / "first",
        "data.source": folder / "train.jsonl",
        "data.validation": folder / "held-out.jsonl",
        "data.sequence_length": 32,
        "loop.steps": 2,
        "loop.batch_rows": 2,
        "loop.micro_rows": 2,
        "optimizer.warmup_steps": 0,
        "optimizer.lr": 1e-2,
    }
    resolved = load_recipe("target-deep", [(name, str(value)) for name, value in values.items()])
    train(resolved, out=folder / "run")
    keep_part(folder / "run")
    return folder / "run"


def test_what_is_installed_is_halfway_and_says_its_own_loss(second_stage: Path, tmp_path: Path) -> None:
    asset = tmp_path / "asset"
    asset.mkdir()
    (asset / "left over").write_text("of an earlier target")
    install(second_stage, asset)

    began = deepened(load_model(str(second_stage.parent / "first")), LAYERS).state_dict()
    ended = load_model(str(second_stage / "target")).state_dict()
    made = load_model(str(asset))
    moved = 0
    for name, weight in made.state_dict().items():
        middle = ((began[name] + ended[name]) / 2).to(torch.bfloat16).float()
        assert torch.allclose(weight, middle, rtol=1e-2, atol=1e-6), name
        moved += not torch.equal(began[name], ended[name])
    assert moved > 10, "the run has trained nothing"

    # what a user gets: a target that decodes, in half the bytes, and how it was made
    assert load_target(str(asset)).tokenizer("def add")["input_ids"]
    assert json.loads((asset / "config.json").read_text())["dtype"] == "bfloat16"
    assert {"README.md", "metrics.jsonl", "run.yaml", "model.safetensors"} <= {each.name for each in asset.iterdir()}
    assert not (asset / "left over").exists()

    recipe = load_recipe(str(asset / "run.yaml")).recipe
    loss = held_out_loss(made, recipe, asset)
    assert 0 < loss < 2 * math.log(300)
    card = " ".join((asset / "README.md").read_text().split())
    assert f"Held-out loss {loss:.3f} nats" in card
    assert f"({LAYERS} layers, hidden size 32, vocabulary {made.config.vocab_size})" in card
    assert f"{100 * loop_share(asset):.0f} % stands in loops" in card
    assert "64 tokens behind each of 24 prompts" in card
    assert re.search(r"`target-deep`: 2 steps, 0\.0 M tokens", card)


def figure(pattern: str) -> float:
    """A figure of the embedded target's card."""
    found = re.search(pattern, " ".join(Path(embedded_target(), "README.md").read_text(encoding="utf-8").split()))
    assert found is not None, pattern
    return float(found[1])


def test_the_embedded_target_is_within_its_bounds() -> None:
    assert Path(embedded_target(), "model.safetensors").stat().st_size <= 25_000_000
    assert figure(r"Held-out loss ([\d.]+) nats per token") <= HELD_OUT
    assert figure(r"([\d.]+) % stands in loops") < LOOPS


@pytest.mark.slow
def test_the_embedded_targets_card_says_what_it_does() -> None:
    """On all 512 held-out rows: of 24 or 48 the loss is 0.1 nats off. Another Python has another library."""
    asset = Path(embedded_target())
    few = [("data.source", "stdlib"), ("data.limit_rows", "50")]  # the rows to train on say nothing here
    recipe = load_recipe(str(asset / "run.yaml"), few).recipe
    assert recipe.loop.validate_rows == 512
    loss = held_out_loss(load_model(str(asset)), recipe, asset)
    assert loss <= HELD_OUT
    assert loss == pytest.approx(figure(r"Held-out loss ([\d.]+) nats per token"), abs=0.05)
    assert 100 * loop_share(asset) == pytest.approx(figure(r"([\d.]+) % stands in loops"), abs=5)


@pytest.mark.parametrize("way", [0.0, 0.5, 1.0])
def test_part_of_the_way_is_a_mean_of_two_models(way: float) -> None:
    began, ended = make_target("qwen3").model, make_target("qwen3", seed=1).model
    expected = {name: (1 - way) * w + way * ended.state_dict()[name] for name, w in began.state_dict().items()}
    before = {name: weight.clone() for name, weight in began.state_dict().items()}
    made = between(began, ended, way)
    assert {weight.dtype for weight in made.state_dict().values()} == {torch.bfloat16}
    for name, weight in made.state_dict().items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name
        assert torch.equal(began.state_dict()[name], before[name]), "the beginning is not written over"


def test_the_second_stage_reads_more_than_the_library() -> None:
    """The library's training split first, then the sources of packages; none is empty."""
    read = list(texts())
    assert all(read)
    library = [text for _, text in stdlib_texts("train") if text]
    assert read[: len(library)] == library
    assert Path(rich.__file__).read_text(encoding="utf-8") in read[len(library) :]
