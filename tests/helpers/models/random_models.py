"""Small models of any family that `transformers` has, with weights that say something; those that are recurrent."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import VOCABULARY, make_target
from draftsmith.benchmarks.common.random_models import random_model as of_any_size
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import keep_soft_cap
from draftsmith.decoding.backbone.recurrence.recurrent import RecurrentStates
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.packed.masks import document_mask
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel


def skip_unknown(family: str) -> None:
    """Skip a family that an older `transformers`, which is allowed, does not have or computes wrongly."""
    if Version(transformers.__version__) >= Version("5.23"):
        return
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {family}")
    if family == "olmo_hybrid":
        pytest.skip(f"transformers {transformers.__version__} asks a cache of its own what olmo_hybrid has seen")


def random_model(family: str, *, spread: float = 0.2, **settings: Any) -> PreTrainedModel:
    """One of the tests' vocabulary; as of the benchmarks' own."""
    skip_unknown(family)
    return of_any_size(family, spread=spread, **{"vocab_size": VOCABULARY} | settings)


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
    keep_soft_cap(model)
    use_grouped_attention(model)
    return Backbone(model, name="random")


def own_text(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt], device=model.device),
        attention_mask=torch.ones(1, len(prompt), device=model.device),
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
