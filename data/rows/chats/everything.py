"""Chats of which everything counts (`data.loss_on: all`), but for turns that say otherwise and ends that nobody wrote.

Read next: `turns.py`, which finds the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import Any

from ..shapes import Chat
from ..templates import Span
from .answer import AnswerText, Piece, why_left_out
from .message import counts


def everything(texts: Sequence[str], groups: Sequence[Sequence[AnswerText]], chat: Chat) -> Iterator[Piece]:
    """The texts of a chat, one for each group of answers; what is rewritten in a later one counts in its own alone."""
    done = 0
    for text, group in zip(texts, groups, strict=True):
        holes = [*_unwritten(text, group, chat), *_marked(text, chat)]
        said: list[Span] = []
        if done:
            first = group[0]
            holes.append((0, first.start))
            said = list(_said(text, chat.messages[done : first.turn], first.start))
        done = group[-1].turn + 1 if group else done
        spans = [*said, *_outside(holes, len(text))]
        yield Piece(text, None) if spans == [(0, len(text))] else Piece(text, spans, [-1] * len(spans))


def _unwritten(text: str, answers: Sequence[AnswerText], chat: Chat) -> Iterator[Span]:
    """Answers that are left out, and ends that a template writes behind answers that have none."""
    for each in answers:
        end = len(each.text)
        if each.is_cut:
            yield end, end + len(commonprefix([text[end:], each.unwritten]))
        if why_left_out(chat, each):
            yield each.start, end


def _marked(text: str, chat: Chat) -> Iterator[Span]:
    """What others said in turns that are marked, each behind the one in front of it."""
    at = 0
    for message in chat.messages:
        words = message["content"].strip()
        found = text.find(words, at)
        if found >= 0:
            at = found + len(words)
            if message["role"] != "assistant" and not counts(message):
                yield found, at


def _said(text: str, messages: Sequence[dict[str, Any]], end: int) -> Iterator[Span]:
    """What others said in these turns, which end at a character, in order."""
    found: list[Span] = []
    for message in reversed(messages):
        words = message["content"].strip()
        at = text.rfind(words, 0, end) if words and message["role"] != "assistant" and counts(message) else -1
        if at >= 0:
            found.append((at, at + len(words)))
            end = at
    yield from reversed(found)


def _outside(holes: Sequence[Span], length: int) -> Iterator[Span]:
    """What of a text lies in none of its holes."""
    at = 0
    for start, end in sorted(holes):
        if at < start:
            yield at, min(start, length)
        at = max(at, end)
    if at < length:
        yield at, length
