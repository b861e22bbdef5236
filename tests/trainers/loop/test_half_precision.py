"""fp16's gradient scale, on a CPU: a step that is not finite is skipped, lowers it, and the next one is taken."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate.optimizer import AcceleratedOptimizer
from faults import poison, toy


def test_a_skipped_step_lowers_the_scale(tmp_path: Path) -> None:
    loop = toy.loop_in(tmp_path, steps=4)
    team = loop.accelerator
    # what accelerate makes where a GPU trains in fp16
    team.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    team.native_amp, team.state._mixed_precision = True, "fp16"
    loop.optimizers[:] = [AcceleratedOptimizer(each.optimizer, False, team.scaler) for each in loop.optimizers]
    team._optimizers = loop.optimizers
    bad = {1, 2}
    planted = poison.Poison(loop, lambda step: "gradient" if step in bad else None, bad.__contains__)
    toy.run(loop)
    assert planted.moved == []
    assert loop.steps.skipped == 2
    assert team.scaler.get_scale() == 2.0**18
