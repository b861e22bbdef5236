"""A deeper model says at first what the trained one says, and learns with every layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.loading import load_model
from draftsmith.errors import RequestError
from draftsmith.launch.cli import main
from draftsmith.trainers.student.deeper import deepened, sources


@pytest.mark.parametrize(("own", "layers"), [(2, 3), (2, 7), (8, 20), (3, 4)])
def test_layers_come_in_order_and_evenly(own: int, layers: int) -> None:
    order = sources(own, layers)
    counts = [order.count(layer) for layer in range(own)]
    assert order == sorted(order)
    assert len(order) == layers
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_its_logits_are_at_first_the_same(architecture: str) -> None:
    model = make_target(architecture).model
    tokens = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        before = model(tokens).logits
        made = deepened(model, 5)
        after = made(tokens).logits
    assert made.config.num_hidden_layers == len(made.model.layers) == 5
    assert torch.equal(before, after)


def test_every_layer_learns_and_none_is_shared() -> None:
    made = deepened(make_target("qwen3").model, 5).train()
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    tokens = torch.arange(12)[None] % made.config.vocab_size
    made(tokens, labels=tokens, use_cache=False).loss.backward()
    for layer in made.model.layers:
        assert layer.self_attn.o_proj.weight.grad.abs().sum() > 0
        assert layer.mlp.down_proj.weight.grad.abs().sum() > 0
    own = [parameter.data_ptr() for layer in made.model.layers for parameter in layer.parameters()]
    assert len(set(own)) == len(own)


def test_it_is_read_back_as_it_was(tmp_path: Path) -> None:
    """The folder says how deep it is, and its cache has a place for every layer."""
    made = deepened(make_target("qwen3").model, 5)
    made.save_pretrained(tmp_path)
    again = load_model(str(tmp_path))
    tokens = torch.arange(12)[None] % made.config.vocab_size
    with torch.no_grad():
        assert torch.equal(made(tokens, use_cache=True).logits, again(tokens, use_cache=True).logits)


def test_it_has_to_become_deeper() -> None:
    model = make_target("qwen3").model
    with pytest.raises(RequestError, match="model.deepen_to is 2, and model.start_from has 2 layers already"):
        deepened(model, 2)


def test_a_recipe_without_a_model_to_deepen_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "target-tiny", "--model.deepen_to", "12"]) == 2
    assert "deepen_to adds layers to a trained model: set start_from" in capsys.readouterr().err


def test_a_draft_is_not_deepened(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model.deepen_to", "12", "--model.start_from", "target"]
    assert main(["check", "distill-tiny", *flags]) == 2
    assert "model.deepen_to is 12, and method `distill` does not read it" in capsys.readouterr().err
