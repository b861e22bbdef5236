"""Set-up shared by all trainers with a frozen target: target, rows, loop, and the drafter's folder.

Read next: `../distill.py`, `../medusa.py`, `../eagle.py`, which say what is taught.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from ...data.rows.prepare import Prepared, prepare
from ...decoding.backbone.backbone import Backbone, check_token_ids
from ...decoding.backbone.cut import Cut, held_numbers, teams
from ...decoding.backbone.hub import load_config
from ...decoding.backbone.loading import load_target
from ...decoding.backbone.quantised import quantisation_of
from ...drafters.folder import save_heads
from ...drafters.projection import check_logits
from ...errors import RequestError
from ..config import FROM_TARGET, TargetConfig
from ..loop.interruptions import name_the_silent
from ..loop.loop import Plan, RunOutcome
from ..loop.objective import Objective
from ..loop.setup import make_accelerator, make_deterministic, run_loop
from ..packed.lengths import check_rows_fit
from ..recipe import Run, TrainingRecipe
from ..student.warm_start import check_start_folder
from .engine_answers import answered_rows
from .feature_cache import feature_source
from .handshake import KEPT_LAYERS
from .unused import check_unused, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)
Save = Callable[[nn.Module, Path], None]
CheckTarget = Callable[[TrainingRecipe, "PreTrainedModel"], None]
CheckRows = Callable[[TrainingRecipe, Prepared], None]
Build = Callable[[Backbone, Prepared], Objective]


def check_teacher(recipe: TrainingRecipe, target: PreTrainedModel) -> None:
    """Raise RequestError for a target that no method with a frozen target can learn from.

    Args:
        target: its weights may be only shapes; they are not changed.
    """
    whose = f"target.path {recipe.target.path!r}"
    check_logits(target, whose)
    check_rows_fit(recipe, target.config, whose)
    _check_not_moved(recipe, target.config)


def _check_not_moved(recipe: TrainingRecipe, config: Any) -> None:
    """Raise RequestError where a quantised target would be trained, or a draft be made of its weights."""
    how = recipe.target.quantization or quantisation_of(config)
    if how is None:
        return
    made_of_it = FROM_TARGET in (recipe.model.start_from, *(recipe.boost.start_from or ()))
    if recipe.tunes_target or made_of_it:
        what = "trains the target itself" if recipe.tunes_target else "cuts the draft from the target's weights"
        raise RequestError(
            f"the recipe {what}, and target.path {recipe.target.path!r} is quantised ({how}): rounded weights can "
            "be neither moved nor cut; take the unquantised model"
        )


def run_for_target(
    build: Build, run: Run, *, check_target: CheckTarget, check_rows: CheckRows | None = None
) -> RunOutcome:
    """Train what `build` makes for the target and its rows into `out/drafter`.

    Args:
        check_target: called as soon as the target is loaded; rows, which come next, may take hours.
        check_rows: called as soon as the rows are there.
    """
    recipe, plan = run.recipe, plan_of(run.recipe)
    check_start_folder(recipe)
    accelerator, teacher = load_teacher(run, check_target)
    cut = recipe.target.sharding != "none"
    # prompts that have no room are refused here too
    decodes = recipe.features.source != "engine" and not cut  # a process's share of the layers decodes nothing
    probe = run.make_probe(teacher) if run.make_probe and decodes else None
    rows = prepare_rows(run, accelerator, teacher)
    check_unused(recipe, texts_of(rows))
    if check_rows is not None:
        check_rows(recipe, rows)
    if recipe.features.answers is not None:
        rows = _answered(build(teacher, rows), run, teacher, rows, accelerator)
    torch.manual_seed(plan.loop.seed)  # fresh weights must not depend on what loading has drawn
    objective = build(teacher, rows)
    with feature_source(objective, recipe.features, teacher, rows, recipe.data, out=run.out, accelerator=accelerator):
        return run_loop(
            objective,
            rows.train,
            rows.validation,
            plan,
            accelerator,
            out=run.out,
            export_to=run.out / "drafter",
            probe=probe,
            resume=run.resume,
            by_validation=cut,
            probe_together=recipe.target.tensor_parallel > 1,
        )


def _answered(objective: Objective, run: Run, teacher: Backbone, rows: Prepared, accelerator: Accelerator) -> Prepared:
    """The rows with the engine's own answers; an objective made for the given ones says whose states it needs."""
    if objective.features is None:
        raise RequestError("features.answers is set, and this method reads no features; leave it")
    recipe = run.recipe
    return answered_rows(
        rows,
        recipe.features,
        teacher,
        recipe.data,
        layers=objective.features.layers,
        seed=recipe.loop.seed,
        out=run.out,
        accelerator=accelerator,
    )


