"""A request to the decoder as plain numbers, or one message that says what is wrong with it.

It needs no torch, because drafters check their own numbers by `whole` as well. Read next: `engine.py`, which decodes
it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from .backbone.backbone import Backbone

STATES = "a list of the numbers of hidden states, -1 the last, () for none"
_ASKED_OF_DRAFTERS = ("draft_length", "nodes", "draft_steps", "reset", "observe")
_IDS = "token ids, whole numbers from 0, as tokenizer(text).input_ids makes them"


@dataclass(frozen=True)
class Asked:
    """A request that the decoder can start on."""

    prompts: list[list[int]]
    max_new_tokens: int
    eos_ids: list[int]
    seed: int
    requests: list[int]
    """The number of every row's stream."""


def asked_for(
    target: Backbone,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    seed: int,
    requests: Sequence[int] | None,
    draft_length: int = 0,
) -> Asked:
    """The request, with `requests` counted from 0 where there are none.

    Raises:
        RequestError: a value is not what `generate` says of it, or the target has too few positions.
    """
    rows = _prompts(prompts)
    request = Asked(
        rows,
        whole(max_new_tokens, "max_new_tokens", least=1),
        whole_numbers(eos_ids, "eos_ids", "a list of the ids that end a row, [] for none"),
        whole(seed, "seed"),
        list(range(len(rows))) if requests is None else _streams(requests, len(rows)),
    )
    _check_room(target, request, draft_length)
    return request


def check_target(target: object) -> None:
    """Raise RequestError for what is no target, a model of `transformers` among it."""
    if not hasattr(target, "eos_ids") or not hasattr(target, "prefill"):
        raise RequestError(
            f"target is a {type(target).__name__}; expected what draftsmith.load_target(folder, hub name or 'tiny') "
            "returns"
        )


def check_drafter(drafter: object) -> None:
    """Raise RequestError for what cannot draft."""
    if isinstance(drafter, type) or not hasattr(drafter, "propose"):
        raise RequestError(
            f"the drafter is {_short(drafter)}; expected one that is made: load_drafter(folder, target) for one that "
            "was trained, PromptLookup() for one that needs no training. Without a drafter decodes `autoregressive`"
        )
    if hasattr(drafter, "draft_length"):  # of which others are made
        whole(drafter.draft_length, f"draft_length of {type(drafter).__name__}", least=0)
    missing = [name for name in _ASKED_OF_DRAFTERS if not hasattr(drafter, name)]
    if missing:
        raise RequestError(
            f"{type(drafter).__name__} drafts, and has no {', '.join(missing)}; derive the class from "
            "draftsmith.Drafter, which has a default for everything but `propose`"
        )
    whole_numbers(getattr(drafter, "layers", ()), f"layers of {type(drafter).__name__}", STATES)


def whole(value: object, name: str, *, least: int | None = None) -> int:
    """The whole number that `value` is; `name` says in the RequestError what it is of."""
    number = _index(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise RequestError(f"{name} is {_short(value)}; expected a whole number{bound}")
    return number


def whole_numbers(values: object, name: str, expected: str) -> list[int]:
    """The list of whole numbers that `values` is; `name` and `expected` go into the RequestError."""
    items = _items(values)
    if items is None:
        raise RequestError(f"{name} is {_short(values)}; expected {expected}")
    try:
        return list(map(operator.index, items))
    except TypeError:
        wrong = next(item for item in items if _index(item) is None)
        raise RequestError(f"{name} holds {_short(wrong)}; expected {expected}") from None


def _prompts(prompts: object) -> list[list[int]]:
    if hasattr(prompts, "tolist"):
        raise RequestError(
            f"prompts is a {type(prompts).__name__} of shape {list(getattr(prompts, 'shape', []))}; expected a list "
            "of prompts, each a list of token ids without padding, as tokenizer(texts).input_ids makes them: leave "
            "return_tensors and padding out, or give prompts.tolist() where no row is padded"
        )
    rows = _items(prompts)
    if rows is None or any(getattr(row, "ndim", 0) == 0 and _index(row) is not None for row in rows):
        raise RequestError(
            f"prompts is {_short(prompts)}; expected a list of prompts, each a list of token ids: put a single prompt "
            "into a list"
        )
    if not rows:
        raise RequestError("there is no prompt; expected at least one")
    return [prompt_ids(row, number, len(rows)) for number, row in enumerate(rows, 1)]


def prompt_ids(row: object, number: int, count: int) -> list[int]:
    """The token ids that a prompt is, `number` of `count`; a RequestError says which is none."""
    place = f"number {number} of {count}"
    ids = whole_numbers(row, f"prompt {place}", _IDS)
    if not ids:
        raise RequestError(f"a prompt is empty, {place}; expected at least one token")
    if min(ids) < 0:
        raise RequestError(f"prompt {place} holds {min(ids)}; expected {_IDS}")
    return ids


def _streams(requests: object, rows: int) -> list[int]:
    expected = f"one number of at least 0 for each of the {rows} prompts, or None to count them from 0"
    numbers = whole_numbers(requests, "requests", expected)
    if len(numbers) != rows:
        raise RequestError(f"requests holds {len(numbers)} numbers; expected {expected}")
    if min(numbers) < 0 or max(numbers) >= 2**64:
        wrong = next(number for number in numbers if not 0 <= number < 2**64)
        raise RequestError(f"requests holds {wrong}; expected {expected}, below 2^64")
    return numbers


def _check_room(target: Backbone, request: Asked, draft_length: int) -> None:
    longest, new = max(map(len, request.prompts)), request.max_new_tokens
    needed = longest + new + draft_length
    if needed > target.context:
        raise RequestError(
            f"the longest prompt ({longest} tokens), max_new_tokens ({new}) and the draft length ({draft_length}) "
            f"need {needed} positions; the target {target.name} has {target.context}{target.context_reason}. Shorten "
            "the prompt or the answer"
        )


def _items(values: Any) -> list[Any] | None:
    """What stands in a list, an array or the like; None for a text and for what holds nothing."""
    if isinstance(values, (str, bytes)):
        return None
    try:
        return list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:
        return None


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
