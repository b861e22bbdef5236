"""Hidden states by a serving engine: a document's token ids out, its states back, over HTTP and a file.

vLLM's `extract_hidden_states`, as it is released: nothing of the engine is imported or patched. One
request per document, as token ids, so that no template, no neighbour and no truncation can come in
between.

The file that the engine leaves for a request is waited for, read, held to what was asked, and removed: vLLM's
connector writes `hidden_states` [T, N, H] and `token_ids` [T] beside a lock file, which it holds until the file is
whole.

Read next: `trainers/teacher/engine.py`, who asks;
`trainers/teacher/handshake.py`, the proof that they are the target's.

Shapes: T tokens of a document, N hidden states of a token, H hidden size.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from torch import Tensor

from ...errors import EnvironmentFailure, RequestError
from ...storage import check_tensors, read_tensors
from ..generate.server_request import ServerRequest
from ..generate.transport import KEY

_SHOWN = 300  # characters of a server's reply that a message quotes
_PASSING = (408, 429)
_TRIES = 4
_UNFILTERED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said, because a server takes what the model's generation_config.json has in their place."""


@dataclass(frozen=True)
class EngineRequest:
    """Which server, and what it hands out."""

    url: str
    model: str
    """The name that the server knows the target by."""
    shared: Path
    """The server's shared_storage_path, as it is seen here: files elsewhere are neither read nor removed."""
    layers: tuple[int, ...]
    """The states of a token, low to high, as `hidden_states` counts them."""
    hidden: int
    timeout: float = 120.0
    """Seconds for one document."""
    first_wait: float = 0.5
    """Seconds before the first retry; later ones wait twice as long each."""

    @property
    def _server(self) -> ServerRequest:
        return ServerRequest(self.url, self.model, 0.0, 0, 1.0, 1, 0)

    @property
    def base_url(self) -> str:
        """The URL up to the endpoints; RequestError where it is none."""
        try:
            return self._server.base_url
        except RequestError as error:
            raise RequestError(
                f"features.server is {self.url!r:.120}, no URL; expected for example http://localhost:8000"
            ) from error

    @property
    def public_url(self) -> str:
        """The same without user name and password."""
        _ = self.base_url
        return self._server.public_url


class States(NamedTuple):
    """What a server says of a document."""

    states_TNH: Tensor
    """In the engine's precision; the last one is in front of the last norm."""
    fingerprint: str | None
    """The server's own word for what it runs."""
    logprobs: list[float] | None
    """Of tokens 1 to T - 1, given those before; None where they were not asked for."""
    next_token: int | None
    """The likeliest token behind the document."""


class AnswerStates(NamedTuple):
    """What a server has written behind a prompt, and the states of both."""

    ids: list[int]
    states_TNH: Tensor
    """Of the prompt and the answer without its last token, which the server never reads."""
    fingerprint: str | None


