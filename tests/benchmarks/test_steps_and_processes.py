"""The model of many processes by hand, and the step beside SpecForge's."""

from __future__ import annotations

import pytest
import torch
from helpers.benchmark_scripts import load
from torch import nn

eagle3_step, scaling = load("eagle3_step"), load("scaling")


def test_a_step_of_many_processes_by_hand() -> None:
    model = scaling.Model(fixed=0.5, each=0.25, gradients=100, gathered=60, bandwidth=10.0)
    assert model.seconds(1, 8) == 0.5 + 8 * 0.25
    # a ring sends 2 (n - 1) / n of the gradients; of the layers a process lacks (n - 1) / n
    assert model.seconds(4, 8) == pytest.approx(0.5 + 2 * 0.25 + 0.75 * (200 + 60) / 10)


def test_where_more_processes_stop_to_pay() -> None:
    free = scaling.Model(fixed=0.0, each=1.0, gradients=0, gathered=0, bandwidth=1.0)
    (row,) = scaling.predicted("here", free, 64)
    assert row["stops"] == "beyond 64"
    assert row["gains"] == "2.00, 4.00, 8.00, 16.00, 32.00, 64.00"
    # 2 and 1 s of work, and as much for sending whatever the number: 2 -> 4 is 3 / 2.5
    slow = scaling.Model(fixed=0.0, each=1.0, gradients=1, gathered=0, bandwidth=1.0)
    (row,) = scaling.predicted("here", slow, 4)
    assert row["stops"] == "1"


def test_two_steps_that_differ_are_no_comparison() -> None:
    def side(scale: float) -> object:
        layer = nn.Linear(3, 2, bias=False)
        nn.init.ones_(layer.weight)

        def step() -> list[float]:
            layer.zero_grad()
            loss = scale * layer(torch.ones(1, 3)).sum()
            loss.backward()
            return [float(loss.detach())]

        return eagle3_step.Side(step, layer)

    assert eagle3_step.check_equal({"ours": side(1.0), "theirs": side(1.0)}) == 0
    with pytest.raises(SystemExit, match="not the same step"):
        eagle3_step.check_equal({"ours": side(1.0), "theirs": side(1.01)})


def test_our_side_of_the_step() -> None:
    """The loss of a fresh head that begins as nothing of the target's: about log U, seven times."""
    shape = eagle3_step.Shape.parsed("64x64x128")
    side = eagle3_step.ours(shape, eagle3_step.made(shape))
    (loss,) = side.step()
    assert 3 < loss / eagle3_step.PASSES < 9
    assert all(weight.grad is not None for weight in side.module.parameters())
