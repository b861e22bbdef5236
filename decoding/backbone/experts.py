"""The experts of a model: the many feed-forward parts of a layer, of which each token reads a few.

Read next: `eval/measure/speed.py`, how many a verify call reads; `launch/check/activations.py`, what a pass
holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
"""What configs call the number of experts that a token reads."""


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in which `transformers` holds a layer's experts in one tensor, by name."""
    for name, module in model.named_modules():
        if name.endswith(".experts") and any(each.ndim == 3 for each in module.parameters(recurse=False)):
            yield name, module


def expert_count(part: nn.Module) -> int:
    """How many experts such a module has."""
    return next(len(each) for each in part.parameters(recurse=False) if each.ndim == 3)


def chosen_of(config: Any, part: nn.Module) -> int:
    """How many of them a token reads; all if the config does not say."""
    own = config.get_text_config(decoder=True)
    said = next((getattr(own, name) for name in _CHOSEN if isinstance(getattr(own, name, None), int)), None)
    return expert_count(part) if said is None else min(said, expert_count(part))


def unread_by_a_token(model: Any) -> int:
    """Numbers of the experts' weights that a token does not read."""
    unread = 0
    for _, part in experts_of(model):
        held, of = sum(each.numel() for each in part.parameters()), expert_count(part)
        unread += held * (of - chosen_of(model.config, part)) // of
    return unread


def expert_widths(model: Any) -> Iterator[int]:
    """Numbers in and out of a token's experts, layer by layer: each chosen one has rows of its own."""
    for _, part in experts_of(model):
        sides = sum(sum(each.shape[1:]) for each in part.parameters(recurse=False) if each.ndim == 3)
        yield chosen_of(model.config, part) * sides
