"""From a recipe's `data` section to packed rows for training and validation.

Read next: `stdlib.py` for the offline default, `rows.py` for the packing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RequestError
from .config import DataConfig
from .rows import Document, PackedRows, pack
from .stdlib import stdlib_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prepared:
    """Rows to train on and rows held out."""

    train: PackedRows
    validation: PackedRows


def prepare(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, out: Path) -> Prepared:
    """Tokenise and pack what `config` names. `out` receives `rejected.jsonl`."""
    if config.source != "stdlib":
        raise RequestError(f"data.source is {config.source!r}; expected 'stdlib'")
    return Prepared(
        train=_packed((text for _, text in stdlib_texts("train")), config, tokenizer),
        validation=_packed((text for _, text in stdlib_texts("validation")), config, tokenizer),
    )


def training_texts(config: DataConfig) -> Iterator[str]:
    """The texts that a new tokenizer is trained on: the training split alone."""
    return (text for _, text in stdlib_texts("train"))


def _packed(
    texts: Iterable[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> PackedRows:
    documents = (_document(text, tokenizer) for text in texts)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return pack(
        documents, config.sequence_length, pad=pad, fingerprint="", together=config.packing
    )


def _document(text: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    """A whole text counts in the loss, the end-of-text token behind it included."""
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Document(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_))
