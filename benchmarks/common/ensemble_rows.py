"""Rows of the table of ensembles: what each arm covers, accepts and would be worth.

Read next: `benchmarks/ensembles.py`, which trains and decodes them.

Shapes: R samples, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.common.acceptance import Pair, gain_over_seeds, over_seeds
from draftsmith.benchmarks.common.acceptance import pair as sums_of
from draftsmith.benchmarks.common.records import Figure
from draftsmith.eval.measure.speed import Costs
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.boosting.coverage import acceptance
from draftsmith.trainers.method_config import BoostConfig
from safetensors.torch import load_file

# what is said of every arm, however it was trained
SPANS = BoostConfig(unit="span", match_tokens=4)
WHOLE = BoostConfig(unit="sample", match_tokens=0)
COPIES = "copies"
HEADS = {
    "SSMs": "{ssms}",
    "n": "{n}",
    "spans of 4 covered": "{spans_covered}",
    "whole continuations": "{whole_covered}",
    "tau": "{tau}",
    "verified per call": "{verified}",
    "predicted speed-up": "{predicted_speedup}",
    "tau - copies": "{tau_less_copies}",
}
FORMATS = {"n": ".0f", "spans_covered": ".1%", "whole_covered": ".1%"}
FORMATS |= dict.fromkeys(["tau", "verified", "predicted_speedup", "tau_less_copies"], ".2f")


@dataclass(frozen=True)
class Run:
    """A line of SSMs, decoded as ensembles of the first n."""

    name: str
    folder: Path
    counts: tuple[int, ...]
    """Of SSMs that decode together."""
    costs_like: str
    """Whose step of drafting it takes, once for each SSM."""
    own_first: bool = False
    """SSM 1 is another than that of the copies."""


def coverage(run: Run, n: int) -> list[Pair]:
    """Sums of the held-out spans of 4, and of whole continuations, that the first n SSMs cover together."""
    folder = load_recipe(str(run.folder / "run.yaml")).recipe.boost.continuations
    parts = sorted(Path(str(folder)).glob("part-*.safetensors"))
    results = [load_file(run.folder / f"ssm-{k}" / "coverage.safetensors")["validation"] for k in range(1, n + 1)]
    # held-out samples come first in the parts
    label_RS = torch.cat([load_file(part)["labels"] for part in parts])[: len(results[0])]
    pairs = []
    for unit in (SPANS, WHOLE):
        best_RS = torch.stack([acceptance(each, label_RS, unit) for each in results]).amax(0)
        covered_RS = label_RS & (best_RS >= 1)
        pairs.append((covered_RS.sum(1).double().numpy(), label_RS.sum(1).double().numpy()))
    return pairs


def rows_at(
    of_seeds: Sequence[list[Run]],
    results: Sequence[dict[str, Any]],
    costs: dict[str, Costs],
    temperature: float,
    length: int,
) -> Iterator[dict[str, Any]]:
    """Cells of every arm and number of SSMs at a temperature, over all seeds."""
    sums = [
        {
            (name, row["members"]): row
            for name, rows in each.items()
            for row in rows
            if row["temperature"] == temperature
        }
        for each in results
    ]
    for run, n in _cells(of_seeds[0]):
        own = [each[run.name, n] for each in sums]
        seeds = [next(each for each in runs if each.name == run.name) for runs in of_seeds]
        spans, whole = zip(*(coverage(each, n) for each in seeds), strict=True)
        tau = over_seeds([sums_of(row, "tau") for row in own])
        nodes = over_seeds([sums_of(row, "verified") for row in own])
        row = {"ssms": run.name, "n": n, "T": temperature, "tau": tau, "verified": nodes}
        row |= {"spans_covered": over_seeds(spans), "whole_covered": over_seeds(whole)}
        row["predicted_speedup"] = predicted(tau, nodes, length * n, costs.get(run.costs_like))
        size = int(run.name.split()[0]) if run.costs_like != "base" else n
        other = control(run, of_seeds[0]), size
        if other in sums[0] and other != (run.name, n):
            copies = [sums_of(each[other], "tau") for each in sums]
            row["tau_less_copies"] = gain_over_seeds([sums_of(each, "tau") for each in own], copies)
        yield row


def predicted(tau: Figure | None, nodes: Figure | None, draft_steps: int, cost: Costs | None) -> Figure | str | None:
    """The speed-up over plain decoding, by the speed model; empty without costs."""
    if cost is None:
        return ""
    if tau is None or nodes is None:
        return None
    work = cost.verify(nodes.value) + draft_steps * (cost.c or 0.0)
    ends = {} if tau.low is None or tau.high is None else {"low": tau.low / work, "high": tau.high / work}
    seeds = {} if tau.seeds is None else {"seeds": [each / work for each in tau.seeds]}
    return Figure.model_validate({"value": tau.value / work, **ends, **seeds})


def _cells(runs: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    """From n = 1 with an SSM 1 of its own, what shares that of the copies from n = 2."""
    for run in runs:
        for n in run.counts:
            if n > 1 or run.name == COPIES or run.own_first or len(run.counts) == 1:
                yield run, n


def control(run: Run, runs: Sequence[Run]) -> str:
    """The copies that an arm is compared with: those with its own other values, where there are."""
    kind, *words = run.name.split()
    same = " ".join([COPIES, *words[1:]])
    boosted = kind != COPIES and run.costs_like == "base"
    return same if boosted and same in {each.name for each in runs} else COPIES
