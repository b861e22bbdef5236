"""What of a server's answers can be judged, what comes of it, and what else than a wrong server would explain it.

To call a right server wrong is the worst that an audit can do. So an answer of which not everything is known is left
out, and a failure that something else explains decides nothing: defaults that the server would not leave off, a
template of its own, parts that it keeps to itself, answers that are missing for what they say.

An answer of which the token ids are known was ended by the target's own end, by a stop string, or nobody says. Servers
leave the token out that ended an answer, or name a string of theirs that did. An end that is not there is judged
nowhere; and to judge a sample in which ends alone are missing would be to choose. So where it is not known whether an
end is missing, greedy answers are judged without it, and sampled ones not at all.

Read next: `texts.py`, `sampled.py`, `precision.py`; `audit.py`, the verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from ...data.generate.server_defaults import left_on
from ...decoding.backbone.backbone import Backbone
from ...decoding.sampling import Warper
from ..audit.audit import failures_of
from ..audit.replay import Replay, replay
from ..config import AuditConfig
from .answer import Answer
from .answers import Judgeable, ServedAnswers
from .precision import LIMIT, Precision, precision_of
from .sampled import SampledJudgement, judge_sampled
from .texts import own_greedy, replay_texts

_EXCHANGED = 20.0  # greedy tokens that differences of log-probabilities would change, if they were the model's
_MARGINS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # upper ends of the histogram of margins


@dataclass(frozen=True)
class Evidence:
    """Answers that are judged, and what is missing among them."""

    greedy: list[Judgeable]
    sampled: list[Judgeable]
    """None at all where to judge those that can be judged would be to choose."""
    gaps: list[str] = field(default_factory=list)
    """What stands against `lossless`, in sentences."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Findings:
    """What came out."""

    greedy: Replay | None
    sampled: SampledJudgement | None
    precision: Precision
    failures: list[str]
    certain: bool
    """Whether something failed that no rounding explains."""
    notes: list[str]
    contradicted: bool
    """Whether its log-probabilities are of another model than its greedy tokens are."""


def evidence_of(target: Backbone, served: ServedAnswers, config: AuditConfig) -> Evidence:
    """The answers with their ends, those left out of which not all is known."""
    notes, gaps = [], []
    told = [each for each in (*served.greedy, *served.sampled) if each.answer.tokens]
    beyond = [each for each in told if max(each.answer.tokens or [0]) >= target.vocabulary]
    if beyond:
        gaps.append(
            f"{len(beyond)} answers hold token ids beyond the target's {target.vocabulary:,}: of another model, or of "
            "another tokenizer"
        )
    greedy, drawn = ([each for each in some if each not in beyond] for some in (served.greedy, served.sampled))
    ends = with_ends(target, greedy, drawn, config.max_new_tokens)
    if ends.stops:
        notes.append(f"answers were ended by {', '.join(ends.stops)}, which are no ends of the target")
    if ends.open_greedy:
        gaps.append(
            f"{ends.open_greedy} greedy answers end where the target goes on, and the server does not say by what: "
            "a stop string, or a wrong end"
        )
    partial = sum(not each.answer.whole for each in told)
    if partial:
        notes.append(f"{partial} answers are left out: the server hands out the ids of some of their tokens alone")
    sampled = ends.sampled
    silent = sum(not each.answer.whole for each in sampled)
    if silent or ends.open_sampled:
        if 0 < silent < len(sampled):
            gaps.append(
                f"{silent} of {len(sampled)} sampled answers do not say all of their tokens: to leave these out would "
                "be to choose"
            )
        if ends.open_sampled:
            gaps.append(
                f"{ends.open_sampled} sampled answers do not say what ended them, nor whether an end is missing"
            )
        sampled = []
    sampled = [each for each in sampled if each.tokens]
    if any(each.tokens for each in ends.greedy) and (left := sum(each.answer.tokens is None for each in ends.greedy)):
        notes.append(f"{left} greedy answers are left out: they say no token ids, as others do")
    return Evidence(ends.greedy, sampled, gaps, [*notes, *gaps])


