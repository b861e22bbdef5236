"""What ended an answer of which the token ids are known: the target's own end, a stop string, or nobody says.

Servers leave the token out that ended an answer, or name a string of theirs that did. An end that is not there is
judged nowhere; and to judge a sample in which ends alone are missing would be to choose. So where it is not known
whether an end is missing, greedy answers are judged without it, and sampled ones not at all.
Read next: `answer.py`, what is told; `audit.py`, which judges.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ...decoding.backbone.backbone import Backbone
from .answer import Answer
from .answers import Judgeable

_Open = Literal["open"]


@dataclass(frozen=True)
class Ends:
    """Answers with the tokens that ended them."""

    greedy: list[Judgeable]
    sampled: list[Judgeable]
    open_greedy: int
    """Greedy answers of which nobody says what ended them, and the target would go on."""
    open_sampled: int
    """Sampled ones of which nobody says it."""
    stops: list[str]
    """Strings and tokens beside the target's ends that ended answers."""


def with_ends(target: Backbone, greedy: Sequence[Judgeable], sampled: Sequence[Judgeable], limit: int) -> Ends:
    """Add the ends that a server keeps to itself, where it is certain that it does.

    Args:
        limit: most tokens of an answer.
    """
    ends = target.eos_ids
    hidden = [_hidden(each.answer, ends, limit) for each in greedy]
    # what the server does not say shows at T = 0: a missing end is what the target would write there
    seen = [_written(target, each) if end == "open" else end for each, end in zip(greedy, hidden, strict=True)]
    keeps = "open" in hidden and "open" not in seen and len(ends) == 1
    drawn = [
        ends[0] if end == "open" and keeps else end for end in (_hidden(each.answer, ends, limit) for each in sampled)
    ]
    every = [each.answer.stop for each in (*greedy, *sampled) if each.answer.stop not in (None, *ends)]
    return Ends(
        [_with(each, end) for each, end in zip(greedy, seen, strict=True)],
        [_with(each, end) for each, end in zip(sampled, drawn, strict=True)],
        seen.count("open"),
        drawn.count("open"),
        sorted({repr(each) for each in every}),
    )


def _hidden(answer: Answer, ends: Collection[int], limit: int) -> int | _Open | None:
    """The end that a server keeps to itself; None where it keeps none."""
    tokens = answer.tokens
    if answer.ended is None and tokens is not None and len(tokens) >= limit:
        return None
    if tokens is None or not answer.whole or answer.ended is False or (tokens and tokens[-1] in ends):
        return None
    if answer.stop is not None:
        return answer.stop if isinstance(answer.stop, int) and answer.stop in ends else None
    if answer.count == len(tokens) + 1 and len(ends) == 1:
        return next(iter(ends))
    return "open"


@torch.inference_mode()
def _written(target: Backbone, each: Judgeable) -> int | _Open:
    """The end that the target itself would write behind the answer."""
    ids_1S = torch.tensor([[*each.prompt, *each.tokens]], device=target.device)
    likeliest = int(target.model(ids_1S, use_cache=False).logits[0, -1].argmax())
    return likeliest if likeliest in target.eos_ids else "open"


def _with(each: Judgeable, end: int | _Open | None) -> Judgeable:
    if not isinstance(end, int):
        return each
    answer = each.answer
    tokens = [*(answer.tokens or []), end]
    logprobs = None if answer.logprobs is None else [*answer.logprobs, None]
    return replace(each, answer=replace(answer, tokens=tokens, logprobs=logprobs, count=len(tokens)))
