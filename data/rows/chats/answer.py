"""One answer of a chat in its text, and why it is left out of the loss. Read next: `turns.py`, which finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..shapes import Chat
from ..templates import Span
from .message import counts, is_empty


class Piece(NamedTuple):
    """A text, and the characters of it that count (None: all), each stretch with the turn that it is of."""

    text: str
    spans: list[Span] | None
    turns: Sequence[int] = ()


class AnswerText(NamedTuple):
    """One turn: the text up to its end, where its prompt ends, and the same with what the template writes behind."""

    turn: int
    start: int
    text: str
    upto: str | None
    """None where the template's own text is not what is learnt."""
    is_cut: bool
    unwritten: str = ""
    """Of one that was cut off, the end that the template writes behind it and the target never did."""
    is_silent: bool = False
    """Nothing that the turn says is in its text."""


def why_left_out(chat: Chat, answer: AnswerText) -> str | None:
    """Why an answer is not in the loss, by `turns.NOTES`; None where it is."""
    message = chat.messages[answer.turn]
    if not counts(message):
        return "marked"
    return "empty" if is_empty(message) or answer.is_silent else None
