"""What tells targets apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from draftsmith.drafters.identity import fingerprint


def tokenizer(**vocabulary: int) -> Any:
    return SimpleNamespace(get_vocab=lambda: vocabulary)


def test_a_tokenizer_is_its_tokens_with_their_numbers() -> None:
    assert fingerprint(tokenizer(a=0, b=1)) == fingerprint(tokenizer(b=1, a=0))
    assert fingerprint(tokenizer(a=0, b=1)) != fingerprint(tokenizer(a=1, b=0))
