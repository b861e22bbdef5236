"""Train from a recipe: what `draftsmith train` and `accelerate launch -m draftsmith.launch.train` do.

Read next: `recipe/load.py`; then `trainers/loop/loop.py`, where the work is done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import RequestError, Stopped
from ...storage import explain_full_disk
from ...trainers.loop.interruptions import Interrupted, interrupt_on_signal
from ..check.models import check_recipe
from ..recipe.load import Resolved, field_paths, load_recipe
from ..recipe.model import Recipe
from ..recipe.values import value_path
from .clock import on_a_day
from .folder import held_folder
from .status import Status

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone
    from ...trainers.loop.loop import Outcome, Probe


def train(
    recipe: str | Mapping[str, Any] | Resolved,
    *,
    out: str | Path | None = None,
    resume: str = "auto",
    **overrides: Any,
) -> Outcome:
    """Run a recipe: a shipped one by name, a file, or a dict of its sections.

    Args:
        out: the run's folder, by default `runs/NAME`; it has `run.yaml`, `metrics.jsonl`, `checkpoints/`, and
            `drafter/` or `target/` or both.
        resume: `auto`, `never` or a checkpoint's path.
        overrides: values over the recipe's: `data_source="stdlib"`, `loop__steps=50`, or `steps=50` where one
            section alone has such a value.

    Returns:
        How the run ended.

    Raises:
        RequestError: a wrong value, or a folder that another run is at work in or that holds another
            run. EnvironmentFailure: the folder cannot be written. Stopped: a signal ended the run.
    """
    if out == "":
        raise RequestError("out is empty; name a folder, or leave it out for runs/NAME")
    known = field_paths()
    flags = [
        (value_path(key, known), str(value) if isinstance(value, (str, Path)) else json.dumps(value))
        for key, value in overrides.items()
    ]
    resolved = recipe if isinstance(recipe, Resolved) else load_recipe(recipe, flags)
    folder = Path(out) if out is not None else Path("runs") / resolved.recipe.name
    check_recipe(resolved.recipe)
    resolved = on_a_day(resolved, folder, resume)
    with held_folder(folder, resolved, resume):
        return _dispatch(resolved.recipe, folder, resume)


def _dispatch(recipe: Recipe, out: Path, resume: str) -> Outcome:
    status = Status(out)
    with interrupt_on_signal():
        try:
            with explain_full_disk(out):
                status.write("running", None)
                outcome = _train_method(recipe, out, resume)
                status.write("finished", 0)
        except BaseException as error:  # whatever ends the run
            status.fail(Stopped(str(error)) if isinstance(error, Interrupted) else error)
            raise
    return outcome


def _train_method(recipe: Recipe, out: Path, resume: str) -> Outcome:
    from ...trainers.loop.setup import own_kernels
    from ...trainers.spine import run

    with own_kernels():
        return run(recipe, out, resume, lambda target: _probe(target, recipe))


def _probe(target: Backbone, recipe: Recipe) -> Probe:
    """Real decoding for the training loop: trainers know of no prompts and no measures."""
    from ...data.prompts import fitting, load_prompts, render
    from ...eval.measure.probe import as_proposer, tau_probe
    from ..check.room import check_probe_length, check_room

    check_probe_length(recipe)
    prompts = load_prompts(recipe.eval.prompts, limit=recipe.probe.prompts, seed=recipe.eval.seed, data=recipe.data)
    tokenizer, most = target.tokenizer, recipe.eval.prompt_tokens
    kept = fitting(prompts, tokenizer, most, warn=True)
    ids = [render(prompt, tokenizer, limit=most) for prompt in kept]
    longest, answer = max(map(len, ids)), recipe.probe.max_new_tokens
    check_room(recipe, target.model.config, longest, answer=answer, depth=recipe.record.probe_depth(recipe))
    return tau_probe(
        target,
        ids,
        make_proposer=as_proposer(recipe.record.family or "", target, recipe.probe.draft_length),
        max_new_tokens=answer,
    )
