"""Greedy answers of which only the text is known, beside the target's own greedy text.

The same text can be other tokens, so nothing is encoded anew: the target's own greedy tokens are followed
as long as they spell the server's text. Where they part, the target's margin tells a near-tie from a bug;
behind that nothing is known. A text that was altered on its way, or that is not all of the answer, is left out.
A text that begins as the target's and then parts from it, by a word, is another one.
Between a model and its users stand parsers and gateways. They strip white space, take thoughts away, end texts at a
string, put words in front, spoil characters that were cut in two, write other characters for the same ones. None of
that is a wrong token, so a text that such a thing explains is no evidence, neither for the server nor against it.
Read next: `eval/audit/replay.py`, the same for tokens.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from scipy import stats

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import autoregressive
from ...decoding.sampling import Warper
from ..audit.replay import Replay, explained_near_ties, histogram_of, one_by_one
from .answer import Answer
from .answers import Judgeable

_SPOILT = "\ufffd"
_ENOUGH = 12  # characters that two texts do not share by chance
_ALIKE = 4  # characters by which texts begin alike, or end
_OTHER_REASONS = ("content_filter", "tool_calls", "function_call")


def own_greedy(
    target: Backbone, answers: Sequence[Judgeable], *, max_new_tokens: int, batch: int
) -> list[Sequence[int]]:
    """The target's own greedy tokens for the same prompts."""
    found: list[Sequence[int]] = []
    for start in range(0, len(answers), batch):
        prompts = [each.prompt for each in answers[start : start + batch]]
        found += autoregressive(
            target, prompts, warper=Warper(0.0), max_new_tokens=max_new_tokens, eos_ids=target.eos_ids
        ).tokens
    return found


def replay_texts(
    target: Backbone, answers: Sequence[Judgeable], own: Sequence[Sequence[int]], rounding: Sequence[float]
) -> tuple[Replay | None, list[str]]:
    """Compare texts token by token of the target's own greedy answers, up to where they part.

    Args:
        own: of `own_greedy`.
        rounding: by how much logits are off.

    Returns:
        None where no text can be compared; and sentences for those that were left out.
    """
    fit = [each.answer.text for each in answers if _unfit(each.answer) is None]
    found = _Found(max(map(abs, rounding), default=0.0), footer_of(fit))
    for number, (each, tokens) in enumerate(zip(answers, own, strict=True)):
        reason = _unfit(each.answer)
        if reason is None:
            found.judge(target, number, each, tokens)
        else:
            found.left[reason] += 1
    notes = [
        f"{count} greedy {'text is' if count == 1 else 'texts are'} left out of the comparison: {reason}"
        for reason, count in found.left.items()
    ]
    return (found.replay(rounding) if found.margins else None), notes


@dataclass
class _Found:
    """What the texts show, added up."""

    noise: float
    footer: str = ""
    """The end that all texts have in common."""
    tested: int = 0
    near: int = 0
    bugs: int = 0
    margins: list[float] = field(default_factory=list)
    first_bug: str | None = None
    left: Counter[str] = field(default_factory=Counter)

    def judge(self, target: Backbone, number: int, each: Judgeable, tokens: Sequence[int]) -> None:
        """Take one answer's text beside the target's own tokens."""
        text, ended = each.answer.text, each.answer.ended is True
        at, spelled = _followed(target.tokenizer, tokens, text, ended=ended)
        own_ended = tokens[-1] in target.eos_ids
        whole = str(target.tokenizer.decode(list(tokens), skip_special_tokens=True)).rstrip(_SPOILT)
        if at >= len(tokens) and own_ended and len(text) > len(whole) and text.startswith(whole):
            self.left["they go on behind the target's end"] += 1
            return
        parted = at < len(tokens)
        if parted and (reason := alteration(text, whole, ended=ended, footer=self.footer)) is not None:
            self.left[reason] += 1
            return
        top = one_by_one(target, each.prompt, tokens).topk(2, dim=-1).values
        margin = (top[:, 0] - top[:, 1]).tolist()
        if parted and margin[at] > 2 * self.noise:
            self.bugs += 1
            self.first_bug = self.first_bug or (
                f"request {number}, token {at}: the text is not that of the argmax {tokens[at]}, margin "
                f"{margin[at]:.3g} against noise {self.noise:.3g}"
            )
        elif parted:
            self.near += 1
        counted = at + 1 if parted else spelled
        self.margins += margin[:counted]
        self.tested += counted

    def replay(self, rounding: Sequence[float]) -> Replay:
        """As of tokens."""
        explained = explained_near_ties(self.margins, [2**0.5 * each for each in rounding], self.noise)
        p_value = float(stats.poisson.sf(self.near - 1, explained))
        argmax = self.tested - self.near - self.bugs
        shown = histogram_of(self.margins)
        smallest = min(self.margins)
        return Replay(
            self.tested, argmax, self.near, explained, p_value, self.bugs, self.noise, smallest, shown, self.first_bug
        )


def _unfit(answer: Answer) -> str | None:
    """Why the text is not all that was written."""
    if answer.apart:
        return "thoughts or calls of tools stand apart from them"
    if answer.reason in _OTHER_REASONS:
        return f"the server ended them by {answer.reason}"
    if not answer.text:
        return "they are empty"
    return None


def _followed(tokenizer: Any, tokens: Sequence[int], text: str, *, ended: bool) -> tuple[int, int]:
    """The first of the target's own tokens that the text does not go along with, or their number; how many it spells.

    Servers write special tokens or leave them out: what goes further is taken.
    """
    return max(_parting(tokenizer, tokens, text, ended=ended, skip=skip) for skip in (True, False))


def _parting(tokenizer: Any, tokens: Sequence[int], text: str, *, ended: bool, skip: bool) -> tuple[int, int]:
    # a text that the length limit ended may end within a character
    seen = text if ended else text.rstrip(_SPOILT)
    for at in range(len(tokens)):
        spelled = str(tokenizer.decode(list(tokens[: at + 1]), skip_special_tokens=skip)).rstrip(_SPOILT)
        if seen.startswith(spelled):
            continue
        # a text that the length limit ended early is one of other, longer tokens, and no contradiction
        return (at, at) if ended or not spelled.startswith(seen) else (len(tokens), at)
    return len(tokens), len(tokens)


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
