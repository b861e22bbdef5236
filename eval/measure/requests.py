"""Which turns of which prompts are decoded, as token ids.

A text is cut to its end, a chat is whole or left out. Read next: `data/prompts.py`, which renders
them; `evaluate.py`, which decodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.prompts import Prompt, fitting, render
from ...decoding.engine import autoregressive
from ...decoding.sampling import Warper
from ...decoding.target.backbone import Backbone
from ..config import EvalConfig


@dataclass
class Request:
    """One turn of one prompt."""

    prompt: Prompt
    ids: list[int]
    number: int


def make_requests(target: Backbone, prompts: Sequence[Prompt], config: EvalConfig) -> list[Request]:
    """Every turn that fits of every prompt; the target's own greedy answers stand before it.

    Raises:
        RequestError: none fits.
    """
    requests: list[Request] = []
    warper, most = Warper(0.0), config.prompt_tokens
    for prompt in fitting(prompts, target.tokenizer, most):
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            ids = render(prompt, target.tokenizer, answers=answers, limit=most)
            if len(ids) > most:
                break  # later turns hold this one
            requests.append(Request(prompt, ids, len(requests)))
            if turn + 1 < len(prompt.turns):
                done = autoregressive(
                    target, [ids], warper=warper, max_new_tokens=config.max_new_tokens, eos_ids=target.eos_ids
                )
                text = target.tokenizer.decode(done.tokens[0], skip_special_tokens=True)
                answers.append(str(text))
    return requests