class Engine:
    """A running server. Any thread may ask."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._key = os.environ.get(KEY) or None
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._http = httpx2.Client(headers=headers, timeout=request.timeout)

    def close(self) -> None:
        """Let connections go."""
        self._http.close()

    def check_serves(self, tokens: int) -> None:
        """Raise RequestError where the server has no such model, or no room for documents of so many tokens."""
        content = self._send("GET", "models", None)
        try:
            served = {str(each["id"]): each.get("max_model_len") for each in content["data"]}
        except (LookupError, TypeError, AttributeError) as error:
            raise self._strange("a list of models", content) from error
        if self.request.model not in served:
            raise RequestError(
                f"{self.request.public_url} serves {', '.join(served) or 'no model'}, and features.served_model is "
                f"{self.request.model!r}; name it as the server does"
            )
        room = served[self.request.model]
        if isinstance(room, int) and room <= tokens:
            raise RequestError(
                f"{self.request.public_url} has room for {room} tokens, and a document may have {tokens}, and one is "
                f"written behind it; start it with --max-model-len {tokens + 1} or more, or lower data.sequence_length"
            )

    def ask(self, ids: Sequence[int], *, logprobs: bool = False) -> States:
        """The states of a document.

        Args:
            logprobs: what the engine itself makes of them too.

        Raises:
            RequestError: the server refuses the document, or hands out what is not its states.
            EnvironmentFailure: nobody is there, or no file appears.
        """
        asked = {"max_tokens": 1, "temperature": 0} | ({"prompt_logprobs": 1} if logprobs else {})
        content, tensors = self._complete(ids, asked)
        try:
            choice = content["choices"][0]
            next_token = choice.get("token_ids") or [None]
            own = _logprobs(choice, ids) if logprobs else None
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._strange("prompt_logprobs, which were asked for", content) from error
        states = checked(tensors, ids, self.request.layers, self.request.hidden)
        return States(states, content.get("system_fingerprint"), own, next_token[0])

    def answer(self, prompt: Sequence[int], tokens: int, *, temperature: float, seed: int) -> AnswerStates:
        """What the target itself writes behind a prompt, at most so many tokens, and its states: one request.

        Raises:
            As `ask` does, and RequestError where the states of the answer are not among those handed out.
        """
        sampling = {"temperature": temperature, "seed": seed, **_UNFILTERED}
        asked = {"max_tokens": tokens, **sampling, "kv_transfer_params": {"include_output_tokens": True}}
        content, tensors = self._complete(prompt, asked)
        written = content["choices"][0].get("token_ids")
        if not isinstance(written, list) or not written or not all(isinstance(token, int) for token in written):
            raise self._strange("the token ids of an answer (return_token_ids)", content)
        if len(tensors.get(IDS, ())) == len(prompt) < len(prompt) + len(written) - 1:
            raise RequestError(
                f"{self.request.public_url} has answered, and hands out the states of the prompt alone: it does not "
                "know include_output_tokens. Take vLLM 0.32 or newer, or leave features.answers and let draftsmith "
                "generate write the answers first"
            )
        states = checked(tensors, [*prompt, *written[:-1]], self.request.layers, self.request.hidden)
        return AnswerStates(written, states, content.get("system_fingerprint"))

    def _complete(self, ids: Sequence[int], asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The server's reply to token ids that it has read as they are, and the tensors of its file."""
        body = {"model": self.request.model, "prompt": list(ids), "return_token_ids": True, **asked}
        content = self._send("POST", "completions", body)
        tensors = take(self._path(content), self.request.timeout)
        try:
            read = content["choices"][0]["prompt_token_ids"]
        except (LookupError, TypeError) as error:
            raise self._strange("the token ids that it has read (return_token_ids)", content) from error
        if read != list(ids):
            raise RequestError(
                f"{self.request.public_url} was sent {len(ids)} token ids and has read {len(read or ())} others: a "
                "prompt is cut or changed on the way; leave out truncate_prompt_tokens and proxies that rewrite"
            )
        return content, tensors

    def _path(self, content: dict[str, Any]) -> Path:
        """Where the states are, which has to be in the folder that the recipe names."""
        given = (content.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(given, str):
            raise RequestError(
                f"{self.request.public_url} answers and hands out no hidden states; start it with\n"
                f"{start_command('TARGET', self.request)}"
            )
        shared, path = self.request.shared.resolve(), Path(given)
        if path.suffix != ".safetensors" or not path.resolve().is_relative_to(shared):
            raise RequestError(
                f"{self.request.public_url} names the file {given!r:.200}, which is not in features.shared "
                f"({shared}), and so neither read nor removed; name the server's shared_storage_path, as seen here"
            )
        return path

    def _send(self, method: str, endpoint: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """A server's answer; what may pass is tried again."""
        last = ""
        for retry in range(_TRIES):
            try:
                response = self._http.request(method, f"{self.request.base_url}/{endpoint}", json=body)
            except httpx2.TimeoutException:
                last = f"no answer within {self.request.timeout:g} s"
            except httpx2.TransportError as error:
                last = f"no connection ({type(error).__name__}: {error})"
            else:
                if response.status_code < 500 and response.status_code not in _PASSING:
                    return self._read(response)
                last = f"status {response.status_code}: {self._shown(response.text)}"
            if retry + 1 < _TRIES:
                time.sleep(self.request.first_wait * 2**retry)
        raise EnvironmentFailure(
            f"the engine at {self.request.public_url} was tried {_TRIES} times: {last}. What is done is kept: start "
            "the server and go on with --resume auto"
        )

    def _read(self, response: httpx2.Response) -> dict[str, Any]:
        if response.status_code != 200:
            raise RequestError(
                f"the engine at {self.request.public_url} refuses with status {response.status_code}: "
                f"{self._shown(response.text)}; check features.server, features.served_model and {KEY}"
            )
        try:
            content = response.json()
        except ValueError as error:
            raise self._strange("JSON", response.text) from error
        if not isinstance(content, dict):
            raise self._strange("a JSON object", content)
        return content

    def _strange(self, expected: str, found: object) -> RequestError:
        return RequestError(
            f"{self.request.public_url} answers {self._shown(str(found))}; expected {expected}: is it vLLM, 0.18 or "
            "newer?"
        )

    def _shown(self, text: str) -> str:
        """The start of the server's message, without the key in case it repeats it."""
        return " ".join((text.replace(self._key, "...") if self._key else text).split())[:_SHOWN] or "nothing"


def _logprobs(choice: dict[str, Any], ids: Sequence[int]) -> list[float]:
    """The engine's own log-probabilities of tokens 1 to T - 1."""
    listed = choice["prompt_logprobs"]
    if len(listed) != len(ids):
        raise ValueError(f"{len(listed)} log-probabilities for {len(ids)} tokens")
    return [float(each[str(token)]["logprob"]) for each, token in zip(listed[1:], ids[1:], strict=True)]


def start_command(target: str, request: EngineRequest) -> str:
    """How vLLM is started so that it hands out these states, quoted for a shell."""
    ids = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(request.layers)}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": ids}
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(request.shared)},
    }
    words = ["vllm", "serve", target, "--served-model-name", request.model]
    words += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    return shlex.join(words)


