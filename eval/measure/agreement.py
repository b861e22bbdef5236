"""Agreement: how often sampled answers repeat the answer at T = 0, and the majority among them.

The share that agrees is a measure of confidence, and the majority vote is an answer of its own
(self-consistency, Wang et al. 2023). The samples of a prompt are rows of one batch, each with its
own random numbers; speculation changes their speed and not their distribution.
Read next: `evaluate.py`, `report/tables.py`.

Shapes: R prompts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import autoregressive, generate
from ...decoding.proposal import Proposer
from ...decoding.sampling import Warper
from ...errors import RequestError
from ..report.tables import MISSING, interval, plain_table
from .metrics import ratio

Normalise = Callable[[list[int]], str]
_GREEDY = Warper(0.0)
# requests of a prompt start at a multiple: its streams do not depend on how many are drawn
_STRIDE = 1 << 20
_NUMBER = re.compile(r"(?<!\d)(?<!\d\.)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_MARK = "####"


def stripped(text: str) -> str:
    """The text without the white space around it."""
    return text.strip()


def first_line(text: str) -> str:
    """The first line that holds anything."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def last_number(text: str) -> str:
    """The number behind `####`, as GSM8K writes it, else the last one; "" if there is none.

    Written plainly: `1,042.50` is `1042.5`.
    """
    _, mark, behind = text.partition(_MARK)
    numbers = _NUMBER.findall(behind)[:1] if mark else []
    numbers = numbers or _NUMBER.findall(text)[-1:]
    if not numbers:
        return ""
    plain = str(numbers[0]).replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


NORMALISERS: dict[str, Callable[[str], str]] = {
    "stripped": stripped,
    "first_line": first_line,
    "last_number": last_number,
}


def agreement(
    target: Backbone,
    drafter: Proposer | None,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    warper: Warper,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    seed: int = 0,
    normalise: Normalise | str = "stripped",
    references: Sequence[str | None] | None = None,
) -> dict[str, Any]:
    """Answer every prompt at T = 0 and `samples` times at the warper's temperature, and vote.

    Args:
        drafter: decodes speculatively; None for plain decoding.
        prompts: token ids of every prompt.
        samples: answers drawn per prompt, the rows of one batch.
        warper: the distribution of the samples; its temperature is above 0.
        normalise: what of an answer is compared: a name of `NORMALISERS`, applied to the decoded
            text, or a function of the token ids, EOS included.
        references: right answers, to measure accuracy with; None for a prompt without one.

    Raises:
        RequestError: no prompt, no sample, a greedy warper, an unknown normaliser, or references
            that are not one per prompt.
    """
    _check(prompts, samples, warper, references)
    of_ids, of_text = _normalisers(target, normalise)
    write = _writer(target, drafter, max_new_tokens, eos_ids, seed)
    greedy: list[list[int]] = []
    for at in range(0, len(prompts), samples):
        greedy += write(prompts[at : at + samples], range(samples), _GREEDY)
    rows = []
    for number, prompt in enumerate(prompts):
        requests = range(number * _STRIDE, number * _STRIDE + samples)
        drawn = write([prompt] * samples, requests, warper)
        right = references[number] if references is not None else None
        rows.append(
            _row(
                of_ids(greedy[number]), [of_ids(answer) for answer in drawn], None if right is None else of_text(right)
            )
        )
    return {
        "samples": samples,
        "temperature": warper.temperature,
        "speculative": drafter is not None,
        **summarise(rows, seed=seed),
        "rows": rows,
    }


def majority(answers: Sequence[str], greedy: str) -> str:
    """The most frequent answer; of several that are, the one at T = 0, else the first seen."""
    counts = Counter(answers)
    most = max(counts.values())
    tied = [answer for answer, count in counts.items() if count == most]
    return greedy if greedy in tied else tied[0]