def judge_evidence(target: Backbone, evidence: Evidence, config: AuditConfig) -> Findings:
    """All tests of these answers."""
    greedy, sampled = evidence.greedy, evidence.sampled
    warper = Warper.of(config, config.temperature)
    own = [] if any(each.tokens for each in greedy) else _own_greedy(target, greedy, config)
    texts = [(each.prompt, tokens) for each, tokens in zip(greedy, own, strict=False)]
    precision, rounding = precision_of(target, greedy, sampled, warper, texts)
    replayed, notes = _replayed(target, greedy, own, rounding)
    judged = None
    if sampled:
        largest = max(map(abs, rounding), default=0.0)
        sigma = precision.sigma if precision.is_rounding else precision.rounding_rms
        judged = judge_sampled(target, sampled, warper, sigma=sigma, largest=largest, seed=config.seed)
    tested = None if judged is None else judged.tested
    pair = (None, None) if tested is None else (tested.rosenblatt, tested.scores)
    failures = failures_of(None, pair[0], replayed, pair[1])
    certain = replayed is not None and replayed.bugs > 0
    if judged is not None and judged.outside:
        failures.append(f"{judged.outside} tokens have no probability under the filters: {judged.first_outside}")
        certain = True
    contradicted = not precision.is_rounding and _contradicts(precision, replayed)
    if not precision.is_rounding and not contradicted:
        failures.append(
            f"its log-probabilities are {precision.rms:.3g} away from the target's (root mean square) and rounding "
            f"explains {LIMIT * max(precision.rounding_rms, 1e-5):.3g}: other weights, a quantised copy, or other text"
        )
        certain = True
    return Findings(replayed, judged, precision, failures, certain, notes, contradicted)


def _own_greedy(target: Backbone, greedy: Sequence[Judgeable], config: AuditConfig) -> list[Sequence[int]]:
    return own_greedy(target, greedy, max_new_tokens=config.max_new_tokens, batch=config.batch)


def _replayed(
    target: Backbone, greedy: Sequence[Judgeable], own: Sequence[Sequence[int]], rounding: Sequence[float]
) -> tuple[Replay | None, list[str]]:
    """By token ids where there are any; else by texts, beside what the target itself writes."""
    if not greedy:
        return None, []
    told = [each for each in greedy if each.tokens]
    if told:
        return replay(target, [each.prompt for each in told], [each.tokens for each in told], rounding=rounding), []
    return replay_texts(target, greedy, own, rounding)


def _contradicts(precision: Precision, greedy: Replay | None) -> bool:
    """Whether a model with these log-probabilities would have written other greedy tokens than were written."""
    if greedy is None or greedy.bugs or precision.rms is None:
        return False
    counts = [count for _, count in greedy.margin_histogram]
    # a margin that is half as large as the differences is overcome by about one of three
    exchanged = sum(count for count, most in zip(counts, _MARGINS, strict=False) if most <= precision.rms / 2) / 3
    return exchanged > _EXCHANGED and greedy.near_ties < exchanged / 4


def doubt_of(
    target: Backbone, served: ServedAnswers, evidence: Evidence, found: Findings, config: AuditConfig
) -> str | None:
    """What else than a wrong server explains all that failed; None where nothing does."""
    if (sentence := left_on(served.way.off)) is not None:
        return f"tests fail, and {sentence}"
    sure = replace(
        evidence,
        greedy=[each for each in evidence.greedy if each.sure],
        sampled=[each for each in evidence.sampled if each.sure],
    )
    if (len(sure.greedy), len(sure.sampled)) != (len(evidence.greedy), len(evidence.sampled)) and (
        not sure.greedy or not judge_evidence(target, sure, config).failures
    ):
        return (
            "what fails are answers to chats whose prompt the server renders and does not show: another template of "
            "the same length, with a date say, would fail so too"
        )
    if found.greedy is not None and found.greedy.bugs:
        return _spelled_alike(target, evidence.greedy, config)
    if not found.certain and served.chosen:
        return (
            f"{served.chosen} sampled answers are missing whose prompts have others: where what they say decides "
            "which ones are refused, those left are another sample"
        )
    drawn = found.sampled
    if not found.certain and drawn is not None and drawn.copies and not drawn.of_another_law:
        return _copied(drawn.copies)
    return None


