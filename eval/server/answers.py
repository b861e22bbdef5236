"""The answers that an audit judges: greedy ones and sampled ones, side by side, kept as they come.

They stand in the journal of `data/generate`, so that an audit which was stopped does not ask twice.
Read next: `answer.py`, one answer; `evidence.py` and `audit.py`, which judge them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...bars import live
from ...data.generate.journal import REJECTED, Journal
from ...data.generate.server_defaults import left_on
from ...data.generate.server_request import LEVELS, ServerRequest
from ...data.generate.transport import Refused, Transport, WrongServer
from ...errors import EnvironmentFailure
from ...storage import json_lines
from ..config import AuditConfig
from ..measure.environment import environment
from ..measure.requests import Request
from .answer import Answer, read_answer
from .exchange import identity_of, question

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


JOURNAL = "server-answers"


@dataclass(frozen=True)
class Judgeable:
    """An answer, and the prompt that the server read."""

    prompt: list[int]
    answer: Answer
    sure: bool = True
    """Whether the server read this prompt for certain; it is not where only the number of its tokens is known."""

    @property
    def tokens(self) -> list[int]:
        """Of the answer; none where the server does not say all of them."""
        return (self.answer.tokens or []) if self.answer.whole else []


@dataclass(frozen=True)
class ServedAnswers:
    """All answers of one server."""

    way: RequestStyle
    greedy: list[Judgeable]
    sampled: list[Judgeable]
    notes: list[str]
    """What is missing, and what was left out."""
    chosen: int = 0
    """Sampled answers that are missing though their prompt has others: which ones may depend on what they say."""


def served_answers(
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[Request],
    server: ServerRequest,
    config: AuditConfig,
    out: Path,
    *,
    vocabulary: int,
) -> ServedAnswers:
    """Ask for `config.prompts` greedy answers, and for sampled ones until they have `config.tokens` tokens.

    Raises:
        EnvironmentFailure: nobody is there, or it refuses one request after the other.
        RequestError: address, key or model are refused, or the journal is of another audit.
    """
    settings = {
        "server": identity_of(server, requests[0].prompt),
        "prompts": [each.ids for each in requests],
        "audit": config.model_dump(mode="json"),
    }
    folder = out / JOURNAL
    with Journal(folder, settings, environment()) as journal:
        collect = _Collect(tokenizer, requests, server, config, journal)
        try:
            way, first = asyncio.run(collect.run())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        if not journal.complete:
            journal.publish()
    rows = list(json_lines(folder / "answers.jsonl"))
    notes = missing(way, first)
    refused = journal.manifest["rows"]["rejected"]
    if refused:
        notes.append(f"{refused} requests were refused")
    asked = [collect.asked(row["number"]) for row in rows]
    kept = [_judgeable(row, way, each, vocabulary) for row, each in zip(rows, asked, strict=True)]
    unknown = sum(each is None for each in kept)
    if unknown:
        notes.append(
            f"{unknown} answers are left out: the server's template makes other tokens of their prompts than the "
            "target's own, and it does not say which"
        )
    foreign = sum(each is not None and each.prompt != sent.ids for each, sent in zip(kept, asked, strict=True))
    if foreign:
        notes.append(f"{foreign} prompts are rendered by another template than the target's own; they are judged so")
    pairs = [(row["number"], each) for row, each in zip(rows, kept, strict=True) if each is not None]
    sampled = [each for number, each in pairs if number >= collect.greedy]
    answered = {row["number"] for row in rows}
    lost = [number for number in _rejected(folder) if number >= collect.greedy]
    with_others = {id(collect.asked(number)) for number in answered if number >= collect.greedy}
    return ServedAnswers(
        way,
        [each for number, each in pairs if number < collect.greedy],
        sampled,
        notes,
        sum(id(collect.asked(number)) in with_others for number in lost),
    )


class _Collect:
    """Asks until there is enough."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[Request],
        server: ServerRequest,
        config: AuditConfig,
        journal: Journal,
    ) -> None:
        self._tokenizer, self._requests, self._config = tokenizer, list(requests), config
        self._journal = journal
        self._server = replace(
            server, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p
        )

    async def run(self) -> tuple[RequestStyle, Answer]:
        """The way that was found, and the answer that it was found by."""
        async with Transport(self._server) as transport:
            greedy = replace(self._server, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
            try:
                way, answer = await probe(
                    transport, replace(greedy, max_new_tokens=4), self._requests, self._tokenizer
                )
            except Refused as refused:
                raise EnvironmentFailure(
                    f"{self._server.public_url} answers no request, however it is asked; the last one: {refused}"
                ) from refused
            self._requests = [each for each in self._requests if way.takes(each)]
            if not self._journal.complete:
                await self._wave(transport, way, greedy, range(self.greedy))
                if answer.whole:
                    await self._until_enough(transport, way)
            return way, answer

    @property
    def greedy(self) -> int:
        """Greedy answers; those behind them are sampled."""
        return min(self._config.prompts, len(self._requests))

    def asked(self, number: int) -> Request:
        """What is asked: greedy ones stand in front, sampled ones go round and round."""
        at = number if number < self.greedy else number - self.greedy
        return self._requests[at % len(self._requests)]

    async def _until_enough(self, transport: Transport, way: RequestStyle) -> None:
        """Waves, all of whose answers are taken: short ones come first, and to stop by them would choose."""
        number, tokens = self.greedy, 0
        with live("asking", self._config.tokens, " tokens") as line:
            while tokens < self._config.tokens:
                wave = range(number, number + self._config.batch)
                await self._wave(transport, way, self._server, wave)
                entries = [self._journal.entry(each) for each in wave]
                written = sum(each.get("tokens", 0) for each in entries)
                if not written:
                    break  # it has stopped saying what it writes: more of the same would never be enough
                tokens += written
                number = wave.stop
                line.update(min(tokens, self._config.tokens) - line.n)

    async def _wave(self, transport: Transport, way: RequestStyle, request: ServerRequest, numbers: range) -> None:
        waiting = iter([each for each in numbers if each not in self._journal])
        refused: list[str] = []

        async def work() -> None:
            for number in waiting:
                asked = self.asked(number)
                try:
                    done = await ask(transport, request, way, asked, self._tokenizer, str(number))
                except Refused as reason:
                    refused.append(str(reason))
                    self._journal.add([_refusal(number, str(reason))])
                    continue
                self._journal.add([_entry(number, done)])

        async with asyncio.TaskGroup() as group:
            for _ in range(request.concurrency):
                group.create_task(work())
        if len(refused) == len(numbers):
            raise EnvironmentFailure(
                f"{request.public_url} refused {len(refused)} requests one after the other, the last one with: "
                f"{refused[-1]}. See to the server, then name a new --out"
            )


def _entry(number: int, answer: Answer) -> dict[str, Any]:
    """A line of the journal, with the sums that it adds up."""
    sums = {"tokens": len(answer.tokens or []), "turns": 1, "cut": int(not answer.ended)}
    zeros = dict.fromkeys(("retokenised", "steps", "emitted", "tested", "accepted"), 0)
    return {"row": number, "shape": "answer", "answer": {"number": number, **asdict(answer)}, **sums, **zeros}


def _refusal(number: int, reason: str) -> dict[str, Any]:
    return {"row": number, "rejected": {"file": "requests", "line": number + 1, "kind": "server", "reason": reason}}


def _rejected(folder: Path) -> list[int]:
    path = folder / REJECTED
    return [refused["line"] - 1 for refused in json_lines(path)] if path.is_file() else []


def _judgeable(row: dict[str, Any], way: RequestStyle, sent: Request, vocabulary: int) -> Judgeable | None:
    answer = Answer(**{name: value for name, value in row.items() if name != "number"})
    prompt = prompt_read(answer, way, sent.ids, vocabulary)
    # the same text as so many tokens is the same prompt; a chat goes through a template that may say other words
    sure = answer.prompt is not None or way.prompts == "ids" or not sent.prompt.chat
    return None if prompt is None else Judgeable(prompt, answer, sure)
