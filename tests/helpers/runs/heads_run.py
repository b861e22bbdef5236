"""A run folder of Medusa heads that have learnt nothing: each repeats the target's own last guess."""

from __future__ import annotations

from pathlib import Path

from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.shallow_target import SHALLOW


def write_heads_run(folder: Path, heads: int = 2, **values: str) -> Path:
    """The folder, with `drafter/` and `run.yaml`; `values`: of the recipe, a section and a field as `data__source`."""
    target = load_target(SHALLOW)
    net = MedusaHeads.for_target(target.model, heads=heads, shared_head=True)
    saver(target, "medusa")(net, folder / "drafter")
    own = [("target.path", SHALLOW), *((name.replace("__", "."), value) for name, value in values.items())]
    (folder / "run.yaml").write_text(load_recipe("medusa-tiny", own).yaml())
    return folder
