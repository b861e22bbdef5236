"""Initialise from a drafter that is there: its weights in place of the fresh ones.

Published schedules train behind one another: HASS behind a finished EAGLE-1, Medusa's stage 2 on
the heads of stage 1, EAGLE-3 on one set of rows behind another. Weights alone are taken over; the
optimiser and the schedule of its rate begin anew. Draft models and targets are models of
`transformers` and go on in `distill.py` and `target.py`. Read next: `drafters/folder.py`, the
folder; `drafters/identity.py`, the target that it was made for.
"""

from __future__ import annotations

import json
import logging
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ...decoding.backbone.backbone import Backbone
from ...drafters.families import FAMILIES
from ...drafters.folder import REMEDY, built_from, read_entry
from ...drafters.identity import TargetIdentity
from ...drafters.layers.llama import LayerShape, Rotary
from ...drafters.published.forms import published
from ...drafters.published.sizes import resolved
from ...drafters.published.weights import TargetParts
from ...drafters.weights import load_weights
from ...errors import RequestError
from ..methods import METHODS
from ..pruning.sizes import check_not_pruned
from ..recipe import TrainingRecipe

_log = logging.getLogger(__name__)
_Drafter = TypeVar("_Drafter", bound=nn.Module)
_POSITIONS = ("rope_theta", "rope_scaling")
_OF_FOLDER = (*_POSITIONS, "windows", "causal_windows")
"""What weights go on with as they were trained, as no recipe says it."""
_THEIRS = (
    "intermediate",
    "heads",
    "kv_heads",
    "head_size",
    "eps",
    "fc_bias",
    "norm_before_residual",
    "output_norm",
    "own_embedding",
    "norm_before_fc",
    "head_norms",
    "rotary",
    "query_norm",
    "bias",
    "blank_first",
)
"""Sizes of a published drafter's layers, which it goes on with whatever the target's are."""


def warm_started(module: _Drafter, recipe: TrainingRecipe, target: Backbone) -> _Drafter:
    """`module`, a drafter, with the weights that `model.start_from` names, if it names any.

    EAGLE-3 takes over the folder's draft vocabulary with them: the rows of its projection are
    those tokens', whatever is frequent in the new data.

    Raises:
        RequestError: as for `check_warm_start`, or the weights are damaged.
    """
    if recipe.model.start_from is None:
        return module
    check_warm_start(module, recipe, TargetIdentity.of(target), target.model.config)
    folder = Path(recipe.model.start_from)
    settings = resolved(_entry(folder)["settings"], target.model.config)
    if published(folder) is None and not settings.get("windows"):
        _keep_positions(module, settings, folder)
    else:
        module = _of_its_own_sizes(module, settings, folder)
    load_weights(module, folder, TargetParts.of(target.model))
    _log.info("the drafter is initialised from %s", recipe.model.start_from)
    return module


def check_warm_start(module: nn.Module, recipe: TrainingRecipe, target: TargetIdentity | None, config: Any) -> None:
    """Raise RequestError where `module` cannot go on from the folder that `start_from` names.

    That is: no drafter is there, it is of another family, for another target, or of other sizes.

    Args:
        module: the fresh drafter; its weights may be only shapes.
        target: None where it is not known yet.
        config: the target's, of `transformers`.
    """
    check_not_pruned(recipe.model)
    folder = Path(recipe.model.start_from or "")
    entry, family = _entry(folder), str(module.family)
    if entry["family"] != family:
        raise RequestError(
            f"model.start_from names {folder}, a drafter of family {entry['family']!r}; this run "
            f"trains one of family {family!r} and goes on from such a one alone: name the "
            "`drafter` folder of a run that trained it, or leave model.start_from out"
        )
    if target is not None:
        entry["identity"].check_same(target, f"{folder} (model.start_from)")
    settings = resolved(entry["settings"], config)
    if settings.get("own_embedding"):
        raise RequestError(
            f"model.start_from names {folder}, a drafter with an embedding of its own, and training embeds by the "
            "target's: it decodes as it is, and is not trained on here"
        )
    _check_sizes(module, recipe, settings, folder)


