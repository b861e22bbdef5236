"""What `families.py` names of drafts that are whole models: load, draft while training.

Read next: `draft_model.py`, `ensemble.py`, `quantised.py`, `early_exit.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.loading import load_target
from ...errors import RequestError
from ..config import BY_AUTO, DrafterConfig
from ..families import FAMILIES
from ..folder import REMEDY, is_drafter, kind_of, names_in, read_entry, read_settings
from ..identity import TargetIdentity, fingerprint
from ..layers.draft_vocabulary import common, restrict
from ..layers.named_ids import read_ids
from ..registry import load_drafter
from ..weights import check_finite
from .adapters import adapter_names, take_up
from .draft_model import DraftModel
from .early_exit import EarlyExit, load_early_exit
from .ensemble import Ensemble, join, join_adapters
from .pard import Pard, mask_of, need_mask
from .quantised import Quantised, load_quantised

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ACROSS = f", or let it draft across vocabularies by {BY_AUTO}"


def load_draft_model(
    folder: Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None
) -> DraftModel:
    """Load an independent draft model for `target`; errors as for `load_drafter`."""
    entry = read_entry(folder)
    entry["identity"].check_same(TargetIdentity.of(target), str(folder), hint=_ACROSS)
    backbone = load_target(str(folder), device=str(target.device))
    config = config or DrafterConfig()
    drafter = DraftModel(backbone, target.vocabulary, **_how(draft_length, config))
    take_up(drafter.module, folder, entry["settings"], config.adapter)
    own = read_ids(folder, entry["settings"], target.vocabulary)
    restrict(drafter.module, config.draft_ids if own is None else common(torch.tensor(own), config.draft_ids))
    check_finite(drafter.module, folder)
    return drafter


def load_pard(folder: Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None) -> Pard:
    """Load a draft model that drafts in one pass, for any target of its tokenizer.

    Raises:
        RequestError: as for `load_drafter`, sizes apart; or its mask has no id.
    """
    any_states, identity = FAMILIES[Pard.family].any_states, read_entry(folder)["identity"]
    identity.check_same(TargetIdentity.of(target), str(folder), any_states=any_states)
    backbone = load_target(str(folder), device=str(target.device))
    if identity.tokenizer is None:  # as others publish it, with its tokenizer beside it
        own = replace(identity, tokenizer=fingerprint(backbone.tokenizer))
        own.check_same(TargetIdentity.of(target), str(folder), any_states=any_states)
    mask = need_mask(backbone.model.config, folder)
    config = config or DrafterConfig()
    drafter = Pard(backbone, target.vocabulary, mask=mask, **_how(draft_length, config))
    restrict(drafter.module, config.draft_ids)
    check_finite(drafter.module, folder)
    return drafter


def load_ensemble(
    folder: Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None
) -> Ensemble:
    """Load draft models that draft together, all or the first `config.members`.

    Raises:
        RequestError: as for `load_drafter`; or there are fewer members, or one drafts no chain of
            its own tokens.
    """
    config = config or DrafterConfig()
    if config.adapter is not None:
        raise RequestError(
            f"drafter.adapter is {config.adapter!r}, and {folder} is an ensemble, whose members "
            "have adapters of their own; leave it out"
        )
    _, settings = read_settings(folder, target, "ensemble")
    folders, adapters = (names_in(settings, key, folder) for key in ("members", "adapters"))
    if not folders:
        raise RequestError(
            f"{folder / 'config.json'} lists no members of the ensemble; expected the names of the "
            f"folders beside it: {REMEDY}"
        )
    names = (adapters or folders)[: config.members]
    if config.members is not None and config.members > len(names):
        raise RequestError(
            f"drafter.members is {config.members}; the ensemble {folder} has {len(names)}: {', '.join(names)}"
        )
    own = config.model_copy(update={"members": None})
    drafts = [
        load_chain_draft(folder / name, target, draft_length=draft_length, config=own)
        for name in (folders if adapters else names)
    ]
    return join_adapters(drafts[0], names) if adapters else join(drafts)


def load_chain_draft(
    folder: Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None
) -> DraftModel:
    """A member of an ensemble, whatever its origin; errors as for `load_drafter`."""
    if is_drafter(folder) and kind_of(read_entry(folder)["family"]) == "several models":
        raise RequestError(f"member {folder} is an ensemble itself; expected draft models, whose chains can be merged")
    draft = load_drafter(folder, target, draft_length=draft_length, config=config)
    if not isinstance(draft, DraftModel) or isinstance(draft, Pard):
        raise RequestError(
            f"member {folder} is a drafter of family {read_entry(folder)['family']!r}; expected "
            "draft models, whose chains can be merged"
        )
    return draft


def load_quantised_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> Quantised:
    """Errors as for `load_quantised`."""
    return load_quantised(folder, target, **_how(draft_length, config))


def load_early_exit_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> EarlyExit:
    """Errors as for `load_early_exit`."""
    drafter = load_early_exit(folder, target, **_how(draft_length, config))
    restrict(drafter.module, config.draft_ids)
    return drafter


def _how(draft_length: int, config: DrafterConfig) -> dict[str, Any]:
    """How a draft model draws, as the recipe has it."""
    return {"draft_length": draft_length, "policy": config.policy, "factors": config.temperature_factors}


def draft_by_model(module: nn.Module, target: Backbone, draft_length: int) -> DraftModel:
    """A causal LM in training as the draft."""
    draft = Backbone(cast("PreTrainedModel", module), name="draft")
    return DraftModel(draft, target.vocabulary, draft_length=draft_length)


def draft_by_pard(module: nn.Module, target: Backbone, draft_length: int) -> Pard:
    """A PARD draft in training as the draft."""
    draft, mask = Backbone(cast("PreTrainedModel", module), name="draft"), mask_of(module)
    assert mask is not None  # its trainer has marked it
    return Pard(draft, target.vocabulary, mask=mask, draft_length=draft_length)


def draft_together(module: nn.Module, target: Backbone, draft_length: int) -> Ensemble:
    """Models in training, or all adapters of one, as an ensemble."""
    names = adapter_names(module)
    if names:  # ssm-2 before ssm-10
        ordered = sorted(names, key=lambda name: (len(name), name))
        return join_adapters(draft_by_model(module, target, draft_length), ordered)
    return join([draft_by_model(each, target, draft_length) for each in cast(nn.ModuleList, module)])
