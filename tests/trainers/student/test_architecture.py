"""Sizes of a draft that the recipe leaves open: derived from whatever the target's config says."""

from __future__ import annotations

import pytest
from draftsmith.benchmarks.model_families import FAMILIES, config_of
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import derived_sizes, fresh_model
from random_models import random_model
from transformers import GPT2Config

OPEN = ModelConfig(architecture="qwen3", layers=1, hidden=32)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family(family: str) -> None:
    """Older configs name neither key-value heads nor an inner size."""
    _, settings = FAMILIES[family]
    config = random_model(config_of(family), **settings).config.get_text_config(decoder=True)
    sizes = derived_sizes(OPEN, config)
    assert sizes["num_attention_heads"] % sizes["num_key_value_heads"] == 0
    assert sizes["intermediate_size"] >= sizes["hidden_size"]
    assert fresh_model(OPEN, like=config, vocabulary=61, eos=None).num_parameters()


def test_where_the_config_says_nothing() -> None:
    sizes = derived_sizes(OPEN, GPT2Config(n_embd=32, n_head=4, n_layer=2))
    assert (sizes["num_attention_heads"], sizes["num_key_value_heads"]) == (4, 4)
    assert sizes["intermediate_size"] == 4 * 32
