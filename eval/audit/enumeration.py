"""Proof 1: on a tiny vocabulary, the distribution of whole emitted sequences against the exact one.

The real engine, proposer and rule decode many sequences at once with models that are tables, on the
device of the pair. All distributions are known in closed form, so the count of every possible sequence
of four tokens (of a deep draft six) has an exact expectation. Several speculative steps make up a
sequence: numbers reused from step to step, or a wrong token between steps, show in the joint
distribution alone.
Read next: `toys.py`, `rosenblatt.py`.

Shapes: B sequences, V vocabulary, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ...decoding.engine import generate
from ...decoding.proposal import Proposer
from ...decoding.random import SharedStream
from ...decoding.rules.acceptance import Rule
from ...decoding.rules.choice import LOSSY
from ...decoding.sampling import Warper
from ..config import AuditConfig
from .plants import PLANTS
from .scores import detectable_total_variation
from .toy_models.table import TableModel
from .toys import PROMPT, TOYS, Toy

if TYPE_CHECKING:
    from rich.table import Table


_BLOCK = 100_000
# cells that are expected to hold fewer sequences are counted as one
_LEAST = 5.0


@dataclass(frozen=True)
class Enumeration:
    """Counts of sequences against their exact distribution."""

    sequences: int
    cells: int
    statistic: float
    p_value: float
    total_variation: float
    """Measured distance, sampling noise included."""
    noise: float
    """What that distance is expected to be for an exact decoder."""
    detectable: float


def enumerate_decoding(
    target: TableModel,
    make_proposer: Callable[[], Proposer],
    *,
    rule: Rule | str | None,
    sequences: int,
    warper: Warper,
    seed: int,
    level: float,
    length: int = 4,
    prompt: Sequence[int] = PROMPT,
) -> Enumeration:
    """Decode `sequences` sequences with the real engine and test the joint counts.

    Args:
        make_proposer: a fresh proposer for each block of sequences.
        rule: as the engine takes it; None for the lossless one.
        level: of the test, for the stated power.
        length: tokens of a sequence.
        prompt: what stands in front of every sequence.
    """
    V = target.vocabulary
    counts = np.zeros(V**length, dtype=np.int64)
    for block, first in enumerate(range(0, sequences, _BLOCK)):
        rows = min(_BLOCK, sequences - first)
        done = generate(
            target.as_backbone(),
            make_proposer(),
            [prompt] * rows,
            warper=warper,
            max_new_tokens=length,
            rule=rule,
            graphs=False,  # planted rules decide as they like, and sequences are short
            uniforms=SharedStream(seed * 1_000_003 + block, rows, target.device),
        )
        counts += _count(np.array(done.tokens), V)
    distribution = _exact_distribution(warper(target.logits_VV).double().cpu().numpy(), prompt[-1], length)
    possible = distribution > 0
    cells = int(possible.sum())
    statistic, p_value = _test(counts, distribution, possible)
    share = counts / sequences
    return Enumeration(
        sequences,
        cells,
        statistic,
        p_value,
        float(0.5 * np.abs(share - distribution).sum()),
        _expected_distance(distribution, sequences),
        detectable_total_variation(max(cells, 2), sequences, level),
    )


def _test(
    counts: NDArray[np.int64], distribution: NDArray[np.float64], possible: NDArray[np.bool_]
) -> tuple[float, float]:
    """Chi-square over the possible sequences, rare ones together; a single impossible one settles it."""
    if counts[~possible].any():
        return float("inf"), 0.0
    if possible.sum() == 1:
        return 0.0, 1.0
    observed, expected = counts[possible], distribution[possible] * counts.sum()
    few = expected < _LEAST
    if few.sum() > 1 and few.sum() < len(few):
        observed, expected = (np.append(each[~few], each[few].sum()) for each in (observed, expected))
    test = stats.chisquare(observed, expected)
    return float(test.statistic), float(test.pvalue)


def _expected_distance(distribution: NDArray[np.float64], sequences: int) -> float:
    """Mean total variation of exact counts from their distribution: half of E|N(0, p(1-p)/n)| summed."""
    deviations = np.sqrt(distribution * (1 - distribution) / sequences)
    return float(0.5 * np.sqrt(2 / np.pi) * deviations.sum())


def _count(tokens_BL: NDArray[np.int64], V: int) -> NDArray[np.int64]:
    L = tokens_BL.shape[1]
    place_L = V ** np.arange(L - 1, -1, -1)
    return np.bincount((tokens_BL * place_L).sum(1), minlength=V**L)


def _exact_distribution(p_VV: NDArray[np.float64], last: int, length: int) -> NDArray[np.float64]:
    """Probability of every sequence of that many tokens behind the prompt's last one."""
    p_VV = p_VV / p_VV.sum(1, keepdims=True)
    V = len(p_VV)
    distribution = p_VV[last]
    for _ in range(length - 1):
        distribution = (distribution.reshape(-1, V)[:, :, None] * p_VV[None]).reshape(-1)
    return distribution / distribution.sum()


