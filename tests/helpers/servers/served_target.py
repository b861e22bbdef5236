"""A small real server: a target decoded by our own engine behind OpenAI's endpoints, as vLLM speaks them.

It streams tokens as they are decoded, counts drafts on a Prometheus page, and hands out as much as it is
told to. Its bugs are those of real engines: a wrong token now and then, another temperature, a wrong rule.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from draftsmith.data.rows.templates import render_chat
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.rules.acceptance import Rule
from draftsmith.decoding.sampling import Warper, draw
from draftsmith.decoding.tree.tree import chain
from draftsmith.eval.report.pieces import TokenTexts
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from helpers.servers.server_thread import answering

ALL = frozenset({"completions", "prompt ids", "off", "ids", "names", "logprobs", "metrics"})


def small_target(folder: Path, tokenizer_folder: Path, *, seed: int = 0) -> Path:
    """A random target with a tokenizer and a chat template, whose greedy text does not repeat at once."""
    tokenizer = load_tokenizer(str(tokenizer_folder))
    torch.manual_seed(seed)
    sizes = ModelConfig(
        architecture="qwen3", layers=2, hidden=32, heads=4, kv_heads=2, head_size=16, max_positions=512
    )
    model = fresh_model(sizes, vocabulary=len(tokenizer), eos=None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.5)
        # embedding and projection are one: logits apart by some nats, as a trained model's
        model.get_output_embeddings().weight.mul_(3.7)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Engine:
    """What decodes, and what is wrong with it."""

    target: Backbone
    drafter: Proposer | None = None
    rule: Callable[[], Rule | None] = lambda: None
    heat: float = 1.0
    """By what the temperature is multiplied."""
    unfiltered: bool = False
    """Whether top-k, top-p and min-p are passed over."""
    second_best: int = 0
    """Every so many greedy tokens the second best one is written."""
    pause: float = 0.0
    """Seconds that a step takes beyond its computing."""
    counts: Counter[str] = field(default_factory=Counter)

    def write(
        self, prompt: list[int], warper: Warper, limit: int, seed: int, watch: Callable[[list[int]], None]
    ) -> tuple[list[int], dict[str, Any] | None]:
        """Tokens, and vLLM's account of the drafts; `watch` is given what is written so far."""
        filters = () if self.unfiltered else (warper.top_k, warper.top_p, warper.min_p)
        warper = Warper(warper.temperature * self.heat, *filters)
        self.counts["request_success"] += 1
        if self.drafter is None:
            tokens = self._plain(prompt, warper, limit, seed, watch)
            self.counts["generation_tokens"] += len(tokens)
            return tokens, None

        def watched(tokens: list[list[int]], _: list[list[str]]) -> None:
            time.sleep(self.pause)
            watch(tokens[0])

        done = generate(
            self.target,
            self.drafter,
            [prompt],
            warper=warper,
            max_new_tokens=limit,
            seed=seed,
            eos_ids=self.target.eos_ids,
            rule=None if warper.greedy else self.rule(),
            watch=watched,
        )
        tokens, length = done.tokens[0], self.drafter.draft_length
        accepted = done.steps.accepted_TB[done.steps.running_TB].tolist()
        self.counts["generation_tokens"] += len(tokens)
        self.counts["drafts"] += len(accepted)
        self.counts["draft_tokens"] += length * len(accepted)
        self.counts["accepted_tokens"] += sum(accepted)
        for at in range(length):
            self.counts[f"position {at}"] += sum(each > at for each in accepted)
        histogram = [accepted.count(n) for n in range(length + 1)]
        own = {"num_spec_tokens": length, "num_spec_steps": len(accepted), "num_accepted_draft_tokens": sum(accepted)}
        return tokens, own | {"acceptance_histogram_by_draft_length": {str(length): histogram}}

    @torch.inference_mode()
    def _plain(
        self, prompt: list[int], warper: Warper, limit: int, seed: int, watch: Callable[[list[int]], None]
    ) -> list[int]:
        kv_cache = KVCache(1, len(prompt) + limit + 1)
        uniforms = Uniforms(seed, [0], self.target.device)
        logits_1V = self.target.prefill([prompt], kv_cache)
        tokens: list[int] = []
        while True:
            place = int(warper.greedy and self.second_best and len(tokens) % self.second_best == 3)
            best = int(logits_1V[0].topk(2).indices[place])
            tokens.append(best if warper.greedy else int(draw(warper(logits_1V), uniforms.take(1)[:, 0])[0]))
            time.sleep(self.pause)
            watch(tokens)
            if len(tokens) == limit or tokens[-1] in self.target.eos_ids:
                return tokens
            length = torch.tensor([len(prompt) + len(tokens) - 1])
            logits_1V = self.target.forward(torch.tensor([[tokens[-1]]]), length, chain(0), kv_cache)[:, 0]

    def page(self) -> str:
        """The counters as Prometheus reads them."""
        labels = 'engine="0",model_name="small"'
        names = ["generation_tokens", "request_success"]
        lines = ["# HELP vllm:generation_tokens_total Number of tokens.", 'python_info{version="3"} 1.0']
        lines += [f"vllm:{name}_total{{{labels}}} {float(self.counts[name])}" for name in names]
        if self.drafter is not None:
            drafted = ("drafts", "draft_tokens", "accepted_tokens")
            lines += [f"vllm:spec_decode_num_{n}_total{{{labels}}} {float(self.counts[n])}" for n in drafted]
            lines += [f"vllm:spec_decode_num_{n}_created{{{labels}}} 1.7e+09" for n in drafted]
            for at in range(self.drafter.draft_length):
                name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{at}"}}'
                lines.append(f"{name} {float(self.counts[f'position {at}'])}")
        return "\n".join(lines) + "\n"


