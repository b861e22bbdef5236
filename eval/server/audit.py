"""Is what a server writes the target's own? The audit of an engine that nobody here wrote.

T = 0: every token replayed through the target. T > 0: what was sampled against the target's own distributions,
beside a control with the server's rounding. And the log-probabilities that it gives, against the target's: a
server that computes other ones has another model. Our own decoder's enumeration has no counterpart here.
Read next: `answers.py`, what is asked; `evidence.py`, what of it is judged; docs/server.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...data.generate.server_request import ServerRequest
from ...decoding.backbone.backbone import Backbone
from ...storage.formats import AUDIT
from ..audit.audit import FALSE_ALARM
from ..audit.replay import Replay
from ..config import AuditConfig
from ..measure.requests import Request
from .answers import served_answers
from .evidence import Findings, doubt_of, evidence_of, gap_of, judge_evidence
from .precision import Precision
from .sampled import SampledJudgement

Verdict = Literal["lossless", "NOT lossless", "undecided"]


@dataclass(frozen=True)
class ServerAudit:
    """What the audit of a server found and what it would have found."""

    verdict: Verdict
    why: str | None
    """Of `undecided`."""
    server: str
    model: str
    temperature: float
    greedy: Replay | None
    sampled: SampledJudgement | None
    precision: Precision
    missing: list[str]
    """What the server does not hand out, and what that costs."""
    failures: list[str]
    off: list[str]
    """Which of its own defaults the server was told to leave off."""

    def to_dict(self) -> dict[str, Any]:
        """For `audit.json`, under the names of our own audit's."""
        sampled = self.sampled
        own = {name: value for name, value in asdict(self).items() if name not in ("greedy", "sampled")}
        return {
            "format": AUDIT.number,
            **own,
            "decoder": f"server {self.server}",
            "rule": None,
            "plant": None,
            "distance": None,
            "enumeration": None,
            "rosenblatt": None if sampled is None else asdict(sampled.tested.rosenblatt),
            "scores": None if sampled is None else asdict(sampled.tested.scores),
            "replay": None if self.greedy is None else asdict(self.greedy),
            "control": None if sampled is None else {**asdict(sampled.control), "failures": sampled.control.failures},
            "outside": None if sampled is None else sampled.outside,
            "nats": None if sampled is None else sampled.nats,
            "expected_nats": None if sampled is None else sampled.expected_nats,
        }

    def text(self) -> str:
        """A short block for the terminal."""
        why = "" if self.why is None else f": {self.why}"
        lines = [f"verdict: {self.verdict}{why}", f"  {self.model} at {self.server}"]
        if self.greedy is not None:
            g = self.greedy
            lines += [
                f"  T = 0: {g.argmax:,} of {g.tokens:,} tokens are the target's argmax,",
                f"    {g.near_ties} near-ties (rounding explains {g.explained:.1f}), {g.bugs} bugs,",
                f"    where logits are off by {g.noise:.2g} at most",
            ]
        if self.sampled is not None:
            lines += _sampled_lines(self.sampled, self.temperature)
        lines += [*_precision_lines(self.precision), *(f"  missing: {each}" for each in self.missing)]
        lines.append(f"  a server of this target fails once in {1 / FALSE_ALARM:,.0f} audits")
        return "\n".join([*lines, *(f"  FAILED: {failure}" for failure in self.failures)])


def audit_server(
    target: Backbone, requests: Sequence[Request], server: ServerRequest, config: AuditConfig, out: Path
) -> ServerAudit:
    """Ask a server and judge what it writes.

    Args:
        target: the model that it claims to serve, in the precision that is to be compared with.
        requests: first turns, as token ids; they are used over and over until there are `config.tokens`.
        out: a folder for the answers, in which a stopped audit goes on.

    Raises:
        EnvironmentFailure: nobody is there, or it refuses one request after the other.
        RequestError: address, key or model are refused, or `out` holds another audit's answers.
    """
    served = served_answers(target.tokenizer, requests, server, config, out, vocabulary=target.vocabulary)
    evidence = evidence_of(target, served, config)
    found = judge_evidence(target, evidence, config)
    verdict, why = _verdict(found, None if not found.failures else doubt_of(target, served, evidence, found, config))
    if verdict == "lossless" and (gap := gap_of(evidence, found)) is not None:
        verdict, why = "undecided", gap
    return ServerAudit(
        verdict,
        why,
        server.public_url,
        server.model,
        config.temperature,
        found.greedy,
        found.sampled,
        found.precision,
        [*served.notes, *evidence.notes, *found.notes],
        found.failures,
        list(served.way.off),
    )


def _verdict(found: Findings, doubt: str | None) -> tuple[Verdict, str | None]:
    """`doubt`: what else would fail the same tests."""
    coarse = found.sampled is not None and bool(found.sampled.control.failures)
    if found.failures and not found.certain and coarse:
        return "undecided", "rounding as large as the server's would fail the same tests; serve it in fp32 to decide"
    if found.failures:
        return ("NOT lossless", None) if doubt is None else ("undecided", doubt)
    if found.greedy is None or not found.greedy.tokens:
        return "undecided", "no greedy answer could be tested"
    if found.sampled is None:
        return "undecided", "T = 0 passes, and T > 0 could not be tested"
    return "lossless", None


def _sampled_lines(sampled: SampledJudgement, temperature: float) -> list[str]:
    r, c, control = sampled.tested.rosenblatt, sampled.tested.scores, sampled.control
    outcome = "would fail" if control.failures else "would pass"
    return [
        f"  T = {temperature:g}: {r.tokens:,} tokens, p = {r.histogram_p:.3g} (histogram), {r.mean_p:.3g} (mean),",
        f"    {r.serial_p:.3g} (serial); would see a bias along {r.order} of {r.detectable:.4f}",
        f"    context by context: {len(c.tests)} tests, p = {c.p_value:.3g};",
        f"    would see means shifted by {c.detectable:.3f} standard deviations",
        f"    {sampled.nats:.3f} nats per token under the target, where {sampled.expected_nats:.3f} are expected",
        f"    rounding as large as the server's {outcome} these tests (smallest p = {control.smallest_p:.3g})",
    ]


def _precision_lines(precision: Precision) -> list[str]:
    bf16 = f"{precision.rounding_rms:.2g} (at most {precision.rounding_largest:.2g})"
    if precision.rms is None:
        return [f"  precision: not known; 16 bits move log-probabilities by {bf16} nats"]
    return [
        f"  precision: log-probabilities of {precision.of} are {precision.rms:.2g} nats off, root mean square",
        f"    (at most {precision.largest:.2g}, of {precision.tokens:,} tokens); 16 bits move them by {bf16}",
    ]
