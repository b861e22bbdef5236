"""Real decoding for the training loop: how many tokens a target call yields right now.

Read next: `evaluate.py`, the full measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from torch import nn

from ..decoding.backbone import Backbone
from ..decoding.engine import generate
from ..decoding.sampling import Warper
from ..drafters.draft_model import DraftModel
from .metrics import tau

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tau_probe(
    target: Backbone, prompts: Sequence[Sequence[int]], *, draft_length: int, max_new_tokens: int
) -> Callable[[nn.Module], dict[str, float]]:
    """A function of the draft module: greedy tau over the prompts, steps cut short left out."""

    def probe(module: nn.Module) -> dict[str, float]:
        draft = Backbone(cast("PreTrainedModel", module), name="draft")
        drafter = DraftModel(draft, target.vocabulary, draft_length=draft_length)
        done = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=max_new_tokens)
        return {"tau": tau([done.steps])}

    return probe