STATES, IDS = "hidden_states", "token_ids"
_POLL = 0.005  # seconds
_REMEDY = "look into the server's log, and start it anew"


def take(path: Path, seconds: float) -> dict[str, Tensor]:
    """The tensors of a file once it is whole; the file and its lock are removed, whatever they hold.

    Raises:
        EnvironmentFailure: it has not appeared whole in so many seconds, or cannot be read or removed here.
        RequestError: it is whole and damaged.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        try:
            _wait(path, lock, seconds)
            return read_tensors(path, remedy=_REMEDY)
        finally:
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentFailure(
            f"the engine's file {path} cannot be read and removed here ({error.strerror or error}); let the server "
            "and this process run as one user, or share the folder with that right"
        ) from error


def _wait(path: Path, lock: Path, seconds: float) -> None:
    """Return once nobody writes the file any more."""
    until = time.monotonic() + seconds
    while True:
        if _is_whole(path, lock):
            return
        if time.monotonic() > until:
            raise EnvironmentFailure(
                f"the engine says that the states are in {path}, and no whole file has appeared in {seconds:g} s; "
                "see that features.shared is the server's shared_storage_path, seen by both, and has room; then look "
                "into the server's log"
            )
        time.sleep(_POLL)


def _is_whole(path: Path, lock: Path) -> bool:
    if not path.is_file():
        return False
    if not lock.is_file():  # the server was told to use none: the file's header knows its length
        try:
            check_tensors(path, remedy=_REMEDY)
        except RequestError:
            return False
        return True
    with lock.open() as held:
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def checked(tensors: Mapping[str, Tensor], ids: Sequence[int], layers: Sequence[int], hidden: int) -> Tensor:
    """The states [T, N, H] of a file, if they are all of the document `ids` and of nothing else.

    Raises:
        RequestError: they are of other tokens, too few, of other layers or sizes, or not finite.
    """
    states, found = tensors.get(STATES), tensors.get(IDS)
    if states is None or found is None or states.ndim != 3 or not states.is_floating_point():
        raise RequestError(
            f"the engine's file holds {', '.join(sorted(tensors)) or 'nothing'}; expected {STATES}, of 3 dimensions, "
            f"and {IDS}, as vLLM's ExampleHiddenStatesConnector writes them"
        )
    T, N, H = states.shape
    if len(ids) != T:
        raise RequestError(
            f"the engine's states are of {T} tokens, and the document has {len(ids)}. Older engines leave out what "
            "their prefix cache holds: start the server with --no-enable-prefix-caching, or take vLLM 0.23 or newer"
        )
    if found.tolist() != list(ids):
        at = next((t for t, (a, b) in enumerate(zip(found.tolist(), ids, strict=False)) if a != b), len(ids))
        raise RequestError(
            f"the engine's file is of other tokens, from position {at} on, than it was asked for; its files are mixed "
            "up: give each server a shared_storage_path of its own"
        )
    if len(layers) != N or hidden != H:
        raise RequestError(
            f"the engine hands out {N} hidden states of {H} numbers for a token; expected {len(layers)} of {hidden}: "
            f"start it with eagle_aux_hidden_state_layer_ids {list(layers)}, and the recipe's target"
        )
    if not bool(states.isfinite().all()):
        raise RequestError(
            f"the engine's states of a document of {T} tokens hold NaN or infinity; start it with another --dtype "
            "(bfloat16 for float16)"
        )
    return states
