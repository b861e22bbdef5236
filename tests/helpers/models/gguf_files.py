"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.decoding.backbone.hub import load_tokenizer
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

pytestmark_gguf = pytest.mark.skipif(
    Version(version("transformers")) < Version("5.23"), reason="older releases are refused for GGUF"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "sliding_window": 8,
    },
}
PIECES = ("\u2581", "a", "d", "e", "f", "\u2581a", "de", "def", "<start_of_turn>", "<end_of_turn>", "  ")


def tiny_model(family: str = "llama", *, vocabulary: int, **sizes: Any) -> PreTrainedModel:
    """Random, its output projection its embedding; norms are not all ones."""
    given = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512, "tie_word_embeddings": True}
    config = AutoConfig.for_model(family, vocab_size=vocabulary, **given | SIZES[family] | sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def write_llama(
    path: Path,
    *,
    kind: str = "F32",
    fields: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    **sizes: Any,
) -> PreTrainedModel:
    """A Llama with the embedded target's tokenizer, byte-level BPE; returns the model that it was made of.

    Args:
        kind: the type of the matrices.
        fields: stated beside the usual ones, or in their place.
        without: what is left out of these.
        tensors: written beside the model's.
    """
    tokenizer = load_tokenizer("tiny")
    numbers = tokenizer.get_vocab()
    words = sorted(numbers, key=numbers.__getitem__)
    model = tiny_model(vocabulary=len(words), **sizes)
    stated = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if number < 4 else 1 for number in range(len(words))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(tokenizer)],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": numbers["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        "llama.rope.dimension_count": SIZES["llama"]["head_dim"],
    }
    _write(path, "llama", model, stated | dict(fields or {}), without, kind, tensors or {})
    return model


def write_gemma(path: Path, *, kind: str = "F32", fields: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """A Gemma 3 with sliding windows and a tokenizer of SentencePiece's kind; a base model, without a template."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    words += [f"word{number}" for number in range(-len(words) % 32)]
    model = tiny_model("gemma3_text", vocabulary=len(words))
    control = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    stated = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [-1000.0] * len(words),
        "tokenizer.ggml.token_type": [
            3 if word in control else 2 if word == "<unk>" else 6 if word.startswith("<0x") else 1 for word in words
        ],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "gemma3.attention.key_length": SIZES["gemma3_text"]["head_dim"],
        "gemma3.attention.sliding_window": SIZES["gemma3_text"]["sliding_window"],
    }
    _write(path, "gemma3", model, stated | dict(fields or {}), (), kind, {})
    return model


def _merges(tokenizer: Any) -> list[tuple[str, str]]:
    import json

    found: list[tuple[str, str]] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return found


def _write(
    path: Path,
    kind: str,
    model: PreTrainedModel,
    stated: Mapping[str, Any],
    without: Collection[str],
    weights: str,
    tensors: Mapping[str, np.ndarray],
) -> None:
    config = model.config
    fields = {
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": _theta(config),
        f"{kind}.vocab_size": config.vocab_size,
        **stated,
    }
    writer = GGUFWriter(path, kind)
    for key, value in fields.items():
        if key not in without:
            _state(writer, key, value)
    for name, tensor in {**dict(_tensors(kind, model)), **tensors}.items():
        if weights == "F32" or tensor.ndim < 2:
            writer.add_tensor(name, tensor)
        else:
            named = GGMLQuantizationType[weights]
            writer.add_tensor(name, quantize(tensor, named), raw_dtype=named)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _theta(config: Any) -> float:
    rope = config.rope_parameters
    return float(rope.get("full_attention", rope)["rope_theta"])


def _state(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensors(kind: str, model: PreTrainedModel) -> Any:
    """Names and numbers as the converter leaves them: Llama's heads reordered, Gemma's norms from one on."""
    names = get_tensor_name_map(next(each for each in MODEL_ARCH if MODEL_ARCH_NAMES[each] == kind), 6)
    for name, parameter in model.named_parameters():
        stem, _, end = name.rpartition(".")
        numbers = parameter.detach().numpy()
        if kind == "llama" and ("q_proj" in stem or "k_proj" in stem):
            heads = model.config.num_attention_heads if "q_proj" in stem else model.config.num_key_value_heads
            halves = numbers.reshape(heads, 2, -1, numbers.shape[1])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        if kind == "gemma3" and stem.endswith("norm"):
            numbers = numbers + 1
        yield f"{names.get_name(stem)}.{end}", np.ascontiguousarray(numbers)
