"""The file that an engine leaves for a request: waited for, read, held to what was asked, removed.

vLLM's connector writes `hidden_states` [T, N, H] and `token_ids` [T] beside a lock file, which it holds
until the file is whole. Read next: `engine.py`, which asks.

Shapes: T tokens of a document, N hidden states of a token, H hidden size.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ...errors import EnvironmentFailure, RequestError
from ...storage import check_tensors, read_tensors

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
