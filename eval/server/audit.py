"""Is what a server writes the target's own? The audit of an engine that nobody here wrote.

T = 0: every token replayed through the target. T > 0: what was sampled against the target's own distributions,
beside a control with the server's rounding. And the log-probabilities that it gives, against the target's: a
server that computes other ones has another model. Our own decoder's enumeration has no counterpart here.
Read next: `answers.py`, what is asked; `precision.py`, `sampled.py`, `texts.py`; docs/server.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...data.generate.server_request import ServerRequest
from ...decoding.sampling import Warper
from ...decoding.target.backbone import Backbone
from ...storage.formats import AUDIT
from ..audit.audit import FALSE_ALARM, failures_of
from ..audit.replay import Replay, replay
from ..config import AuditConfig
from ..measure.requests import Request
from .answers import Judgeable, Served, served_answers
from .precision import LIMIT, Precision, precision_of
from .sampled import Sampled, judge_sampled
from .texts import replay_texts

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
    sampled: Sampled | None
    precision: Precision
    missing: list[str]
    """What the server does not hand out, and what that costs."""
    failures: list[str]

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
    served = served_answers(target.tokenizer, requests, server, config, out)
    greedy = [_whole(each, target.eos_ids) for each in served.greedy]
    sampled = [_whole(each, target.eos_ids) for each in served.sampled]
    precision, rounding = precision_of(target, greedy, sampled, config.temperature)
    replayed = _replayed(target, greedy, rounding, config)
    judged = None
    if sampled:
        warper = Warper.of(config, config.temperature)
        largest = max(map(abs, rounding), default=0.0)
        sigma = precision.sigma if precision.is_rounding else precision.rounding_rms
        judged = judge_sampled(target, sampled, warper, sigma=sigma, largest=largest, seed=config.seed)
    return _decided(served, server, config, replayed, judged, precision)


def _whole(each: Judgeable, eos_ids: Sequence[int]) -> Judgeable:
    """The answer with the token that ended it, where a server keeps that to itself and there is but one."""
    tokens = each.answer.tokens
    if not tokens or not each.answer.ended or tokens[-1] in eos_ids or len(eos_ids) != 1:
        return each
    content = asdict(each.answer) | {"tokens": [*tokens, eos_ids[0]]}
    return Judgeable(each.prompt, type(each.answer)(**content))


def _replayed(
    target: Backbone, greedy: Sequence[Judgeable], rounding: Sequence[float], config: AuditConfig
) -> Replay | None:
    if not greedy:
        return None
    if any(each.tokens for each in greedy):
        told = [each for each in greedy if each.tokens]
        return replay(target, [each.prompt for each in told], [each.tokens for each in told], rounding=rounding)
    return replay_texts(target, greedy, rounding, max_new_tokens=config.max_new_tokens, batch=config.batch)


def _decided(
    served: Served,
    server: ServerRequest,
    config: AuditConfig,
    greedy: Replay | None,
    sampled: Sampled | None,
    precision: Precision,
) -> ServerAudit:
    tested = None if sampled is None else sampled.tested
    judged, scores = (None, None) if tested is None else (tested.rosenblatt, tested.scores)
    failures = failures_of(None, judged, greedy, scores)
    certain = greedy is not None and greedy.bugs > 0
    if sampled is not None and sampled.outside:
        failures.append(f"{sampled.outside} tokens have no probability under the filters: {sampled.first_outside}")
        certain = True
    if not precision.is_rounding:
        failures.append(
            f"its log-probabilities are {precision.rms:.3g} away from the target's (root mean square) and rounding "
            f"explains {LIMIT * max(precision.rounding_rms, 1e-5):.3g}: other weights, a quantised copy, or other text"
        )
        certain = True
    verdict, why = _verdict(failures, greedy, sampled, certain=certain)
    return ServerAudit(
        verdict,
        why,
        server.public_url,
        server.model,
        config.temperature,
        greedy,
        sampled,
        precision,
        served.notes,
        failures,
    )


def _verdict(
    failures: Sequence[str], greedy: Replay | None, sampled: Sampled | None, *, certain: bool
) -> tuple[Verdict, str | None]:
    """`certain`: something failed that no rounding explains."""
    coarse = sampled is not None and bool(sampled.control.failures)
    if failures and not certain and coarse:
        return "undecided", "rounding as large as the server's would fail the same tests; serve it in fp32 to decide"
    if failures:
        return "NOT lossless", None
    if greedy is None or not greedy.tokens:
        return "undecided", "no greedy answer could be tested"
    if sampled is None:
        return "undecided", "T = 0 passes, and T > 0 could not be tested"
    return "lossless", None


def _sampled_lines(sampled: Sampled, temperature: float) -> list[str]:
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
