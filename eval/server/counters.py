"""A server's own counts of drafts, from its Prometheus page, or from an answer that carries its own.

vLLM counts steps with a draft, drafted and accepted tokens, and accepted tokens by position; started
with `--per-request-spec-decode-metrics` it also says per answer how many tokens each step accepted.
SGLang counts verify calls and written tokens, which gives tokens per call and no positions. All
counters are sums since the server began, so what counts is their difference.
Read next: `blocks.py`, which looks at them before and after; docs/serving.md for what is equal to ours.

Shapes: D positions of a draft.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ..measure.metrics import Counts, Floats

Engine = Literal["vLLM", "SGLang"]
_LINE = re.compile(r'^([A-Za-z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? +(\S+)')
_POSITION = re.compile(r'(?:^|,) *position="(\d+)"')
_VLLM, _SGLANG = "vllm:", "sglang:"
_DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Counters:
    """What a server has counted, or between two looks."""

    engine: Engine
    written: int
    """Tokens of answers, anybody's."""
    requests: int
    """Answers that ended, anybody's."""
    steps: int | None = None
    """Verify calls with a draft; None: the server does not speculate, or does not count."""
    drafted: int | None = None
    accepted: int | None = None
    per_position: tuple[int, ...] = ()
    """Steps in which that position was accepted, by position."""

    def since(self, earlier: Counters) -> Counters | None:
        """What was counted since; None where the server began anew in between."""
        pairs = [(self.written, earlier.written), (self.steps or 0, earlier.steps or 0)]
        if any(now < before for now, before in pairs):
            return None
        before = earlier.per_position or (0,) * len(self.per_position)
        return Counters(
            self.engine,
            self.written - earlier.written,
            self.requests - earlier.requests,
            _less(self.steps, earlier.steps),
            _less(self.drafted, earlier.drafted),
            _less(self.accepted, earlier.accepted),
            tuple(now - then for now, then in zip(self.per_position, before, strict=True)),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Counters:
        """Of `to_dict`."""
        return cls(**{**content, "per_position": tuple(content["per_position"])})

    def counts(self) -> Counts | None:
        """As the measures of acceptance take it; None without a step with a draft.

        SGLang's steps are its verify calls, and of what it wrote the first token of every answer is
        the prefill's.
        """
        if not self.steps:
            return None
        if self.accepted is None:
            return _counts(self.steps, self.written - self.requests, np.zeros(0), np.zeros(0))
        passed_D = np.array(self.per_position, dtype=float)
        # a position is tested where the one before it was accepted; a server that drafts fewer tokens than it
        # may says so by `drafted` alone, and the rejected ones behind are not told from those never drafted
        tested_D = np.array([self.steps, *self.per_position[:-1]], dtype=float)[: len(passed_D)]
        return _counts(self.steps, self.steps + self.accepted, tested_D, passed_D)


def read_counters(page: str) -> Counters | None:
    """The counters of a Prometheus page, summed over a server's engines; None where it is no known server's."""
    sums: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for line in page.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        name, labels, value = found[1].removesuffix("_total"), found[2] or "", _number(found[3])
        if name == _PER_POSITION and (position := _POSITION.search(labels)):
            positions[int(position[1])] += value
        else:
            sums[name] += value
    if any(name.startswith(_VLLM) for name in sums):
        written, requests = sums[f"{_VLLM}generation_tokens"], sums[f"{_VLLM}request_success"]
        if f"{_VLLM}spec_decode_num_drafts" not in sums:
            return Counters("vLLM", written, requests)
        steps, drafted, accepted = (sums[f"{_VLLM}spec_decode_num_{name}"] for name in _DRAFTS)
        per_position = tuple(positions[at] for at in range(max(positions, default=-1) + 1))
        return Counters("vLLM", written, requests, steps, drafted, accepted, per_position)
    if any(name.startswith(_SGLANG) for name in sums):
        calls = sums.get(f"{_SGLANG}spec_verify_calls")
        return Counters("SGLang", sums[f"{_SGLANG}generation_tokens"], sums[f"{_SGLANG}num_requests"], calls)
    return None


def counts_of_answer(metrics: object) -> Counts | None:
    """vLLM's counts of one answer, the `metrics` of its last chunk; None where there are none."""
    own = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    by_length = own.get("acceptance_histogram_by_draft_length") if isinstance(own, dict) else None
    if not isinstance(own, dict) or not isinstance(by_length, dict):
        return None
    depth = int(own["num_spec_tokens"])
    tested_D, passed_D = np.zeros(depth), np.zeros(depth)
    for length, steps in by_length.items():
        for accepted, count in enumerate(steps):
            tested_D[: min(int(length), accepted + 1)] += count
            passed_D[:accepted] += count
    steps, accepted = int(own["num_spec_steps"]), int(own["num_accepted_draft_tokens"])
    return _counts(steps, steps + accepted, tested_D, passed_D)


def _counts(steps: int, emitted: int, tested_D: Floats, passed_D: Floats) -> Counts:
    return Counts(steps, emitted, 0, tested_D, passed_D, np.zeros_like(tested_D))


def _number(text: str) -> int:
    """Counters are whole; `1.2e+06` is how they are written. What is none counts nothing."""
    try:
        return int(float(text))
    except (ValueError, OverflowError):  # NaN and +Inf, of gauges
        return 0


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None else now - (before or 0)
