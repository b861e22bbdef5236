"""What the trainers of block drafters share: what they require, the sizes of a network, the teacher's side.

Read next: `dflash.py`, `dspark.py` and `dflash2.py`, the trainers; `student.py`, the loss; `anchors.py`, where
blocks begin.

Shapes: R rows, S tokens of a row, A anchors of a row, H hidden size, F numbers of the fused states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...decoding.backbone.hidden_states import LAST, layer_count
from ...drafters.block.net import BlockNet, Layout, spread_layers
from ...errors import RequestError
from ..labels import check_in_rows
from ..loop.objective import Batch
from ..losses.terms import check_terms
from ..method_config import BlockConfig
from ..own_drafts.places import check_own_drafts
from ..pruning.sizes import check_not_pruned
from ..recipe import TrainingRecipe
from ..spine import DrafterObjective
from ..student.fused import drafted_ids
from ..teacher.frozen import Save
from .anchors import HELD_OUT_SEED, drawn
from .student import BlockStudent, BlockTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_blocks(recipe: TrainingRecipe, layout: Layout) -> None:
    """Raise RequestError where nothing would be learnt, or blocks are longer than rows."""
    positions = recipe.block.size - (layout == "fill-in")
    check_terms(recipe.objective, positions=positions, counted_by="block.size")
    check_in_rows(recipe, positions, "block.size")
    if recipe.objective.positions == "on-policy" and recipe.block.ce_label == "target":
        raise RequestError(
            "objective.positions is on-policy, which goes by the text's own tokens, and block.ce_label is target, "
            "which puts others in their place; set block.ce_label to text, or take objective.positions accepted"
        )
    check_not_pruned(recipe.model)
    check_own_drafts(recipe)


def check_target(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for hidden states or a mask token that the target does not have."""
    chosen_layers(recipe.block, target)
    table: Any = target.get_input_embeddings()
    mask, known = recipe.block.mask_token, len(table.weight)
    if mask is not None and mask >= known:
        raise RequestError(
            f"block.mask_token is {mask}; the target has embeddings of ids 0 to {known - 1}: name one that its "
            "texts never use, or leave it out for a vector that is learnt"
        )


def sizes_of(
    recipe: TrainingRecipe, target: PreTrainedModel, layout: Layout, ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """What a recipe chooses of a network: the fields of `BlockShape`, and the tokens that it drafts.

    Args:
        layout: where it leaves the choice to the method.
        ids: as of `drafted_ids`.
    """
    config = recipe.block
    return {
        "layers": chosen_layers(config, target),
        "decoder_layers": config.decoder_layers,
        "size": config.size,
        "layout": layout if config.layout is None else config.layout,
        "causal": config.causal,
        "mask_token": config.mask_token,
        "ids": drafted_ids(config.vocabulary, target, ids),
    }


def chosen_layers(config: BlockConfig, target: PreTrainedModel) -> tuple[int, ...]:
    """The hidden states to read, the recipe's or the usual ones."""
    count = layer_count(target)
    layers = config.layers or spread_layers(count)
    if list(layers) != sorted(set(layers)) or not all(0 <= layer <= count for layer in layers):
        raise RequestError(
            f"block.layers is {list(layers)}; expected different hidden states, low to high, from 0 (the embedding) "
            f"to {count} (the last layer, behind its norm)"
        )
    return layers


class BlockObjective(DrafterObjective):
    """Trains `draft` to have the distributions of the frozen `target` in every slot of a block."""

    Student: ClassVar[type[BlockStudent]] = BlockStudent

    def __init__(self, recipe: TrainingRecipe, draft: BlockNet, target: PreTrainedModel, save: Save) -> None:
        super().__init__(self.Student(draft, target, recipe), draft, target, save, layers=(*draft.config.layers, LAST))
        self._embed: Any = target.get_input_embeddings()
        self._most, self._anchors, self._seed = draft.config.most, recipe.block.anchors, HELD_OUT_SEED

    def begin_step(self, _step: int, seed: int) -> None:
        """Blocks of this step begin elsewhere than the last one's."""
        self._seed = seed

    @torch.no_grad()
    def prepare(self, batch: Batch) -> BlockTeacher:
        """The target's hidden states, where blocks begin, and the embeddings of the tokens there."""
        hidden_RSH, _, fused_RSF = super().prepare(batch)
        seed = self._seed if self.module.training else HELD_OUT_SEED
        anchors = drawn(batch, self._anchors, self._most, seed)
        roots_RAH = self._embed(batch["input_ids"].gather(1, anchors.at_RA))
        return BlockTeacher(hidden_RSH, fused_RSF, roots_RAH, anchors)
