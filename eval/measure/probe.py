"""Real decoding for the training loop: how many tokens a target call yields right now.

Read next: `evaluate.py`, the full measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from torch import nn

from ...decoding.engine import generate
from ...decoding.proposal import Proposer
from ...decoding.sampling import Warper
from ...decoding.target.backbone import Backbone
from ...drafters.eagle.net import EagleNet
from ...drafters.eagle.net3 import Eagle3Net
from ...drafters.eagle.proposer import Eagle, Eagle3
from ...drafters.heads.bpd import Bpd, BpdHeads
from ...drafters.heads.hydra import HydraHeads, hydra_on
from ...drafters.heads.medusa import Medusa, MedusaHeads
from ...drafters.model.adapters import adapter_names
from ...drafters.model.draft_model import DraftModel
from ...drafters.model.ensemble import Ensemble, join, join_adapters
from .metrics import tau

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        if isinstance(drafter, Ensemble):
            drafter.close()  # what it decoded with goes on training
        return {"tau": tau([done.steps])}

    return probe


def as_proposer(method: str, target: Backbone, draft_length: int) -> Callable[[nn.Module], Proposer]:
    """How what is being trained drafts for the target; trees in their default shape."""

    def draft_model(module: nn.Module) -> DraftModel:
        draft = Backbone(cast("PreTrainedModel", module), name="draft")
        return DraftModel(draft, target.vocabulary, draft_length=draft_length)

    def ensemble(module: nn.Module) -> Proposer:
        names = adapter_names(module)
        if names:  # ssm-2 before ssm-10
            return join_adapters(draft_model(module), sorted(names, key=lambda n: (len(n), n)))
        return join([draft_model(each) for each in cast(nn.ModuleList, module)])

    def medusa(module: nn.Module) -> Proposer:
        return Medusa(cast(MedusaHeads, module), target)

    def hydra(module: nn.Module) -> Proposer:
        return hydra_on(cast(HydraHeads, module), target)

    def bpd(module: nn.Module) -> Proposer:
        return Bpd(cast(BpdHeads, module), target)

    def eagle(module: nn.Module) -> Proposer:
        return Eagle(cast(EagleNet, module), target, draft_length=draft_length)

    def eagle3(module: nn.Module) -> Proposer:
        return Eagle3(cast(Eagle3Net, module), target, draft_length=draft_length)

    return {
        "distill": draft_model,
        "boost": ensemble,
        "medusa": medusa,
        "medusa2": medusa,
        "hydra": hydra,
        "bpd": bpd,
        "eagle": eagle,
        "eagle3": eagle3,
    }[method]
