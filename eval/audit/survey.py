"""Every method over tables under many warpers: what is exact, and how well it is seen.

Each line is proof 1 with the real engine, proposer and rule, and a check that rows alone write what
they write in a batch of four. Read next: `toys.py`, `enumeration.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...decoding.engine import generate
from ...decoding.rules.choice import LOSSY
from ...decoding.sampling import Warper
from ..config import AuditConfig
from .enumeration import enumerate_decoding
from .plants import PLANTS
from .toys import PROMPT, TOYS, Toy

if TYPE_CHECKING:
    from rich.table import Table

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
