"""A tokenizer of SentencePiece's kind, small enough to count on."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

PIECES = ("\u2581", "a", "d", "e", "f", "\u2581a", "de", "def")
MERGES = (("\u2581", "a"), ("d", "e"), ("de", "f"))


def sentence_piece(
    pieces: Sequence[str] = PIECES, merges: Sequence[tuple[str, str]] = MERGES, *, begins: bool = True
) -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are written as a letter, bytes as <0x..>, a text begins with <s>."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    numbers = {word: n for n, word in enumerate(words)}
    raw = Tokenizer(models.BPE(numbers, list(merges), byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if begins:
        raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