def check_start_folder(recipe: TrainingRecipe) -> None:
    """Raise RequestError for a `start_from` that holds no drafter, where one is expected; reads no weights."""
    family = METHODS[recipe.method].family
    if recipe.model.start_from is not None and family in FAMILIES and FAMILIES[family].build is not None:
        check_not_pruned(recipe.model)
        _entry(Path(recipe.model.start_from))


def _entry(folder: Path) -> dict[str, Any]:
    """What `read_entry` says of a folder that the recipe names."""
    try:
        return read_entry(folder)
    except RequestError as error:
        raise RequestError(f"model.start_from: {error}") from error


def _of_its_own_sizes(module: _Drafter, settings: dict[str, Any], folder: Path) -> _Drafter:
    """A drafter of the sizes that others chose for theirs, which are rarely the target's, in place of a fresh one."""
    fresh: Any = module
    with built_from(folder / "config.json", "a drafter"):
        made: _Drafter = type(fresh).from_settings(settings)
    return made.to(next(module.parameters()).device)


def _keep_positions(module: Any, settings: dict[str, Any], folder: Path) -> None:
    """Give it the rotary positions that the folder's weights were trained with, where they are not the target's."""
    own, part = asdict(module.config), settings.get("prefix")  # Hydra's settings hold its layer's
    there = {name: (part or settings).get(name) for name in _POSITIONS}
    if there == {name: (own.get("prefix") or own).get(name) for name in _POSITIONS}:
        return
    with built_from(folder / "config.json", "a drafter"):
        if part:
            module.config = replace(module.config, prefix=replace(module.config.prefix, **there))
        else:
            module.config = replace(module.config, **there)
    shape = module.config.prefix if part else module.config
    for each in module.modules():
        if isinstance(each, Rotary):
            each.follow(shape)
    _log.info(
        "the drafter goes on with the rotary positions of %s (theta %g, scaling %s), which are not the target's",
        folder,
        shape.rope_theta,
        (shape.rope_scaling or {}).get("rope_type", "none"),
    )


def _without_positions(sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes but for what weights go on with."""
    left = {name: size for name, size in sizes.items() if name not in _OF_FOLDER}
    return left | {"prefix": _without_positions(left["prefix"])} if left.get("prefix") else left


def _check_sizes(module: Any, recipe: TrainingRecipe, settings: dict[str, Any], folder: Path) -> None:
    own = json.loads(json.dumps(asdict(module.config)))  # as a folder has them: lists, no tuples
    # a folder may be older than a size, which then is what it was before there was a choice
    older = {each.name: each.default for each in fields(module.config)}
    known = {name: default for name, default in older.items() if default is not MISSING}
    there = known | settings
    if lost := sorted(own.keys() - there.keys()):
        raise RequestError(f"model.start_from: {folder / 'config.json'} does not say its {', '.join(lost)}: {REMEDY}")
    own, there = _without_positions(own), _without_positions(there)
    if isinstance(module.config, LayerShape) and published(folder) is not None:
        own, there = ({name: each[name] for name in each if name not in _THEIRS} for each in (own, there))
    wrong = sorted(key for key in own.keys() | there.keys() if own.get(key) != there.get(key))
    if not wrong:
        return
    stored = ", ".join(f"{key} {there.get(key)}" for key in wrong)
    asked = ", ".join(f"{key} {own.get(key)}" for key in wrong)
    chosen = METHODS[recipe.method].sizes
    remedy = "these follow from the target: train for the one that the folder was made for"
    if all(key in chosen for key in wrong):
        remedy = "set " + ", ".join(f"{chosen[key]} to {there.get(key)}" for key in wrong)
    raise RequestError(
        f"model.start_from names {folder}, which has {stored}; this run would have {asked}: "
        f"{remedy}, or leave model.start_from out"
    )
