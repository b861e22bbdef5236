"""Refuses recipe values that the chosen method ignores, by the method's record.

Read next: `trainers/methods.py`, the records; `train/run.py` and `check.py`, which both ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...drafters.tuned_file import DRAFT_LENGTH
from ...errors import RequestError
from ...eval.config import EvalConfig
from ...storage.identity import flat
from ...trainers.method_config import LoraConfig
from ...trainers.methods import METHODS, own_sections
from ..recipe.load import Resolved
from ..recipe.model import Recipe
from .engine import check_whole_target


def check_read(recipe: Recipe) -> None:
    """Raise RequestError for a value that the run would not follow."""
    for path, value in flat(recipe.model_dump(exclude_defaults=True)).items():
        if not recipe.record.reads_value(path, recipe):
            raise RequestError(
                f"{path} is {value}, and method `{recipe.method}` does not read it; {_remedy(path, recipe)}"
            )
    lora = recipe.lora
    if lora.rank is None and lora != LoraConfig():
        given = next(iter(lora.model_dump(exclude_defaults=True)))
        raise RequestError(
            f"lora.{given} is {getattr(lora, given)!r}, and lora.rank is not set: the model "
            "itself would be trained, no adapter; set lora.rank, or leave the section out"
        )
    check_whole_target(recipe)
    if recipe.rollouts.share and recipe.features.source == "cache" and not recipe.record.drafts_its_own:
        raise RequestError(
            "rollouts.share is above 0 and features.source is cache: rows that are written while "
            "training come once, and would fill the cache; use features.source online"
        )


def foreign_sections(resolved: Resolved, failures: Sequence[str] = ()) -> list[str]:
    """A line for each section that the recipe names and its method does not have; none where a failure tells of it.

    Values other than the defaults are refused by `check_read`; these change nothing. A recipe that
    names all sections was written by a run.
    """
    own, method = own_sections().keys(), resolved.recipe.record
    if own <= resolved.sections.keys():
        return []
    return [
        f"note: `{name}` ({resolved.sections[name]}) is no section of method `{method.name}`, and nothing reads it"
        for name in sorted(own & resolved.sections.keys() - method.sections.keys())
        if not any(failure.startswith(f"{name}.") for failure in failures)
    ]


def shorter_drafts(resolved: Resolved) -> list[str]:
    """A line where the recipe or a flag asks for longer drafts than what is trained makes."""
    recipe, where = resolved.recipe, resolved.origin.get(DRAFT_LENGTH, "default")
    asked = recipe.eval.draft_length
    most = recipe.record.drafts_of(recipe, asked)
    # a run's recipe has the default written out
    told = where.startswith("--") or (where != "default" and asked != EvalConfig().draft_length)
    if most >= asked or not told:
        return []
    drafts = f"{most} token{'s' * (most > 1)}"
    return [f"note: {DRAFT_LENGTH} is {asked} ({where}), and what is trained drafts at most {drafts} a call"]


def _remedy(path: str, recipe: Recipe) -> str:
    for section, remedy in recipe.record.unread(recipe).items():
        if path.startswith(f"{section}."):
            return f"{remedy}, or leave it out"
    readers = [f"`{name}`" for name, method in METHODS.items() if method.reads_value(path, recipe)]
    return f"leave it out, or train with {' or '.join(readers)}"


def check_room(recipe: Recipe, config: Any, longest: int, *, answer: int, depth: int) -> None:
    """Raise RequestError where a prompt with its answer is longer than the target's context.

    Args:
        config: the target's.
        longest: tokens of the longest prompt.
        answer: most tokens that are written behind it.
        depth: tokens drafted behind those.
    """
    from ...decoding.backbone.backbone import context_limits

    context, reason = min(context_limits(config.get_text_config(decoder=True)))
    if longest + answer + depth > context:
        raise RequestError(
            f"{recipe.eval.prompts}: a prompt of {longest} tokens, an answer of {answer} and a "
            f"draft of {depth} do not fit the target's context of {context} tokens{reason}; lower "
            "--eval.prompt_tokens or max_new_tokens (of probe, eval and audit)"
        )


def check_probe_length(recipe: Recipe) -> None:
    """Raise RequestError where a probe's answers are too short for a step that tau counts.

    Then no probe says which draft is the best (docs/evaluation.md, which steps count).
    """
    answer, depth = recipe.probe.max_new_tokens, recipe.record.probe_depth(recipe)
    if answer < depth + 2:
        raise RequestError(
            f"probe.max_new_tokens is {answer}, and the probes draft up to {depth} tokens per target call: the length "
            f"limit may cut every step, so tau counts none; set --probe.max_new_tokens {depth + 2} or more"
        )
