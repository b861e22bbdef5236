"""The sizes of a draft that is cut from its target, and a check of those it cannot have.

No weights are read here, so that `check` can call the same functions. Read next: `pruning/layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...decoding.backbone.layers import check_layer_family, config_with_layers
from ...drafters.identity import TUNED
from ...errors import FieldError, RequestError
from ..config import FROM_TARGET, ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EMPTY = "''"
"""A flag's value that does away with a recipe's own."""


def pruned_config(
    model: ModelConfig, target: PretrainedConfig, name: str, layers: Sequence[int] | None = None
) -> PretrainedConfig:
    """The draft's config, unset sizes as the target has them.

    Args:
        name: the target's class, as in Qwen3ForCausalLM.
        layers: those that are kept, where they are chosen already.

    Raises:
        RequestError: a size is larger than the target's, heads do not divide, or the target is of
            a family that cannot be cut.
    """
    check_layer_family(name, "prune")
    _check_unchanged(model, target)
    own: Any = target
    count = _within("layers", model.layers, own.num_hidden_layers)
    layers = layers or layers_kept(model, target) or range(count)
    config: Any = config_with_layers(target, layers)
    if hasattr(config, TUNED):  # it describes the target's weights
        delattr(config, TUNED)
    config.hidden_size = _within("hidden", model.hidden, own.hidden_size)
    config.intermediate_size = _within("intermediate", model.intermediate, own.intermediate_size)
    heads, kv_heads = _heads(model, own)
    config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
    config.head_dim = head_size(target)
    return config


def check_cut(model: ModelConfig, target: Any) -> None:
    """Raise RequestError for sizes that a draft cut from the target cannot have, where one is to be cut."""
    if model.start_from == FROM_TARGET:
        pruned_config(model, target.config, type(target).__name__)


def check_not_pruned(model: ModelConfig) -> None:
    """Raise RequestError for a recipe that wants its model cut where nothing is cut."""
    if model.start_from == FROM_TARGET:
        raise RequestError(
            "model.start_from is target: only method `distill` cuts a draft from its target, and "
            "`boost` its SSMs in turn; name a model to start from (a folder of that name is "
            "./target), or leave it out"
        )


def layers_kept(model: ModelConfig, target: PretrainedConfig) -> list[int] | None:
    """The layers that the recipe names, in the target's order; None where they are to be searched for.

    Raises:
        RequestError: there is no such layer, one comes twice, or `model.layers` says otherwise.
    """
    named: list[int] | None = model.keep_layers
    own = int(target.num_hidden_layers)
    if named is None:
        return list(range(own)) if model.layers in (None, own) else None
    wrong = [layer for layer in named if not 0 <= layer < own]
    if not named or wrong or len(set(named)) < len(named):
        what = f"has {own} layers" if wrong else "needs each layer once, and at least one"
        raise RequestError(f"model.keep_layers is {named}; the target {what}: expected numbers from 0 to {own - 1}")
    if model.layers not in (None, len(named)):
        raise RequestError(f"model.layers is {model.layers} and model.keep_layers names {len(named)}; give one")
    return sorted(named)


def head_size(config: PretrainedConfig) -> int:
    """Size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _heads(model: ModelConfig, own: Any) -> tuple[int, int]:
    """Query and key-value heads: whole groups, and as many queries in each."""
    ratio = own.num_attention_heads // own.num_key_value_heads
    heads = _within("heads", model.heads, own.num_attention_heads)
    kv_heads = _within("kv_heads", model.kv_heads, own.num_key_value_heads)
    if model.heads is None:
        heads = kv_heads * ratio
    elif model.kv_heads is None:
        kv_heads = min(kv_heads, max(1, heads // ratio))
    if heads % kv_heads or heads // kv_heads > ratio:
        raise RequestError(
            f"model.heads is {heads} and model.kv_heads {kv_heads}; a key-value head of the target "
            f"serves {ratio} heads, and in the draft each serves equally many, at most {ratio}"
        )
    return heads, kv_heads


def _within(name: str, wanted: int | None, own: int) -> int:
    if wanted is not None and wanted > own:
        raise FieldError(f"model.{name}", f"is {wanted}, and the target has {own}: a draft cut from it is no larger")
    return own if wanted is None else wanted


def _check_unchanged(model: ModelConfig, target: Any) -> None:
    """Raise RequestError for sizes that differ from the target's and that pruning cannot change."""
    fixed = {
        "architecture": (model.architecture, target.model_type),
        "head_size": (model.head_size, head_size(target)),
        "max_positions": (model.max_positions, target.max_position_embeddings),
        # true is the default, so only its opposite has been asked for
        "tied": (None if model.tied else False, target.tie_word_embeddings),
    }
    for name, (wanted, own) in fixed.items():
        if wanted is not None and wanted != own:
            raise FieldError(
                f"model.{name}",
                f"is {wanted}, and a draft cut from the target keeps its {own}; leave it out, or do away with a "
                f"recipe's own by --model.{name} {'true' if name == 'tied' else EMPTY}",
            )
