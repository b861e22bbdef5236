"""Small recipes of every method that rides on a target, and of PARD, and what their runs wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import launcher
from helpers.runs.small_run import drafter

LAUNCHER = str(launcher.__file__)
COMMON = """\
data: {limit_rows: 30, sequence_length: 64}
optimizer: {lr: 1e-3, warmup_steps: 2}
loop: {steps: 6, batch_rows: 8, micro_rows: 2, precision: fp32, validate_rows: 3, log_every: 1}
checkpoint: {every_steps: 6}
probe: {prompts: 1, max_new_tokens: 6}
"""
# every process draws its own noise, so there is none here
RECIPES = {
    "medusa": "medusa: {heads: 2}\nobjective: {kl: 0.0, ce: 1.0, chunk: 64}\n",
    "hydra": "medusa: {heads: 2}\nobjective: {chunk: 64}\n",
    "eagle": "eagle: {noise: 0.0, passes: 2, top_k: 1.0}\nobjective: {chunk: 64}\n",
    "eagle3": "eagle3: {passes: 3, vocabulary: 512}\nobjective: {chunk: 64}\n",
    "mtp": "mtp: {passes: 2}\nobjective: {kl: 0.5, ce: 0.5, chunk: 64}\n",
    "peagle": "peagle: {depths: 3, decoder_layers: 2, vocabulary: 512}\nobjective: {chunk: 64}\n",
    "dflash": "block: {size: 4, decoder_layers: 2, anchors: 12}\nobjective: {positions: d-pace, chunk: 64}\n",
    "dflash2": (
        "block: {size: 4, decoder_layers: 1, anchors: 12}\ndflash2: {rank: 8, candidates: 6}\n"
        "objective: {positions: d-pace, chunk: 64}\n"
    ),
    "dspark": (
        "block: {size: 3, decoder_layers: 1, anchors: 12}\ndspark: {rank: 32, confidence: 0.5}\n"
        "objective: {kl: 0.0, ce: 0.1, tv: 0.9, chunk: 64}\n"
    ),
    "pard": (
        "model: {layers: 1, hidden: 64, intermediate: 64, heads: 1, kv_heads: 1}\npard: {drafts: 3}\n"
        "objective: {chunk: 64}\n"
    ),
    "bpd": "bpd: {block: 3}\nobjective: {kl: 0.0, ce: 1.0, chunk: 64}\n",
    "medusa2": (
        "medusa: {heads: 2}\nmedusa2: {self_distillation: true}\ntune: {dropout: 0.0, rest_steps: 1}\n"
        "objective: {kl: 0.0, ce: 1.0, chunk: 64}\n"
    ),
}
CLOCKS = {"tokens_per_second", "data_wait", "memory_gb"}


def write_recipes(folder: Path, methods: list[str]) -> list[str]:
    for method in methods:
        recipe = f"method: {method}\nname: {method}\n{RECIPES[method]}{COMMON}"
        (folder / f"{method}.yaml").write_text(recipe)
    return [str(folder / f"{method}.yaml") for method in methods]


def records(run: Path) -> dict[tuple[str, int], dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {(line["kind"], line["step"]): line for line in lines}


def assert_same_run(mine: Path, alone: Path) -> None:
    """Every term of every record, and the exported weights; rounding alone may differ."""
    found, wanted = records(mine), records(alone)
    assert found.keys() == wanted.keys()
    assert len(found) >= 7
    for key, values in wanted.items():
        assert found[key].keys() == values.keys(), key
        for name in values.keys() - CLOCKS - {"kind"}:
            assert found[key][name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), (key, name)
    weights, exported = drafter(alone), drafter(mine)
    assert weights.keys() == exported.keys()
    for name, weight in weights.items():
        assert exported[name].dtype == weight.dtype
        distance = (exported[name].double() - weight.double()).norm()
        assert distance <= 1e-3 * weight.double().norm(), name