def load_teacher(run: Run, check_target: CheckTarget) -> tuple[Accelerator, Backbone]:
    """The accelerator, and the target on its device.

    Raises:
        RequestError: there is no such target, or as `check_target` says.
    """
    plan, target = plan_of(run.recipe), run.recipe.target
    make_deterministic(plan.loop)
    accelerator = make_accelerator(plan.loop, plan.optimizer, run.out)
    cut = _cut(target, accelerator.num_processes, bound=timedelta(seconds=plan.loop.stall_seconds))
    with name_the_silent(run.out, accelerator, bound=plan.loop.stall_seconds):
        teacher = load_target(
            target.path,
            revision=target.revision,
            dtype=target.dtype,
            device=str(accelerator.device),
            trust_remote_code=target.trust_remote_code,
            quantization=target.quantization,
            layers=_layers_here(run.recipe),
            cut=cut,
        )
        check_target(run.recipe, teacher.model)
    if cut is not None and accelerator.is_main_process:
        _say_what_is_held(teacher, target, accelerator.num_processes)
    return accelerator, teacher


def _layers_here(recipe: TrainingRecipe) -> int | None:
    """How many of the target's first layers this process needs; None for all."""
    if recipe.features.source != "engine":
        return None
    target = recipe.target
    config = load_config(target.path, revision=target.revision, trust_remote_code=target.trust_remote_code)
    return min(KEPT_LAYERS, int(config.get_text_config(decoder=True).num_hidden_layers))


def _cut(target: TargetConfig, processes: int, *, bound: timedelta) -> Cut | None:
    """How the target is cut in a run of so many processes.

    Args:
        target: what the recipe says of it.
        processes: of the run.
        bound: how long one waits for another.

    Raises:
        RequestError: the processes are no whole number of teams.
    """
    if target.tensor_parallel > 1:
        if processes == 1:
            return None  # it goes on with the whole target
        teams(processes, target.tensor_parallel)  # of which none may be left over
        return Cut(target.tensor_parallel, bound=bound)
    # a share of everything is worth it for its place alone
    alone = processes == 1 and not target.offload
    return None if target.sharding == "none" or alone else Cut(offload=target.offload)


def _say_what_is_held(teacher: Backbone, target: TargetConfig, processes: int) -> None:
    """How much of a target that is to be cut is here, and what follows for choosing the best drafter."""
    _log.info(
        "%s: %.2f M of the target's %.2f M numbers on each of %d process%s; %s",
        target.cut_as,
        held_numbers(teacher.model) / 1e6,
        sum(each.numel() for each in teacher.model.parameters()) / 1e6,
        processes,
        "es" * (processes > 1),
        "they decode with it together"
        if target.tensor_parallel > 1
        else "held-out loss chooses the best drafter, as no process decodes with a share",
    )


def prepare_rows(run: Run, accelerator: Accelerator, teacher: Backbone) -> Prepared:
    """The recipe's rows, every token of which the target has an embedding for."""
    watch = name_the_silent(run.out, accelerator, bound=run.recipe.loop.stall_seconds)
    with watch, accelerator.main_process_first():
        rows = prepare(run.recipe.data, teacher.tokenizer, out=run.out)
    if max(teacher.tokenizer.get_vocab().values()) >= teacher.vocabulary:  # all rows are read then
        for part in (rows.train, rows.validation):
            check_token_ids(teacher, int(part.ids_RS.max(initial=0)), "a row")
    return rows


def plan_of(recipe: TrainingRecipe) -> Plan:
    """The sections that the loop reads, and what the run is known by."""
    return Plan(recipe.loop, recipe.optimizer, recipe.checkpoint, recipe.probe, recipe.identity)


def freeze(target: PreTrainedModel) -> PreTrainedModel:
    """`target` itself, without gradients and dropout."""
    target.requires_grad_(False).eval()
    return target


def settings_of(shape: Any) -> dict[str, Any]:
    """The sizes of a drafter as its folder holds them, without a word of what it does not have."""
    lacking = {
        "draft_vocabulary": None,
        "fc_bias": False,
        "norm_before_residual": False,
        "output_norm": None,
        "own_embedding": False,
        "norm_before_fc": False,
        "head_norms": False,
        "target_hidden": None,
        "as_published": False,
    }
    return {name: value for name, value in asdict(shape).items() if lacking.get(name, ...) is not value}


def saver(target: Backbone, family: str) -> Save:
    """How a drafter that rides on `target` is written; its sizes are `module.config`."""

    def save(module: nn.Module, folder: Path) -> None:
        net: Any = module
        save_heads(module, folder, target, family=family, settings=settings_of(net.config))

    return save
