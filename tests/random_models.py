"""Small models of any family that `transformers` has, with weights that say something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
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
