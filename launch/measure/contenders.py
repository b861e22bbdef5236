"""The methods that `draftsmith tune` compares: each pair's, with the settings that fit its drafter.

Read next: `tune.py`; `drafters/grids.py`, the settings.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any

from ...decoding.backbone.backbone import Backbone
from ...decoding.proposal import Proposer
from ...drafters.config import DrafterConfig, turned_off
from ...drafters.families import FAMILIES
from ...drafters.folder import read_entry
from ...drafters.grids import Grid
from ...drafters.hub import is_fetched, shown
from ...drafters.record import Family
from ...drafters.tuned_file import DRAFT_LENGTH
from ...errors import DraftsmithError
from ...eval.config import EvalConfig
from ...eval.measure.arms import check_longest
from ...eval.tune.settings import CUT, Contender
from ..check.early import NamedFolders
from ..drafted import load_trained, with_ids
from ..methods import TRAINED, make_method, need_draft
from ..recipe.model import Recipe

_log = logging.getLogger(__name__)
_CUTS = (4_096, 8_192, 16_384, 32_768)
"""Tokens of a draft vocabulary (FR-Spec, Zhao et al. 2025, is best with a quarter of 128,000)."""


def contenders_of(pairs: Sequence[NamedFolders], target: Backbone, *, chains: bool = False) -> list[Contender]:
    """A contender per method of each pair; each is loaded once, so that what cannot be loaded is said at once.

    Args:
        chains: without settings that draft a tree.

    Raises:
        RequestError: a drafter that is none, or not for this target; a method without what it needs.
    """
    several = sum(pair.drafter is not None for pair in pairs) > 1
    found = [_contender(name, pair, target, several=several) for pair in pairs for name in pair.methods]
    return [each.of_chains() for each in found] if chains else found


def _contender(name: str, pair: NamedFolders, target: Backbone, *, several: bool) -> Contender:
    folder = pair.drafter if name in need_draft() else None

    def load(values: Mapping[str, str]) -> Proposer:
        recipe = _with(pair.recipe, values)

        def trained() -> Proposer:
            return load_trained(folder or "", recipe, target)

        return make_method(name, recipe, target, trained)

    drafter = load({})
    family = FAMILIES[name if name in FAMILIES else str(getattr(drafter, "family", name))]
    grids = [
        each for grid in family.grids if (each := _that_fits(grid, family, folder, pair.recipe.drafter)) is not None
    ]
    title = f"{family.title} of {whose(folder)}" if several and folder else family.title
    stands = any(grid.holds(_own_values(pair.recipe, grid)) for grid in grids)
    sizes = cuts(folder, pair.recipe, target) if folder is not None and family.reads("draft_vocabulary") else ()
    return Contender(name_of(name, folder), title, grids, not stands, load, sizes)


def check_chains(contenders: Sequence[Contender], config: EvalConfig, temperature: float) -> None:
    """Now, and not behind minutes of decoding, raise RequestError for chains that the answers are too short for."""
    for contender in contenders:
        for grid in contender.grids_at(temperature):
            if grid.chain:
                check_longest(contender.title, grid.sizes[-1], config.max_new_tokens)


def name_of(method: str, folder: Path | None) -> str:
    """The drafter's folder for its own method, for one around it with that method's name."""
    if folder is None:
        return method
    return shown(folder) if method == TRAINED else f"{method} {shown(folder)}"


def whose(folder: Path) -> str:
    """The run that a drafter is of, or its name on the hub."""
    return shown(folder) if is_fetched(folder) else folder.parent.name or folder.name


def _that_fits(grid: Grid, family: Family, folder: Path | None, config: DrafterConfig) -> Grid | None:
    """Without chains that are longer than there are heads, or than it ever copies; None if it cannot draft so."""
    if folder is None or not family.build or not (folder / "config.json").is_file():
        longest = family.longest(config)
        return grid if longest is None else grid.up_to(longest)
    settings = read_entry(folder)["settings"]
    most = family.most_tokens(settings) if grid.value == DRAFT_LENGTH else None
    if not grid.suits(settings):
        return None
    return grid if most is None else grid.up_to(most)


def cuts(folder: Path, recipe: Recipe, target: Backbone) -> Sequence[int]:
    """Sizes of a draft vocabulary that are worth a try: at most half of the tokens that a drafter drafts.

    None where a size is asked for, or where no rows are here whose tokens could be counted, which is said.
    """
    drafted = read_entry(folder)["settings"].get("draft_vocabulary") or target.vocabulary
    sizes = [size for size in _CUTS if size <= drafted // 2]
    if recipe.drafter.draft_vocabulary is not None or not sizes:
        return ()
    try:
        with_ids(_with(recipe, {CUT: str(sizes[0])}), target.tokenizer, target.vocabulary)
    except DraftsmithError as error:
        _log.warning("no draft vocabulary is tried for %s: its training rows are not at hand (%s)", folder, error)
        return ()
    return sizes


def _own_values(recipe: Recipe, grid: Grid) -> dict[str, str]:
    """What the recipe itself has for the values of a grid."""
    return {path: str(attrgetter(path)(recipe)) for path in grid.chosen}


def _with(recipe: Recipe, values: Mapping[str, str]) -> Recipe:
    """The recipe with values of `drafter.*` and `eval.*`, given as flags give them."""
    own: dict[str, dict[str, Any]] = {"drafter": recipe.drafter.model_dump(), "eval": recipe.eval.model_dump()}
    for size in turned_off({path.removeprefix("drafter."): value for path, value in values.items()}):
        section, name = size.split(".")
        del own["drafter"][section][name]  # sizes of the recipe's tree, where a chain is tried
    for path, value in values.items():
        *sections, name = path.split(".")
        at: dict[str, Any] = reduce(getitem, sections, own)
        at[name] = json.loads(value) if value.startswith("[") else value
    update = {"drafter": DrafterConfig.model_validate(own["drafter"]), "eval": EvalConfig.model_validate(own["eval"])}
    return recipe.model_copy(update=update)
