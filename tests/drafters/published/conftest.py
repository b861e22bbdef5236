"""A target that is deep enough for every state that drafters read by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from helpers.models.published_forms import VOCABULARY


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """Of eight layers; its folder, with a tokenizer of its tokens, is `deep.name`."""
    torch.manual_seed(0)
    sizes = ModelConfig(architecture="qwen3", layers=8, hidden=32, heads=4, kv_heads=2, head_size=8, max_positions=256)
    tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, VOCABULARY)
    model = fresh_model(sizes, vocabulary=VOCABULARY, eos=None).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3 if parameter.ndim > 1 else 1)
    folder: Path = tmp_path_factory.mktemp("deep")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    target = Backbone(model, name=str(folder))
    target.tokenizer = tokenizer
    return target
