"""Which turns of which prompts are decoded, as token ids: rendered once, for audit and evaluation.

A text is cut to its end, a chat is whole or left out. Read next: `data/prompts.py`, which renders
them; `evaluate.py`, which decodes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ...data.prompts import Prompt, fitting_ids, render
from ...data.rows.chats.spoken import Spoken
from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import autoregressive
from ...decoding.sampling import Warper
from ..config import EvalConfig


@dataclass(frozen=True)
class Request:
    """One turn of one prompt."""

    prompt: Prompt
    ids: list[int]
    number: int
    """Of its stream of random numbers."""
    turn: int = 0


def make_requests(
    target: Backbone, prompts: Sequence[Prompt], config: EvalConfig, *, later_turns: bool = True
) -> list[Request]:
    """Every turn that fits of every prompt; the target's own greedy answers stand before it, in the ids it wrote.

    Logs how many prompts are left out. With `later_turns` false, first turns alone: nothing is decoded.

    Raises:
        RequestError: no prompt fits. DataError: as for `render`.
    """
    requests: list[Request] = []
    for prompt, first in fitting_ids(prompts, target.tokenizer, config.prompt_tokens, warn=True):
        ids, answers = first, list[Spoken]()
        for turn in range(len(prompt.points) if later_turns else 1):
            if turn:
                answers.append(_answer(target, ids, config))
                ids = render(prompt, target.tokenizer, answers=answers, limit=config.prompt_tokens)
            if len(ids) > config.prompt_tokens:
                break  # later turns hold this one
            number = len(requests) if prompt.stream is None else prompt.stream + turn
            requests.append(Request(prompt, ids, number, turn))
    return requests


def sets_of(requests: Sequence[Request]) -> list[str]:
    """The sets that the prompts are of, in order, where there are several."""
    names = list(dict.fromkeys(each.prompt.set for each in requests))
    return [name for name in names if name is not None] if len(names) > 1 else []


def batches(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """What is decoded together: at most `size` neighbours of one set."""
    groups = [list(group) for _, group in groupby(requests, lambda each: each.prompt.set)]
    return [group[at : at + size] for group in groups for at in range(0, len(group), size)]


def in_turn(requests: Sequence[Request]) -> list[Request]:
    """One of every set in turn, where the first ones are to stand for all; mixed, they are of no set any more."""
    if not sets_of(requests):
        return list(requests)
    seen: Counter[str | None] = Counter()
    ranks = []
    for each in requests:
        ranks.append(seen[each.prompt.set])
        seen[each.prompt.set] += 1
    mixed = [requests[at] for at in sorted(range(len(requests)), key=ranks.__getitem__)]
    return [replace(each, prompt=replace(each.prompt, set=None)) for each in mixed]


def first_turns(requests: Sequence[Request]) -> list[list[int]]:
    """Token ids of the first turn of every prompt, of every set in turn: what the audit decodes."""
    return [each.ids for each in in_turn(requests) if each.turn == 0]


def _answer(target: Backbone, ids: list[int], config: EvalConfig) -> Spoken:
    done = autoregressive(
        target, [ids], warper=Warper(0.0), max_new_tokens=config.max_new_tokens, eos_ids=target.eos_ids
    )
    (written,) = done.tokens
    return Spoken(ids, written, bool(written) and written[-1] in target.eos_ids)
