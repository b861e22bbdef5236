"""What one answer of a server says, as far as it says it; what is of another type than it should be says nothing.

Read next: `answers.py`, how it is asked for; `evidence.py`, what ended it; `data/generate/server_request.py`, thoughts
and calls of tools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from ...data.generate.server_request import read_message, told_tokens
from ...data.generate.transport import Passing

_BY_ID = "token_id:"
_FLOOR = -1e3  # below it a log-probability is a server's word for "none"
_STOPS = ("stop_reason", "matched_stop", "stopping_word")  # vLLM's, SGLang's, llama.cpp's


@dataclass(frozen=True)
class Answer:
    """What a server wrote, as far as it says."""

    text: str
    ended: bool | None
    """Whether the model ended it, and not the length limit; None where the server does not say so."""
    prompt: list[int] | None
    """The prompt's token ids, as the server says them."""
    prompt_tokens: int | None
    """How many it says that they are."""
    tokens: list[int] | None
    logprobs: list[float | None] | None
    """Of each token under the server's own model; None where it is missing or cut off."""
    count: int | None = None
    """How many tokens it says that it wrote."""
    apart: bool = False
    """Whether thoughts or calls of tools stand apart from the text."""
    stop: str | int | None = None
    """The string or token that ended it, where the server names it."""
    reason: str | None = None
    """Why it ended, in the server's words."""

    @property
    def whole(self) -> bool:
        """Whether its ids are those of all tokens, the one that ended it perhaps apart."""
        if self.tokens is None:
            return False
        if self.apart:
            # one token that is missing may as well be a thought as the end
            return self.count == len(self.tokens)
        return self.count is None or abs(self.count - len(self.tokens)) <= 1


def read_answer(response: httpx2.Response) -> Answer:
    """The answer of either endpoint.

    Raises:
        Passing: it is none.
    """
    try:
        content = response.json()
        choice = content["choices"][0]
        message = choice.get("message")
        usage, told = content.get("usage"), choice.get("prompt_token_ids") or content.get("prompt_token_ids")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Passing(f"no completion in the answer ({type(error).__name__}: {error})") from error
    if not isinstance(message, Mapping) and "text" not in choice:
        raise Passing("no completion in the answer (it has neither message nor text)")
    said = read_message(message) if isinstance(message, Mapping) else None
    text = choice.get("text") if said is None else said.text
    names, logprobs = _logprobs(choice.get("logprobs"))
    by_name = _ids([name.removeprefix(_BY_ID) for name in names]) if _are_ids(names) else None
    # an answer of no token is one
    tokens = [] if choice.get("token_ids") == [] else _ids(choice.get("token_ids"))
    reason = choice.get("finish_reason")
    return Answer(
        text if isinstance(text, str) else "",
        {"stop": True, "length": False}.get(reason) if isinstance(reason, str) else None,
        _ids(told),
        told_tokens(usage, "prompt_tokens"),
        by_name if tokens is None else tokens,
        logprobs if len(logprobs or []) == len((by_name if tokens is None else tokens) or []) else None,
        told_tokens(usage, "completion_tokens"),
        said is not None and said.apart,
        next((each for name in _STOPS if _is_stop(each := choice.get(name))), None),
        reason if isinstance(reason, str) else None,
    )


def _ids(found: Any) -> list[int] | None:
    """Token ids; None where they are something else, or none."""
    if not isinstance(found, list) or not found or any(isinstance(each, bool) for each in found):
        return None
    try:
        ids = [int(each) for each in found]
    except (ValueError, TypeError, OverflowError):
        return None
    return ids if min(ids) >= 0 else None


def _are_ids(names: Sequence[str]) -> bool:
    return bool(names) and all(name.startswith(_BY_ID) for name in names)


def _is_stop(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool) and value != ""


def _logprobs(found: Any) -> tuple[list[str], list[float | None] | None]:
    """Names and log-probabilities of an answer's tokens, from either endpoint's shape."""
    if not isinstance(found, Mapping):
        return [], None
    if "content" in found:
        content = found["content"] if isinstance(found["content"], list) else []
        pairs = [(each.get("token"), each.get("logprob")) for each in content if isinstance(each, Mapping)]
    else:
        names, values = found.get("tokens"), found.get("token_logprobs")
        if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
            return [], None
        pairs = list(zip(names, values, strict=True))
    numbers = [_finite(value) for _, value in pairs]
    if any(each is not None and each > _ROUNDING for each in numbers):
        return [str(name) for name, _ in pairs], None
    return [str(name) for name, _ in pairs], numbers or None


_ROUNDING = 1e-3
"""What a log-probability may be above 0; numbers above that are logits or probabilities, whatever their name says."""


def _finite(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and value > _FLOOR else None
