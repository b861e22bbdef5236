"""`model.recompute` and `tune.recompute`: layers of a `transformers` model are computed again for their gradient.

Each keeps what it reads alone, by the library's own switch (gradient checkpointing, Chen et al. 2016, arXiv
1604.06174), in the graph that there is and not by a second one (`use_reentrant=False`): so frozen layers in front
of an adapter, several processes and dropout need nothing more. It acts on a module in training alone; decoding,
folders and configs never see it. Read next: `draft.py`, which asks for it; `drafters/layers/static.py`, networks
of our own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

from ...decoding.backbone.hidden_states import decoder_of, layer_count, layers_of
from ...drafters.layers.spans import attending_as_now
from ...errors import RequestError
from ..config import MASKED

Within = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


def recompute_layers(model: Any, whose: str, field: str = "model.recompute", *, row_tokens: int) -> None:
    """Have every decoder layer of `model` keep its input alone.

    Args:
        whose: what the message calls the model.
        field: the recipe's value that asks for it.
        row_tokens: the length of its rows. What long rows are read by in place of a mask is handed over to the second
            pass, which comes when the model attends by masks again.

    Raises:
        RequestError: the model's layers do not know how.
    """
    unable = [layer for layer in decoder_layers(model) if not _is_able(layer)]
    if unable or not model.supports_gradient_checkpointing:
        what = f"its {type(unable[0]).__name__}" if unable else "it"
        raise RequestError(
            f"{field} is on, and {whose} is a {type(model).__name__}: {what} does not support gradient checkpointing "
            f"in transformers, so nothing would be computed again. Leave {field} out, and lower loop.micro_rows for "
            "memory; or take another model"
        )
    within: Within | None = partial(attending_as_now, decoder_of(model)) if row_tokens > MASKED else None
    with warnings.catch_warnings():  # of the two names of the switch the older one is known to all versions
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(
            {"use_reentrant": False} | ({} if within is None else {"context_fn": within})
        )
    # asked for by reentrant checkpoints alone: it would compute a gradient of frozen embeddings
    model.disable_input_require_grads()


def layers_within(model: nn.Module) -> list[nn.Module]:
    """The layers of all models within `model` that would keep their inputs alone, none inside of another."""
    if _is_able(model):
        return [model]
    return [layer for each in model.children() for layer in layers_within(each)]


def decoder_layers(model: Any) -> list[nn.Module]:
    """What is computed again piece by piece."""
    return list(layers_of(decoder_of(model), layer_count(model)))


def _is_able(layer: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(layer, GradientCheckpointingLayer)
