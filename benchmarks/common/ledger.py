"""Where the time of decoding goes, by part: the models' forwards, and each thing between them.

Methods of the running objects are watched from outside, so what is timed is the decoder as it ships. A part's time is
its own: what it calls that is a part itself counts there. On a CPU alone, where a call has ended when it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import Generation, generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.rows import Rows
from draftsmith.decoding.rules.choice import rule_for
from draftsmith.decoding.sampling import Warper

TARGET, DRAFT = "target forward", "draft forward"
PARTS = (TARGET, DRAFT, "proposal", "acceptance", "commit", "bookkeeping")
# methods by which a proposer without a backbone runs its network
NETWORK = ("_run", "_logits", "logits")


@dataclass
class Ledger:
    """Seconds by part, of everything that was decoded into it."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    calls: int = 0
    _inner: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> dict[str, float]:
        """Milliseconds a step, by part."""
        return {part: 1e3 * spent / self.calls for part, spent in self.seconds.items()}

    @property
    def outside(self) -> float:
        """Share of a step outside the forwards of target and drafter."""
        return 1 - (self.seconds[TARGET] + self.seconds[DRAFT]) / sum(self.seconds.values())

    def watched(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its own time booked under `part`."""

        def watch(*given: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            result = call(*given, **named)
            spent = time.perf_counter() - start
            self.seconds[part] += spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent
            return result

        return watch


def decode(ledger: Ledger, target: Backbone, drafter: Proposer, ids: list[int], **how: Any) -> Generation:
    """Decode a prompt and book where its steps' time went; the prefill is left out."""
    before = dict(ledger.seconds)
    with watching(ledger, target, drafter) as rule, _from_the_first_proposal(ledger, drafter, before):
        done = generate(target, drafter, [ids], rule=rule, graphs=False, **how)
    booked = sum(ledger.seconds.values()) - sum(before.values())
    ledger.seconds["bookkeeping"] += done.decode_seconds - booked
    ledger.calls += done.target_calls
    return done


@contextmanager
def watching(ledger: Ledger, target: Backbone, drafter: Proposer) -> Iterator[Callable[..., Any]]:
    """Watch the parts of every step inside the block; gives the rule to decode with."""
    with ExitStack() as stack:

        def watch(owner: Any, name: str, part: str) -> None:
            watched = ledger.watched(part, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, watched))

        watch(target, "_run", TARGET)
        for owner, name in _network(drafter):
            watch(owner, name, DRAFT)
        watch(drafter, "observe", "commit")
        for owner, name in ((KVCache, "commit"), (Rows, "emit")):
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, _method(ledger.watched("commit", original))))
        watch(drafter, "propose", "proposal")
        yield ledger.watched("acceptance", _choose_and_apply)


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class binds."""
    return lambda self, *given, **named: call(self, *given, **named)


def _choose_and_apply(logits_BNV: Any, proposal: Any, warper: Warper, coins: Any) -> Any:
    return rule_for(proposal, warper, None)(logits_BNV, proposal, warper, coins)


def _network(drafter: Any) -> list[tuple[Any, str]]:
    """What runs a drafter's network; nothing for a drafter without one."""
    if hasattr(drafter, "backbone"):
        return [(drafter.backbone, "_run")]
    fused = [(drafter.net, "fuse")] if hasattr(drafter, "net") else []
    return fused + [(drafter, name) for name in NETWORK if hasattr(drafter, name)]


@contextmanager
def _from_the_first_proposal(ledger: Ledger, drafter: Any, before: dict[str, float]) -> Iterator[None]:
    """Forget what was booked until the drafter first proposes: the prefill."""
    propose, prefilled = drafter.propose, [before]

    def begin(*given: Any) -> Any:
        if prefilled:
            ledger.seconds.update(prefilled.pop())
        return propose(*given)

    with mock.patch.object(drafter, "propose", begin):
        yield


def bandwidth(mebibytes: int = 256, rounds: int = 5) -> float:
    """Bytes a second that this machine reads from memory with torch's threads: the best of some sums of a tensor."""
    data = torch.ones(mebibytes * 2**18)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return 4 * data.numel() / best
