"""Models with random weights: Qwen3 or Llama classes of `transformers`, sizes given or derived.

Read next: `target.py` and `distill.py`, which train them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import EnvironmentFailure, RequestError
from ..config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def fresh_model(
    config: ModelConfig, *, vocabulary: int, eos: int | None, like: PretrainedConfig | None = None
) -> PreTrainedModel:
    """A causal LM in fp32 with random weights; unset sizes follow `like`, a target's config."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    family = config.architecture or (like.model_type if like is not None else "qwen3")
    classes: dict[str, tuple[Any, Any]] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    # a target of another family still gets a draft: any causal LM over the same tokens will do
    config_class, model_class = classes.get(family, classes["qwen3"])
    sizes = derived_sizes(config, like)
    _check_memory(sizes, vocabulary)
    return model_class(
        config_class(
            vocab_size=vocabulary,
            eos_token_id=eos,
            bos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=config.tied,
            attention_bias=False,
            rope_parameters=None if like is None else _positions(like, sizes["head_dim"]),
            **sizes,
        )
    )


def _positions(like: PretrainedConfig, head_size: int) -> dict[str, Any]:
    """The rotary positions of a target: a draft reads its texts, however long they are."""
    from ...drafters.layers.rope import PLAIN, rope_of

    theta, scaling = rope_of(like, head_size)
    return {**(scaling or {"rope_type": PLAIN}), "rope_theta": theta}


def _check_memory(sizes: dict[str, int], vocabulary: int) -> None:
    """Raise EnvironmentFailure where not even the weights fit where they are made; on the meta device all do."""
    import torch
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if torch.get_default_device().type == "meta" or is_deepspeed_zero3_enabled():
        return  # shapes alone, or each process makes a piece
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"] + sizes["num_key_value_heads"]
    layer = hidden * (2 * heads * sizes["head_dim"] + 3 * sizes["intermediate_size"])
    need = torch.get_default_dtype().itemsize * (hidden * vocabulary + sizes["num_hidden_layers"] * layer)
    have, where = _memory()
    if need > have:
        raise EnvironmentFailure(
            f"a model of these sizes ({', '.join(f'{name} {size:,}' for name, size in sizes.items())}) has weights of "
            f"{need / 1e9:,.0f} GB, and {where} {have / 1e9:,.0f} GB of memory; take smaller ones (section model)"
        )


def _memory() -> tuple[int, str]:
    """Bytes for new weights on the default device, and what has them: what is free of a card, all of the machine."""
    import psutil
    import torch

    device = torch.get_default_device()
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free, f"{device} has free"
    return int(psutil.virtual_memory().total), "the machine has"


def derived_sizes(config: ModelConfig, like: PretrainedConfig | None) -> dict[str, int]:
    """Sizes under the names of `transformers`, each given in the recipe or derived from `like`."""
    head = config.head_size or (_head_size(like) if like is not None else 32)
    hidden = config.hidden or (_half(like.hidden_size, head) if like is not None else 256)
    heads = config.heads or max(1, hidden // head)
    ratio = _sharing(like) if like is not None else 1
    kv_heads = config.kv_heads or max(1, heads // ratio)
    if heads % kv_heads:
        raise RequestError(
            f"model.heads is {heads} and model.kv_heads is {kv_heads}: the first must be a multiple of the second"
        )
    expansion = _expansion(like) if like is not None else 8 / 3
    return {
        "num_hidden_layers": config.layers or max(1, like.num_hidden_layers // 4 if like else 4),
        "hidden_size": hidden,
        "intermediate_size": config.intermediate or 32 * max(1, round(expansion * hidden / 32)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "max_position_embeddings": config.max_positions
        or (like.max_position_embeddings if like is not None else 2048),
    }


def _head_size(like: PretrainedConfig) -> int:
    return getattr(like, "head_dim", None) or like.hidden_size // like.num_attention_heads


def _sharing(like: PretrainedConfig) -> int:
    """Query heads of a key-value head; older families have as many of both and say nothing."""
    return int(like.num_attention_heads // (getattr(like, "num_key_value_heads", None) or like.num_attention_heads))


def _expansion(like: PretrainedConfig) -> float:
    """Inner size of the feed-forward part over the hidden size; GPT-2's four where the config says nothing."""
    return float((getattr(like, "intermediate_size", None) or 4 * like.hidden_size) / like.hidden_size)


def _half(hidden: int, head: int) -> int:
    """Half of a hidden size, rounded to whole heads."""
    return head * max(1, round(hidden / 2 / head))
