"""Small models of any family that `transformers` has, with weights that say something; those that are recurrent."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.target.attention import use_grouped_attention
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.recurrence.recurrent import RecurrentStates
from draftsmith.trainers.loop.objective import Batch, document_mask
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SIZES = {
    "vocab_size": VOCABULARY,
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


def random_model(family: str, *, spread: float = 0.2, **settings: Any) -> PreTrainedModel:
    """A model as `AutoModelForCausalLM` makes it, its matrices drawn from N(0, spread^2).

    With 0.2 greedy text does not repeat at once; with 1 logits are as large as a trained model's.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | settings)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, spread)
    return model


def hidden_states(decoder: Any, batch: Batch) -> tuple[Tensor, ...]:
    """Every state [R, S, H] of packed rows, as the model itself hands them out: the last one behind the norm."""
    with torch.no_grad():
        output = decoder(
            input_ids=batch["input_ids"],
            attention_mask=document_mask(batch["documents"]),
            position_ids=batch["positions"],
            use_cache=False,
            output_hidden_states=True,
        )
    return tuple(output.hidden_states)


def save_with_tokenizer(folder: Path) -> Path:
    """A random target on disk with a tokenizer of a few words."""
    model = make_target("qwen3").model
    tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ready(model: PreTrainedModel) -> Backbone:
    """A copy of it, as `load_target` would prepare it."""
    model = copy.deepcopy(model)
    use_grouped_attention(model)
    return Backbone(model, name="random")


def own_text(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def keep_states_after_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a forward begins at the newest state of a row, whatever was accepted."""
    aim = RecurrentStates.aim

    def newest(self: RecurrentStates, lengths_B: torch.Tensor, count: int, *, check: bool) -> None:
        aim(self, torch.maximum(lengths_B, torch.tensor(self._ends)), count, check=check)

    monkeypatch.setattr(RecurrentStates, "aim", newest)