WARPERS = {
    "T=0": Warper(0.0),
    "T=0.6": Warper(0.6),
    "T=1": Warper(1.0),
    "T=1, top-k": Warper(1.0, top_k=2),
    "T=1, top-p": Warper(1.0, top_p=0.8),
    "T=0.6, both": Warper(0.6, top_k=2, top_p=0.9),
}
_PLANTED = Warper(0.7)
# a correct decoder fails the whole survey once in a thousand
_FALSE_ALARM = 1e-3
# lenience needs the distribution of a draft; the others were published for likeliest tokens
_LOSSY_METHODS = {rule: "draft-model" if rule == "lossy-lenient" else "tree, likeliest tokens" for rule in LOSSY}


def survey(config: AuditConfig, methods: Sequence[str] = tuple(TOYS)) -> dict[str, Any]:
    """Run it; `config.sequences` per line, its seed throughout."""
    level = _FALSE_ALARM / (len(methods) * len(WARPERS))
    exact = [_line(name, shown, warper, config, level) for name in methods for shown, warper in WARPERS.items()]
    planted = [_planted(name, config, level) for name in PLANTS]
    lossy = [_lossy(rule, config, level) for rule in LOSSY]
    passed = all(each["p_value"] > level and each["rows_alone"] for each in exact)
    caught = all(each["p_value"] < level for each in planted)
    return {
        "format": 1,
        "sequences": config.sequences,
        "level": level,
        "passed": passed and caught,
        "exact": exact,
        "planted": planted,
        "lossy": lossy,
    }


def _line(name: str, shown: str, warper: Warper, config: AuditConfig, level: float) -> dict[str, Any]:
    small = Toy.of(name, config.seed + 1)
    result = enumerate_decoding(
        small.target,
        small.proposer,
        rule=None,
        sequences=config.sequences,
        warper=warper,
        seed=config.seed + 1,
        level=level,
        length=small.kind.length,
        prompt=small.kind.prompt,
    )
    return {
        "method": name,
        "warper": shown,
        "p_value": result.p_value,
        "cells": result.cells,
        "detectable": result.detectable,
        "rows_alone": rows_alone(small, warper),
    }


def rows_alone(small: Toy, warper: Warper, rows: int = 4, rounds: int = 16) -> bool:
    """Whether rows decoded one by one write what they write together, with the same numbers."""
    for first in range(0, rows * rounds, rows):
        numbers = list(range(first, first + rows))
        prompts = [PROMPT[: 3 + number % 6] for number in numbers]

        def write(some: list[list[int]], requests: list[int], batch: int = first) -> list[list[int]]:
            return generate(
                small.target.as_backbone(),
                small.proposer(),
                some,
                warper=warper,
                max_new_tokens=12,
                seed=batch,
                requests=requests,
            ).tokens

        alone = [write([p], [n])[0] for p, n in zip(prompts, numbers, strict=True)]
        if write(prompts, numbers) != alone:
            return False
    return True


def _planted(name: str, config: AuditConfig, level: float) -> dict[str, Any]:
    plant, small = PLANTS[name], Toy.of("draft-model", config.seed + 1)
    result = enumerate_decoding(
        small.target,
        lambda: plant.toy(small.drafts),
        rule=plant.make_rule(),
        sequences=config.sequences,
        warper=_PLANTED,
        seed=config.seed + 1,
        level=level,
    )
    return {"plant": name, "p_value": result.p_value, "total_variation": result.total_variation, "noise": result.noise}


def _lossy(rule: str, config: AuditConfig, level: float) -> dict[str, Any]:
    small = Toy.of(_LOSSY_METHODS[rule], config.seed + 1)
    result = enumerate_decoding(
        small.target,
        small.proposer,
        rule=rule,
        sequences=config.sequences,
        warper=_PLANTED,
        seed=config.seed + 1,
        level=level,
    )
    return {"rule": rule, "method": small.name, "total_variation": result.total_variation, "noise": result.noise}


def survey_table(survey: dict[str, Any]) -> Table:
    """One line per method: the smallest p, the bias that would be seen; then plants and lossy."""
    from rich import box
    from rich.table import Table

    title = (
        f"{survey['sequences']:,} sequences per method and warper; a p below {survey['level']:.1g} "
        f"fails\nwarpers: {'; '.join(WARPERS)}"
    )
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for name in ("method", "smallest p", "would see", "rows alone"):
        table.add_column(name, no_wrap=True)
    for name in dict.fromkeys(each["method"] for each in survey["exact"]):
        mine = [each for each in survey["exact"] if each["method"] == name]
        table.add_row(
            name,
            f"{min(each['p_value'] for each in mine):.2g}",
            f"{max(each['detectable'] for each in mine):.4f}",
            "equal" if all(each["rows_alone"] for each in mine) else "DIFFER",
        )
    for each in survey["planted"]:
        seen = "caught" if each["p_value"] < survey["level"] else "MISSED"
        table.add_row(f"planted: {each['plant']}", f"{each['p_value']:.2g}", seen, "")
    for each in survey["lossy"]:
        distance = max(0.0, each["total_variation"] - each["noise"])
        table.add_row(f"{each['rule']} ({each['method']})", "", f"distance {distance:.3f}", "")
    return table
