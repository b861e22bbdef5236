"""What EAGLE-3's family reads of a target and may draft: hidden states that are fused, the draft vocabulary.

Read next: `../eagle3.py` and `../block/peagle.py`, whose students are made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.rows.packed import PackedRows
from ...drafters.eagle.net3 import fused_layers
from ...errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def draft_vocabulary(size: int, target: PreTrainedModel) -> int:
    """How many tokens can be drafted."""
    head: Any = target.get_output_embeddings()
    return min(size, len(head.weight))


def chosen_layers(
    given: Sequence[int] | None, target: PreTrainedModel, option: str = "eagle3.layers"
) -> tuple[int, ...]:
    """The hidden states to fuse, the recipe's or those that serving engines take."""
    count = int(target.config.get_text_config(decoder=True).num_hidden_layers)
    layers = tuple(given or fused_layers(count))
    if not all(0 <= layer <= count for layer in layers):
        raise RequestError(
            f"{option} is {list(layers)}; expected hidden states from 0 (the embedding) to "
            f"{count} (the last layer, behind its norm)"
        )
    if list(layers) != sorted(set(layers)):
        raise RequestError(
            f"{option} is {list(layers)}; expected three different hidden states, low to "
            "high: serving engines hand out each once and in this order"
        )
    return layers


def frequent_tokens(rows: PackedRows, size: int) -> list[int]:
    """The `size` most frequent tokens among the labels, ascending; of equals the lower id first.

    What is not among the labels at all fills up, lower ids first, so that there are always `size`.
    """
    counts_V = np.bincount(rows.ids_RS[rows.in_loss_RS], minlength=size)
    order = np.argsort(-counts_V, kind="stable")
    return sorted(int(token) for token in order[:size])
