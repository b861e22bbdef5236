"""Skeleton-of-Thought (Ning et al. 2023): an outline first, then all of its points as one batch.

It is no speculative decoding and not lossless: the target gets other prompts, so it gives other
answers. Hence latency, length and target calls beside plain decoding, and never acceptance.
Read next: `metrics.py`, which judges both texts; `evaluate.py` for what is lossless.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from ...data.prompts import Prompt, render
from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import autoregressive
from ...decoding.sampling import Warper
from ..report.tables import MISSING, interval, number
from .metrics import degeneracy, ratio

METHOD = "skeleton-of-thought"
_BEGINNING = "1."  # without a blank behind it: most tokenizers put that into the next word
# The paper's pattern, and two traps less: a number alone on its line does not take the next point
# for its outline, and what has four digits is a year or a loop, not the number of a point.
_POINT = re.compile(r"(?<!\d)(\d{1,3})\.(?!\s*\n\s*\d+\.)\s?([\s\S]+?)(?=\n|\n*$)")
# Streams of random numbers: no two texts of an answer may share one.
_PLAIN, _SKELETON, _FIRST_POINT = 0, 1, 2


@dataclass(frozen=True)
class PricedAnswer:
    """One answer and its price."""

    text: str
    ids: tuple[int, ...]
    """Of the answer as it is read, begun ones with their beginning: its length and its loops."""
    tokens: int
    """Written in total, those of a skeleton included."""
    calls: int
    """Target calls one after the other; prefills are not counted, but the clock holds them."""
    seconds: float


@dataclass(frozen=True)
class SkeletonAnswer(PricedAnswer):
    """An answer by way of a skeleton, or the plain one where no skeleton came."""

    points: int
    """Points that were expanded; 0 after a fallback."""
    fallback: bool
    """The skeleton had no point, so the plain answer was written behind it."""


@dataclass(frozen=True)
class _Rows:
    """A batch of texts, each with its forced beginning, and what it cost together."""

    texts: list[str]
    ids: list[list[int]]
    tokens: int
    calls: int
    seconds: float


def parse_skeleton(text: str) -> list[tuple[int, str]]:
    """Number and outline of every point, in the order of the text; of equal numbers the first."""
    points: dict[int, str] = {}
    for number_, outline in _POINT.findall(text):
        if outline.strip():
            points.setdefault(int(number_), outline.strip())
    return list(points.items())


def skeleton_request(question: str) -> str:
    """Ask for the outline alone."""
    return (
        "Plan an answer to the question below, but do not write the answer yet. Name its main "
        "points in a numbered list (1., 2., 3. and so on) of at least 3 and at most 10 lines, one "
        "point per line, in the order in which they should be read. A point has 3 to 5 words and "
        f"no explanation.\n\nQuestion: {question}\n\nReply with the numbered list only."
    )


def point_request(question: str, skeleton: str, number: int, outline: str) -> str:
    """Ask for one point of the outline, which others do not wait for."""
    return (
        "Several authors answer a question together. They agreed on a plan, and each of them "
        f"writes one point of it.\n\nQuestion: {question}\n\nPlan:\n{skeleton}\n\nPoint {number} "
        f'("{outline}") is yours. Fill it out in one or two short sentences, and leave all other '
        "points to their authors."
    )


def answer_by_skeleton(
    target: Backbone, prompt: Prompt, *, warper: Warper, max_new_tokens: int, seed: int
) -> SkeletonAnswer:
    """Answer the first turn of a prompt: skeleton, then every point in the rows of one batch.

    Args:
        max_new_tokens: of the skeleton, and of each point.
        seed: of the random streams; plain and skeleton answers draw from different ones.
    """
    settings: dict[str, Any] = {"warper": warper, "max_new_tokens": max_new_tokens, "seed": seed}
    question = prompt.turns[0]
    asked = [(skeleton_request(question), _BEGINNING)]
    skeleton = _write(target, prompt, asked, first=_SKELETON, **settings)
    plan = skeleton.texts[0].strip()
    points = parse_skeleton(plan)
    if not points:
        return _fallback(skeleton, answer_plainly(target, prompt, **settings))
    asked = [(point_request(question, plan, at, outline), f"{at}. {outline}") for at, outline in points]
    answer = _write(target, prompt, asked, first=_FIRST_POINT, **settings)
    return SkeletonAnswer(
        text="\n".join(text.strip() for text in answer.texts),
        ids=tuple(token for row in answer.ids for token in row),
        tokens=skeleton.tokens + answer.tokens,
        calls=skeleton.calls + answer.calls,
        seconds=skeleton.seconds + answer.seconds,
        points=len(points),
        fallback=False,
    )


def answer_plainly(
    target: Backbone, prompt: Prompt, *, warper: Warper, max_new_tokens: int, seed: int
) -> PricedAnswer:
    """Answer the first turn of a prompt as anyone would: what the skeleton is compared with."""
    ids = render(prompt, target.tokenizer)
    rows = _decode(target, [(ids, [])], first=_PLAIN, warper=warper, max_new_tokens=max_new_tokens, seed=seed)
    return PricedAnswer(rows.texts[0], tuple(rows.ids[0]), rows.tokens, rows.calls, rows.seconds)


def evaluate_skeleton(
    target: Backbone, prompts: Sequence[Prompt], *, warper: Warper, max_new_tokens: int, seed: int
) -> dict[str, Any]:
    """Both ways on every prompt in turn: ratios are skeleton / plain, so below 1 is faster.

    Answers that fell back are in all figures, with the time of their useless skeleton;
    `mean_points` is over the others alone, null where there is none.
    """
    _warm_up(target, prompts[0], max_new_tokens)
    plain, own = [], []
    for at, prompt in enumerate(prompts):
        settings: dict[str, Any] = {"warper": warper, "max_new_tokens": max_new_tokens, "seed": seed + at}
        plain.append(answer_plainly(target, prompt, **settings))
        own.append(answer_by_skeleton(target, prompt, **settings))
    points = [each.points for each in own if not each.fallback]
    return {
        "method": METHOD,
        "lossless": False,
        "temperature": warper.temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "prompts": len(prompts),
        "latency_ratio": _ratio([x.seconds for x in own], [x.seconds for x in plain], seed),
        "length_ratio": _ratio([len(x.ids) for x in own], [len(x.ids) for x in plain], seed),
        "fallbacks": len(own) - len(points),
        "fallback_share": 1 - len(points) / len(own),
        "mean_points": fmean(points) if points else None,
        "skeleton": _means(own),
        "plain": _means(plain),
        "answers": [_shown(*each) for each in zip(prompts, own, plain, strict=True)],
    }


def skeleton_table(results: dict[str, Any]) -> Table:
    """The result of `evaluate_skeleton`, plain decoding beside it."""
    own, plain = results["skeleton"], results["plain"]
    count = results["prompts"]
    fallbacks = f"{results['fallbacks']} of {count}"
    rows = [
        ("latency", "s", *_pair(plain, own, "seconds"), interval(results["latency_ratio"])),
        ("target calls", "", *_pair(plain, own, "calls", 1), ""),
        ("answer", "tokens", *_pair(plain, own, "length", 1), interval(results["length_ratio"])),
        ("written", "tokens", *_pair(plain, own, "tokens", 1), ""),
        ("loops", "%", _loops(plain), _loops(own), ""),
        ("points", "", MISSING, number(results["mean_points"], 1), ""),
        ("without a skeleton", "", MISSING, fallbacks, ""),
    ]
    title = f"Skeleton-of-Thought, not lossless (T = {results['temperature']:g}, {count} prompts)"
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for name in ("per answer", "unit"):
        table.add_column(name, no_wrap=True)
    for name in ("plain", "skeleton", "skeleton / plain [95 %]"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _write(
    target: Backbone, prompt: Prompt, asked: Sequence[tuple[str, str]], *, first: int, **settings: Any
) -> _Rows:
    """Texts for pairs of a request and the beginning that the answer is forced to have."""
    tokenizer = target.tokenizer
    # without a template nothing tells the request from the answer but an empty line
    gap = "" if prompt.chat and tokenizer.chat_template is not None else "\n\n"
    begun = [
        (
            render(replace(prompt, turns=(request + gap,), messages=()), tokenizer),
            list(tokenizer(beginning, add_special_tokens=False)["input_ids"]),
        )
        for request, beginning in asked
    ]
    return _decode(target, begun, first=first, **settings)


def _decode(target: Backbone, begun: Sequence[tuple[list[int], list[int]]], *, first: int, **settings: Any) -> _Rows:
    """One batch of prompts with the beginnings of their answers; streams from `first` upwards."""
    done = autoregressive(
        target,
        [prompt + beginning for prompt, beginning in begun],
        eos_ids=target.eos_ids,
        requests=range(first, first + len(begun)),
        **settings,
    )
    # decoded together with the beginning: by itself a text may lose its first blank
    ids = [[*beginning, *row] for (_, beginning), row in zip(begun, done.tokens, strict=True)]
    texts = [str(target.tokenizer.decode(row, skip_special_tokens=True)) for row in ids]
    return _Rows(texts, ids, sum(map(len, done.tokens)), done.target_calls, done.prefill_seconds + done.decode_seconds)


def _fallback(skeleton: _Rows, plain: PricedAnswer) -> SkeletonAnswer:
    """The plain answer, at the price of both."""
    return SkeletonAnswer(
        text=plain.text,
        ids=plain.ids,
        tokens=skeleton.tokens + plain.tokens,
        calls=skeleton.calls + plain.calls,
        seconds=skeleton.seconds + plain.seconds,
        points=0,
        fallback=True,
    )


def _warm_up(target: Backbone, prompt: Prompt, max_new_tokens: int) -> None:
    """One row and several: the first call of a kind is slow."""
    ids = render(prompt, target.tokenizer)
    for rows in (1, 3):
        autoregressive(target, [ids] * rows, warper=Warper(0.0), max_new_tokens=min(8, max_new_tokens))


def _ratio(top: Sequence[float], bottom: Sequence[float], seed: int) -> list[float | None]:
    """With the bootstrap over prompts; `bottom` is positive everywhere, whatever is drawn."""
    return ratio(np.array(top, float), np.array(bottom, float), seed=seed).to_list()


def _means(answers: Sequence[PricedAnswer]) -> dict[str, Any]:
    """Means per answer, and how degenerate the answers are."""
    text = degeneracy([each.ids for each in answers])
    return {
        "seconds": fmean(each.seconds for each in answers),
        "calls": fmean(each.calls for each in answers),
        "length": fmean(len(each.ids) for each in answers),
        "tokens": fmean(each.tokens for each in answers),
        "distinct_2": text.distinct_2,
        "loop_share": text.loop_share,
        "flagged": text.flagged,
    }


def _shown(prompt: Prompt, own: SkeletonAnswer, plain: PricedAnswer) -> dict[str, Any]:
    """Both texts, for whoever judges their quality: nothing here does."""
    return {
        "id": prompt.id,
        "category": prompt.category,
        "points": own.points,
        "fallback": own.fallback,
        "text": own.text,
        "plain_text": plain.text,
        "seconds": own.seconds,
        "plain_seconds": plain.seconds,
    }


def _pair(plain: dict[str, Any], own: dict[str, Any], field: str, digits: int = 2) -> tuple[str, str]:
    return number(plain[field], digits), number(own[field], digits)


def _loops(side: dict[str, Any]) -> str:
    return f"{'! ' if side['flagged'] else ''}{100 * side['loop_share']:.0f}"
