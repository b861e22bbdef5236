"""What is asked of an OpenAI-compatible server, and how patiently. No torch here, no network.

Read next: `server.py`, which asks; `transport.py`, how.
"""

from __future__ import annotations

import hashlib
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
