"""The losslessness audit: three proofs, their power, one verdict.

1. enumeration: the rule on a tiny vocabulary, whole sequences against their exact law;
2. Rosenblatt: the real pair's sampled tokens against the target's own conditional laws;
3. replay: the real pair's greedy tokens against the target's argmax.
The verdict is `lossless` only if all of them pass. docs/audit.md explains why that convinces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from ..decoding.acceptance import accept_chain
from ..decoding.backbone import Backbone
from ..decoding.engine import generate
from ..decoding.sampling import Warper, draw
from ..drafters.draft_model import DraftModel
from ..errors import RequestError
from .config import AuditConfig
from .enumeration import Enumeration, enumerate_rule
from .plants import PLANTS, Plant
from .replay import Replay, replay
from .rosenblatt import Rosenblatt, judge, transforms

Decoder = Literal["draftsmith", "hf"]
FORMAT = 1
# chance that a correct decoder fails the audit; the four tests share it (Holm 1979)
FALSE_ALARM = 1e-3
_TESTS = 4
_ENUMERATION_WARPER = Warper(temperature=0.7)

Answers = list[list[int]]


@dataclass(frozen=True)
class AuditReport:
    """What the audit found and what it would have found."""

    verdict: Literal["lossless", "NOT lossless"]
    decoder: Decoder
    plant: str | None
    temperature: float
    enumeration: Enumeration | None
    rosenblatt: Rosenblatt
    replay: Replay
    failures: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For `audit.json`."""
        return {"format": FORMAT, **asdict(self)}

    def text(self) -> str:
        """A short block for the terminal."""
        lines = [f"verdict: {self.verdict}" + (f" (planted: {self.plant})" if self.plant else "")]
        if self.enumeration is not None:
            e = self.enumeration
            lines.append(
                f"  enumeration: {e.sequences:,} sequences over {e.cells} cells, chi-square "
                f"{e.statistic:.1f}, p = {e.p_value:.3g}; would see a bias of {e.detectable:.4f}"
            )
        r, g = self.rosenblatt, self.replay
        lines += [
            f"  real pair, T = {self.temperature:g}: {r.tokens:,} tokens, histogram p = "
            f"{r.histogram_p:.3g}, mean p = {r.mean_p:.3g}, serial p = {r.serial_p:.3g}; "
            f"would see a bias of {r.detectable:.4f}",
            f"  real pair, T = 0: {g.argmax:,} of {g.tokens:,} tokens are the argmax, "
            f"{g.near_ties} near-ties, {g.bugs} bugs (noise {g.noise:.2g})",
            "  a bias is a total variation, stated at power 0.99; "
            f"a correct decoder fails once in {1 / FALSE_ALARM:,.0f} audits",
        ]
        lines += [f"  FAILED: {failure}" for failure in self.failures]
        return "\n".join(lines)


def audit(
    target: Backbone, drafter: DraftModel, prompts: Sequence[Sequence[int]], config: AuditConfig,
    *, plant: str | None = None, decoder: Decoder = "draftsmith",
) -> AuditReport:  # fmt: skip
    """Run all proofs on a pair.

    Args:
        prompts: token ids; they are used over and over until `config.tokens` are sampled.
        plant: a known bug of `plants.PLANTS` to decode with; the audit then has to fail.
        decoder: `hf` audits transformers' own assisted generation instead of ours.
    """
    bug = _plant(plant, decoder)
    warper = Warper(config.temperature, config.top_k, config.top_p)
    level = FALSE_ALARM / _TESTS
    counted = None
    if decoder == "draftsmith":
        rule, choose = (accept_chain, draw) if bug is None else (bug.make_rule(), bug.choose)
        counted = enumerate_rule(
            rule, choose, sequences=config.sequences, warper=_ENUMERATION_WARPER,
            seed=config.seed + 1, level=level,
        )  # fmt: skip
    write = _writer(target, drafter, config, bug, decoder)
    asked, sampled = _sampled(prompts, config, write, warper)
    judged = judge(
        transforms(target, drafter.backbone, asked, sampled, warper, seed=config.seed), level
    )
    some = list(prompts[: config.prompts])
    greedy = replay(target, some, write(some, list(range(len(some))), Warper(0.0)))
    failures = _failures(counted, judged, greedy)
    return AuditReport(
        "NOT lossless" if failures else "lossless", decoder, plant, config.temperature,
        counted, judged, greedy, failures,
    )  # fmt: skip


