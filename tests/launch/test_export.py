"""`draftsmith export` from a run folder: what is written, what is said, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.loading import embedded_target, load_target
from draftsmith.drafters.eagle_layers import EagleShape
from draftsmith.drafters.eagle_net import EagleNet
from draftsmith.drafters.medusa import MedusaHeads
from draftsmith.launch.cli import main
from draftsmith.launch.recipe import load_recipe
from draftsmith.trainers.frozen import saver
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target("tiny")


def run_folder(place: Path, recipe: str, net: Any, target: Any) -> Path:
    """A run as training leaves it, as far as an export looks."""
    run = place / recipe
    run.mkdir()
    resolved = load_recipe(recipe)
    (run / "run.yaml").write_text(resolved.yaml())
    saver(target, resolved.recipe.method)(net, run / "drafter")
    return run


@pytest.fixture
def eagle(target: Any, tmp_path: Path) -> Path:
    return run_folder(
        tmp_path, "eagle-tiny", EagleNet(EagleShape.like(target.model.config)), target
    )


def test_a_run_becomes_a_folder_for_each_engine(
    eagle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(eagle)]) == 0
    said = capfd.readouterr().out
    assert f"vllm serve {embedded_target()}" in said
    assert '"method": "eagle"' in said
    assert main(["export", str(eagle), "--format", "sglang", "--dtype", "fp32"]) == 0
    assert "--speculative-algorithm EAGLE " in capfd.readouterr().out
    own = load_file(eagle / "drafter" / "model.safetensors")
    for form, dtype in (("vllm", torch.bfloat16), ("sglang", torch.float32)):
        assert {path.name for path in (eagle / form).iterdir()} == {
            "config.json", "model.safetensors",
        }  # fmt: skip
        config = json.loads((eagle / form / "config.json").read_text())
        assert (config["vocab_size"], config["max_position_embeddings"]) == (4096, 2048)
        tensors = load_file(eagle / form / "model.safetensors")
        assert tensors.keys() == {*own, "fc.bias"}
        for name, weight in own.items():
            assert torch.equal(tensors[name], weight.to(dtype))


def test_shared_heads_take_the_targets_projection_along(
    target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM gets no other; and it is told of no more heads than there are."""
    heads = MedusaHeads.for_target(target.model, heads=2, shared_head=True)
    run = run_folder(tmp_path, "medusa-tiny", heads, target)
    assert main(["export", str(run), "--dtype", "fp32"]) == 0
    assert '"num_speculative_tokens": 2' in capfd.readouterr().out
    tensors = load_file(run / "vllm" / "model.safetensors")
    head = target.model.get_output_embeddings().weight
    assert torch.equal(tensors["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--format", "speculators"], "expected vllm or sglang"),
        (["--out", "{run}/drafter"], "exists; name a new folder"),
        (["--target", "{narrow}"], "its hidden size differs"),
    ],
)
def test_what_cannot_be_is_one_message(
    words: list[str], reason: str, eagle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    config = json.loads((Path(embedded_target()) / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"hidden_size": 192}))
    given = [word.format(run=eagle, narrow=narrow) for word in words]
    assert main(["export", str(eagle), *given]) == 2
    said = capfd.readouterr().err
    assert reason in said
    assert said.count("draftsmith: ") == 1
    assert not (eagle / "vllm").exists()


def test_no_run_and_no_drafter(
    eagle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert "is no run folder" in capfd.readouterr().err
    shutil.rmtree(eagle / "drafter")
    assert main(["export", str(eagle)]) == 2
    assert "holds no drafter" in capfd.readouterr().err
