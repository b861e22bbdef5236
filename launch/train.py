"""Train from a recipe: `draftsmith train`, or `accelerate launch -m draftsmith.launch.train`.

Read next: `recipe.py`; then `trainers/loop.py`, where the work is done.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DraftsmithError, RequestError
from ..storage import write_text
from .recipe import Recipe, Resolved, load_recipe
from .unread import refuse_unread

if TYPE_CHECKING:
    from ..decoding.backbone import Backbone
    from ..trainers.loop import Outcome, Plan, Probe

_log = logging.getLogger(__name__)


def train(
    recipe: str | Resolved, *, out: str | Path | None = None, resume: str = "auto",
    **overrides: Any,
) -> Outcome:  # fmt: skip
    """Run a recipe. Overrides are `section__field=value`.

    Returns how the run ended; files are in `out` (default `runs/NAME`): `run.yaml`,
    `metrics.jsonl`, `checkpoints/`, and `drafter/` or `target/` or both.
    """
    flags = [
        (key.replace("__", "."), value if isinstance(value, str) else json.dumps(value))
        for key, value in overrides.items()
    ]
    resolved = load_recipe(recipe, flags) if isinstance(recipe, str) else recipe
    folder = Path(out) if out is not None else Path("runs") / resolved.recipe.name
    prepare_folder(folder, resolved, resume)
    return _dispatch(resolved.recipe, folder, resume)


def prepare_folder(folder: Path, resolved: Resolved, resume: str) -> None:
    """Make the run's folder; refuse to go on in one that was made by another recipe."""
    saved = folder / "run.yaml"
    if saved.is_file() and resume == "auto" and _has_begun(folder):
        before = load_recipe(str(saved)).recipe
        changed = sorted(_differences(before, resolved.recipe))
        if changed:
            raise RequestError(
                f"{folder} holds a run of another recipe; these values differ: "
                f"{', '.join(changed[:6])}. Give the same values to go on, or another --out"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") == "0":
            write_text(saved, resolved.yaml())
    except OSError as error:
        raise RequestError(f"cannot write the run folder {folder}: {error.strerror}") from error


def _has_begun(folder: Path) -> bool:
    """Whether there is work to go on from: a checkpoint, of an SSM too, or an SSM that is done."""
    places = ("checkpoints/step-*", "ssm-*/checkpoints/step-*", "ssm-*/coverage.safetensors")
    return any(any(folder.glob(each)) for each in places)


# what may change between the parts of a run: how it is measured and reported, not what it computes
_FREE = ("eval.", "audit.", "checkpoint.", "loop.log_every", "loop.trackers", "summary", "name",
         "machine.", "target.sizes", "model.sizes", "features.folder", "features.max_gb",
         "features.prefetch", "boost.continuations")  # fmt: skip


def _differences(before: Recipe, now: Recipe) -> set[str]:
    old, new = _flat(before.model_dump()), _flat(now.model_dump())
    return {
        path for path in old.keys() | new.keys()
        if old.get(path) != new.get(path) and not path.startswith(_FREE)
    }  # fmt: skip


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _dispatch(recipe: Recipe, out: Path, resume: str) -> Outcome:
    from ..trainers.loop import Plan

    plan = Plan(recipe.loop, recipe.optimizer, recipe.checkpoint, recipe.probe)
    status = _Status(out)
    status.write("running", None)
    try:
        outcome = _train_method(recipe, plan, out, resume)
    except DraftsmithError as error:
        status.write("stopped" if error.exit_code == 75 else "failed", error.exit_code, str(error))
        raise
    status.write("finished", 0)
    return outcome


def _train_method(recipe: Recipe, plan: Plan, out: Path, resume: str) -> Outcome:
    from ..trainers.lora import refuse_adapter

    refuse_adapter(recipe.lora, recipe.model, recipe.method)
    refuse_unread(recipe)
    if recipe.method == "target":
        from ..trainers import target

        return target.run(
            data=recipe.data, tokenizer=recipe.tokenizer, model=recipe.model,
            objective=recipe.objective, plan=plan, out=out, resume=resume,
        )  # fmt: skip
    common: dict[str, Any] = {
        "target": recipe.target, "features": recipe.features, "data": recipe.data,
        "model": recipe.model, "objective": recipe.objective, "plan": plan, "out": out,
        "resume": resume, "make_probe": lambda target: _probe(target, recipe),
    }  # fmt: skip
    if recipe.method == "medusa":
        from ..trainers import medusa

        return medusa.run(medusa=recipe.medusa, **common)
    if recipe.method == "medusa2":
        from ..trainers import medusa2

        return medusa2.run(medusa=recipe.medusa, medusa2=recipe.medusa2, tune=recipe.tune, **common)
    if recipe.method == "hydra":
        from ..trainers import hydra

        return hydra.run(medusa=recipe.medusa, **common)
    if recipe.method == "bpd":
        from ..trainers import bpd

        return bpd.run(bpd=recipe.bpd, tune=recipe.tune, **common)
    if recipe.method == "eagle":
        from ..trainers import eagle

        return eagle.run(eagle=recipe.eagle, **common)
    if recipe.method == "eagle3":
        from ..trainers import eagle3

        return eagle3.run(eagle3=recipe.eagle3, **common)
    if recipe.method == "boost":
        from ..trainers import boost

        return boost.run(boost=recipe.boost, lora=recipe.lora, **common)
    from ..trainers import distill

    return distill.run(lora=recipe.lora, rollouts=recipe.rollouts, **common)


def _probe(target: Backbone, recipe: Recipe) -> Probe:
    """Real decoding for the training loop: trainers know of no prompts and no measures."""
    from ..data.prompts import load_prompts, render
    from ..eval.probe import as_proposer, tau_probe

    prompts = load_prompts(recipe.eval.prompts, limit=recipe.probe.prompts, seed=recipe.eval.seed)
    ids = [render(prompt, target.tokenizer, limit=recipe.eval.prompt_tokens) for prompt in prompts]
    return tau_probe(
        target, ids, make_proposer=as_proposer(recipe.method, target, recipe.probe.draft_length),
        max_new_tokens=recipe.probe.max_new_tokens,
    )  # fmt: skip


class _Status:
    """`status.json`: the true exit code, for launchers that turn every code into 1."""

    def __init__(self, out: Path) -> None:
        self._path = out / "status.json"
        self._active = os.environ.get("RANK", "0") == "0"

    def write(self, state: str, code: int | None, message: str = "") -> None:
        if self._active:
            content = {"state": state, "exit_code": code, "message": message}
            write_text(self._path, json.dumps(content) + "\n")


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
