"""The lean forward of a GPU: torch's own steps against the model's forward, and the kernels against those steps.

All of it runs on a CPU as well, the kernels in Triton's interpreter.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from draftsmith.benchmarks.common.random_models import EXPERTS, GROUPED
from draftsmith.decoding.kernels import available
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.kv_cache import KVCache
from draftsmith.decoding.target.lean.on_cuda import Compiled, OnCuda, Plain, Steps
from draftsmith.decoding.tree.tree import Tree, chain
from random_models import random_model, ready

pytest.importorskip("triton")

DEVICE = "cuda" if available() else "cpu"
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "mistral": GROUPED | {"sliding_window": 6},
    "gemma3_text": GROUPED | MIXED | {"query_pre_attn_scalar": 16},
    "mixtral": GROUPED | EXPERTS | {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": GROUPED | EXPERTS | {"num_experts": 4},
}
PROMPTS = [[7, 3, 50, 9, 22, 8, 1, 30], [4, 5, 60, 7, 8, 31, 10, 11, 12, 13, 2]]
TREE = Tree((-1, 0, 0, 1, 1, 2, 4))
STEPS = {"plain": Plain, "compiled": Compiled}


class OnThisDevice(Backbone):
    """Runs the GPU's way of a forward wherever the model is."""

    steps: Steps

    def _way(self, mask: Any) -> Any:
        return None if mask is None else OnCuda(self.model, self._joined, self.steps)


def both(family: str, steps: Steps) -> tuple[OnThisDevice, Backbone]:
    model = ready(random_model(family, **FAMILIES[family])).model.to(DEVICE)
    model.requires_grad_(False)
    own = Backbone(copy.deepcopy(model), name="own")
    own.lean = False
    lean = OnThisDevice(model, name="lean")
    lean.steps = steps
    return lean, own


def seen(target: Backbone, tree: Tree, count: int, *, static: bool) -> tuple[torch.Tensor, ...]:
    """Logits and two states of a tree's nodes behind prompts, and of a token behind what was kept of it."""
    kv_cache = KVCache(len(PROMPTS), 64, static=static)
    target.prefill(PROMPTS, kv_cache)
    lengths = torch.tensor([len(each) for each in PROMPTS], device=DEVICE)
    tokens = torch.arange(2, 2 + len(tree), device=DEVICE).expand(len(PROMPTS), -1)
    first = target.see(tokens, lengths, tree, kv_cache, layers=(0, 1, -2, -1))
    kv_cache.commit(lengths, torch.tensor([[1, 4, 6][:count]] * 2, device=DEVICE))
    second = target.see(tokens[:, :1], lengths + 1 + count, chain(0), kv_cache)
    assert first.features_BNF is not None
    return first.logits_BNV, first.features_BNF, second.logits_BNV


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_tree_is_seen_as_the_model_itself_sees_it(family: str, steps: str, static: bool) -> None:
    lean, own = both(family, STEPS[steps]())
    for got, expected in zip(seen(lean, TREE, 3, static=static), seen(own, TREE, 3, static=static), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
