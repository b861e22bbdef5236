"""Which turns of which prompts are decoded, as token ids: rendered once, for audit and evaluation.

A text is cut to its end, a chat is whole or left out. Read next: `data/prompts.py`, which renders
them; `evaluate.py`, which decodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
            requests.append(Request(prompt, ids, len(requests), turn))
    return requests


def first_turns(requests: Sequence[Request]) -> list[list[int]]:
    """Token ids of the first turn of every prompt: what the audit decodes."""
    return [each.ids for each in requests if each.turn == 0]


def _answer(target: Backbone, ids: list[int], config: EvalConfig) -> Spoken:
    done = autoregressive(
        target, [ids], warper=Warper(0.0), max_new_tokens=config.max_new_tokens, eos_ids=target.eos_ids
    )
    (written,) = done.tokens
    return Spoken(ids, written, bool(written) and written[-1] in target.eos_ids)
