"""The lean forward of a GPU: torch's own steps against the model's forward, and the kernels against those steps.

All of it runs on a CPU as well, the kernels in Triton's interpreter.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.benchmarks.common.random_models import EXPERTS, GROUPED
from draftsmith.decoding.kernels import available
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.kv_cache import KVCache
from draftsmith.decoding.target.lean.joined import Joined
from draftsmith.decoding.target.lean.on_cuda import Compiled, OnCuda, Plain, Steps
from draftsmith.decoding.tree.tree import Tree, chain
from random_models import random_model, ready

pytest.importorskip("triton")

from draftsmith.decoding.kernels import attend, product  # noqa: E402

DEVICE = "cuda" if available() else "cpu"
# a kernel's products in fp32 are rounded as tf32 on a GPU, so there it is the type that it is for
KIND, NEAR = (torch.bfloat16, 5e-2) if DEVICE == "cuda" else (torch.float32, 2e-5)
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
    model = ready(random_model(family, **FAMILIES[family])).model.to(DEVICE, KIND)
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
        torch.testing.assert_close(got, expected, rtol=NEAR, atol=NEAR)


def test_weights_move_together_once_and_stay_those_of_the_model(tmp_path: Any) -> None:
    model = random_model("qwen2", **GROUPED)
    model.requires_grad_(False)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.inference_mode():  # as the decoder does
        first = Joined(model)
    places = [each.data_ptr() for each in model.parameters()]
    second = Joined(model)
    assert [each.data_ptr() for each in model.parameters()] == places
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.query_key_value.weight.data_ptr() == other.query_key_value.weight.data_ptr()
        torch.testing.assert_close(one.query_key_value.weight, other.query_key_value.weight, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    for each in (model, type(model).from_pretrained(tmp_path), copy.deepcopy(model)):
        for name, weight in each.state_dict().items():
            assert torch.equal(weight, before[name]), name
    given = torch.ones(1, 3, model.config.hidden_size, requires_grad=True)
    model(inputs_embeds=given).logits.sum().backward()
    assert given.grad is not None
    # what is written to a layer's own weight is written to the joined one
    layer = model.model.layers[0].self_attn
    layer.k_proj.weight.data.fill_(3.0)
    rows = layer.q_proj.out_features
    assert bool((first.layers[0].query_key_value.weight[rows : rows + layer.k_proj.out_features] == 3).all())
    assert first.is_current
    layer.k_proj.weight.data = layer.k_proj.weight.data.clone()
    assert not first.is_current


@pytest.mark.skipif(DEVICE != "cuda", reason="the kernel streams weights in halves of fp32, on a GPU")
def test_a_product_of_few_rows_goes_by_the_kernel() -> None:
    x = torch.randn(1, 5, 64, device=DEVICE, dtype=torch.bfloat16)
    assert product.fits(x, torch.randn(96, 64, device=DEVICE, dtype=torch.bfloat16))
    assert not product.fits(x.expand(4, -1, -1), torch.randn(96, 64, device=DEVICE, dtype=torch.bfloat16))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 64, 64), (5, 100, 72), (16, 130, 256)])
def test_a_product_of_few_rows_is_that_of_torch(rows: int, out: int, inner: int, biased: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(1, rows, inner, device=DEVICE), torch.randn(out, inner, device=DEVICE)
    bias = torch.randn(out, device=DEVICE) if biased else None
    for tiles in (product.Tiles(32, 64, 4, 2), None):
        got = product.product(x, weight, bias, tiles)
        torch.testing.assert_close(got, F.linear(x, weight, bias), rtol=1e-2, atol=1e-2 if DEVICE == "cuda" else 1e-4)


@pytest.mark.parametrize("splits", [1, 16])
@torch.inference_mode()
def test_attention_in_parts_is_that_of_the_whole_and_sees_only_what_the_mask_shows(
    monkeypatch: pytest.MonkeyPatch, splits: int
) -> None:
    monkeypatch.setattr(attend, "_multiprocessors", lambda _: splits)
    torch.manual_seed(0)
    B, Q, G, N, D, slots, capacity = 2, 6, 2, 5, 24, 300, 310
    kind = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    query, keys, values = (
        torch.randn(B, heads, count, D, device=DEVICE, dtype=kind)
        for heads, count in ((Q, N), (G, capacity), (G, capacity))
    )
    mask = torch.rand(B, 1, N, slots, device=DEVICE) < 0.5
    mask[0, 0, 1, : slots - 1] = False  # one slot alone, in the last part
    mask[0, 0, 1, slots - 1] = True
    got = attend.attend(query, keys, values, mask, slots, 0.3)
    expected = F.scaled_dot_product_attention(
        query.double(), keys[:, :, :slots].double(), values[:, :, :slots].double(), mask, scale=0.3, enable_gqa=True
    )
    near = 2e-2 if DEVICE == "cuda" else 2e-6
    torch.testing.assert_close(got.double(), expected.transpose(1, 2).reshape(B, N, -1), rtol=near, atol=near)
    values[:, :, slots - 1] += 100.0
    assert (attend.attend(query, keys, values, mask, slots, 0.3)[0, 1] - got[0, 1]).min() > 50
