"""What is asked of an OpenAI-compatible server, and how patiently. No torch here, no network.

Read next: `server.py`, which asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from ...errors import RequestError


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
