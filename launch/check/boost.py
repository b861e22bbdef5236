"""The pre-flight's view of a boosted ensemble: what of it is in memory at once, on shapes alone.

Read next: `check/models.py`, which asks for it; `trainers/boost.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..recipe.load import Recipe
from .memory import BYTES, parameters

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def members(recipe: Recipe) -> list[Recipe]:
    """The recipe of each SSM that is trained, as if it were distilled alone.

    Raises:
        RequestError: origins or sizes that do not fit the members.
    """
    from ...trainers.boosting.members import check_members, derived_folder, member_model, own_member

    boost = recipe.boost
    check_members(boost, recipe.lora, recipe.model)
    found: dict[int, Recipe] = {}
    for number in range(1, boost.members + 1):
        origin = boost.start_from[number - 1] if number <= len(boost.start_from) else ""
        if derived_folder(boost, number) is not None:
            continue  # made from the target, as it stands
        earlier = own_member(origin)
        if earlier is not None:  # of the same make as the one that it goes on from
            found[number] = found[earlier]
            continue
        model = member_model(recipe.model, boost, number, Path())
        found[number] = recipe.model_copy(update={"model": model})
    return list(found.values())


def at_once(recipe: Recipe, make: Callable[[Recipe], PreTrainedModel]) -> nn.Module:
    """What is trained at the same time: the largest SSM, or all of them side by side."""
    from torch import nn

    from ...trainers.boosting.members import check_members
    from ...trainers.student.lora import adapt_shapes

    check_members(recipe.boost, recipe.lora, recipe.model)
    if recipe.lora.rank is not None:  # adapters on one base, one after another
        return adapt_shapes(make(recipe), recipe.lora, recipe.model)
    made = [make(each) for each in members(recipe)]
    if recipe.boost.order == "side_by_side":
        return nn.ModuleList(made)
    return max(made, key=parameters)


def kept_for_probes(recipe: Recipe, make: Callable[[Recipe], PreTrainedModel], target: nn.Module) -> int:
    """Bytes of the SSMs that are in memory beside the largest one: those of earlier rounds."""
    if recipe.boost.order == "side_by_side" or recipe.lora.rank is not None:
        return 0
    counts = [parameters(make(each)) for each in members(recipe)]
    return BYTES["fp32"] * (sum(counts) - max(counts)) + _copies(recipe, target)


def _copies(recipe: Recipe, target: nn.Module) -> int:
    """Bytes of the quantised copies among earlier rounds; an early exit is the target itself."""
    from torch import nn

    from ...drafters.folder import derived_family
    from ...trainers.boosting.members import derived_folder

    folders = [derived_folder(recipe.boost, number) for number in range(1, recipe.boost.members)]
    count = sum(each is not None and derived_family(each) == "quantised" for each in folders)
    # a byte for each of 8 bits or 4, of all layers that multiply
    return count * sum(m.weight.numel() for m in target.modules() if isinstance(m, nn.Linear))


def runs(recipe: Recipe) -> int:
    """How many runs of the loop keep checkpoints."""
    in_turn = recipe.method == "boost" and recipe.boost.order == "in_turn"
    return recipe.boost.members if in_turn else 1
