"""From nothing to a trained, proven and reported drafter: the main job, offline, on a CPU.

The embedded target, an EAGLE-1 drafter for it, prompt lookup, which needs no training, and the untrained
drafter as the control: tuning, audit, evaluation, report.
Read next: `train/run.py`, `measure/tune.py`, `measure/run.py`.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.prompts import SECOND
from ..drafters.families import FAMILIES
from ..drafters.record import function
from ..errors import TrainingFailed
from ..storage.identity import flat
from .methods import TRAINED
from .recipe.load import load_recipe
from .recipe.model import Recipe
from .requests import Pair, TuneRequest
from .train import train

if TYPE_CHECKING:
    from rich.console import Console

    from ..decoding.proposal import Proposer
    from ..eval.measure.arms import Arm
    from ..eval.measure.requests import Request
    from .measure.loaded import Loaded

RECIPE = "eagle-tiny"
TRAINING = {
    "data.train_rows": "800",
    "features.source": "cache",
    "loop.steps": "800",
    "loop.validate_every": "800",
    "probe.every_steps": "",
}
"""How long it learns here: the whole takes minutes, not hours.

The target's pass is about half of a training step (docs/results/training.md), so a part of the rows is read several
times from kept states.
"""
HALF = {"loop.precision": "bf16", "features.precision": "bf16"}
"""On a CPU that multiplies bf16: a training step takes two thirds of the time. Decoding stays in fp32."""
RUN = "run"
"""The folder of its run, in the quickstart's own."""
TRAINING_FREE = "prompt-lookup"
"""The method beside them that needs no training."""
# with less evidence for each, the whole stays a matter of minutes
_LESS = {
    "audit.tokens": "4000",
    "audit.max_new_tokens": "64",
    "audit.batch": "64",
    "audit.sequences": "80000",
    "audit.prompts": "8",
    "eval.limit": "16",
    "eval.sweep": "[]",
    "eval.repeats": "1",
    "eval.second_prompts": SECOND,
}
_OF_THE_CONTROL = 4
"""Prompts that the untrained drafter decodes: it has nothing accepted, whatever the prompt."""
_TOGETHER = 8
"""Prompts of the second set that are decoded at once: nothing of it is timed, and no row depends on the others."""


def quickstart(out: Path, console: Console, steps: int | None = None) -> None:
    """Run everything into `out`, print the table, the report's path and the next command.

    Args:
        steps: of training; fewer than its own show that everything works here, and no figure to quote.
    """
    from ..decoding.devices import multiplies_bf16
    from .check.early import check_alone

    instead = "on several, train and evaluate by `draftsmith train` and `draftsmith eval`"
    check_alone("quickstart", "tunes by clocks, which differ between them", instead)
    stages = _Stages(console)
    half = multiplies_bf16()
    shorter = {} if steps is None else {"loop.steps": str(steps), "loop.validate_every": str(steps)}
    if steps is not None:
        own = int(TRAINING["loop.steps"])
        warning = ": no figure of it is worth quoting" if steps < own else ""
        console.print(f"a run of {steps} steps in place of {own}{warning}")
    resolved = load_recipe(RECIPE, list((TRAINING | (HALF if half else {}) | shorter).items()))
    stages.begin("a first look: what does copying from the text gain here, without any training?")
    lookup = _first_look(resolved.recipe, out, console)
    stages.begin(f"training{', in bf16' if half else ''}: {resolved.recipe.summary}")
    train(resolved, out=out / RUN)
    stages.begin("tuning: which of its settings is fastest on this machine?")
    _tune(out, console)
    results = _measure(out, lookup, console, stages, steps)
    stages.begin("reporting")
    from ..eval.report.report import write_report
    from ..eval.report.tables import show

    run = out / RUN
    show(results, console)
    page = write_report(run)
    console.print(f"done in {stages.seconds:.0f} s; report: {page}")
    console.print(f"next: draftsmith chat {run}                       (watch it draft)")
    console.print(f"      draftsmith audit {run} --plant fresh-draw   (an audit that must fail)")
    console.print("      draftsmith copy distill-tiny my.yaml        (then train your own)")


class _Stages:
    """Says which of six begins, and how long all before it took."""

    def __init__(self, console: Console) -> None:
        self._console, self._start, self._begun = console, time.perf_counter(), 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def begin(self, words: str) -> None:
        self._begun += 1
        behind = f" ({self.seconds:.0f} s so far)" if self._begun > 1 else ""
        self._console.print(f"{self._begun}/6 {words} ...{behind}")


