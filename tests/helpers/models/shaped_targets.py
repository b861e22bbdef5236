"""Targets whose logits are more than a projection, a row of text, and gradients beside those of whole logits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from conftest import VOCABULARY
from draftsmith.benchmarks.common.random_models import GROUPED
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.trainers.config import ObjectiveConfig
from helpers.models.random_models import random_model
from torch import Tensor, nn
from transformers import PreTrainedModel

S = 12
OBJECTIVE = ObjectiveConfig(kl=1.0, ce=0.5, chunk=4)
LAYERS = {"num_hidden_layers": 3}
FULL = {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 16, "sliding_window": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": GROUPED | LAYERS | FULL | {"final_logit_softcapping": 1.5},
    "cohere": GROUPED | LAYERS | {"logit_scale": 0.25},
    "granite": GROUPED | LAYERS | {"logits_scaling": 4.0},
    "phi": LAYERS | {"num_key_value_heads": 4},
}


@lru_cache
def shaped(family: str) -> PreTrainedModel:
    """With the decoder's attention, and a cap, a scale or a bias that a wrong distribution would show."""
    model: Any = random_model(family, spread=0.5, **FAMILIES[family])
    if model.get_output_embeddings().bias is not None:
        model.get_output_embeddings().bias.normal_(0, 1)
    use_grouped_attention(model)
    return model


def text() -> dict[str, Tensor]:
    """A row of one document, all of whose tokens but the first are labels."""
    ids = torch.randint(0, VOCABULARY, (1, S), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(1, S, dtype=torch.bool)
    mask[:, 0] = False
    positions = torch.arange(S)[None]
    return {"input_ids": ids, "loss_mask": mask, "positions": positions, "documents": torch.zeros_like(positions)}


def shake(module: nn.Module) -> Any:
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return module


def divergence(p_PV: Tensor, q_PV: Tensor) -> Tensor:
    """KL of two distributions given by their logits, summed."""
    return F.kl_div(q_PV.log_softmax(-1), p_PV.log_softmax(-1), reduction="sum", log_target=True)


def assert_same_gradients(loss: Tensor, wanted: Tensor, module: nn.Module) -> None:
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ours = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    theirs = torch.autograd.grad(wanted, parameters, allow_unused=True)
    seen = 0
    for mine, other in zip(ours, theirs, strict=True):
        if other is None:
            assert mine is None or not mine.any()
            continue
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
        seen += bool(other.any())
    assert seen > 1
