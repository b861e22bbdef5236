"""Between two reports a training step makes the host wait for nothing, by torch's own word for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.benchmarks.common.waits import Watch
from faults import toy
from helpers.models.method_cases import CASES


@pytest.mark.parametrize("case", [*CASES, "eagle with muon"])
def test_steps_wait_for_nothing(case: str, tmp_path: Path, device: torch.device) -> None:
    """In the middle of a run, behind what is made once; what waits is named with its line."""
    if device.type != "cuda":
        pytest.skip("torch says what waits on CUDA alone")
    name, _, chosen = case.partition(" with ")
    method, sections = CASES[name]
    loop = toy.loop_in(tmp_path, method, given=sections, log_every=12, optimizer=chosen or "adamw")
    watch, take, watched = Watch(cuda=True), loop.train_step, []

    def train_step(number: int, *rest: Any) -> None:
        watch.open = 2 < number < 6
        watched.append(watch.open)
        try:
            take(number, *rest)
        finally:
            watch.open = False

    loop.train_step = train_step  # type: ignore[method-assign]
    with watch:
        toy.run(loop)
    assert watched.count(True) == 3
    assert not watch.waits
