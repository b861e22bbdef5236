"""Targets of well-known shapes with random weights, made on the device in the type that they decode in.

Weights say nothing about a text, and everything about how long a forward takes. Read next: `setting.py`, which says
how much is measured of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.eagle.net3 import Eagle3Net, Eagle3Shape, fused_layers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


@dataclass(frozen=True)
class Shape:
    """A causal LM's sizes, what share of the card's bandwidth it should reach, and what was estimated."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool
    goal: float = 0.0
    """Share of nominal bandwidth that counts as good."""
    estimate: str = ""
    """Milliseconds of a call and shares of an H100's nominal bandwidth, by arithmetic."""

    def kv_bytes(self, tokens: float, dtype: torch.dtype) -> float:
        """Bytes of the keys and values of `tokens` tokens, in all layers."""
        return tokens * 2 * self.layers * self.kv_heads * self.head_size * dtype.itemsize


QWEN3_8B = Shape(
    *("Qwen3-8B", "qwen3", 36, 4096, 32, 8, 128, 12288, 151_936, False),
    goal=0.70,
    estimate="stock 9.4 ms, 48 %; lean 6.6 ms, 68 %",
)
QWEN3_4B = Shape(
    *("Qwen3-4B", "qwen3", 36, 2560, 32, 8, 128, 9728, 151_936, True),
    goal=0.60,
    estimate="stock 7.2 ms, 33 %; lean 4.4 ms, 54 %",
)
QWEN3_1_7B = Shape(
    *("Qwen3-1.7B", "qwen3", 28, 2048, 16, 8, 128, 6144, 151_936, True),
    goal=0.45,
    estimate="stock 4.8 ms, 21 %; lean 2.6 ms, 40 %",
)
LLAMA_1B = Shape(
    *("Llama-3.2-1B", "llama", 16, 2048, 32, 8, 64, 8192, 128_256, True),
    goal=0.50,
    estimate="stock 2.5 ms, 30 %; lean 1.8 ms, 42 %",
)
SHAPES = {shape.name: shape for shape in (QWEN3_8B, QWEN3_4B, QWEN3_1_7B, LLAMA_1B)}


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype, *, positions: int) -> PreTrainedModel:
    """A causal LM of that shape, frozen; its weights never lie in the host's memory."""
    config_class, model_class = CLASSES[shape.architecture]
    config = config_class(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=positions,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    # decoding treats weights that were made without version counters as somebody else's
    with torch.inference_mode(False), _born(device, dtype):
        model: PreTrainedModel = model_class(config)
    return model.requires_grad_(False).eval()


def target_of(shape: Shape, device: torch.device, dtype: torch.dtype, *, positions: int) -> Backbone:
    """Such a model as the decoder calls it."""
    model = random_model(shape, device, dtype, positions=positions)
    use_grouped_attention(model)
    return Backbone(model, name=f"{shape.name}, random weights")


def eagle3_for(target: Backbone, dtype: torch.dtype, *, drafted: int) -> Eagle3Net:
    """An EAGLE-3 network beside it with random weights, over every so many tokens of the vocabulary."""
    config: Any = target.model.config
    every = target.vocabulary // drafted
    shape = Eagle3Shape.of(
        config, layers=fused_layers(config.num_hidden_layers), vocabulary=target.vocabulary, draft_vocabulary=drafted
    )
    with _born(target.device, dtype):
        net = Eagle3Net(shape, range(0, every * drafted, every))
    return net.requires_grad_(False).eval()


class _born:
    """New tensors lie on a device and have a type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = torch.device(device), dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._device.__exit__(*error)
        torch.set_default_dtype(self._before)
