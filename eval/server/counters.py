"""A server's own counts of drafts, from its Prometheus page, or from an answer that carries its own.

vLLM counts steps with a draft, drafted and accepted tokens, and accepted tokens by position; started
with `--per-request-spec-decode-metrics` it also says per answer how many tokens each step accepted.
llama.cpp counts as vLLM does, without the number of its answers, and says per answer how many drafts were
accepted. SGLang counts verify calls and written tokens, which gives tokens per call and no positions. All
counters are sums since the server began, so what counts is their difference.

Engines count the accepted drafts of a step before they look for the end of the answer among them. Where it is
known how many tokens were written, `within` leaves those behind the end out.
Read next: `measure.py`, which looks at them before and after; docs/serving.md for what is equal to ours.

Shapes: D positions of a draft.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ..measure.metrics import Counts, Floats

Engine = Literal["vLLM", "SGLang", "llama.cpp"]
_LINE = re.compile(r'^([A-Za-z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? +(\S+)')
_POSITION = re.compile(r'(?:^|,) *position="(\d+)"')
_VLLM, _SGLANG, _LLAMA = "vllm:", "sglang:", "llamacpp:"
_DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class ServerCounters:
    """What a server has counted, or between two looks."""

    engine: Engine
    written: int
    """Tokens of answers, anybody's."""
    requests: int | None
    """Answers that ended, anybody's; None: the server does not count them."""
    steps: int | None = None
    """Verify calls with a draft; None: the server does not speculate, or does not count."""
    drafted: int | None = None
    accepted: int | None = None
    per_position: tuple[int, ...] = ()
    """Steps in which that position was accepted, by position."""

    def since(self, earlier: ServerCounters) -> ServerCounters | None:
        """What was counted since; None where the server began anew in between."""
        pairs = [(self.written, earlier.written), (self.steps or 0, earlier.steps or 0)]
        if any(now < before for now, before in pairs):
            return None
        # a position appears on some pages when it is first accepted
        before = (*earlier.per_position, *(0,) * (len(self.per_position) - len(earlier.per_position)))
        if len(before) > len(self.per_position):
            return None
        return ServerCounters(
            self.engine,
            self.written - earlier.written,
            _less(self.requests, earlier.requests),
            _less(self.steps, earlier.steps),
            _less(self.drafted, earlier.drafted),
            _less(self.accepted, earlier.accepted),
            tuple(now - then for now, then in zip(self.per_position, before, strict=True)),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ServerCounters:
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
            return _counts(self.steps, self.written - (self.requests or 0), np.zeros(0), np.zeros(0))
        passed_D = np.array(self.per_position, dtype=float)
        # a position is tested where the one before it was accepted; a server that drafts fewer tokens than it
        # may says so by `drafted` alone, and the rejected ones behind are not told from those never drafted
        tested_D = np.array([self.steps, *self.per_position[:-1]], dtype=float)[: len(passed_D)]
        return _counts(self.steps, self.steps + self.accepted, tested_D, passed_D)


def read_counters(page: str) -> ServerCounters | None:
    """The counters of a Prometheus page, summed over a server's engines; None where it is no known server's."""
    sums: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for line in page.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        name, labels, value = found[1].removesuffix("_total"), found[2] or "", _number(found[3])
        if name.endswith(f":{_PER_POSITION}") and (position := _POSITION.search(labels)):
            positions[int(position[1])] += value
        else:
            sums[name] += value
    per_position = tuple(positions[at] for at in range(max(positions, default=-1) + 1))
    if any(name.startswith(_VLLM) for name in sums):
        written, requests = sums[f"{_VLLM}generation_tokens"], sums[f"{_VLLM}request_success"]
        return ServerCounters("vLLM", written, requests, *_drafted(sums, _VLLM, per_position))
    if any(name.startswith(_SGLANG) for name in sums):
        calls = sums.get(f"{_SGLANG}spec_verify_calls")
        return ServerCounters("SGLang", sums[f"{_SGLANG}generation_tokens"], sums[f"{_SGLANG}num_requests"], calls)
    if any(name.startswith(_LLAMA) for name in sums):
        written = sums[f"{_LLAMA}tokens_predicted"]
        return ServerCounters("llama.cpp", written, None, *_drafted(sums, _LLAMA, per_position))
    return None


def _drafted(sums: Mapping[str, int], engine: str, per_position: tuple[int, ...]) -> tuple[Any, ...]:
    """Steps, drafted and accepted tokens, and those by position, where an engine counts drafts."""
    if f"{engine}spec_decode_num_drafts" not in sums:
        return ()
    return (*(sums[f"{engine}spec_decode_num_{name}"] for name in _DRAFTS), per_position)


def within(counts: Counts, behind_first: int) -> Counts:
    """The counts without drafts behind the end: no more is emitted than the tokens behind the answers' first ones.

    By position they stay as the engine has them.
    """
    return replace(counts, emitted=min(counts.emitted, max(behind_first, 0)))


def counts_of_answer(metrics: object, timings: object = None) -> Counts | None:
    """The counts that an answer carries; None where there are none, or not enough of them.

    Args:
        metrics: vLLM's, of the last chunk: how many steps accepted so many tokens, by the length of the draft, or
            in its first form without.
        timings: llama.cpp's, which say how many drafts were accepted of the whole answer.
    """
    own = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if isinstance(own, Mapping):
        return _of_histograms(own)
    return _of_timings(timings) if isinstance(timings, Mapping) else None


def _of_histograms(own: Mapping[str, Any]) -> Counts | None:
    by_length, flat = own.get("acceptance_histogram_by_draft_length"), own.get("acceptance_histogram")
    depth = _count(own.get("num_spec_tokens"))
    histograms: dict[int, list[int]] = {}
    if isinstance(by_length, Mapping):
        histograms = {int(length): steps for length, steps in by_length.items() if str(length).isdecimal()}
    elif isinstance(flat, list):
        # of what length the drafts were is not said: all that could be, as by the counters of the page
        histograms = {len(flat) - 1 if depth is None else depth: flat}
    if not histograms or not all(_is_histogram(each) for each in histograms.values()):
        return None
    depth = max(histograms) if depth is None else depth
    tested_D, passed_D = np.zeros(depth), np.zeros(depth)
    for length, histogram in histograms.items():
        for number, count in enumerate(histogram):
            tested_D[: min(length, number + 1)] += count
            passed_D[:number] += count
    steps, accepted = _count(own.get("num_spec_steps")), _count(own.get("num_accepted_draft_tokens"))
    steps = sum(map(sum, histograms.values())) if steps is None else steps
    accepted = int(passed_D.sum()) if accepted is None else accepted
    return _counts(steps, steps + accepted, tested_D, passed_D)


def _is_histogram(found: object) -> bool:
    return isinstance(found, list) and all(_count(each) is not None for each in found)


def _of_timings(timings: Mapping[str, Any]) -> Counts | None:
    """All calls of the target behind the first token: each wrote one token beside those accepted."""
    written, accepted = _count(timings.get("predicted_n")), _count(timings.get("draft_n_accepted"))
    if written is None or accepted is None or _count(timings.get("draft_n")) is None:
        return None
    calls = written - 1 - accepted
    # fewer calls than one: drafts were accepted behind the end, and how many is not said
    return _counts(calls, written - 1, np.zeros(0), np.zeros(0)) if calls > 0 else None


def _counts(steps: int, emitted: int, tested_D: Floats, passed_D: Floats) -> Counts:
    return Counts(steps, emitted, 0, tested_D, passed_D, np.zeros_like(tested_D))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(text: str) -> int:
    """Counters are whole; `1.2e+06` is how they are written. What is none counts nothing."""
    try:
        return int(float(text))
    except (ValueError, OverflowError):  # NaN and +Inf, of gauges
        return 0


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None else now - (before or 0)