Write = Callable[[Sequence[Sequence[int]], list[int], Warper], Answers]


def _writer(
    target: Backbone, drafter: DraftModel, config: AuditConfig, bug: Plant | None, decoder: Decoder
) -> Write:
    """Decode a batch of requests with the decoder under audit."""
    if decoder == "hf":
        return lambda ids, numbers, warper: _hf(target, drafter, ids, numbers, warper, config)
    drafter.draft_length = config.draft_length
    own = drafter if bug is None else _with_choice(drafter, bug)

    def write(ids: Sequence[Sequence[int]], numbers: list[int], warper: Warper) -> Answers:
        # the planted rules are rules of sampling; greedy decoding stays as it is
        rule = None if bug is None or warper.greedy else bug.make_rule()
        return generate(
            target, own, ids, warper=warper, max_new_tokens=config.max_new_tokens,
            seed=config.seed, requests=numbers, rule=rule,
        ).tokens  # fmt: skip

    return write


def _with_choice(drafter: DraftModel, bug: Plant) -> DraftModel:
    """The same drafter, choosing its tokens as the plant does."""

    class Planted(DraftModel):
        def choose(self, law_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
            return bug.choose(law_BV, uniform_B)

    return Planted(
        drafter.backbone, drafter.vocabulary, draft_length=drafter.draft_length, policy="sample"
    )


def _sampled(
    prompts: Sequence[Sequence[int]], config: AuditConfig, write: Write, warper: Warper
) -> tuple[list[Sequence[int]], Answers]:
    """Requests until there are enough tokens; every request has random numbers of its own."""
    asked: list[Sequence[int]] = []
    answers: Answers = []
    tokens = number = 0
    while tokens < config.tokens:
        numbers = list(range(number, number + config.batch))
        batch = [prompts[n % len(prompts)] for n in numbers]
        written = write(batch, numbers, warper)
        asked += batch
        answers += written
        number += config.batch
        tokens += sum(len(answer) - 1 for answer in written)
    return asked, answers


def _hf(
    target: Backbone, drafter: DraftModel, prompts: Sequence[Sequence[int]], numbers: list[int],
    warper: Warper, config: AuditConfig,
) -> Answers:  # fmt: skip
    """transformers' `generate(assistant_model=...)`, one request at a time as it demands."""
    assistant: Any = drafter.backbone.model
    model: Any = target.model
    assistant.generation_config.num_assistant_tokens = config.draft_length
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    sampling: dict[str, Any] = {"do_sample": False}
    if not warper.greedy:
        sampling = {"do_sample": True, "temperature": warper.temperature, "top_k": warper.top_k,
                    "top_p": warper.top_p}  # fmt: skip
    answers = []
    for prompt, number in zip(prompts, numbers, strict=True):
        torch.manual_seed(config.seed * 1_000_003 + number)
        ids = torch.tensor([list(prompt)], device=target.device)
        done = model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant,
            max_new_tokens=config.max_new_tokens, eos_token_id=None, pad_token_id=0, **sampling,
        )  # fmt: skip
        answers.append(done[0, len(prompt) :].tolist())
    return answers


def _failures(counted: Enumeration | None, judged: Rosenblatt, greedy: Replay) -> list[str]:
    """The tests that fail after Holm's correction, and the greedy bugs."""
    found = [
        ("histogram of the real pair", judged.histogram_p),
        ("mean of the real pair", judged.mean_p),
        ("serial dependence of the real pair", judged.serial_p),
    ]
    if counted is not None:
        found.append(("enumeration", counted.p_value))
    failures = []
    for rank, (name, p_value) in enumerate(sorted(found, key=lambda each: each[1])):
        if p_value > FALSE_ALARM / (len(found) - rank):
            break
        failures.append(f"{name}, p = {p_value:.3g}")
    if greedy.bugs:
        failures.append(f"{greedy.bugs} greedy tokens are not the argmax: {greedy.first_bug}")
    return failures


def _plant(name: str | None, decoder: Decoder) -> Plant | None:
    if name is None:
        return None
    if name not in PLANTS:
        raise RequestError(f"no bug is called {name!r}; known: {', '.join(PLANTS)}")
    if decoder == "hf":
        raise RequestError("--plant goes into our own decoder; leave out --decoder hf")
    return PLANTS[name]
