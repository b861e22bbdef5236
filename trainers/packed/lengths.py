"""Whether rows fit the context of a model; reads no weights. Read next: `passes.py`, a pass over rows."""

from __future__ import annotations

from typing import Any

from ...decoding.backbone.backbone import context_limits
from ...decoding.backbone.hub import load_config
from ...drafters.folder import check_trainable_model
from ...errors import RequestError
from ..config import FROM_TARGET, ModelConfig
from ..methods import METHODS
from ..recipe import TrainingRecipe


def check_rows_fit(recipe: TrainingRecipe, config: Any, whose: str) -> None:
    """Raise RequestError where a training row is longer than the context of a model's `config`.

    Args:
        whose: what the message calls the model, and where the recipe names it.
    """
    check_row_length(config, recipe.row_tokens, whose, named=METHODS[recipe.method].row_flags)


def check_row_length(config: Any, tokens: int, whose: str, *, named: str = "--data.sequence_length") -> None:
    """Raise RequestError for rows that are longer than a model's context.

    Args:
        config: the model's.
        tokens: the length of a row.
        whose: the model's name in the message, and the recipe field that names it.
        named: the name of the row's length in the message.
    """
    context, reason = min(context_limits(config.get_text_config(decoder=True)))
    if tokens > context:
        raise RequestError(
            f"{named} is {tokens}; the context of {whose} is {context} tokens{reason}. Lower "
            f"{named} to {context}, or take another model"
        )


def check_start_context(model: ModelConfig, tokens: int) -> None:
    """Raise RequestError for rows that are too long for the model of `start_from`; reads no weights.

    A draft that is cut from the target has the target's context.
    """
    given = model.start_from
    if given is not None and given != FROM_TARGET:
        check_trainable_model(given)
        check_row_length(load_config(given), tokens, f"model.start_from {given!r}")
