"""Decoders of others under the audit: transformers' assisted generation, and any function from tokens to tokens.

Of a function nothing is known but what it returns, so the proofs on the real pair judge it: every sampled token
against the target's own distribution, every greedy one against its argmax. Read next: `audit.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...decoding.backbone.backbone import Backbone
from ...decoding.sampling import Warper
from ...drafters.model.draft_model import DraftModel
from ...errors import RequestError
from ..config import AuditConfig

Answers = list[list[int]]
Write = Callable[[Sequence[Sequence[int]], list[int], Warper], Answers]
"""Prompts, a number for each, and how tokens are drawn -> the new tokens of each."""


@dataclass(frozen=True)
class DecodeRequest:
    """How a batch of prompts is to be decoded."""

    max_new_tokens: int
    """The most that an answer may have; it goes on behind an end of text, or ends with it."""
    temperature: float
    """0: the likeliest token."""
    top_k: int
    """0: all."""
    top_p: float
    min_p: float
    seeds: tuple[int, ...]
    """One for each prompt: the same prompt comes many times, and every answer needs random numbers of its own."""


class Decode(Protocol):
    """A decoder that is handed over: token ids in, token ids out."""

    def __call__(self, prompts: list[list[int]], request: DecodeRequest) -> Sequence[Sequence[int]]:
        """The new token ids of each prompt, without the prompt."""


def by_function(decode: Decode, target: Backbone, config: AuditConfig) -> Write:
    """What `decode` writes, held to what can be judged."""

    def write(prompts: Sequence[Sequence[int]], numbers: list[int], warper: Warper) -> Answers:
        request = DecodeRequest(
            max_new_tokens=config.max_new_tokens,
            temperature=0.0 if warper.greedy else warper.temperature,
            top_k=warper.top_k,
            top_p=warper.top_p,
            min_p=warper.min_p,
            seeds=tuple(_seed(config, number) for number in numbers),
        )
        answers = decode([list(prompt) for prompt in prompts], request)
        return _checked(answers, len(prompts), target.vocabulary, config.max_new_tokens)

    return write


def _checked(answers: Any, prompts: int, vocabulary: int, most: int) -> Answers:
    """Answers as lists of ids.

    Raises:
        RequestError: they are none that could be judged.
    """
    expected = f"expected {prompts} lists of 1 to {most} new token ids from 0 to {vocabulary - 1}, without the prompts"
    try:
        found = [[operator.index(token) for token in answer] for answer in answers]
    except TypeError as error:
        raise RequestError(f"decode returned {type(answers).__name__} ({error}); {expected}") from None
    if len(found) != prompts:
        raise RequestError(f"decode returned {len(found)} answers; {expected}")
    for number, answer in enumerate(found):
        if not 1 <= len(answer) <= most:
            raise RequestError(f"decode's answer {number} has {len(answer)} tokens; {expected}")
        if odd := [token for token in answer if not 0 <= token < vocabulary]:
            raise RequestError(f"decode's answer {number} has the token id {odd[0]}; {expected}")
    return found


def by_transformers(target: Backbone, drafter: DraftModel, config: AuditConfig) -> Write:
    """transformers' `generate(assistant_model=...)`, one request at a time as it demands."""
    assistant: Any = drafter.backbone.model
    model: Any = target.model
    assistant.generation_config.num_assistant_tokens = config.draft_length
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0

    def write(prompts: Sequence[Sequence[int]], numbers: list[int], warper: Warper) -> Answers:
        sampling: dict[str, Any] = {"do_sample": False}
        if not warper.greedy:
            own = {name: getattr(warper, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            sampling = {"do_sample": True, **own}
        answers = []
        for prompt, number in zip(prompts, numbers, strict=True):
            torch.manual_seed(_seed(config, number))
            ids = torch.tensor([list(prompt)], device=target.device)
            done = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=assistant,
                max_new_tokens=config.max_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **sampling,
            )
            answers.append(done[0, len(prompt) :].tolist())
        return answers

    return write


def _seed(config: AuditConfig, number: int) -> int:
    """Of a request's random numbers, whatever batch it is decoded in."""
    return config.seed * 1_000_003 + number
