"""What a serving config says of a target, from the target's own config: positions, and the ends of a text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from draftsmith.drafters.export import ServedTarget, llama_words
from draftsmith.drafters.layers.llama import LayerShape
from helpers.models.random_models import random_model, ready
from transformers import AutoConfig


@pytest.mark.parametrize(
    ("family", "rope", "plain"),
    [
        ("llama", {"rope_type": "default"}, 128),
        ("llama", {"rope_type": "linear", "factor": 4.0}, 512),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, 256),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ("gemma3_text", {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}, 128),
    ],
)
def test_positions_are_as_many_as_engines_serve_the_target_with(family: str, rope: dict[str, Any], plain: int) -> None:
    """A drafter's are scaled as the target's are; those of one with plain positions are as many as the target's."""
    config = AutoConfig.for_model(family, vocab_size=61, max_position_embeddings=128, num_hidden_layers=8)
    config.rope_parameters = {"rope_theta": 1e4} | rope
    shape, target = LayerShape.of(config), ServedTarget.of("org/target", config)
    words, wanted = llama_words(shape, target), {"rope_theta": 1e4} | rope.get("full_attention", rope)
    assert words["max_position_embeddings"] == 128
    assert words["rope_parameters"] == wanted
    assert words["rope_theta"] == wanted.pop("rope_theta")
    assert words["rope_scaling"] == (None if wanted["rope_type"] == "default" else wanted)
    older = llama_words(replace(shape, rope_scaling=None), target)
    assert (older["max_position_embeddings"], older["rope_parameters"]["rope_type"]) == (plain, "default")


def test_a_target_that_names_no_ends_of_a_text() -> None:
    """As the text part of a model that reads images too may."""
    config = AutoConfig.for_model("qwen3_vl_text", vocab_size=61)
    assert not hasattr(config, "eos_token_id")
    served = ServedTarget.of("org/target", config)
    assert (served.bos, served.eos) == (None, None)


def test_a_target_that_does_not_name_its_class_has_that_of_its_model() -> None:
    """As one of a GGUF file; an export says whose hidden states it needs."""
    model = random_model("llama")
    model.config.architectures = None
    assert ServedTarget.of("model.gguf", model.config, model).architectures == ["LlamaForCausalLM"]


def test_such_a_target_is_decoded_to_the_length_limit() -> None:
    target = ready(random_model("llama"))
    target.model.generation_config.eos_token_id = None
    target.model.config = AutoConfig.for_model("qwen3_vl_text", vocab_size=61)
    assert target.eos_ids == ()
