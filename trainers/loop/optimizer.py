"""Optimisers and the learning-rate schedule, from the recipe's section.

Read next: `loop.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..config import OptimizerConfig


@dataclass(frozen=True)
class Pace:
    """How a parameter's learning rate differs from the recipe's."""

    factor: float = 1.0
    """The rate is multiplied by this."""
    first_step: int = 0
    """The rate is 0 before this step, and begins with a warm-up of its own."""


@runtime_checkable
class Paced(Protocol):
    """A module whose parameters have different learning rates."""

    def pace(self, name: str) -> Pace:
        """The pace of the parameter of that name in the module."""


def build(module: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """One AdamW, or Muon for the hidden matrices and AdamW for everything else.

    Muon (Jordan 2024) is torch's own; `match_rms_adamw` (Liu et al. 2025) lets both share `lr`.
    """
    embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)} | {
        id(p) for name, p in module.named_parameters() if "head" in name
    }
    matrices, hidden, vectors = _Groups(module), _Groups(module), _Groups(module)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            vectors.add(name, parameter)
        elif config.name == "muon" and parameter.ndim == 2 and id(parameter) not in embeddings:
            hidden.add(name, parameter)
        else:
            matrices.add(name, parameter)
    decay = config.weight_decay
    adamw = torch.optim.AdamW(
        [*matrices.listed(weight_decay=decay), *vectors.listed(weight_decay=0.0)], lr=config.lr, betas=config.betas
    )
    groups = hidden.listed(weight_decay=decay)
    if not groups:
        return [adamw]
    muon = torch.optim.Muon(groups, lr=config.lr, adjust_lr_fn="match_rms_adamw")
    return [adamw, muon]


class _Groups:
    """Parameters of one kind, grouped by pace."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_pace: dict[Pace, list[nn.Parameter]] = defaultdict(list)

    def add(self, name: str, parameter: nn.Parameter) -> None:
        pace = self._module.pace(name) if isinstance(self._module, Paced) else Pace()
        self._by_pace[pace].append(parameter)

    def listed(self, *, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser; it keeps the entries of `Pace` for `group_rate`."""
        return [{"params": each, "weight_decay": weight_decay, **asdict(pace)} for pace, each in self._by_pace.items()]


def rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of `step` (from 0) of `steps`: a pure function, so nothing has to be saved."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "linear":
        share = 1 - done
    elif config.schedule == "wsd":
        share = min(1.0, (1 - done) / config.decay_share)
    else:
        share = 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.final_share + (1 - config.final_share) * share)


def group_rate(group: dict[str, Any], step: int, lr: float, config: OptimizerConfig) -> float:
    """The learning rate of a group of `build`: `rate` times its factor, 0 before its first step."""
    first = group["first_step"]
    if step < first:
        return 0.0
    begun = step - first + 1
    share = min(1.0, begun / config.warmup_steps) if first and config.warmup_steps else 1.0
    return float(lr * group["factor"] * share)