def gap_of(evidence: Evidence, found: Findings) -> str | None:
    """What stands against `lossless` where no test fails; None where nothing does."""
    if evidence.gaps:
        return evidence.gaps[0]
    if found.contradicted:
        return (
            f"its log-probabilities are {found.precision.rms:.3g} away from the target's, and its greedy tokens are "
            "the target's own: they are not of its tokens, or of another model"
        )
    if found.sampled is not None and found.sampled.copies:
        return _copied(found.sampled.copies)
    return None


def _copied(count: int) -> str:
    return (
        f"{count} sampled answers repeat others to the same prompt, word for word: answers from a cache, or the same "
        "random numbers for every request"
    )


def _spelled_alike(target: Backbone, greedy: Sequence[Judgeable], config: AuditConfig) -> str | None:
    """Whether the ids that are wrong spell the target's own text: somebody encoded the text anew."""
    told = [each for each in greedy if each.tokens]
    texts, left = replay_texts(target, told, _own_greedy(target, told, config), ())
    if texts is None or left or texts.bugs or texts.near_ties:
        return None
    return "its token ids are not the target's, and spell the target's own text: the text was encoded anew on its way"


_Open = Literal["open"]


@dataclass(frozen=True)
class Ends:
    """Answers with the tokens that ended them."""

    greedy: list[Judgeable]
    sampled: list[Judgeable]
    open_greedy: int
    """Greedy answers of which nobody says what ended them, and the target would go on."""
    open_sampled: int
    """Sampled ones of which nobody says it."""
    stops: list[str]
    """Strings and tokens beside the target's ends that ended answers."""


def with_ends(target: Backbone, greedy: Sequence[Judgeable], sampled: Sequence[Judgeable], limit: int) -> Ends:
    """Add the ends that a server keeps to itself, where it is certain that it does.

    Args:
        limit: most tokens of an answer.
    """
    ends = target.eos_ids
    hidden = [_hidden(each.answer, ends, limit) for each in greedy]
    # what the server does not say shows at T = 0: a missing end is what the target would write there
    seen = [_written(target, each) if end == "open" else end for each, end in zip(greedy, hidden, strict=True)]
    keeps = "open" in hidden and "open" not in seen and len(ends) == 1
    drawn = [
        ends[0] if end == "open" and keeps else end for end in (_hidden(each.answer, ends, limit) for each in sampled)
    ]
    every = [each.answer.stop for each in (*greedy, *sampled) if each.answer.stop not in (None, *ends)]
    return Ends(
        [_with(each, end) for each, end in zip(greedy, seen, strict=True)],
        [_with(each, end) for each, end in zip(sampled, drawn, strict=True)],
        seen.count("open"),
        drawn.count("open"),
        sorted({repr(each) for each in every}),
    )


def _hidden(answer: Answer, ends: Collection[int], limit: int) -> int | _Open | None:
    """The end that a server keeps to itself; None where it keeps none."""
    tokens = answer.tokens
    if answer.ended is None and tokens is not None and len(tokens) >= limit:
        return None
    if tokens is None or not answer.whole or answer.ended is False or (tokens and tokens[-1] in ends):
        return None
    if answer.stop is not None:
        return answer.stop if isinstance(answer.stop, int) and answer.stop in ends else None
    if answer.count == len(tokens) + 1 and len(ends) == 1:
        return next(iter(ends))
    return "open"


@torch.inference_mode()
def _written(target: Backbone, each: Judgeable) -> int | _Open:
    """The end that the target itself would write behind the answer."""
    ids_1S = torch.tensor([[*each.prompt, *each.tokens]], device=target.device)
    likeliest = int(target.model(ids_1S, use_cache=False).logits[0, -1].argmax())
    return likeliest if likeliest in target.eos_ids else "open"


def _with(each: Judgeable, end: int | _Open | None) -> Judgeable:
    if not isinstance(end, int):
        return each
    answer = each.answer
    tokens = [*(answer.tokens or []), end]
    logprobs = None if answer.logprobs is None else [*answer.logprobs, None]
    return replace(each, answer=replace(answer, tokens=tokens, logprobs=logprobs, count=len(tokens)))
