"""A training run of a few seconds through the real command line, for tests that kill and launch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from helpers.models.shallow_target import SHALLOW
from safetensors.torch import load_file

STEPS = 24
RECIPE = f"""\
method: distill
name: small
target: {{path: {SHALLOW}}}
data: {{limit_rows: 30, sequence_length: 64}}
model: {{layers: 1, hidden: 64, intermediate: 64, heads: 1, kv_heads: 1}}
optimizer: {{lr: 3e-3, warmup_steps: 2}}
loop: {{steps: 24, batch_rows: 8, micro_rows: 2, precision: fp32, validate_every: 8,
       validate_rows: 4, log_every: 1}}
checkpoint: {{every_steps: 3}}
probe: {{every_steps: 8, prompts: 1, max_new_tokens: 6}}
"""


def write_recipe(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(RECIPE)
    return path


def drafter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "drafter" / "model.safetensors")


def assert_same_weights(left: Path, right: Path, steps: int = STEPS) -> None:
    """Bit for bit: the exported drafter and the last checkpoint with its optimiser state."""
    last = f"checkpoints/step-{steps:08d}"
    files = ["drafter/model.safetensors", f"{last}/model.safetensors"]
    files += [f"{last}/{path.name}" for path in (left / last).glob("optimizer-*.safetensors")]
    assert len(files) > 2
    for name in files:
        mine, theirs = load_file(left / name), load_file(right / name)
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(mine[key], theirs[key]), f"{name}: {key}"


def losses(run: Path) -> dict[int, float]:
    """Step -> training loss; a step that is there twice must say the same."""
    found: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            assert found.setdefault(record["step"], record["loss"]) == record["loss"]
    return found


def train(recipe: Path, out: Path) -> None:
    """The body of a run's process."""
    from draftsmith.launch.cli import main

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)
    sys.exit(main(["train", str(recipe), "--out", str(out)]))