def summarise(rows: Sequence[dict[str, Any]], *, seed: int = 0) -> dict[str, Any]:
    """Means over prompts with 95 % bootstrap intervals; null where nothing was measured."""
    judged = [row for row in rows if row["reference"] is not None]
    return {
        "prompts": len(rows),
        "agreement": _mean([row["agreement"] for row in rows], seed),
        "vote_differs": _mean([row["vote"] != row["greedy"] for row in rows], seed),
        "references": len(judged),
        "greedy_accuracy": _mean([row["greedy_correct"] for row in judged], seed),
        "vote_accuracy": _mean([row["vote_correct"] for row in judged], seed),
    }


def agreement_table(result: dict[str, Any]) -> Table:
    """The answer at T = 0 beside the vote; accuracy where there are references."""
    greedy = ("greedy", "0", MISSING, MISSING, interval(result["greedy_accuracy"]))
    vote = (
        f"vote of {result['samples']}",
        f"{result['temperature']:g}",
        interval(result["agreement"]),
        interval(result["vote_differs"]),
        interval(result["vote_accuracy"]),
    )
    columns = (("method", ""), ("T", ""), ("agreement", "share"), ("vote differs", "share"), ("accuracy", "share"))
    shown = len(columns) if result["references"] else len(columns) - 1
    rows = [vote[:shown], greedy[:shown]] if result["references"] else [vote[:shown]]
    title = f"Agreement with T = 0 on {result['prompts']} prompts [95 % interval]"
    return plain_table(title, columns[:shown], rows)


def _row(greedy: str, answers: list[str], reference: str | None) -> dict[str, Any]:
    vote = majority(answers, greedy)
    return {
        "greedy": greedy,
        "answers": answers,
        "agreement": answers.count(greedy) / len(answers),
        "vote": vote,
        "votes": answers.count(vote),
        "vote_is_greedy": vote == greedy,
        "reference": reference,
        "greedy_correct": None if reference is None else greedy == reference,
        "vote_correct": None if reference is None else vote == reference,
    }


Write = Callable[[Sequence[Sequence[int]], Sequence[int], Warper], list[list[int]]]


def _writer(
    target: Backbone, drafter: Proposer | None, max_new_tokens: int, eos_ids: Sequence[int], seed: int
) -> Write:
    """Decode the rows of one batch."""

    def write(prompts: Sequence[Sequence[int]], requests: Sequence[int], warper: Warper) -> list[list[int]]:
        common: dict[str, Any] = {
            "warper": warper,
            "max_new_tokens": max_new_tokens,
            "eos_ids": eos_ids,
            "seed": seed,
            "requests": list(requests)[: len(prompts)],
        }
        if drafter is None:
            return autoregressive(target, prompts, **common).tokens
        return generate(target, drafter, prompts, **common).tokens

    return write


def _normalisers(target: Backbone, normalise: Normalise | str) -> tuple[Normalise, Callable[[str], str]]:
    """What turns an answer's ids, and a reference's text, into what is compared."""
    if not isinstance(normalise, str):
        return normalise, stripped
    if normalise not in NORMALISERS:
        raise RequestError(f"no normaliser is called {normalise!r}; known: {', '.join(NORMALISERS)}")
    of_text = NORMALISERS[normalise]

    def of_ids(ids: list[int]) -> str:
        return of_text(str(target.tokenizer.decode(ids, skip_special_tokens=True)))

    return of_ids, of_text


def _mean(values_R: Sequence[float], seed: int) -> list[float | None]:
    values = np.array(values_R, dtype=float)
    return ratio(values, np.ones_like(values), seed=seed).to_list()


def _check(
    prompts: Sequence[Sequence[int]], samples: int, warper: Warper, references: Sequence[str | None] | None
) -> None:
    if not prompts:
        raise RequestError("agreement has no prompt; it needs at least one")
    if not 1 <= samples <= _STRIDE:
        raise RequestError(f"samples is {samples}; expected 1 to {_STRIDE:,}")
    if warper.greedy:
        raise RequestError("agreement samples at a temperature above 0; at 0 all answers are one")
    if references is not None and len(references) != len(prompts):
        raise RequestError(
            f"{len(references)} references for {len(prompts)} prompts; expected one each, None where there is none"
        )
