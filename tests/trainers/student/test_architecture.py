"""Sizes of a draft that the recipe leaves open: derived from whatever the target's config says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from draftsmith.benchmarks.model_families import FAMILIES, config_of
from draftsmith.errors import EnvironmentFailure
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import derived_sizes, fresh_model
from helpers.models.random_models import random_model
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


NEEDED = 32 * 61 + 32 * (2 * (4 + 4) * 8 + 3 * 96)  # numbers of a layer and of the embedding


@pytest.mark.parametrize(
    ("device", "dtype", "host", "card", "refused"),
    [
        ("cpu", torch.float32, 4 * NEEDED - 1, 10**12, "the machine has 0 GB"),
        ("cpu", torch.float32, 4 * NEEDED, 0, None),
        # made on the card, in its precision: what the machine has does not count
        ("cuda:1", torch.bfloat16, 0, 2 * NEEDED, None),
        ("cuda:1", torch.bfloat16, 10**12, 2 * NEEDED - 1, "cuda:1 has free 0 GB"),
    ],
)
def test_weights_are_compared_with_the_memory_they_are_made_in(
    device: str, dtype: torch.dtype, host: int, card: int, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=host))
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(device))
    monkeypatch.setattr(torch, "get_default_dtype", lambda: dtype)
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: asked.append(str(where)) or (card, 10**12))
    sizes = OPEN.model_copy(update={"heads": 4, "kv_heads": 4, "head_size": 8, "intermediate": 96})
    if refused is None:
        assert fresh_model(sizes, vocabulary=61, eos=None).num_parameters()
    else:
        with pytest.raises(EnvironmentFailure, match=refused):
            fresh_model(sizes, vocabulary=61, eos=None)
    assert asked == ([device] if device != "cpu" else [])
