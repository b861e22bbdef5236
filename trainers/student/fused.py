"""What drafters may draft, their draft vocabulary; and what EAGLE-3's family reads of a target: states that are fused.

Read next: `../eagle3.py` and `../block/peagle.py`, whose students are made of it; `../spine.py`, where a run over a
draft vocabulary begins.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ...data.rows.packed import PackedRows
from ...drafters.eagle.net3 import fused_layers
from ...errors import RequestError
from ..methods import METHODS
from ..recipe import TrainingRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


@overload
def drafted_ids(size: int, target: PreTrainedModel, ids: Sequence[int] | None) -> Sequence[int]: ...
@overload
def drafted_ids(size: int | None, target: PreTrainedModel, ids: Sequence[int] | None) -> Sequence[int] | None: ...
def drafted_ids(size: int | None, target: PreTrainedModel, ids: Sequence[int] | None) -> Sequence[int] | None:
    """The tokens that a recipe lets be drafted, ascending target ids; None: all.

    Args:
        size: how many, of the recipe.
        ids: which, or None where their number alone matters: the first ones then.
    """
    head: Any = target.get_output_embeddings()
    return range(min(size, len(head.weight))) if ids is None and size is not None else ids


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


def say_covered(rows: PackedRows, ids: Sequence[int]) -> None:
    """Say how many of the training labels a draft vocabulary has."""
    labels = rows.ids_RS[rows.in_loss_RS]
    _log.info(
        "the draft vocabulary of %s tokens has %.1f %% of the %s training labels; others are never drafted, and "
        "covered_mass is the target's mass on it",
        f"{len(ids):,}",
        100 * np.isin(labels, ids).mean() if len(labels) else 0.0,
        f"{len(labels):,}",
    )


def draft_vocabulary(recipe: TrainingRecipe) -> tuple[int | None, str]:
    """How many tokens what a recipe trains can draft, None: all; and the value that says so, empty where none does."""
    option = METHODS[recipe.method].sizes.get("draft_vocabulary", "")
    return (attrgetter(option)(recipe) if option else None), option


def coverage(recipe: TrainingRecipe, labels: Sequence[Any]) -> str:
    """What the recipe's draft vocabulary would cover of texts' labels, in words; empty where it has none."""
    size, option = draft_vocabulary(recipe)
    return "" if size is None else covered_by_half(labels, size, option)


def covered_by_half(labels: Sequence[Sequence[int]], size: int, option: str) -> str:
    """How much a draft vocabulary of the labels of every second text covers of the others', in words.

    Args:
        labels: of every text.
        option: the value that has the size.
    """
    none = np.zeros(0, np.int64)
    seen, others = (np.concatenate([none, *(np.asarray(each, np.int64) for each in labels[at::2])]) for at in (0, 1))
    if not len(seen) or not len(others):
        return ""
    counts_V = np.bincount(seen)
    chosen = np.argsort(-counts_V, kind="stable")[:size]
    share = np.isin(others, chosen[counts_V[chosen] > 0]).mean()
    return (
        f"; a draft vocabulary of {size:,} tokens ({option}) chosen from every second of these rows has {share:.1%} "
        "of the labels of the others"
    )


def frequent_tokens(rows: PackedRows, size: int) -> list[int]:
    """The `size` most frequent tokens among the labels, ascending; of equals the lower id first.

    What is not among the labels at all fills up, lower ids first, so that there are always `size`.
    """
    counts_V = np.bincount(rows.ids_RS[rows.in_loss_RS], minlength=size)
    order = np.argsort(-counts_V, kind="stable")
    return sorted(int(token) for token in order[:size])
