"""The pre-flight's view of a boosted ensemble: what of it is in memory at once, on shapes alone.

Read next: `check/models.py`, which asks for it; `trainers/boost.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..recipe.load import Recipe
from .memory import BYTES, parameters

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def kept_for_probes(recipe: Recipe, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Bytes of the SSMs that are in memory beside the largest one: those of earlier rounds."""
    import torch

    from ...trainers.boost import students

    if recipe.boost.order == "side_by_side" or recipe.lora.rank is not None:
        return 0
    with torch.device("meta"):
        counts = [parameters(each) for each in students(recipe, target, tokenizer)]
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
