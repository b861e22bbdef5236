"""A method's objective for a target: its checks, what it trains, its loss, in the order of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.config import DataConfig
from draftsmith.drafters.layers.draft_vocabulary import hold
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import bpd, distill, eagle, eagle3, hydra, medusa, medusa2
from draftsmith.trainers.block import dflash, dflash2, dspark, mtp, pard, peagle
from draftsmith.trainers.methods import METHODS
from draftsmith.trainers.own_drafts.objective import on_own_drafts
from draftsmith.trainers.spine import check_target
from draftsmith.trainers.teacher.tuned import TunedTarget
from torch import nn

OBJECTIVES: dict[str, Any] = {
    "distill": distill.DistillObjective,
    "medusa": medusa.MedusaObjective,
    "medusa2": medusa2.Medusa2Objective,
    "hydra": hydra.HydraObjective,
    "bpd": bpd.BpdObjective,
    "eagle": eagle.EagleObjective,
    "eagle3": eagle3.Eagle3Objective,
    "dflash": dflash.DFlashObjective,
    "dflash2": dflash2.DFlash2Objective,
    "dspark": dspark.DSparkObjective,
    "peagle": peagle.PeagleObjective,
    "mtp": mtp.MtpObjective,
    "pard": pard.PardObjective,
}
MODULES: dict[str, Any] = {name: method.code() for name, method in METHODS.items()}


class NoTokenizer:
    """An export without one."""

    eos_token_id = 0

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def nothing(_module: nn.Module, _folder: Path) -> None:
    """Where an export goes that no test looks at."""


def build(
    method: str,
    frozen: Any,
    save: Callable[[nn.Module, Path], None] = nothing,
    /,
    *,
    ids: Sequence[int] | None = None,
    tokenizer: Any = None,
    **sections: Any,
) -> Any:
    """The objective of a recipe with these sections; `frozen` may be a `TunedTarget` too."""
    recipe = Recipe(method=method, **({"data": DataConfig(sequence_length=8)} | sections))
    return objective_of(recipe, frozen, save, ids=ids, tokenizer=tokenizer)


def objective_of(
    recipe: Recipe,
    frozen: Any,
    save: Callable[[nn.Module, Path], None] = nothing,
    *,
    ids: Sequence[int] | None = None,
    tokenizer: Any = None,
) -> Any:
    """What the recipe's trainer would hand to the loop."""
    module = MODULES[recipe.method]
    module.check_recipe(recipe)
    is_tuned = isinstance(frozen, TunedTarget)
    plain = frozen.model if is_tuned else frozen
    check_target(recipe, plain)
    with_tokens = {"tokenizer": tokenizer}
    is_model = recipe.method in ("distill", "pard")
    made = module.student(recipe, plain, **(with_tokens if is_model else {"ids": ids}))
    if is_model and ids is not None:
        hold(made, len(ids), ids, saved=False)
    kind = bpd.TunedBpdObjective if is_tuned and recipe.method == "bpd" else OBJECTIVES[recipe.method]
    objective = kind(recipe, made, frozen, save)
    return on_own_drafts(objective, frozen, recipe) if recipe.record.drafts_its_own else objective
