"""How many numbers a drafter has: by hand, of a target of 10 tokens with two heads of three and one key-value head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student import numbers
from draftsmith.trainers.student.architecture import derived_sizes

TARGET: Any = SimpleNamespace(hidden=4, intermediate=5, heads=2, kv_heads=1, head_size=3, vocabulary=10)
ATTENTION = 2 * (4 * 6) + 2 * (4 * 3)  # query and output, key and value
FEED_FORWARD = 3 * (4 * 5)


def test_a_layer_of_eagle_and_of_mtp() -> None:
    recipe: Any = SimpleNamespace(mtp=SimpleNamespace(from_target=False))
    layer = ATTENTION + FEED_FORWARD
    assert numbers.of_eagle(recipe, TARGET) == layer + (8 * 4) + 4
    # norms of the layer (2), of both halves (2) and of the output, of a query's and a key's head
    assert numbers.of_mtp(recipe, TARGET) == layer + (8 * 4) + 5 * 4 + 2 * 3
    recipe.mtp.from_target = True
    assert numbers.of_mtp(recipe, TARGET) is None


@pytest.mark.parametrize(("vocabulary", "rows"), [(6, 6), (10, 10), (32, 10)])
def test_a_head_of_its_own_has_no_more_rows_than_the_target_has_tokens(vocabulary: int, rows: int) -> None:
    eagle3: Any = SimpleNamespace(eagle3=SimpleNamespace(vocabulary=vocabulary))
    # query, key and value read embedding and state; three states are fused; norms: 4
    wider = 4 * 6 + 2 * (4 * 3)
    assert numbers.of_eagle3(eagle3, TARGET) == ATTENTION + FEED_FORWARD + wider + (12 * 4) + rows * 4 + 4 * 4
    own = SimpleNamespace(heads=3, layers=2, vocabulary=vocabulary, shared_head=False)
    medusa: Any = SimpleNamespace(medusa=own)
    assert numbers.of_medusa(medusa, TARGET) == 3 * (2 * (4 * 4 + 4) + rows * 4)
    own.shared_head = True
    assert numbers.of_medusa(medusa, TARGET) == 3 * 2 * (4 * 4 + 4)
    own.shared_head, own.vocabulary = False, None
    assert numbers.of_medusa(medusa, TARGET) == 3 * (2 * (4 * 4 + 4) + 10 * 4)


@pytest.mark.parametrize(("hidden", "inner"), [(256, 672), (128, 352), (64, 160), (8, 32)])
def test_an_inner_size_is_eight_thirds_in_the_nearest_32(hidden: int, inner: int) -> None:
    """21.3, 10.7, 5.3 and 0.7 of them."""
    assert derived_sizes(ModelConfig(hidden=hidden), None)["intermediate_size"] == inner