def _first_look(recipe: Recipe, out: Path, console: Console) -> dict[str, str]:
    """The fastest setting of prompt lookup, on held-out rows of the recipe; what it gains is printed."""
    from .check.early import NamedFolders
    from .measure.tune import run_tune

    request = TuneRequest(method=TRAINING_FREE, limit=8, best=2, surfaces=False, out=out / TRAINING_FREE)
    alone = NamedFolders([TRAINING_FREE], recipe, recipe.target.path, None, out / RUN)
    best, *_ = run_tune(request, [alone], console)
    return dict(best.prediction.setting.values)


def _tune(out: Path, console: Console) -> None:
    """Leave `tuned.json` beside the drafter."""
    from .check.early import check_tune
    from .measure.tune import run_tune

    # trees need calls that cost little more with many tokens, which a CPU does not have
    request = TuneRequest(runs=(out / RUN,), method=TRAINED, limit=16, best=2, chains=True, surfaces=False)
    run_tune(request, check_tune(request, []), console)


def _measure(
    out: Path, lookup: dict[str, str], console: Console, stages: _Stages, steps: int | None
) -> dict[str, Any]:
    """Audit and measure what was trained, as it was tuned; measure the untrained draft beside it."""
    from ..eval.measure.evaluate import evaluate
    from ..eval.measure.requests import first_turns, make_requests
    from .measure.run import arms_of, audited, left_out, prompts_of, second_of, write_json

    stages.begin("auditing: is the output the target's own?")
    pair = _load(out, lookup)
    config, folder = pair.recipe.eval, pair.folder / "eval"
    prompts = prompts_of(config, pair.recipe.data)
    requests = make_requests(pair.target, prompts, config)
    arms = list(audited(pair, arms_of(pair), first_turns(requests), folder, console).values())
    stages.begin("measuring acceptance and speed")
    results = evaluate(pair.target, arms, requests, config, left_out=left_out(prompts, requests))
    results["draft"]["settings"] = flat(pair.recipe.drafter.model_dump(mode="json"))
    shorter = [] if steps is None else ["--steps", str(steps)]
    results["repeat"] = [shlex.join(["draftsmith", "quickstart", "--out", str(out), *shorter])]
    together = config.model_copy(update={"batch": _TOGETHER})
    results["second"] = second_of(pair, arms, prompts, together, results["rows"])
    results["rows"].append(_control(pair, _untrained(pair), requests[:_OF_THE_CONTROL], arms[0]))
    write_json(folder / "results.json", results)
    unproven = [arm.name for arm in arms if arm.verdict != "lossless"]
    if unproven:
        raise TrainingFailed(f"the audit failed for {', '.join(unproven)}, so no number above can be trusted")
    return results


def _load(out: Path, lookup: dict[str, str]) -> Loaded:
    """The drafter and prompt lookup on one target, each as tuned."""
    from .check.early import named
    from .measure.loaded import load_pair
    from .methods import make_method

    pair = load_pair(named(Pair(out / RUN), list(_LESS.items()), tuned=True))
    recipe = named(Pair(out / RUN, method=TRAINING_FREE), list(lookup.items())).recipe
    copying = make_method(TRAINING_FREE, recipe, pair.target, lambda: pair.drafter)
    return replace(pair, drafters={**pair.drafters, TRAINING_FREE: copying})


def _untrained(pair: Loaded) -> Proposer:
    """The drafter before its first step, as the control."""
    import torch

    recipe: Recipe = pair.recipe
    torch.manual_seed(recipe.loop.seed)
    net = recipe.record.code().student(recipe, pair.target.model)
    make = function(FAMILIES[str(recipe.record.family)].proposer or "")
    drafter: Proposer = make(net.requires_grad_(False).eval(), pair.target, pair.drafter.draft_length)
    return drafter


def _control(pair: Loaded, untrained: Proposer, requests: list[Request], trained: Arm) -> dict[str, Any]:
    """A row of the control.

    It is not audited: its row says that the verdict is the trained drafter's, whose code and rule it shares.
    """
    from ..eval.measure.arms import Arm
    from ..eval.measure.evaluate import evaluate

    config = pair.recipe.eval.model_copy(update={"temperatures": [0.0], "sweep": [], "repeats": 1})
    arm = Arm(f"untrained {trained.name}", untrained, trained.verdict, audited_as=trained.audited)
    row: dict[str, Any] = evaluate(pair.target, [arm], requests, config)["rows"][0]
    return row
