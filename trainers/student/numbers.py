"""How many numbers a drafter for a target has, by the sizes of both alone: no network is made, and no torch imported.

`check` counts them on the very network, in shapes; a test holds these sums to it. Read next: `../methods.py`, whose
records name them; `launch/recommend/recommend.py`, which asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..recipe import TrainingRecipe


class TargetSizes(Protocol):
    """What of a target a drafter's size hangs on."""

    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...


def of_eagle(_recipe: TrainingRecipe, target: TargetSizes) -> int:
    """A layer without its first norm, and the product that joins both halves of a pair."""
    return _layer(target) + 2 * target.hidden**2 + target.hidden


def of_mtp(recipe: TrainingRecipe, target: TargetSizes) -> int | None:
    """A whole layer with norms of query and key, of both halves and of the output; None of the target's own module."""
    if recipe.mtp.from_target:
        return None
    return _layer(target) + 2 * target.hidden**2 + 5 * target.hidden + 2 * target.head_size


def of_eagle3(recipe: TrainingRecipe, target: TargetSizes) -> int:
    """Its attention reads embedding and state side by side, three states are fused, and the head is its own."""
    wider = target.hidden * (_attention(target) - target.heads * target.head_size)
    rows = min(recipe.eagle3.vocabulary, target.vocabulary)
    return _layer(target) + wider + (3 * target.hidden + rows + 4) * target.hidden


def of_medusa(recipe: TrainingRecipe, target: TargetSizes) -> int:
    """Blocks with a bias, and a projection of each head unless they share the target's."""
    medusa, hidden = recipe.medusa, target.hidden
    rows = min(medusa.vocabulary or target.vocabulary, target.vocabulary)
    own = 0 if medusa.shared_head else rows * hidden
    return int(medusa.heads * (medusa.layers * hidden * (hidden + 1) + own))


def _attention(target: TargetSizes) -> int:
    """What its products write and read of a head's numbers, of a state's one number."""
    return 2 * target.heads * target.head_size + 2 * target.kv_heads * target.head_size


def _layer(target: TargetSizes) -> int:
    return target.hidden * _attention(target) + 3 * target.hidden * target.intermediate