class ServedTarget(ThreadingHTTPServer):
    """The engine behind its endpoints; `hands_out` says what clients may ask and learn."""

    daemon_threads = True

    def __init__(self, engine: Engine, hands_out: Collection[str] = ALL, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.engine, self.hands_out = engine, frozenset(hands_out)
        self.decoding = threading.Lock()
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.fail_after: int | None = None
        """Requests that are answered before all others get status 401."""
        self.refusal: str | None = None
        """What every request is refused with."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ServedTarget

    def do_GET(self) -> None:
        if self.path == "/metrics" and "metrics" in self.server.hands_out:
            self._send(200, self.server.engine.page(), "text/plain; version=0.0.4")
        else:
            self._send(404, "nothing here")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.keys.append(self.headers.get("Authorization"))
        server.asked.append(body)
        if server.fail_after is not None and len(server.asked) > server.fail_after:
            self._send(401, "away")
        elif server.refusal is not None:
            self._send(400, server.refusal)
        elif self.path == "/v1/completions" and "completions" not in server.hands_out:
            self._send(404, "no such endpoint")
        elif isinstance(body.get("prompt"), list) and "prompt ids" not in server.hands_out:
            self._send(400, "prompt: expected a string")
        elif "repetition_penalty" in body and "off" not in server.hands_out:
            self._send(400, "repetition_penalty: unknown field")
        else:
            self._answer(body, chat=self.path.startswith("/v1/chat"))

    def _answer(self, body: dict[str, Any], *, chat: bool) -> None:
        target = self.server.engine.target
        prompt = _prompt(body, target.tokenizer, chat=chat)
        stream = body.get("stream")
        pieces = TokenTexts(target.tokenizer)
        sent: list[int] = []

        def watch(tokens: list[int]) -> None:
            new = tokens[len(sent) :]
            sent.extend(new)
            text = "".join(pieces.add(token) for token in new)
            if stream and text:
                self._event(_choice(text, None, chat=chat, delta=True))

        if stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
        warper = Warper(body["temperature"], max(0, body.get("top_k", 0)), body["top_p"], body.get("min_p", 0.0))
        with self.server.decoding:
            tokens, drafts = self.server.engine.write(prompt, warper, body["max_tokens"], body.get("seed", 0), watch)
        ended = tokens[-1] in target.eos_ids
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        if stream:
            self._event(_choice("", "stop" if ended else "length", chat=chat, delta=True))
            last: dict[str, Any] = {"choices": [], "usage": usage}
            if "per request" in self.server.hands_out:
                last["metrics"] = {"speculative_decoding": drafts}
            self._event(last)
            self.wfile.write(b"data: [DONE]\n\n")
            return
        text = target.tokenizer.decode(tokens, skip_special_tokens=True)
        choice = _choice(text, "stop" if ended else "length", chat=chat)
        self._hand_out(choice["choices"][0], body, prompt, tokens, chat=chat)
        self._send(200, json.dumps(choice | {"usage": usage}), "application/json")

    def _hand_out(
        self, choice: dict[str, Any], body: dict[str, Any], prompt: list[int], tokens: list[int], *, chat: bool
    ) -> None:
        hands_out, target = self.server.hands_out, self.server.engine.target
        if body.get("return_token_ids") and "ids" in hands_out:
            choice |= {"token_ids": tokens, "prompt_token_ids": prompt}
        if body.get("logprobs") and "logprobs" in hands_out:
            named = body.get("return_tokens_as_token_ids") and "names" in hands_out
            names = [f"token_id:{each}" if named else target.tokenizer.decode([each]) for each in tokens]
            with torch.inference_mode():
                logits = target.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
            values = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            pairs = list(zip(names, values, strict=True))
            content = {"content": [{"token": name, "logprob": value} for name, value in pairs]}
            choice["logprobs"] = content if chat else {"tokens": names, "token_logprobs": values}

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _prompt(body: dict[str, Any], tokenizer: Any, *, chat: bool) -> list[int]:
    if chat:
        text = render_chat(tokenizer, body["messages"], answer_next=True)
    elif isinstance(body["prompt"], list):
        return list(body["prompt"])
    else:
        text = body["prompt"]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _choice(text: str, reason: str | None, *, chat: bool, delta: bool = False) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    own: dict[str, Any] = {"delta" if delta else "message": message} if chat else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": reason, **own}]}


@contextmanager
def serving(engine: Engine, hands_out: Collection[str] = ALL) -> Iterator[ServedTarget]:
    """The server while it runs."""
    with answering(ServedTarget(engine, hands_out)) as server:
        yield server


def without(*names: str) -> Sequence[str]:
    """What a server hands out that keeps these to itself."""
    return sorted(ALL - set(names))
