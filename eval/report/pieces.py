"""What each token adds to a text, in the order in which tokens are written.

Read next: `launch/chat.py`, which shows them as they come; `eval/measure/evaluate.py`, which keeps a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"


class TokenTexts:
    """The text of tokens one by one; of a character in several tokens the last one shows it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._written = ""

    def add(self, token: int, *, last: bool = False) -> str:
        """What the next token adds; nothing while a character is unfinished, unless it is the last token."""
        self._ids.append(token)
        text = str(self._tokenizer.decode(self._ids))
        if text.endswith(_UNFINISHED) and not last:
            return ""
        piece, self._written = text[len(self._written) :], text
        return piece


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The pieces of a whole answer."""
    pieces = TokenTexts(tokenizer)
    return [pieces.add(token, last=at == len(tokens)) for at, token in enumerate(tokens, 1)]
