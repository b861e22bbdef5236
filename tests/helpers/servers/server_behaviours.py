"""Servers of many kinds over one small target: what they hand out, keep back, alter on its way, and get wrong.

`Behaviour.drawn` makes one of a seed, and all of them are right: nothing of it changes which tokens are written.
`FAULTS` are wrong ones. Texts are decoded once for each kind of fault and kept, so that many behaviours are cheap.
"""

from __future__ import annotations

import html
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from draftsmith.data.generate.server_request import OFF
from draftsmith.data.rows.templates import named_template, render_chat
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.rules.acceptance import Rule
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.audit.plants import PLANTS
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from helpers.servers.scripted_server import Answer, Server
from helpers.servers.served_target import Engine

WORDS = "the quick brown fox asks, and a lazy dog answers: yes, no, perhaps. caf\u00e9 \u4e16\u754c & <b> \U0001f642\n"


def talking_target(folder: Path, *, seed: int = 12) -> Backbone:
    """A random target with a small tokenizer, whose greedy text wanders and some of whose answers end by themselves."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>", "<think>", "</think>"]
    corpus = [WORDS, "system user assistant be helpful\n"] * 9
    raw.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=96, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=special[0], additional_special_tokens=special[1:2]
    )
    tokenizer.chat_template = named_template("chatml")
    torch.manual_seed(seed)
    sizes = ModelConfig(
        architecture="qwen3", layers=2, hidden=32, heads=4, kv_heads=2, head_size=16, max_positions=256, tied=False
    )
    model = fresh_model(sizes, vocabulary=len(tokenizer), eos=tokenizer.eos_token_id).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
        projection_VH = model.get_output_embeddings().weight.normal_(0, 0.35)
        projection_VH[tokenizer.eos_token_id] *= 1.5  # ends that come now and then
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    backbone = Backbone(model, name=str(folder))
    backbone.tokenizer = tokenizer
    return backbone


@dataclass(frozen=True)
class Fault:
    """What is wrong with an engine; nothing by default."""

    heat: float = 1.0
    rule: Callable[[], Rule | None] | None = None
    top_k: int = 0
    """Left on whatever a request says, above T = 0."""
    cached: bool = False
    """Whether a prompt has one answer, whatever its random numbers."""
    second_best: int = 0
    other: bool = False
    """Whether another model is served."""


RIGHT = Fault()
FAULTS = {
    "lenient acceptance": Fault(rule=PLANTS["typical-acceptance"].make_rule),
    "too warm": Fault(heat=1.6),
    "too cold": Fault(heat=0.6),
    "top-k left on": Fault(top_k=5),
    "cached answers": Fault(cached=True),
    "second best": Fault(second_best=7),
    "another model": Fault(other=True),
}


class Speaker:
    """Engines over one target, each of whose answers is decoded once."""

    def __init__(self, target: Backbone, other: Backbone, drafter: Proposer) -> None:
        self.target, self._other, self._drafter = target, other, drafter
        self._kept: dict[tuple[Any, ...], list[int]] = {}
        self._lock = threading.Lock()

    def write(self, fault: Fault, prompt: list[int], warper: Warper, limit: int, seed: int) -> list[int]:
        """The tokens of an answer, its end included."""
        if fault.top_k and not warper.greedy:
            warper = Warper(warper.temperature, fault.top_k, warper.top_p, warper.min_p)
        number = 0 if warper.greedy or fault.cached else seed
        key = (fault, tuple(prompt), warper, limit, number)
        with self._lock:
            if key not in self._kept:
                target = self._other if fault.other else self.target
                drafted = fault.rule is not None and not warper.greedy
                engine = Engine(target, self._drafter if drafted else None, fault.rule or (lambda: None), fault.heat)
                engine.second_best = fault.second_best
                self._kept[key] = engine.write(prompt, warper, limit, number, lambda _: None)[0]
            return self._kept[key]


THOUGHTS = ("reasoning", "reasoning_content", "reasoning_details")
ENDINGS = {"stop": ("stop", "eos", "end_turn", None), "length": ("length", "max_tokens", None)}


@dataclass(frozen=True)
class Behaviour:
    """How a server takes requests and gives answers; each field is one of its habits."""

    takes_ids: bool = True
    completions: bool = True
    refuses: tuple[str, ...] = ()
    refusal: int = 400
    ids: str | None = "token_ids"
    """By which field ids are told: `token_ids`, `names`; None: not at all."""
    end_told: bool = True
    """Whether the token that ended an answer is among the ids."""
    prompt_told: str | None = "choice"
    usage: str = "all"
    logprobs: str = "raw"
    nulls: bool = False
    """Whether fields without a value are there as null."""
    thoughts: tuple[str, ...] = ()
    """By which fields the beginning of an answer is told as thoughts."""
    calls: bool = False
    """Whether the end of an answer is told as a call of a tool."""
    apart_ids: bool = True
    """Whether what stands apart has its ids among the others."""
    ending: int = 0
    """Which of the words for why an answer ended."""
    stop: str | None = None
    """A string at which answers end."""
    stop_told: bool = True
    text: str = "as it is"
    cap: int | None = None
    """Fewer tokens than are asked for."""
    system: str | None = None
    """A turn that the template puts in front of chats."""
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)

    @classmethod
    def drawn(cls, seed: int) -> Behaviour:
        """One of many; half of the habits are the usual ones."""
        rng = random.Random(seed)
        usual = cls()

        def some(name: str, *others: Any, share: float = 0.3) -> Any:
            return rng.choice(others) if rng.random() < share else getattr(usual, name)

        names = [*OFF, "return_token_ids", "return_tokens_as_token_ids", "logprobs"]
        kinds = ("application/json; charset=utf-8", "text/plain", "application/json; charset=iso-8859-1")
        return cls(
            some("takes_ids", False),
            some("completions", False, share=0.2),
            some("refuses", tuple(rng.sample(names, rng.randint(1, 4)))),
            some("refusal", 422),
            some("ids", "names", None, share=0.4),
            some("end_told", False),
            some("prompt_told", "top", "empty", None, share=0.4),
            some("usage", "none", "null", "zeros", "no prompt", "list", "with the end alone"),
            some("logprobs", "behind", "none", "null", "no content", "zeros", "short", "last is null"),
            some("nulls", True),
            some("thoughts", *((each,) for each in THOUGHTS), THOUGHTS[:2], THOUGHTS),
            some("calls", True, share=0.15),
            some("apart_ids", False),
            some("ending", 1, 2, 3),
            some("stop", "a", " ", "o", share=0.15),
            some("stop_told", False),
            some("text", *TEXTS, share=0.4),
            some("cap", 5, share=0.15),
            some("system", "be the fox", share=0.15),
            some("headers", *((("Content-Type", each), ("X-Via", "a gateway")) for each in kinds)),
        )

    def serve(self, speaker: Speaker, fault: Fault = RIGHT) -> Server:
        """A server that behaves so; it is to be started."""
        return Server(lambda _, body: self._answer(speaker, fault, body))

    def _answer(self, speaker: Speaker, fault: Fault, body: dict[str, Any]) -> Answer:
        unknown = [name for name in self.refuses if name in body]
        if unknown:
            return self._json(self.refusal, {"error": {"message": f"{unknown[0]}: extra fields not permitted"}})
        chat = "messages" in body
        if not chat and not self.completions:
            return self._json(404, {"detail": "Not Found"})
        if not chat and isinstance(body["prompt"], list) and not self.takes_ids:
            return self._json(self.refusal, {"error": "prompt: expected a string"})
        written = self._written(speaker, fault, body)
        return self._json(200, written.told(self, body))

    def _written(self, speaker: Speaker, fault: Fault, body: dict[str, Any]) -> Written:
        target = speaker.target
        chat, prompt = "messages" in body, body.get("prompt")
        if chat:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = render_chat(target.tokenizer, [*system, *body["messages"]], answer_next=True)
        ids = prompt if isinstance(prompt, list) else target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        warper = Warper(body["temperature"], max(0, body.get("top_k", 0)), body["top_p"], body.get("min_p", 0.0))
        limit = body["max_tokens"] if self.cap is None else min(self.cap, body["max_tokens"])
        tokens = speaker.write(fault, ids, warper, limit, body.get("seed", 0))
        return Written(speaker, fault, ids, self._stopped(target, tokens), warper, len(tokens))

    def _stopped(self, target: Backbone, tokens: list[int]) -> list[int]:
        """The tokens up to the one that completes the stop string."""
        for at in range(1, len(tokens) + 1):
            if self.stop is not None and self.stop in target.tokenizer.decode(tokens[:at], skip_special_tokens=True):
                return tokens[:at]
        return tokens

    def _json(self, status: int, content: dict[str, Any]) -> Answer:
        return status, dict(self.headers), json.dumps(content, ensure_ascii=False).encode()


TEXTS: dict[str, Callable[[str], str]] = {
    "stripped": str.strip,
    "in front": lambda text: f"Answer: {text}",
    "behind": lambda text: f"{text}\n-- a gateway",
    "escaped": lambda text: html.escape(text).replace("a", "&#97;"),
    "spoilt": lambda text: text.replace("\u00e9", "\ufffd\ufffd").replace("\u4e16", "\ufffd"),
    "one space": lambda text: " ".join(text.split()),
    "no beginning": lambda text: text[len(text) // 2 :],
    "empty": lambda _: "",
}


@dataclass
class Written:
    """An answer before it is told."""

    speaker: Speaker
    fault: Fault
    prompt: list[int]
    tokens: list[int]
    warper: Warper
    whole: int
    """Tokens before a stop string cut it."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.tokens[-1] in self.speaker.target.eos_ids

    def told(self, how: Behaviour, body: dict[str, Any]) -> dict[str, Any]:
        """The body of the response."""
        chat = "messages" in body
        stopped = how.stop is not None and how.stop in self._text(self.tokens)
        reason = "stop" if self.ended or stopped else "length"
        words = ENDINGS[reason]
        choice: dict[str, Any] = {"index": 0, "finish_reason": words[how.ending % len(words)]}
        if stopped and how.stop_told:
            choice["stop_reason"] = how.stop
        elif how.nulls:
            choice["stop_reason"] = None
        parts = self._parts(how) if chat else ([], self.tokens, [])
        choice |= self._message(how, parts, stopped) if chat else {"text": self._shown(how, self.tokens, stopped)}
        shown = [*parts[0], *parts[1], *parts[2]] if how.apart_ids else parts[1]
        if self.ended and not how.end_told and shown and shown[-1] == self.tokens[-1]:
            shown = shown[:-1]
        content = {"id": "cmpl", "object": "text_completion", "choices": [choice], "model": body["model"]}
        self._tell_ids(how, body, choice, content, shown)
        self._tell_logprobs(how, body, choice, shown, chat=chat)
        return content | self._usage(how)

    def _parts(self, how: Behaviour) -> tuple[list[int], list[int], list[int]]:
        """Thoughts, text, call."""
        third = max(1, len(self.tokens) // 3)
        thoughts = third if how.thoughts else 0
        calls = third if how.calls and len(self.tokens) > 2 * third else 0
        return (
            self.tokens[:thoughts],
            self.tokens[thoughts : len(self.tokens) - calls],
            self.tokens[len(self.tokens) - calls :],
        )

    def _message(self, how: Behaviour, parts: tuple[list[int], list[int], list[int]], stopped: bool) -> dict[str, Any]:
        thoughts, text, call = parts
        shown = self._shown(how, text, stopped)
        empty = dict.fromkeys(("reasoning", "tool_calls", "function_call", "refusal"), None) if how.nulls else {}
        message = {"role": "assistant", **empty, "content": shown or (None if how.nulls else "")}
        told = self._text(thoughts)
        for name in how.thoughts if thoughts else ():
            message[name] = [{"type": "reasoning.text", "text": told}] if name == THOUGHTS[2] else told
        if call:
            message["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": self._text(call)}}]
        return {"message": message}

    def _shown(self, how: Behaviour, tokens: list[int], stopped: bool) -> str:
        text = self._text(tokens)
        if stopped and how.stop is not None:
            text = text.partition(how.stop)[0]
        return TEXTS.get(how.text, lambda each: each)(text)

    def _text(self, tokens: list[int]) -> str:
        return str(self.speaker.target.tokenizer.decode(tokens, skip_special_tokens=True))

    def _tell_ids(
        self, how: Behaviour, body: dict[str, Any], choice: dict[str, Any], content: dict[str, Any], shown: list[int]
    ) -> None:
        if not body.get("return_token_ids"):
            return
        if how.ids == "token_ids":
            choice["token_ids"] = shown
        elif how.nulls:
            choice["token_ids"] = None
        where = {"choice": choice, "top": content, "empty": choice}.get(how.prompt_told or "")
        if where is not None:
            where["prompt_token_ids"] = [] if how.prompt_told == "empty" else self.prompt

    def _tell_logprobs(
        self, how: Behaviour, body: dict[str, Any], choice: dict[str, Any], shown: list[int], *, chat: bool
    ) -> None:
        if not body.get("logprobs") or how.logprobs == "none":
            return
        if how.logprobs in ("null", "no content"):
            choice["logprobs"] = None if how.logprobs == "null" else {"content": None, "tokens": None}
            return
        named = body.get("return_tokens_as_token_ids") and how.ids == "names"
        names = [f"token_id:{each}" if named else self._text([each]) for each in shown]
        values: list[Any] = self._logprobs(how, shown)
        if how.logprobs == "last is null" and values:
            values[-1] = None
        pairs = list(zip(names, values, strict=True))
        pairs = pairs[:-1] if how.logprobs == "short" and not named else pairs
        if chat:
            choice["logprobs"] = {"content": [{"token": name, "logprob": value} for name, value in pairs]}
        else:
            choice["logprobs"] = {"tokens": [name for name, _ in pairs], "token_logprobs": [each for _, each in pairs]}

    @torch.inference_mode()
    def _logprobs(self, how: Behaviour, shown: list[int]) -> list[Any]:
        """Of the tokens that are shown, each where it stands in the answer."""
        if how.logprobs == "zeros":
            return [0.0] * len(shown)
        target = self.speaker._other if self.fault.other else self.speaker.target
        ids = torch.tensor([[*self.prompt, *self.tokens]])
        logits = target.model(ids).logits[0, len(self.prompt) - 1 : -1].float()
        heat = self.warper.temperature * self.fault.heat
        log_p = (logits / heat if how.logprobs == "behind" and heat else logits).log_softmax(-1)
        values = log_p.gather(1, torch.tensor(self.tokens)[:, None])[:, 0].tolist()
        start = next(at for at in range(len(self.tokens) + 1) if self.tokens[at : at + len(shown)] == shown)
        return values[start : start + len(shown)]

    def _usage(self, how: Behaviour) -> dict[str, Any]:
        count = len(self.tokens) - (self.ended and how.usage == "with the end alone")
        usage: dict[str, Any] = {"prompt_tokens": len(self.prompt), "completion_tokens": count}
        if how.usage == "no prompt":
            del usage["prompt_tokens"]
        shapes: dict[str, Any] = {"null": None, "zeros": dict.fromkeys(usage, 0), "list": []}
        return {} if how.usage == "none" else {"usage": shapes.get(how.usage, usage)}
