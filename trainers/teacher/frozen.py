"""What all runs share that teach something to draft for a frozen target.

Read next: `distill.py`, `medusa.py`, `eagle.py`, which say what is taught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from torch import nn

from ...data.config import DataConfig
from ...data.rows.prepare import Prepared, prepare
from ...decoding.target.backbone import Backbone, check_token_ids
from ...decoding.target.loading import load_target
from ...drafters.folder import save_heads
from ...drafters.projection import check_plain_logits
from ..config import FeaturesConfig, TargetConfig
from ..loop.loop import Outcome, Plan, Probe
from ..loop.objective import Objective, check_row_length
from ..loop.setup import make_accelerator, make_deterministic, run_loop
from .feature_cache import feature_source

Save = Callable[[nn.Module, Path], None]


class Given(TypedDict):
    """What such a run is given, whatever the method.

    `make_probe` supplies the real decoding of probes.
    """

    target: TargetConfig
    features: FeaturesConfig
    data: DataConfig
    plan: Plan
    out: Path
    resume: str
    make_probe: Callable[[Backbone], Probe] | None


def run_for_target(build: Callable[[Backbone, Prepared], Objective], given: Given) -> Outcome:
    """Train what `build` makes for the target and its rows into `out/drafter`."""
    plan, out, make_probe = given["plan"], given["out"], given["make_probe"]
    accelerator, teacher = _load(given, given["data"].sequence_length)
    # prompts that have no room are refused here; rows may take hours
    probe = make_probe(teacher) if make_probe else None
    rows = _rows(given, accelerator, teacher)
    torch.manual_seed(plan.loop.seed)  # fresh weights must not depend on what loading has drawn
    objective = build(teacher, rows)
    with feature_source(objective, given["features"], teacher, rows, given["data"], out=out, accelerator=accelerator):
        return run_loop(
            objective,
            rows.train,
            rows.validation,
            plan,
            accelerator,
            out=out,
            export_to=out / "drafter",
            probe=probe,
            resume=given["resume"],
        )


def begin(given: Given) -> tuple[Accelerator, Backbone, Prepared]:
    """The accelerator, the target on its device, and the rows; errors as for `_load`."""
    accelerator, teacher = _load(given)
    return accelerator, teacher, _rows(given, accelerator, teacher)


def _load(given: Given, row_tokens: int = 0) -> tuple[Accelerator, Backbone]:
    """The accelerator, and the target on its device.

    Args:
        row_tokens: length of the rows that the target will read, where they are the data's.

    Raises:
        RequestError: there is no such target, its logits are more than a projection, or its
            context is shorter than a row.
    """
    plan, out, target = given["plan"], given["out"], given["target"]
    make_deterministic(plan.loop)
    accelerator = make_accelerator(plan.loop, plan.optimizer, out)
    teacher = load_target(
        target.path,
        revision=target.revision,
        dtype=target.dtype,
        device=str(accelerator.device),
        trust_remote_code=target.trust_remote_code,
    )
    # `build` asks again; rows, pruning and continuations may take hours until then
    whose = f"target.path {target.path!r}"
    check_plain_logits(teacher.model, whose)
    check_row_length(teacher.model.config, row_tokens, whose)
    return accelerator, teacher


def _rows(given: Given, accelerator: Accelerator, teacher: Backbone) -> Prepared:
    with accelerator.main_process_first():
        rows = prepare(given["data"], teacher.tokenizer, out=given["out"])
    if max(teacher.tokenizer.get_vocab().values()) >= teacher.vocabulary:  # all rows are read then
        for part in (rows.train, rows.validation):
            check_token_ids(teacher, int(part.ids_RS.max(initial=0)), "a row")
    return rows


def saver(target: Backbone, family: str) -> Save:
    """How a drafter that rides on `target` is written; its sizes are `module.config`."""

    def save(module: nn.Module, folder: Path) -> None:
        net: Any = module
        save_heads(module, folder, target, family=family, settings=asdict(net.config))

    return save
