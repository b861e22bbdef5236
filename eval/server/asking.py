"""How a server lets itself be audited: what it takes, what it hands out, and what of that is missing.

An audit needs the token ids of prompt and answer, and is better with log-probabilities. Servers differ,
so the first request asks for everything and later ones for less, until one is answered. What a server
leaves out without a word is seen in its answer. Read next: `answer.py`, what an answer says; `answers.py`, which
asks for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from ...data.generate.server_defaults import left_on
from ...data.generate.server_request import LEVELS, ServerRequest
from ...data.generate.transport import Refused, Transport, WrongServer
from ..measure.requests import Request
from .answer import Answer, read_answer
from .exchange import question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_IDS = {"return_token_ids": True}
_NAMES = {"return_tokens_as_token_ids": True}


@dataclass(frozen=True)
class RequestStyle:
    """How to ask. `prompts`: as token ids, or as the text or chat that the server renders itself."""

    prompts: Literal["ids", "text"]
    off: tuple[str, ...]
    """Which of its own defaults the server was told to leave off: names of `server_request.OFF`."""
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
        if self.ids:
            body |= _IDS
        if self.logprobs:
            body |= {"logprobs": True if chat else 1} | (_NAMES if self.ids else {})
        if self.prompts == "ids":
            return body | {"prompt": asked.ids}
        text = tokenizer.decode(asked.ids, skip_special_tokens=True)
        return body | (question(asked.prompt, request.template_values)[1] if chat else {"prompt": text})

    def endpoint(self, asked: Request) -> str:
        """Where to ask."""
        return "chat/completions" if self.prompts == "text" and asked.prompt.chat else "completions"


async def ask(
    transport: Transport, request: ServerRequest, way: RequestStyle, asked: Request, tokenizer: Any, stream: str
) -> Answer:
    """The answer to one request; `stream` names its random numbers.

    Raises:
        Refused, EnvironmentFailure, WrongServer: as of `Transport.tried`.
    """
    body = request.sampling(stream, way.off) | way.body(request, asked, tokenizer)

    async def attempt() -> Answer:
        return read_answer(await transport.post(way.endpoint(asked), body))

    return await transport.tried(attempt)


async def probe(
    transport: Transport, request: ServerRequest, requests: Sequence[Request], tokenizer: Any
) -> tuple[RequestStyle, Answer]:
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


def _ways() -> Iterator[RequestStyle]:
    """From the one that shows most to the one that any server takes."""
    prompts: tuple[tuple[Literal["ids", "text"], bool], ...] = (("ids", False), ("text", False), ("text", True))
    for form, chats_alone in prompts:
        for off, ids, logprobs in product(LEVELS, (True, False), (True, False)):
            yield RequestStyle(form, off, ids, logprobs, chats_alone)


def missing(way: RequestStyle, answer: Answer) -> list[str]:
    """What the server does not hand out, and what that costs, in sentences."""
    notes = []
    if way.prompts == "text":
        told = (
            "it says which tokens it reads" if answer.prompt is not None else "it does not say which tokens it reads"
        )
        notes.append(f"it takes no token ids, so it renders and encodes prompts itself; {told}")
    if way.chats_alone:
        notes.append("it has no endpoint for texts, so only chats are asked")
    if (sentence := left_on(way.off)) is not None:
        notes.append(sentence)
    if answer.tokens is None:
        notes.append(
            "it hands out no token ids (vLLM and SGLang do by return_token_ids), so at T = 0 texts are compared, and "
            "T > 0 cannot be tested"
        )
    if answer.logprobs is None:
        notes.append("it hands out no log-probabilities, so the size of its rounding is not known: bf16 is assumed")
    return notes


def prompt_read(answer: Answer, way: RequestStyle, sent: Sequence[int], vocabulary: int) -> list[int] | None:
    """The prompt that the answer is to; None where nobody can know."""
    if answer.prompt is not None:
        return answer.prompt if max(answer.prompt) < vocabulary else None
    if answer.prompt_tokens == len(sent) or (way.prompts == "ids" and not answer.prompt_tokens):
        return list(sent)
    return None
