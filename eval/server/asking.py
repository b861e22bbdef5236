"""How a server lets itself be audited: what it takes, what it hands out, and what of that is missing.

An audit needs the token ids of prompt and answer, and is better with log-probabilities. Servers differ,
so the first request asks for everything and later ones for less, until one is answered. What a server
leaves out without a word is seen in its answer. Read next: `answers.py`, which asks for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import httpx2

from ...data.generate.server_request import ServerRequest
from ...data.generate.transport import Passing, Refused, Transport, WrongServer
from ..measure.requests import Request
from .exchange import question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_IDS = {"return_token_ids": True}
_NAMES = {"return_tokens_as_token_ids": True}
_BY_ID = "token_id:"
_FLOOR = -1e3  # below it a log-probability is a server's word for "none"


@dataclass(frozen=True)
class Way:
    """How to ask. `prompts`: as token ids, or as the text or chat that the server renders itself."""

    prompts: Literal["ids", "text"]
    off: bool
    """Whether the server was told to leave penalties and unused filters off."""
    ids: bool
    logprobs: bool
    chats_alone: bool = False
    """Whether only chats can be asked, as there is no endpoint for texts."""

    def takes(self, asked: Request) -> bool:
        """Whether a prompt can be asked in this way."""
        return asked.prompt.chat or not self.chats_alone

    def body(self, request: ServerRequest, asked: Request, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """What the body says beside model and distribution."""
        chat = self.prompts == "text" and asked.prompt.chat
        body: dict[str, Any] = {}
        if self.off:
            # both engines take -1 for no top-k; 0 is refused by one of them
            body |= {"top_k": request.top_k or -1, "min_p": request.min_p, "repetition_penalty": 1.0}
            body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        if self.ids:
            body |= _IDS
        if self.logprobs:
            body |= {"logprobs": True if chat else 1} | (_NAMES if self.ids else {})
        if self.prompts == "ids":
            return body | {"prompt": asked.ids}
        text = tokenizer.decode(asked.ids, skip_special_tokens=True)
        return body | (question(asked.prompt)[1] if chat else {"prompt": text})

    def endpoint(self, asked: Request) -> str:
        """Where to ask."""
        return "chat/completions" if self.prompts == "text" and asked.prompt.chat else "completions"


@dataclass(frozen=True)
class Answer:
    """What a server wrote, as far as it says."""

    text: str
    ended: bool
    """Whether the model ended it, and not the length limit."""
    prompt: list[int] | None
    """The prompt's token ids, as the server says them."""
    prompt_tokens: int | None
    """How many it says that they are."""
    tokens: list[int] | None
    logprobs: list[float | None] | None
    """Of each token under the server's own model; None where it is missing or cut off."""


async def ask(
    transport: Transport, request: ServerRequest, way: Way, asked: Request, tokenizer: Any, stream: str
) -> Answer:
    """The answer to one request; `stream` names its random numbers.

    Raises:
        Refused, EnvironmentFailure, WrongServer: as of `Transport.tried`.
    """
    body = request.sampling(stream) | way.body(request, asked, tokenizer)

    async def attempt() -> Answer:
        return _read(await transport.post(way.endpoint(asked), body))

    return await transport.tried(attempt)


async def probe(
    transport: Transport, request: ServerRequest, requests: Sequence[Request], tokenizer: Any
) -> tuple[Way, Answer]:
    """The best way in which the server answers, and its answer to the first prompt that can be asked so.

    Raises:
        Refused, WrongServer: it answers in none. EnvironmentFailure: nobody is there.
    """
    last: Refused | WrongServer | None = None
    gone = False  # the endpoint of texts and token ids
    for way in _ways():
        if gone and not way.chats_alone:
            continue
        first = next((each for each in requests if way.takes(each)), None)
        if first is None or (way.chats_alone and not gone):
            continue
        try:
            return way, await ask(transport, request, way, first, tokenizer, "probe")
        except Refused as refused:
            if refused.status is None:
                raise
            last = refused
        except WrongServer as wrong:
            if gone or wrong.status not in (404, 405):
                raise
            gone, last = True, wrong
    assert last is not None
    raise last


def _ways() -> Iterator[Way]:
    """From the one that shows most to the one that any server takes."""
    prompts: tuple[tuple[Literal["ids", "text"], bool], ...] = (("ids", False), ("text", False), ("text", True))
    for form, chats_alone in prompts:
        for off, ids, logprobs in product((True, False), repeat=3):
            yield Way(form, off, ids, logprobs, chats_alone)


def missing(way: Way, answer: Answer) -> list[str]:
    """What the server does not hand out, and what that costs, in sentences."""
    notes = []
    if way.prompts == "text":
        told = (
            "it says which tokens it reads" if answer.prompt is not None else "it does not say which tokens it reads"
        )
        notes.append(f"it takes no token ids, so it renders and encodes prompts itself; {told}")
    if way.chats_alone:
        notes.append("it has no endpoint for texts, so only chats are asked")
    if not way.off:
        notes.append(
            "it refuses to be told that top_k, min_p and penalties are off; if it has defaults of its own, they count "
            "as differences"
        )
    if answer.tokens is None:
        notes.append(
            "it hands out no token ids (vLLM and SGLang do by return_token_ids), so at T = 0 texts are compared, and "
            "T > 0 cannot be tested"
        )
    if answer.logprobs is None:
        notes.append("it hands out no log-probabilities, so the size of its rounding is not known: bf16 is assumed")
    return notes


def prompt_read(answer: Answer, way: Way, sent: Sequence[int]) -> list[int] | None:
    """The prompt that the answer is to; None where nobody can know."""
    if answer.prompt is not None:
        return answer.prompt
    if way.prompts == "ids" or answer.prompt_tokens == len(sent):
        return list(sent)
    return None


def _read(response: httpx2.Response) -> Answer:
    try:
        content = response.json()
        choice = content["choices"][0]
        message = choice.get("message")
        text = choice["text"] if message is None else message.get("content")
        names, logprobs = _logprobs(choice.get("logprobs"))
        told = choice.get("prompt_token_ids") or content.get("prompt_token_ids")
        tokens = choice.get("token_ids")
        if tokens is None and names and all(name.startswith(_BY_ID) for name in names):
            tokens = [int(name.removeprefix(_BY_ID)) for name in names]
        return Answer(
            text or "",
            choice["finish_reason"] == "stop",
            None if told is None else [int(each) for each in told],
            (content.get("usage") or {}).get("prompt_tokens"),
            None if tokens is None else [int(each) for each in tokens],
            logprobs if tokens is not None and len(logprobs or []) == len(tokens) else None,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Passing(f"no completion in the answer ({type(error).__name__}: {error})") from error


def _logprobs(found: Any) -> tuple[list[str], list[float | None] | None]:
    """Names and log-probabilities of an answer's tokens, from either endpoint's shape."""
    if not found:
        return [], None
    if "content" in found:
        pairs = [(each["token"], each["logprob"]) for each in found["content"] or []]
    else:
        pairs = list(zip(found["tokens"], found["token_logprobs"], strict=True))
    return [str(name) for name, _ in pairs], [_finite(value) for _, value in pairs]


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) and value > _FLOOR else None
