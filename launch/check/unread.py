"""What a recipe asks for and its method, or what stands beside it, would pass over in silence.

A value that nobody reads is a promise broken, so it is refused by name before anything is loaded.
Read next: `train.py` and `check.py`, which both ask here.
"""

from __future__ import annotations

from ...errors import RequestError
from ...trainers.config import LoraConfig
from ..recipe.load import Recipe

# a value, and the methods that do what it says; empty and 0 ask for nothing
READ_BY = {
    "rollouts.share": ("distill",),
    "objective.from_kl_share": ("distill", "boost"),
    "objective.teacher_top_k": ("distill", "boost", "medusa", "medusa2", "hydra", "bpd"),
    # all by now; a method to come is refused until it says that it goes on from something
    "model.start_from": ("target", "distill", "boost", "medusa", "medusa2", "hydra", "bpd", "eagle", "eagle3"),
}


def check_read(recipe: Recipe) -> None:
    """Raise RequestError for a value that the run would not follow."""
    for name, methods in READ_BY.items():
        section, key = name.split(".")
        value = getattr(getattr(recipe, section), key)
        if value and recipe.method not in methods:
            known = " or ".join(f"`{each}`" for each in methods)
            raise RequestError(
                f"{name} is {value}, and method `{recipe.method}` does not read it; leave it out, "
                f"or train with {known}"
            )
    if recipe.lora.rank is None and recipe.lora != LoraConfig():
        given = next(iter(recipe.lora.model_dump(exclude_defaults=True)))
        raise RequestError(
            f"lora.{given} is {getattr(recipe.lora, given)!r}, and lora.rank is not set: the model "
            "itself would be trained, no adapter; set lora.rank, or leave the section out"
        )
    if recipe.rollouts.share and recipe.features.source == "cache":
        raise RequestError(
            "rollouts.share is above 0 and features.source is cache: rows that are written while "
            "training come once, and would fill the cache; use features.source online"
        )
