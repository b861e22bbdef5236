"""The losslessness audit: three proofs, their power, one verdict.

1. enumeration: the rule on a tiny vocabulary, whole sequences against their exact distribution;
2. Rosenblatt: the real pair's sampled tokens against the target's own conditional distributions,
   in all contexts together and by kinds of context;
3. replay: the real pair's greedy tokens against the target's argmax.
The verdict is `lossless` only if all of them pass. docs/audit.md explains why that convinces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal
from weakref import ReferenceType, ref

from ...bars import live
from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import generate
from ...decoding.proposal import Proposer
from ...decoding.rules.choice import is_lossy
from ...decoding.sampling import Warper
from ...drafters.model.draft_model import DraftModel
from ...drafters.model.ensemble import Ensemble
from ...errors import RequestError
from ...storage.formats import AUDIT
from ..config import AuditConfig
from ..notebook import Shown
from .decoders import Answers, Decode, Write, by_function, by_transformers
from .enumeration import Enumeration, enumerate_decoding
from .plants import PLANTS, Plant
from .replay import Replay, replay
from .rosenblatt import Rosenblatt, judge, transforms
from .scores import Scores, ScoreSums
from .toys import MakeToy, Toy, kind_for

Decoder = Literal["draftsmith", "hf", "function"]
# chance that a correct decoder fails the audit, and what each test has of it (Holm 1979, weighted)
FALSE_ALARM = 1e-3
SHARES = {
    "enumeration": 0.25,
    "histogram of the real pair": 0.25,
    "mean of the real pair": 0.1,
    "serial dependence of the real pair": 0.1,
    "contexts of the real pair": 0.2,
    "near-ties of the greedy replay": 0.1,
}
_NAMED: dict[Decoder, str] = {"hf": "--decoder hf", "function": "decode"}
_ENUMERATION_WARPER = Warper(temperature=0.7)
Verdict = Literal["lossless", "NOT lossless", "lossy"]


@dataclass(frozen=True, repr=False)
class AuditReport(Shown):
    """What the audit found and what it would have found."""

    verdict: Verdict
    decoder: Decoder
    rule: str | None
    """The rule that was asked for; None: the lossless one."""
    plant: str | None
    temperature: float
    enumeration: Enumeration | None
    """None where no toy model stands for the proposer, or the decoder is not ours."""
    rosenblatt: Rosenblatt
    scores: Scores
    """Of the real pair, context by context."""
    replay: Replay
    failures: list[str]
    drafter: ReferenceType[Any] | None = field(default=None, repr=False, compare=False)
    """What was audited, as long as somebody holds it."""

    def to_dict(self) -> dict[str, Any]:
        """For `audit.json`."""
        found = {"format": AUDIT.number, **asdict(self), "distance": self.distance}
        del found["drafter"]
        return found

    @property
    def distance(self) -> float | None:
        """Of a lossy rule the measured total variation: the larger of the two proofs' distances.

        Over sequences of four tokens among tables, beyond what sampling noise explains; and of a
        token of the real pair, of which a histogram sees only a part.
        """
        if self.verdict != "lossy":
            return None
        seen = [self.rosenblatt.distance]
        if self.enumeration is not None:
            seen.append(max(0.0, self.enumeration.total_variation - self.enumeration.noise))
        return max(seen)

    @property
    def not_enumerated(self) -> str:
        """Why no sequences over tables were counted; for where there are none."""
        if self.decoder != "draftsmith":
            return "as tables are decoded by our own engine alone"
        return "as no toy model stands for this proposer: the real pair alone was judged"

    def table(self) -> list[dict[str, Any]]:
        """A row per proof: what it judged, its p-value or how many bugs it found, and what it would have seen."""
        r, g, c, e = self.rosenblatt, self.replay, self.scores, self.enumeration
        counted: tuple[Any, ...] = (None, None, f"left out, {self.not_enumerated}")
        if e is not None:
            counted = (f"{e.sequences:,} sequences", e.p_value, f"a bias of {e.detectable:.4f}")
        least = min(r.histogram_p, r.mean_p, r.serial_p)
        shifted = f"means shifted by {c.detectable:.3f} standard deviations"
        proofs = {
            "whole sequences over tables": counted,
            "tokens of the real pair": (
                f"{r.tokens:,} tokens",
                least,
                f"a bias along {r.order} of {r.detectable:.4f}",
            ),
            "context by context": (f"{len(c.tests)} tests", c.p_value, shifted),
            "greedy replay": (
                f"{g.argmax:,} of {g.tokens:,} are the argmax",
                g.near_tie_p,
                f"one bug; found {g.bugs}",
            ),
        }
        return [{"proof": name, **dict(zip(("judged", "p", "would see"), row))} for name, row in proofs.items()]

    @property
    def note(self) -> str:
        """The verdict."""
        return "; ".join([f"verdict: {self.verdict}", *self.failures])

    def text(self) -> str:
        """A short block for the terminal."""
        planted = f" (planted: {self.plant})" if self.plant else ""
        lossy = f" ({self.rule}, distance {self.distance:.3f})" if self.distance is not None else ""
        lines = [f"verdict: {self.verdict}{planted}{lossy}"]
        if self.enumeration is not None:
            e = self.enumeration
            lines += [
                f"  enumeration: {e.sequences:,} sequences over {e.cells} cells,",
                f"    chi-square {e.statistic:.1f}, p = {e.p_value:.3g}; would see a bias of {e.detectable:.4f}",
            ]
        else:
            lines.append(f"  enumeration: left out, {self.not_enumerated}")
        r, g, c = self.rosenblatt, self.replay, self.scores
        lines += [
            f"  real pair, T = {self.temperature:g}: {r.tokens:,} tokens, p = {r.histogram_p:.3g} (histogram),",
            f"    {r.mean_p:.3g} (mean), {r.serial_p:.3g} (serial);",
            f"    would see a bias along {r.order} of {r.detectable:.4f}",
            f"    context by context: {len(c.tests)} tests, p = {c.p_value:.3g};",
            f"    would see means shifted by {c.detectable:.3f} standard deviations",
            f"  real pair, T = 0: {g.argmax:,} of {g.tokens:,} tokens are the argmax,",
            f"    {g.near_ties} near-ties (rounding explains {g.explained:.1f}), {g.bugs} bugs (noise {g.noise:.2g})",
            f"  a bias is a total variation, stated at power 0.99; one along {r.order} has the",
            "  same sign in all contexts;",
            f"  a correct decoder fails once in {1 / FALSE_ALARM:,.0f} audits",
        ]
        lines += [f"  FAILED: {failure}" for failure in self.failures]
        return "\n".join(lines)


def audit(
    target: Backbone,
    drafter: Proposer | None,
    prompts: Sequence[Sequence[int]],
    config: AuditConfig,
    *,
    plant: str | None = None,
    decoder: Decoder = "draftsmith",
    decode: Decode | None = None,
    rule: str | None = None,
    enumerated: Enumeration | None = None,
    toy: MakeToy | None = None,
) -> AuditReport:
    """Run all proofs on a pair.

    Args:
        drafter: beside `decode` the draft model that it uses, by which the tests are sharper; or None.
        prompts: token ids; they are used over and over until `config.tokens` are sampled.
        plant: a known bug of `plants.PLANTS` to decode with; the audit then has to fail.
        decoder: `hf` audits transformers' own assisted generation instead of ours, `function` goes with `decode`.
        decode: a decoder of somebody else's, which is audited in place of ours.
        rule: an acceptance rule by name; with a lossy one the distance is measured.
        enumerated: what an audit of the same drafter on other prompts has enumerated, which knows no prompts.
        toy: makes the proposer over tables (`toys.py`), for a class of the caller's; without it the enumeration of
            such a class is left out, and the report says so.
    """
    bug = _plant(plant, decoder, drafter)
    warper = Warper.of(config, config.temperature)
    counted = enumerated
    if decoder == "draftsmith" and counted is None:
        assert drafter is not None  # as a decoder that is handed over is none of ours
        counted = _enumerated(target, drafter, bug, rule, config, toy)
    if decode is not None:
        write = by_function(decode, target, config)
    else:
        write = _writer(target, drafter, config, bug, decoder, rule)
    asked, sampled = _sampled(prompts, config, write, warper)
    draft = drafter.backbone if isinstance(drafter, DraftModel) else None
    sums = ScoreSums(target.vocabulary)
    numbers = transforms(target, draft, asked, sampled, warper, seed=config.seed, scores=sums)
    judged = judge(numbers, level_of("histogram of the real pair"))
    judged = replace(judged, order="p" if draft is None else "p - q")
    scores = sums.judge(level_of("contexts of the real pair"))
    some = list(prompts[: config.prompts])
    greedy = replay(target, some, write(some, list(range(len(some))), Warper(0.0)))
    failures = [] if is_lossy(rule) else failures_of(counted, judged, greedy, scores)
    held = None if drafter is None else ref(drafter)
    verdict: Verdict = "NOT lossless" if failures else "lossy" if is_lossy(rule) else "lossless"
    return AuditReport(
        verdict, decoder, rule, plant, config.temperature, counted, judged, scores, greedy, failures, held
    )


def _enumerated(
    target: Backbone,
    drafter: Proposer,
    bug: Plant | None,
    rule: str | None,
    config: AuditConfig,
    make_toy: MakeToy | None,
) -> Enumeration | None:
    """Proof 1, with the drafter's class over tables on the target's device, or with the bug; None without a toy."""
    kind = kind_for(drafter, make_toy)
    if kind is None:
        return None
    toy = Toy.of(type(drafter).__name__, config.seed + 1, target.device, made=kind)
    return enumerate_decoding(
        toy.target,
        toy.proposer if bug is None else lambda: bug.toy(toy.drafts),
        rule=rule if bug is None else bug.make_rule(),
        sequences=config.sequences,
        warper=_ENUMERATION_WARPER,
        seed=config.seed + 1,
        level=level_of("enumeration"),
        length=toy.kind.length,
        prompt=toy.kind.prompt,
    )


def _writer(
    target: Backbone,
    drafter: Proposer | None,
    config: AuditConfig,
    bug: Plant | None,
    decoder: Decoder,
    rule: str | None,
) -> Write:
    """Decode a batch of requests with the decoder under audit."""
    if isinstance(drafter, Ensemble):
        drafter.draft_length = config.draft_length
    if isinstance(drafter, DraftModel):
        if drafter.keeps_length:
            drafter.draft_length = config.draft_length
        if decoder == "hf":
            return by_transformers(target, drafter, config)
        if bug is not None:
            # a bug of trees is planted in the toy alone
            drafter = bug.on_pair(drafter) or drafter
    assert drafter is not None
    own = drafter

    def write(ids: Sequence[Sequence[int]], numbers: list[int], warper: Warper) -> Answers:
        # the planted rules are rules of sampling; greedy decoding stays as it is
        planted = None if bug is None or warper.greedy or bug.tree else bug.make_rule()
        # and a lossless rule of sampling that was asked for is none of greedy decoding
        asked = None if warper.greedy and not is_lossy(rule) else rule
        return generate(
            target,
            own,
            ids,
            warper=warper,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            requests=numbers,
            rule=planted or asked,
            graphs=None if bug is None else False,  # what is planted may decide on the host
        ).tokens

    return write


def _sampled(
    prompts: Sequence[Sequence[int]], config: AuditConfig, write: Write, warper: Warper
) -> tuple[list[Sequence[int]], Answers]:
    """Requests until there are enough tokens; every request has random numbers of its own."""
    asked: list[Sequence[int]] = []
    answers: Answers = []
    tokens = number = 0
    with live("auditing", config.tokens, " tokens") as line:
        while tokens < config.tokens:
            numbers = list(range(number, number + config.batch))
            batch = [prompts[n % len(prompts)] for n in numbers]
            written = write(batch, numbers, warper)
            asked += batch
            answers += written
            number += config.batch
            tokens += sum(len(answer) - 1 for answer in written)
            line.update(min(tokens, config.tokens) - line.n)
    return asked, answers


def level_of(test: str) -> float:
    """The level that one test is held to."""
    return FALSE_ALARM * SHARES[test]


def failures_of(
    counted: Enumeration | None, judged: Rosenblatt | None, greedy: Replay | None, scores: Scores | None = None
) -> list[str]:
    """The tests that fail after Holm's correction, weighted by their shares, and the greedy bugs."""
    p_values = {
        "enumeration": None if counted is None else counted.p_value,
        "histogram of the real pair": None if judged is None else judged.histogram_p,
        "mean of the real pair": None if judged is None else judged.mean_p,
        "serial dependence of the real pair": None if judged is None else judged.serial_p,
        "contexts of the real pair": None if scores is None else scores.p_value,
        "near-ties of the greedy replay": None if greedy is None else greedy.near_tie_p,
    }
    made = {name: p_value for name, p_value in p_values.items() if p_value is not None}
    failures, left = [], sum(SHARES[name] for name in made)
    for name in sorted(made, key=lambda name: made[name] / SHARES[name]):
        if made[name] > FALSE_ALARM * SHARES[name] / left:
            break
        left -= SHARES[name]
        failures.append(f"{name}, p = {made[name]:.3g}{_detail(name, greedy, scores)}")
    if greedy is not None and greedy.bugs:
        failures.append(f"{greedy.bugs} greedy tokens are not the argmax: {greedy.first_bug}")
    return failures


def _detail(name: str, greedy: Replay | None, scores: Scores | None) -> str:
    if scores is not None and name == "contexts of the real pair":
        return f" ({scores.worst.name})"
    if greedy is not None and name == "near-ties of the greedy replay":
        return f" ({greedy.near_ties}, and rounding explains {greedy.explained:.1f})"
    return ""


def _plant(name: str | None, decoder: Decoder, drafter: Proposer | None) -> Plant | None:
    if decoder == "hf" and not isinstance(drafter, DraftModel):
        raise RequestError("--decoder hf needs a draft model; leave out --method")
    if name is None:
        return None
    if name not in PLANTS:
        raise RequestError(f"no bug is called {name!r}; known: {', '.join(PLANTS)}")
    if decoder != "draftsmith":
        raise RequestError(f"--plant goes into our own decoder; leave out {_NAMED[decoder]}")
    if not isinstance(drafter, DraftModel):
        raise RequestError("--plant goes into a draft model; leave out --method")
    return PLANTS[name]
