"""The pretended GPU refuses and waits as CUDA does, and leaves torch as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pretended_cuda.device import PretendedCuda
from pretended_cuda.patches import pretended_cuda
from pretended_cuda.tensor import OnCuda
from torch import Tensor, nn

MIXED = "same device"
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a sum": (lambda x: x + torch.ones(3), MIXED),
    "a number where numbers are joined": (lambda x: torch.cat([x, torch.tensor([3])]), MIXED),
    "a condition": (lambda x: torch.where(torch.ones(3) > 0, x, x), MIXED),
    "places of gather": (lambda x: x.gather(0, torch.tensor([0])), MIXED),
    "values at places": (lambda x: x.index_put_((x - 1,), torch.ones(3, dtype=x.dtype)), MIXED),
    "a number of the host is written": (lambda x: torch.zeros(()).add_(x.sum()), MIXED),
    "out": (lambda x: torch.add(x, x, out=torch.empty(3, dtype=x.dtype)), MIXED),
    "places on the device of a tensor of the host": (lambda x: torch.ones(3)[x - 1], "indices should be"),
    "a generator": (lambda _: torch.rand(3, device="cuda", generator=torch.Generator()), "'cuda' device type"),
    "numpy": (lambda x: x.numpy(), "can't convert cuda:0"),
    "an array": (np.asarray, "can't convert cuda:0"),
}
WAITS: dict[str, tuple[Callable[[Tensor], Any], str | None]] = {
    "float": (lambda x: float(x[0]), "_local_scalar_dense"),
    "a truth": (lambda x: bool((x > 1).any()), "_local_scalar_dense"),
    "a list": (lambda x: x.tolist(), "copy to the host"),
    "cpu": (Tensor.cpu, "copy to the host"),
    "nonzero": (Tensor.nonzero, "nonzero"),
    "a mask": (lambda x: x[x > 1], "index by a mask"),
    "places of the host": (lambda x: x[torch.tensor([0])], "index by numbers of the host"),
    "a list of places": (lambda x: x[[0, 2]], "index by numbers of the host"),
    "new numbers": (lambda _: torch.tensor([1], device="cuda"), "copy to the device"),
    "a copy": (lambda _: torch.ones(2).to("cuda"), "copy to the device"),
    "a copy of what is not pinned": (lambda _: torch.ones(2).to("cuda", non_blocking=True), "copy to the device"),
    "a filling by a number of the device": (lambda x: x.masked_fill(x > 1, x[0]), "masked_fill"),
    "a pinned copy": (lambda _: torch.ones(2).pin_memory().to("cuda", non_blocking=True), None),
    "a copy that is waited for later": (lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), None),
    "a number at masked places": (lambda x: x.__setitem__(x > 4, 0), None),
    "a number in a slice": (lambda x: x.__setitem__(slice(0, 1), 7), None),
    "a place": (lambda x: x[0], None),
    "a number of the host": (lambda x: x + torch.tensor(1), None),
    "a new tensor": (lambda _: torch.arange(3, device="cuda"), None),
}


@pytest.fixture
def x(cuda: PretendedCuda) -> Tensor:
    return torch.tensor([1, 2, 3], device="cuda")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cuda_refuses(case: str, inference: bool, x: Tensor) -> None:
    call, message = REFUSED[case]
    with torch.inference_mode(inference), pytest.raises((RuntimeError, TypeError), match=message):
        call(x)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", WAITS)
def test_what_the_host_waits_for(case: str, inference: bool, x: Tensor, cuda: PretendedCuda) -> None:
    call, wait = WAITS[case]
    cuda.waits.clear()
    with torch.inference_mode(inference):
        call(x)
    assert [*cuda.waits.values()] == ([] if wait is None else [{wait}])


def test_numbers_are_those_of_a_cpu(x: Tensor) -> None:
    assert x.device == torch.device("cuda:0")
    assert x.is_cuda
    assert x.to("cuda") is x
    assert x[[2, 0]].tolist() == [3, 1]
    x[x > 1] = 7
    assert x.tolist() == [1, 7, 7]
    assert torch.ones(2).to(x).tolist() == [1, 1]
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda


def test_numbers_that_would_be_lost_are_not_made(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="new_tensor"):
        x.new_tensor([1, 2])


def test_weights_move_and_learn(cuda: PretendedCuda) -> None:
    net, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(net.state_dict())
    weight = net.weight
    net.to("cuda")
    assert net.weight is weight
    assert isinstance(weight, OnCuda)
    for each, device in ((net, "cuda"), (plain, "cpu")):
        each(torch.ones(4, 3, device=device)).square().sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), plain.weight.grad)
    twin = copy.deepcopy(net)
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight is not weight
    assert net.to(torch.bfloat16).weight.held.dtype is torch.bfloat16
    assert net.to("cpu").weight.device.type == "cpu"


def test_afterwards_all_is_as_before() -> None:
    def told() -> list[Any]:
        return [torch.cuda.Event, torch.__future__.get_swap_module_params_on_conversion(), Tensor.to, torch.tensor]

    before = told()
    with pretended_cuda():
        left = torch.ones(2, device="cuda")
    assert told() == before
    assert not torch.cuda.is_initialized()
    with pytest.raises((AssertionError, RuntimeError), match="not compiled with CUDA|no NVIDIA driver"):
        torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="which is closed"):
        left + 1
