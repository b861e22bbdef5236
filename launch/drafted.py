"""A recipe's trained drafter, loaded as the recipe has it: which tokens it drafts may take counting the training rows.

Read next: `drafters/registry.py`, which loads; `measure/loaded.py`, where `eval` and `audit` do.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.config import DataConfig
from ..drafters.config import DrafterConfig
from ..drafters.registry import load_drafter
from .recipe.model import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.rows.packed import PackedRows
    from ..decoding.backbone.backbone import Backbone
    from ..decoding.proposal import Proposer

_log = logging.getLogger(__name__)
_COUNTED = 4_000
"""Rows of the data that are counted at most: which tokens are frequent is settled long before."""


def load_trained(folder: str | Path, recipe: Recipe, target: Backbone) -> Proposer:
    """The drafter of a folder, which proposes as `recipe` says; errors as for `load_drafter`."""
    config = with_ids(recipe, target.tokenizer, target.vocabulary)
    return load_drafter(folder, target, draft_length=recipe.eval.draft_length, config=config)


def with_ids(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> DrafterConfig:
    """What the recipe says of drafters, the ids themselves in place of a number of frequent tokens."""
    size = recipe.drafter.draft_vocabulary
    if not isinstance(size, int) or size >= vocabulary:
        return recipe.drafter if not isinstance(size, int) else _drafting(recipe.drafter, None)
    from ..trainers.student.fused import frequent_tokens

    data = recipe.data if recipe.data.limit_rows else recipe.data.model_copy(update={"limit_rows": _COUNTED})
    rows = _rows(data.model_dump_json(), tokenizer)
    _log.info("the %s most frequent tokens of %s are drafted (%d rows counted)", f"{size:,}", data.source, len(rows))
    return _drafting(recipe.drafter, frequent_tokens(rows, size))


def _drafting(config: DrafterConfig, ids: list[int] | None) -> DrafterConfig:
    return config.model_copy(update={"draft_vocabulary": ids})


@lru_cache(maxsize=2)
def _rows(data: str, tokenizer: PreTrainedTokenizerBase) -> PackedRows:
    """The training rows of a data section; tuning asks for them once for each setting."""
    from ..data.rows.prepare import prepare

    return prepare(DataConfig.model_validate_json(data), tokenizer, out=None).train
