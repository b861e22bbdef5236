"""Real decoding for the training loop: how many tokens a target call yields right now.

Read next: `evaluate.py`, the full measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from torch import nn

from ..decoding.backbone import Backbone
from ..decoding.engine import generate
from ..decoding.proposal import Proposer
from ..decoding.sampling import Warper
from ..drafters.draft_model import DraftModel
from .metrics import tau

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tau_probe(
    target: Backbone, prompts: Sequence[Sequence[int]], *,
    make_proposer: Callable[[nn.Module], Proposer], max_new_tokens: int,
) -> Callable[[nn.Module], dict[str, float]]:  # fmt: skip
    """A function of what is trained: greedy tau over the prompts, steps cut short left out."""

    def probe(module: nn.Module) -> dict[str, float]:
        drafter = make_proposer(module)
        done = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=max_new_tokens)
        return {"tau": tau([done.steps])}

    return probe


def as_draft_model(target: Backbone, draft_length: int) -> Callable[[nn.Module], Proposer]:
    """How a causal LM that is being trained drafts for the target."""

    def make(module: nn.Module) -> Proposer:
        draft = Backbone(cast("PreTrainedModel", module), name="draft")
        return DraftModel(draft, target.vocabulary, draft_length=draft_length)

    return make
