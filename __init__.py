"""draftsmith: train, prove and ship drafters for speculative decoding.

From idea to verdict in a notebook (docs/notebook.md):

    target = draftsmith.load_target("tiny")                  # the embedded target, a folder or a hub name
    drafter = draftsmith.load_drafter("runs/mine", target)   # what was trained; or a class of your own
    draftsmith.generate(target, drafter, ["def f(x):"])      # tokens, texts, tau
    draftsmith.audit(target, drafter, prompts)               # is the text still the target's own?
    draftsmith.measure(target, drafter, prompts)             # tau, alpha by depth, speed-up, with intervals

The repository root is this package. Names are handed out lazily, so that importing the package does not import torch.
Read next: docs/design.md, then `api.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import audit as audit
    from .api import autoregressive as autoregressive
    from .api import generate as generate
    from .api import load_drafter as load_drafter
    from .api import measure as measure
    from .data.config import DataConfig as DataConfig
    from .data.prompts import load_prompts as load_prompts
    from .decoding.backbone.backbone import Backbone as Backbone
    from .decoding.backbone.loading import load_target as load_target
    from .decoding.engine import Generation as Generation
    from .decoding.proposal import Committed as Committed
    from .decoding.proposal import Drafter as Drafter
    from .decoding.proposal import DraftSampling as DraftSampling
    from .decoding.proposal import Proposal as Proposal
    from .decoding.proposal import Proposer as Proposer
    from .decoding.random import Uniforms as Uniforms
    from .decoding.sampling import Warper as Warper
    from .decoding.sampling import draw as draw
    from .decoding.tree.tree import Tree as Tree
    from .decoding.tree.tree import chain as chain
    from .drafters.config import DrafterConfig as DrafterConfig
    from .drafters.record import Family as Family
    from .drafters.record import Form as Form
    from .errors import DraftsmithError as DraftsmithError
    from .errors import RequestError as RequestError
    from .eval.audit.audit import AuditReport as AuditReport
    from .eval.audit.decoders import DecodeRequest as DecodeRequest
    from .eval.config import AuditConfig as AuditConfig
    from .eval.config import EvalConfig as EvalConfig
    from .eval.measure.arms import Arm as Arm
    from .eval.measure.evaluate import evaluate as evaluate
    from .eval.measure.metrics import Interval as Interval
    from .eval.measure.metrics import tau as tau
    from .eval.notebook import Decoded as Decoded
    from .eval.notebook import Measurement as Measurement
    from .fitting import fit as fit
    from .launch.recipe.load import load_recipe as load_recipe
    from .launch.recipe.register import register as register
    from .launch.train import train as train
    from .trainers.methods import Method as Method
    from .trainers.methods import PassMemory as PassMemory

__version__ = "0.2.0"

# public name -> module that owns it
_HOMES = {
    "load_target": "decoding.backbone.loading",
    "load_drafter": "api",
    "load_prompts": "data.prompts",
    "generate": "api",
    "autoregressive": "api",
    "measure": "api",
    "audit": "api",
    "fit": "fitting",
    "train": "launch.train",
    "load_recipe": "launch.recipe.load",
    "register": "launch.recipe.register",
    "Family": "drafters.record",
    "Form": "drafters.record",
    "Method": "trainers.methods",
    "PassMemory": "trainers.methods",
    "evaluate": "eval.measure.evaluate",
    "Drafter": "decoding.proposal",
    "Proposer": "decoding.proposal",
    "Proposal": "decoding.proposal",
    "DraftSampling": "decoding.proposal",
    "Committed": "decoding.proposal",
    "Uniforms": "decoding.random",
    "Tree": "decoding.tree.tree",
    "chain": "decoding.tree.tree",
    "draw": "decoding.sampling",
    "Warper": "decoding.sampling",
    "Backbone": "decoding.backbone.backbone",
    "Generation": "decoding.engine",
    "Decoded": "eval.notebook",
    "Measurement": "eval.notebook",
    "AuditReport": "eval.audit.audit",
    "DecodeRequest": "eval.audit.decoders",
    "Interval": "eval.measure.metrics",
    "tau": "eval.measure.metrics",
    "Arm": "eval.measure.arms",
    "DataConfig": "data.config",
    "EvalConfig": "eval.config",
    "AuditConfig": "eval.config",
    "DrafterConfig": "drafters.config",
    "DraftsmithError": "errors",
    "RequestError": "errors",
}
__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"draftsmith has no public name {name!r}")
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
