"""What is asked of an OpenAI-compatible server, and how patiently. No torch here, no network.

What comes back, text, thoughts and calls of tools, is read by whatever names a server has for it. Servers give
thoughts as `reasoning`, `reasoning_content` or `reasoning_details`, and gateways several of them at once: that is one
text, not two. Text may come as a list of parts, of which some are thoughts. Whole messages and pieces of a stream have
the same shape.

Read next: `server.py`, which asks; `transport.py`, how.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ...errors import RequestError

OFF: Mapping[str, float] = {
    "top_k": -1,  # engines take it for no limit; 0 is refused by one of them
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What a server fills in by itself, from the target's generation_config.json say, and how a body switches it off."""
LEVELS: tuple[tuple[str, ...], ...] = (
    tuple(OFF),
    ("top_k", "min_p", "presence_penalty", "frequency_penalty"),
    ("top_k", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    ("top_k", "presence_penalty", "frequency_penalty"),
    ("presence_penalty", "frequency_penalty"),
    (),
)
"""Which of them are said, from all to none: servers refuse names that they do not know."""


@dataclass(frozen=True)
class ServerRequest:
    """Where to, for which model, by which distribution; retries and time limits."""

    url: str
    """As given; `base_url` is what requests are sent to."""
    model: str
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    seed: int
    concurrency: int = 8
    retries: int = 5
    """Tries after the first one."""
    timeout: float = 600.0
    """Seconds for one answer."""
    first_wait: float = field(default=0.5, repr=False)
    """Seconds before the first retry."""
    min_p: float = 0.0
    template_values: Mapping[str, object] | None = None
    """Of the variables of the target's chat template."""

    def sampling(self, stream: str, off: Collection[str] = ()) -> dict[str, Any]:
        """The model and the distribution, as a request's body says them.

        Args:
            stream: names what is answered; with the seed it gives the random numbers.
            off: of the names in `OFF`, those that the server takes. Others are said where they are on alone.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_new_tokens,
        }
        body |= {name: OFF[name] for name in off}
        filters = {"top_k": self.top_k, "min_p": self.min_p}
        body |= {name: value for name, value in filters.items() if value}
        if self.temperature:
            # a stream's own seed, in the 31 bits that every server takes
            digest = hashlib.sha256(f"{self.seed}:{stream}".encode()).digest()
            body["seed"] = int.from_bytes(digest[:4], "big") >> 1
        return body

    def for_template(self) -> dict[str, Any]:
        """What the body of a chat says to the template."""
        return {} if self.template_values is None else {"chat_template_kwargs": dict(self.template_values)}

    @property
    def base_url(self) -> str:
        """The URL up to the endpoints; `/v1` is added to a bare host.

        Raises:
            RequestError: it is no http(s) URL.
        """
        try:
            parts = urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # half an IPv6 address, a port that is no number
            fits = False
        if not fits:
            raise RequestError(f"--server {self.url!r} is no URL; expected for example http://localhost:8000")
        path = parts.path.rstrip("/") or "/v1"
        return urlunsplit((parts.scheme, parts.netloc, path, "", ""))

    @property
    def public_url(self) -> str:
        """The base URL without user name and password, to be written down."""
        parts = urlsplit(self.base_url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def page_url(self, name: str) -> str:
        """A page at the root of the server, `metrics` say, which is no endpoint of OpenAI's."""
        parts = urlsplit(self.base_url)
        return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/v')[0]}/{name}"))


def told_tokens(usage: Any, name: str) -> int | None:
    """A count of tokens as an answer's `usage` has it; None where it has none: gateways fill in zeros."""
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


_TEXTS = ("reasoning_content", "reasoning")
_DETAILS = "reasoning_details"
_IN_PARTS = ("text", "thinking", "summary", "content")  # the names under which a part has its text


@dataclass(frozen=True)
class Message:
    """A message, or a piece of one."""

    text: str | None
    """Without thoughts and calls; None where the server says that there is none."""
    thoughts: str
    """Empty where none stand apart from the text."""
    withheld: bool
    """Whether thoughts are there that cannot be read as they were written: summarised, or encrypted."""
    calls: str
    """Names and arguments of the tools that are called, one behind the other."""

    @property
    def apart(self) -> bool:
        """Whether something that was decoded stands beside the text."""
        return bool(self.thoughts or self.calls or self.withheld)

    @property
    def decoded(self) -> str:
        """All that was decoded, in the order in which models write it."""
        return self.thoughts + (self.text or "") + self.calls


def read_message(message: Mapping[str, Any]) -> Message:
    """The message under its usual names; what is of another type than it should be says nothing."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    own = [each for each in parts if not _is_thought(each)]
    text = "".join(map(_text_of, own)) if isinstance(content, list) else content
    details, withheld = _details(message.get(_DETAILS))
    said = [message.get(name) for name in _TEXTS]
    inside = "".join(_text_of(each) for each in parts if _is_thought(each))
    thoughts = next((each for each in (*said, details, inside) if isinstance(each, str) and each), "")
    return Message(text if isinstance(text, str) else None, thoughts, withheld, _calls(message))


def _details(details: Any) -> tuple[str, bool]:
    """The text of `reasoning_details`, and whether more of them is there than text."""
    items = [each for each in details if isinstance(each, Mapping)] if isinstance(details, list) else []
    told = [each for each in items if str(each.get("type", "reasoning.text")).endswith("text")]
    return "".join(map(_text_of, told)), len(told) < len(items)


def _is_thought(part: Any) -> bool:
    return isinstance(part, Mapping) and str(part.get("type")) in ("thinking", "reasoning")


def _text_of(part: Any) -> str:
    """The text of a part, which may be a list of parts again."""
    if isinstance(part, list):
        return "".join(map(_text_of, part))
    if isinstance(part, Mapping):
        return "".join(_text_of(part[name]) for name in _IN_PARTS if name in part)
    return part if isinstance(part, str) else ""


def _calls(message: Mapping[str, Any]) -> str:
    """Tools by today's name, and the one function by OpenAI's first one."""
    calls = message.get("tool_calls")
    found = [each.get("function") for each in calls if isinstance(each, Mapping)] if isinstance(calls, list) else []
    # a call of which nothing can be read is one all the same
    shown = ["{}" if not isinstance(each, Mapping) else _call(each) for each in found]
    old = message.get("function_call")
    return "".join([*shown, *([_call(old)] if isinstance(old, Mapping) else [])])


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments)
    return f"{function.get('name') or ''}{written}"
