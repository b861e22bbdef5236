"""`draftsmith inspect`: rows as the trainer sees them, input token -> label token.

Read next: `data/rows/prepare.py`, `data/rows/packed.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RequestError
from .recipe.load import Resolved
from .recipe.model import Recipe

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def inspect(resolved: Resolved, rows: int) -> str:
    """The first `rows` packed training rows, a line per token; `prepare` logs the statistics.

    Everything is prepared as for training, so every stop of a training run shows here as well.

    Raises:
        RequestError: no row is asked for.
    """
    if rows < 1:
        raise RequestError(f"--rows is {rows}; expected 1 or more")
    from ..data.rows.prepare import prepare

    tokenizer = tokenizer_of(resolved.recipe)
    prepared = prepare(resolved.recipe.data, tokenizer, out=None)
    batch = prepared.train.batch(range(min(rows, len(prepared.train))))
    lines: list[str] = []
    for row in range(len(batch["input_ids"])):
        lines += [f"row {row}", f"{'place':>6} {'doc':>4} {'pos':>5}  input -> label"]
        lines += _row({name: tensor[row] for name, tensor in batch.items()}, tokenizer)
    return "\n".join(lines)


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer that the recipe's run would use; a new one is trained here as it would be."""
    if recipe.record.has_target:
        from ..decoding.backbone.hub import load_tokenizer

        target = recipe.target
        return load_tokenizer(target.path, revision=target.revision, trust_remote_code=target.trust_remote_code)
    from ..trainers.target import tokenizer_for

    with tempfile.TemporaryDirectory() as folder:
        return tokenizer_for(recipe.data, recipe.tokenizer, Path(folder))


def _row(row: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line per token: `[x]` marks a label in the loss, `[ ]` one outside it."""
    ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
    documents, positions = row["documents"].tolist(), row["positions"].tolist()
    lines = []
    for at, (token, label) in enumerate(zip(ids, [*ids[1:], -1])):
        if documents[at] < 0:
            lines.append(f"{at:6}       padding to the row's end")
            break
        follows = label >= 0 and documents[at + 1] == documents[at]
        shown = _shown(tokenizer, label) if follows else "(end of document)"
        mark = "[x]" if follows and mask[at + 1] else "[ ]"
        columns = f"{at:6} {documents[at]:4} {positions[at]:5}"
        lines.append(f"{columns}  {_shown(tokenizer, token)} -> {mark} {shown}")
    return lines


def _shown(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return f"{token} {tokenizer.decode([token])!r}"
