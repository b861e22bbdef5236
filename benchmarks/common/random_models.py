"""Small random models of the families that people use: what `transformers` has to be told of each.

Read next: `../model_families.py`, which decodes with them and trains for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from draftsmith.decoding.backbone.hub import auto_class
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # with tied ones greedy text repeats its last token
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {  # more value heads than key heads, a convolution wider than some prompts
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
LOW_RANK = EXPERTS | {  # keys and values that are kept as one small vector, and are of different size
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK = LOW_RANK | {"q_lora_rank": 16, "n_routed_experts": 4}
DELTA_LOW_RANK = LOW_RANK | {  # Kimi's delta attention beside those
    "q_lora_rank": None,
    "num_local_experts": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 4,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": GROUPED | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "lfm2_moe": GROUPED
    | EXPERTS
    | {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
    "lfm3": GROUPED  # layers with a window beside convolutions
    | {"layer_types": ["conv", "full_attention", "sliding_attention"], "num_hidden_layers": 3, "sliding_window": 8},
    "kimi_linear": DELTA_LOW_RANK,
    "bailing_hybrid": DELTA_LOW_RANK | {"head_dim": 16, "num_mtp_layers": 0},
    "qwen3_next": GROUPED | EXPERTS | DELTA | {"num_experts": 4},
    "qwen3_5_text": GROUPED | DELTA,
    "qwen3_5_moe_text": GROUPED | EXPERTS | DELTA | {"num_experts": 4},
    "olmo_hybrid": GROUPED | DELTA,
    "nemotron_h": GROUPED
    | {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "falcon_h1": GROUPED | MAMBA,
    "granitemoehybrid": GROUPED
    | MAMBA
    | {"layer_types": ["linear_attention", "full_attention"], "mamba_expand": 2, "shared_intermediate_size": 64},
    "bamba": GROUPED | MAMBA | {"attn_layer_indices": [1]},
    "zamba2": MAMBA
    | {
        "layers_block_type": ["linear_attention", "hybrid"],
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "attention_head_dim": 16,
    },
}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
    | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
}

_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
_ROTATION = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # models of text and images: settings of the text's side, and the images'
    "qwen2_5_vl": (
        {"num_key_value_heads": 2, "hidden_size": 64, "rope_parameters": _ROTATION},
        _EYES | {"out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        GROUPED | {"rope_parameters": _ROTATION | {"mrope_interleaved": True}},
        _EYES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "gemma3": (
        GROUPED
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "query_pre_attn_scalar": 16},
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
}


def random_model(family: str, *, spread: float = 0.2, **settings: Any) -> PreTrainedModel:
    """A model as `transformers` makes it of its config, its matrices drawn from N(0, spread^2).

    With 0.2 greedy text does not repeat at once; with 1 logits are as large as a trained model's. Settings of a
    family that sees images are those of its text.
    """
    torch.manual_seed(0)
    if family in SEEING:
        text, images = SEEING[family]
        sizes = {"text_config": SIZES | text | settings, "vision_config": images, "tie_word_embeddings": False}
    else:
        sizes = SIZES | settings
    config = AutoConfig.for_model(family, **sizes)
    model = auto_class(config).from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, spread)
    return cast(PreTrainedModel, model)


def in_int8(folder: Path) -> Any:
    """The checkpoint of a folder with int8 weights, in the layout of torchao that `transformers` can write."""
    from torchao.quantization import Int8WeightOnlyConfig

    how = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, local_files_only=True)


def narrow_target(hidden: int, tokens: int, vocabulary: int, device: str) -> PreTrainedModel:
    """Four layers with random weights, whose context holds `tokens`; in evaluation mode."""
    sizes = ModelConfig(
        architecture="llama",
        layers=4,
        hidden=hidden,
        heads=2,
        kv_heads=1,
        head_size=hidden // 2,
        max_positions=max(tokens, 16),
    )
    made: PreTrainedModel = fresh_model(sizes, vocabulary=vocabulary, eos=None).eval().to(device)
    return made
