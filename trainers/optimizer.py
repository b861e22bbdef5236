"""Optimisers and the learning-rate schedule, from the recipe's section.

Read next: `loop.py`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import OptimizerConfig


def build(module: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """One AdamW, or Muon for the hidden matrices and AdamW for everything else.

    Muon (Jordan 2024) is torch's own; `match_rms_adamw` (Liu et al. 2025) lets both share `lr`.
    """
    embeddings = {
        id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)
    } | {id(p) for name, p in module.named_parameters() if "head" in name}
    matrices, hidden, vectors = [], [], []
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif config.name == "muon" and parameter.ndim == 2 and id(parameter) not in embeddings:
            hidden.append(parameter)
        else:
            matrices.append(parameter)
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
    )
    if not hidden:
        return [adamw]
    muon = torch.optim.Muon(
        hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [adamw, muon]


def rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of `step` (from 0) of `steps`: a pure function, nothing to save."""
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
