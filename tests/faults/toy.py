"""Runs of the real loop on models of a few thousand weights, for tests that cut, poison and spread them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from conftest import VOCABULARY, make_target
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import (
    CheckpointConfig,
    LoopConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProbeConfig,
)
from draftsmith.trainers.loop import setup
from draftsmith.trainers.loop.loop import Loop, Plan
from draftsmith.trainers.method_config import TuneConfig
from draftsmith.trainers.student.architecture import fresh_model
from draftsmith.trainers.target import TargetObjective
from draftsmith.trainers.teacher.tuned import TunedTarget
from helpers.models.learnable_text import Batch, Chains, stop_behind
from helpers.models.method_objectives import NoTokenizer, build

ROWS, BATCH, STEPS = 40, 8, 12


class Asked(Chains):
    """Rows that remember which of them were asked for."""

    def __init__(self) -> None:
        super().__init__(ROWS, 0, uneven=True)
        self.asked: list[int] = []

    def batch(self, rows: list[int] | None = None) -> Batch:
        self.asked += rows or []
        return super().batch(rows)


def objective_of(method: str, device: Any = "cpu", **sections: Any) -> Any:
    """A small objective: `target` learns the text alone, the others read a frozen target's states."""
    if method == "target":
        sizes = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=64)
        recipe = Recipe(method="target", objective=ObjectiveConfig(chunk=16))
        return TargetObjective(recipe, fresh_model(sizes, vocabulary=VOCABULARY, eos=0), NoTokenizer())
    target = make_target("qwen3")
    target.model.to(device)
    torch.manual_seed(1)
    if method == "medusa2":
        return build(method, TunedTarget(target, TuneConfig(), row_tokens=64), **sections)
    return build(method, target.model, **sections)


def plan(
    *, every: int = 5, keep: int = 2, optimizer: Literal["adamw", "muon"] = "adamw", lr: float = 3e-3, **loop: Any
) -> Plan:
    """Sections of a short run; `every` and `keep` are those of its checkpoints."""
    values = {"steps": STEPS, "batch_rows": BATCH, "micro_rows": 4, "precision": "fp32", "log_every": 1}
    values |= {"validate_every": 6, "validate_rows": 4} | loop
    chosen = OptimizerConfig(name=optimizer, lr=lr, warmup_steps=2)
    return Plan(LoopConfig(**values), chosen, CheckpointConfig(every_steps=every, keep=keep), ProbeConfig())


def loop_in(
    out: Path, method: str = "target", rows: Any = None, *, given: dict[str, Any] | None = None, **values: Any
) -> Loop:
    """The real loop in a run's folder; `given`: sections of what is trained."""
    sections = plan(**values)
    out.mkdir(parents=True, exist_ok=True)
    setup.make_deterministic(sections.loop)
    accelerator = setup.make_accelerator(sections.loop, sections.optimizer, out)
    goal = objective_of(method, accelerator.device, **(given or {}))
    return Loop(
        goal, rows or Asked(), Chains(8, 2), sections, accelerator, out=out, export_to=out / "drafter", probe=None
    )


def run(
    loop: Loop,
    *,
    stop_at: int | None = None,
    watch: Callable[[int], None] | None = None,
    sent: signal.Signals = signal.SIGTERM,
) -> None:
    """Run or resume to the end, or to a signal behind step `stop_at`; `watch` is called behind each step."""
    stop_behind(loop, stop_at, watch, sent)
    loop.run(setup.resume_from(loop.out, "auto"))


def state_files(out: Path, step: int = STEPS) -> dict[str, bytes]:
    """Weights and moments of a checkpoint, byte by byte."""
    folder = out / "checkpoints" / f"step-{step:08d}"
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("model", "optimizer"))}
    assert len(found) >= 3
    return found


def validations(out: Path) -> list[float]:
    """The held-out losses of a run, in order."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["validation_loss"] for line in lines if line["kind"] == "validation"]


def losses(out: Path) -> dict[int, float]:
    """Step -> training loss, of every step once."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    each = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert len({step for step, _ in each}) == len(each)
    return dict(each)
