"""Room for prompts, answers and drafts in the target's context.

`train/run.py` asks for its probes, before rows are made, and `check.py` for all that is decoded.
Read next: `decoding/engine.py`, which refuses what has none.
"""

from __future__ import annotations

from typing import Any

from ...errors import RequestError
from ..recipe.model import Recipe


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
