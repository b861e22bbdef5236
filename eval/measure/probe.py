"""Real decoding for the training loop: how many tokens a target call yields right now.

Read next: `evaluate.py`, the full measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import generate
from ...decoding.proposal import Drafter, Proposer
from ...decoding.sampling import Warper
from ...drafters.families import FAMILIES
from ...drafters.model.ensemble import Ensemble
from ...drafters.record import function
from .metrics import tau


def tau_probe(
    target: Backbone,
    prompts: Sequence[Sequence[int]],
    *,
    make_proposer: Callable[[nn.Module], Proposer],
    max_new_tokens: int,
) -> Callable[[nn.Module], dict[str, float]]:
    """A function of what is trained: greedy tau over the prompts, steps cut short left out."""

    def probe(module: nn.Module) -> dict[str, float]:
        drafter = make_proposer(module)
        done = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=max_new_tokens)
        if isinstance(drafter, (Ensemble, Drafter)):
            drafter.close()  # what it decoded with goes on training
        return {"tau": tau([done.steps])}

    return probe


def as_proposer(family: str, target: Backbone, draft_length: int) -> Callable[[nn.Module], Proposer]:
    """How a module of a family drafts while it is trained; trees in their default shape."""
    draft_by = FAMILIES[family].proposer
    if draft_by is None:
        raise ValueError(f"no module of family {family!r} is trained")
    make = function(draft_by)
    return lambda module: make(module, target, draft_length)
