"""What a boosted run trains and keeps in memory, on shapes alone: for the run and its pre-flight.

Read next: `members.py`, what each SSM is made of; `../boost.py`, the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ...drafters.families import FAMILIES
from ...drafters.folder import derived_family
from ..method_config import LoraConfig
from ..recipe import TrainingRecipe
from ..student.draft import make_draft
from .members import derived_folder, trained_models

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FP32 = 4  # bytes of a number, in which drafts are kept


def students(
    recipe: TrainingRecipe, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[PreTrainedModel]:
    """Every SSM that is trained; those derived from the target as it stands are not among them."""
    models = trained_models(recipe.boost, recipe.model)
    return [make_draft(recipe, model, LoraConfig(), target, tokenizer) for model in models]


def size_of(model: nn.Module) -> int:
    """How many numbers are in the weights."""
    return sum(parameter.numel() for parameter in model.parameters())


def kept_for_probes(recipe: TrainingRecipe, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Bytes of the SSMs that are in memory beside the largest one: those of earlier rounds."""
    if recipe.boost.order == "side_by_side" or recipe.lora.rank is not None:
        return 0
    with torch.device("meta"):
        counts = [size_of(each) for each in students(recipe, target, tokenizer)]
    return _FP32 * (sum(counts) - max(counts)) + _copies(recipe, target)


def _copies(recipe: TrainingRecipe, target: nn.Module) -> int:
    """Bytes of the copies of the target among earlier rounds; an early exit is the target itself."""
    folders = [derived_folder(recipe.boost, number) for number in range(1, recipe.boost.members)]
    families = [derived_family(each) for each in folders if each is not None]
    count = sum(FAMILIES[each].copies_target for each in families if each is not None)
    # a byte for each of 8 bits or 4, of all layers that multiply
    return count * sum(m.weight.numel() for m in target.modules() if isinstance(m, nn.Linear))
