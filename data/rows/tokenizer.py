"""A byte-level BPE tokenizer for a target made from scratch; what tells any tokenizer from another.

A trained one is an ordinary `transformers` fast tokenizer. Read next: `rows/packed.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL = [END_OF_TEXT, PAD, TURN_START, TURN_END]


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, *, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts` with `vocabulary` entries, the four special tokens included.

    Every byte is in the alphabet, so there is no unknown token and any text can be encoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase, *, with_template: bool = True) -> str:
    """Everything that decides on ids: merges, added and special tokens, the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inner = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    template = tokenizer.chat_template if with_template else None
    parts = [inner, tokenizer.special_tokens_map, template, type(tokenizer).__name__]
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()
