"""Prompts from the held-out rows of the training data, to choose a tree or a setting on.

Neither what the drafter learnt from nor the prompts that evaluation decodes, so what is chosen on
them is judged by others. Read next: `tree.py`, `tune.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...data.rows.prepare import prepare
from ...errors import DataError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...data.rows.packed import PackedRows
    from ..recipe.model import Recipe

_SHORTEST = 8  # tokens of a prompt


def held_out_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Token ids of at most `count` beginnings of held-out rows, an even spread.

    Raises:
        RequestError: these rows are the prompts of the evaluation. DataError: none is long enough.
    """
    if recipe.eval.prompts == recipe.data.validation:
        raise RequestError(
            f"data.validation and eval.prompts are both {recipe.eval.prompts!r}: what is chosen on them would be "
            "measured on the prompts that it is judged by; name other --eval.prompts"
        )
    rows = prepare(recipe.data, tokenizer, out=None).validation
    prompts = list(_beginnings(rows, recipe.eval.prompt_tokens))
    if not prompts:
        raise DataError(
            f"none of the {len(rows)} held-out rows has a beginning of {_SHORTEST} tokens or more, "
            f"of a chat at most eval.prompt_tokens = {recipe.eval.prompt_tokens}"
        )
    count = min(count, len(prompts))
    return [prompts[at * len(prompts) // count] for at in range(count)]


def where(recipe: Recipe) -> str:
    """What the prompts are, in words."""
    data = recipe.data
    return f"held-out rows of {data.validation or data.source}"


def _beginnings(rows: PackedRows, longest: int) -> Iterator[list[int]]:
    """Of every held-out document what stands before its first label, or else its first half."""
    for ids_S, labels_S, documents_S in zip(rows.ids_RS, rows.in_loss_RS, rows.document_RS, strict=True):
        for document in range(int(documents_S.max()) + 1):
            inside_S = documents_S == document
            ids, labels = ids_S[inside_S], labels_S[inside_S]
            first = int(labels.argmax()) if labels.any() else 0
            # a plain text is label from its first token on
            end = first if first > 1 else len(ids) // 2
            # a chat is not cut, as in an evaluation: without its beginning it is none
            if end >= _SHORTEST and (end <= longest or first <= 1):
                yield ids[max(0, end - longest) : end].tolist()
