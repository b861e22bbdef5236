"""The learning rate as a function of the step, and which weights decay."""

from __future__ import annotations

import math

import pytest
import torch
from draftsmith.trainers.config import OptimizerConfig
from draftsmith.trainers.loop import optimizer
from draftsmith.trainers.loop.optimizer import MuonByFlag, MuonInFp32, build, group_rate, rate
from torch import nn

STEPS = 104  # 4 of warm-up and 100
WARM_UP = {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}
# schedule -> step -> share of the peak, with a last rate of a tenth
RATES = {
    "constant": {29: 1.0, 79: 1.0, 104: 1.0},
    "linear": {29: 0.775, 54: 0.55, 79: 0.325, 104: 0.1},
    "cosine": {29: 0.55 + 0.45 * math.sqrt(0.5), 54: 0.55, 79: 0.55 - 0.45 * math.sqrt(0.5), 104: 0.1},
    "wsd": {29: 1.0, 54: 1.0, 79: 1.0, 84: 0.82, 91: 0.568, 99: 0.28, 104: 0.1},  # the last quarter
}


@pytest.mark.parametrize("schedule", RATES)
def test_the_rate_of_every_schedule(schedule: str) -> None:
    config = OptimizerConfig(lr=2.0, warmup_steps=4, schedule=schedule, decay_share=0.25, final_share=0.1)
    for step, share in {**WARM_UP, **RATES[schedule]}.items():
        assert rate(step, STEPS, config) == pytest.approx(2.0 * share), step


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    for schedule in RATES:
        assert rate(0, STEPS, OptimizerConfig(lr=2.0, warmup_steps=0, schedule=schedule)) == 2.0


def test_the_share_of_the_decay_is_the_recipes() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=0, schedule="wsd", decay_share=0.5, final_share=0.0)
    assert [rate(step, 100, config) for step in (0, 50, 75, 100)] == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_a_late_group_warms_up_from_its_own_first_step() -> None:
    """Four steps of warm-up: the first has a quarter of half of the rate, and the one in front of it none."""
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    late = {"first_step": 10, "factor": 0.5}
    assert [group_rate(late, step, 2.0, config) for step in (9, 10, 11, 13, 14)] == [0.0, 0.25, 0.5, 1.0, 1.0]
    assert group_rate(late | {"first_step": 0}, 0, 2.0, config) == 1.0  # `rate` has warmed it up already


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_matrices_decay_and_vectors_do_not(name: str) -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    module[3].weight.requires_grad_(False)
    optimizers = build(module, OptimizerConfig(name=name, weight_decay=0.3))
    decay = {id(p): g["weight_decay"] for o in optimizers for g in o.param_groups for p in g["params"]}
    trained = [p for p in module.parameters() if p.requires_grad]
    assert decay.keys() == {id(p) for p in trained}
    for parameter in trained:
        assert decay[id(parameter)] == (0.3 if parameter.ndim > 1 else 0.0)
    muons = [o for o in optimizers if isinstance(o, torch.optim.Muon)]
    hidden = [p for o in muons for g in o.param_groups for p in g["params"]]
    assert [id(p) for p in hidden] == ([id(module[1].weight)] if name == "muon" else [])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_muon_without_rounding_is_its_definition(shape: tuple[int, int], nesterov: bool) -> None:
    """Three steps against Newton-Schulz in fp64 by hand; torch's own is a rounding to bf16 away."""
    g = torch.Generator().manual_seed(0)
    weight, gradients = torch.randn(*shape, generator=g), [torch.randn(*shape, generator=g) for _ in range(3)]
    ends = []
    for kind in (MuonInFp32, torch.optim.Muon):
        parameter = nn.Parameter(weight.clone())
        muon = kind([parameter], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.0)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            muon.step()
        ends.append(parameter.detach())
    momentum, expected = torch.zeros(*shape, dtype=torch.float64), weight.double()
    for gradient in gradients:
        momentum = 0.9 * momentum + 0.1 * gradient.double()
        update = 0.1 * gradient.double() + 0.9 * momentum if nesterov else momentum
        expected = expected - 0.1 * math.sqrt(max(1, shape[0] / shape[1])) * orthogonal(update)
    torch.testing.assert_close(ends[0].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ends[1].double(), expected, atol=3e-2, rtol=0)
    assert not torch.equal(ends[0], ends[1])


@pytest.mark.parametrize("left_out", [{1}, {0, 2}])
def test_muon_leaves_out_what_a_flag_says(left_out: set[int]) -> None:
    """To the bit what torch's own does without those steps, in every group and whatever their gradients hold."""
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 6, generator=g), torch.randn(5, 3, generator=g)]
    ends = []
    for kind in (MuonByFlag, torch.optim.Muon):
        parameters = [nn.Parameter(each.clone()) for each in weights]
        idle = nn.Parameter(torch.ones(2, 2))  # without a gradient
        muon = kind([{"params": [parameters[0], idle]}, {"params": [parameters[1]], "lr": 0.3}], lr=0.1)
        drawn = torch.Generator().manual_seed(1)
        for step in range(4):
            for each in parameters:
                gradient = torch.randn(each.shape, generator=drawn)
                each.grad = gradient * torch.nan if step in left_out else gradient
            if isinstance(muon, MuonByFlag):
                muon.found_inf = torch.tensor(float(step in left_out))
                muon.step()
            elif step not in left_out:
                muon.step()
        momenta = [muon.state[each]["momentum_buffer"] for each in parameters]
        ends.append([*parameters, idle, *momenta])
        assert [len(group["params"]) for group in muon.param_groups] == [2, 1]
    assert all(torch.equal(mine, its) for mine, its in zip(*ends, strict=True))


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Five steps of Newton-Schulz with Muon's coefficients (Jordan 2024)."""
    wide = x if len(x) <= x.shape[1] else x.T
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * gram + 2.0315 * gram @ gram) @ wide
    return wide if len(x) <= x.shape[1] else wide.T


def test_muon_is_not_rounded_where_a_cpu_would_emulate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for multiplies, kind in ((True, MuonByFlag), (False, MuonInFp32)):
        monkeypatch.setattr(optimizer, "multiplies_bf16", lambda has=multiplies: has)
        _, muon = build(nn.Sequential(nn.Linear(4, 4)), OptimizerConfig(name="muon"))
        assert type(muon) is kind


def test_muon_takes_hidden_matrices_alone() -> None:
    """Not the projection to the vocabulary, its own or the embedding's, nor what has no two dimensions."""
    hidden = {"layer": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "kernel": nn.Conv1d(4, 4, 2)}
    outputs = {"lm_head": nn.Linear(4, 5), "lm_heads": nn.ModuleList([nn.Linear(4, 6)])}
    module = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 4), **hidden, **outputs})
    module["tied"] = nn.Linear(4, 5, bias=False)
    module["tied"].weight = module["embed_tokens"].weight
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    adamw, muon = build(module, OptimizerConfig(name="muon", weight_decay=0.3))
    taken = [[names[id(p)] for group in each.param_groups for p in group["params"]] for each in (adamw, muon)]
    assert taken[1] == ["layer.weight"]
    assert sorted([*taken[0], "layer.weight"]) == sorted(names.values())
