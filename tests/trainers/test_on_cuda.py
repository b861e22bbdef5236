"""A training step of every method on a pretended GPU: no devices mixed, no wait, and the loss of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith.trainers.loop.feed import upload
from draftsmith.trainers.loop.objective import Objective
from draftsmith.trainers.loop.state import Average
from draftsmith.trainers.student import compared
from faults import toy
from helpers.models.learnable_text import Chains
from helpers.models.method_cases import CASES
from pretended_cuda.device import PretendedCuda
from pretended_cuda.tensor import OnCuda
from torch import Tensor, nn

ROWS = Chains(40, 0, uneven=True)


def made(case: str, device: str) -> Objective:
    """The student built from a target that lies there, and moved there as accelerate moves it."""
    method, sections = CASES[case]
    torch.manual_seed(0)
    goal = toy.objective_of(method, device, **sections)
    assert isinstance(goal.module, nn.Module)
    goal.module.to(device)
    return goal


def step(goal: Objective, number: int, device: str) -> Tensor:
    """The loss of three rows, which has left its gradients."""
    torch.manual_seed(number)  # of noise and of anchors
    batch = upload(ROWS.batch([3 * number + row for row in range(3)]), torch.device(device))
    goal.begin_step(number, 1)
    loss, _ = goal.module(batch, goal.prepare(batch))
    loss.backward()
    return loss


def gradients(goal: Objective) -> dict[str, Tensor]:
    return {name: each.grad for name, each in goal.module.named_parameters() if each.grad is not None}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_a_cpu_and_wait_for_nothing(case: str, cuda: PretendedCuda) -> None:
    here, there = made(case, "cpu"), made(case, "cuda")
    for number in range(2):
        cuda.waits.clear()  # what is made once may wait, in the first step
        loss = step(there, number, "cuda:0")
        assert cuda.waits == {} or number == 0
        torch.testing.assert_close(loss.cpu(), step(here, number, "cpu"))
    mine = gradients(there)
    assert mine
    assert all(isinstance(each, OnCuda) for each in mine.values())
    torch.testing.assert_close({name: each.cpu() for name, each in mine.items()}, gradients(here))


def test_a_resumed_average_lies_where_the_weights_do(cuda: PretendedCuda) -> None:
    """A checkpoint is read on the host."""
    module = nn.Linear(3, 2).to("cuda")
    average = Average(module, 0.5)
    average.load({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    average.update(module, torch.ones((), dtype=torch.bool, device="cuda:0"))
    torch.testing.assert_close(average.tensors["weight"].cpu(), module.weight.detach().cpu() / 2)


def planted(monkeypatch: pytest.MonkeyPatch, bug: Any) -> None:
    real = compared.report_weights
    monkeypatch.setattr(compared, "report_weights", lambda *given: bug(real(*given)))


def test_a_tensor_left_on_the_host_is_seen(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = made("eagle", "cuda")
    planted(monkeypatch, Tensor.cpu)
    with pytest.raises(RuntimeError, match="same device"):
        step(goal, 0, "cuda:0")


def test_a_read_is_seen_with_its_function(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = made("eagle", "cuda")
    step(goal, 0, "cuda:0")
    planted(monkeypatch, lambda weight_P: weight_P * float(weight_P.sum()) ** 0)
    cuda.waits.clear()
    step(goal, 1, "cuda:0")
    assert cuda.waits == {("trainers/student/compared.py", "Student.compare"): {"_local_scalar_dense"}}
