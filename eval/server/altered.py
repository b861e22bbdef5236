"""A server's text that is not the target's own: written otherwise, or the same and altered on its way?

A text that begins as the target's and then parts from it, by a word, is another one.
Between a model and its users stand parsers and gateways. They strip white space, take thoughts away, end texts at a
string, put words in front, spoil characters that were cut in two, write other characters for the same ones. None of
that is a wrong token, so a text that such a thing explains is no evidence, neither for the server nor against it.
Read next: `texts.py`, which asks.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from os.path import commonprefix

_SPOILT = "\ufffd"
_ENOUGH = 12  # characters that two texts do not share by chance
_ALIKE = 4  # characters by which texts begin alike, or end


def alteration(text: str, own: str, *, ended: bool, footer: str = "") -> str | None:
    """What makes the text of `own`, the target's; None where nothing that is known here does.

    Args:
        own: as far as the target was followed, which may be further than the server's text or less far.
        ended: whether the server ended the text by itself.
        footer: the end that all of the server's texts have in common.
    """
    if len(footer) >= _ALIKE and text.endswith(footer) and len(text) > len(footer):
        rest = text.removesuffix(footer)
        if own.startswith(rest) or alteration(rest, own, ended=ended) is not None:
            return "something stands behind them"
    if _along(text.strip(), own.strip()) and (own.strip() or not text.strip()):
        return "they end where the target goes on" if ended and own.startswith(text) else "white space at their ends"
    mine, theirs = _loose(own), _loose(text)
    if _along(theirs, mine) and (mine or not theirs):
        return "characters are written otherwise"
    if _SPOILT in text and _is_spoilt(text, own):
        return "characters are spoilt"
    if len(commonprefix([mine, theirs])) >= _ALIKE:
        return None  # it is the target's text up to a word
    # what is put in front of a text, or taken away there, changes its beginning: such a text tells nothing
    if theirs and (mine.endswith(theirs) or (len(theirs) >= _ENOUGH and theirs in mine)):
        return "their beginning is missing"
    if _behind(theirs, mine):
        return "something stands in front of them"
    return "they begin otherwise than the target's, altered on their way or wrong"


def footer_of(texts: Sequence[str]) -> str:
    """The end that texts have in common; of one text nobody can say what was put behind it."""
    return commonprefix([each[::-1] for each in texts])[::-1] if len(set(texts)) > 1 else ""


def _along(text: str, own: str) -> bool:
    """Whether one of the two begins the other."""
    return text.startswith(own) or own.startswith(text)


def _loose(text: str) -> str:
    """The text without what is changed on the way: forms of characters, white space, marks of HTML."""
    plain = unicodedata.normalize("NFKC", html.unescape(text))
    return " ".join("".join(each for each in plain if unicodedata.category(each) != "Cf").split())


def _is_spoilt(text: str, own: str) -> bool:
    """Whether the text is the target's but for characters of several bytes, which are cut in two where bytes are."""
    parts = [re.escape(each) for each in re.split(f"{_SPOILT}+", text)]
    return re.match("[^\\x00-\\x7f]+".join(parts), own) is not None


def _behind(text: str, own: str) -> bool:
    """Whether a text goes along with the target's from some place on."""
    opening = own[:_ENOUGH]
    at = text.find(opening, 1) if opening else -1
    while at >= 0:
        if _along(text[at:], own):
            return True
        at = text.find(opening, at + 1)
    return False
