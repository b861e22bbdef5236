"""Which device models go to, and that loading, training and the pre-flight say the same of it."""

from __future__ import annotations

import pytest
import torch
from draftsmith.decoding.devices import runs_on_cpu
from draftsmith.launch.check.devices import devices_of
from draftsmith.launch.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("asked", "gpu", "cpu"),
    [("", True, False), ("false", True, False), ("true", True, True), ("1", True, True), ("", False, True)],
)
def test_a_launch_may_leave_the_gpu_out(asked: str, gpu: bool, cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    assert runs_on_cpu() is cpu


def test_the_pre_flight_describes_the_cpu_that_a_launch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert devices_of(load_recipe("distill-tiny", []).recipe).on_cpu  # asks no CUDA for its memory, which is not there
