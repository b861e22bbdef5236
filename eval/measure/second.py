"""A second prompt set, to see whether what was chosen on the first holds elsewhere too: tau and alpha on both.

Two sets agree where the interval of their difference holds 0. It follows from the two intervals (Zou and Donner
2008, "MOVER"): its lower end is t1 - t2 - sqrt((t1 - low1)^2 + (high2 - t2)^2), its upper end likewise. The
intervals hold for all rows together (Bonferroni), or one of many rows would differ by chance.
Read next: `evaluate.py`, the first set.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from scipy import stats

from ...decoding.backbone.backbone import Backbone
from ...decoding.engine import generate
from ...decoding.sampling import Warper
from ..config import EvalConfig
from .arms import Arm
from .metrics import Counts, acceptance, counts_of
from .requests import Request

Figure = Sequence[float | None]
"""A value and the ends of its 95 % interval, as results have it."""


def second_rows(
    target: Backbone,
    arms: Sequence[Arm],
    requests: Sequence[Request],
    config: EvalConfig,
    first: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """tau and alpha of each method and temperature on other prompts, beside those of the first set.

    Args:
        requests: of `config.second_prompts`.
        first: the rows of results on the first set, those of `arms` among them.
    """
    of_first = {(row["method"], row["temperature"]): row for row in first}
    made = []
    for temperature in config.temperatures:
        for arm in arms:
            found = acceptance(_decoded(target, arm, requests, config, temperature), seed=config.seed)
            own = of_first[arm.name, temperature]
            made.append(
                {
                    "method": arm.name,
                    "temperature": temperature,
                    "verdict": arm.verdict,
                    "prompts": config.second_prompts,
                    "requests": len(requests),
                    "tau": found.tau.to_list(),
                    "alpha": found.alpha.to_list(),
                    "steps": found.steps,
                    "first_tau": own["tau"],
                }
            )
    for row in made:
        row["difference"] = difference(row["tau"], row["first_tau"], rows=len(made))
        row["agrees"] = row["difference"][1] is None or row["difference"][1] <= 0 <= row["difference"][2]
    return made


def _decoded(
    target: Backbone, arm: Arm, requests: Sequence[Request], config: EvalConfig, temperature: float
) -> list[Counts]:
    """What the steps of every request accepted; nothing is timed, and nothing decoded plainly."""
    warper = Warper.of(config, temperature)
    counts: list[Counts] = []
    for at in range(0, len(requests), config.batch):
        part = requests[at : at + config.batch]
        done = generate(
            target,
            arm.drafter,
            [each.ids for each in part],
            warper=warper,
            max_new_tokens=config.max_new_tokens,
            eos_ids=target.eos_ids,
            seed=config.seed,
            requests=[each.number for each in part],
            rule=config.rule,
        )
        counts += counts_of(done.steps)
    return counts


def difference(one: Figure, other: Figure, *, rows: int) -> list[float | None]:
    """one - other with its interval, which holds for `rows` differences together; null where one has none."""
    if one[0] is None or other[0] is None:
        return [None, None, None]
    middle = one[0] - other[0]
    if one[1] is None or one[2] is None or other[1] is None or other[2] is None:
        return [middle, None, None]
    wider = float(stats.norm.ppf(1 - 0.025 / rows) / stats.norm.ppf(0.975))
    below = sqrt((one[0] - one[1]) ** 2 + (other[2] - other[0]) ** 2)
    above = sqrt((one[2] - one[0]) ** 2 + (other[0] - other[1]) ** 2)
    return [middle, middle - wider * below, middle + wider * above]
