"""Greedy answers of which only the text is known, beside the target's own greedy text.

The same text can be other tokens, so nothing is encoded anew: the target's own greedy tokens are followed
as long as they spell the server's text. Where they part, the target's margin tells a near-tie from a bug;
behind that nothing is known. A text that was altered on its way, or that is not all of the answer, is left out.
Read next: `altered.py`, what may have happened to a text; `eval/audit/replay.py`, the same for tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy import stats

from ...decoding.engine import autoregressive
from ...decoding.sampling import Warper
from ...decoding.target.backbone import Backbone
from ..audit.replay import Replay, explained_near_ties, histogram_of, one_by_one
from .altered import alteration, footer_of
from .answer import Answer
from .answers import Judgeable

_UNFINISHED = "\ufffd"
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
        whole = str(target.tokenizer.decode(list(tokens), skip_special_tokens=True)).rstrip(_UNFINISHED)
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
    seen = text if ended else text.rstrip(_UNFINISHED)
    for at in range(len(tokens)):
        spelled = str(tokenizer.decode(list(tokens[: at + 1]), skip_special_tokens=skip)).rstrip(_UNFINISHED)
        if seen.startswith(spelled):
            continue
        # a text that the length limit ended early is one of other, longer tokens, and no contradiction
        return (at, at) if ended or not spelled.startswith(seen) else (len(tokens), at)
    return len(tokens), len(tokens)
