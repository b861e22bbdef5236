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
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import HiddenStates
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.backbone.lean.forward import lean_states
from draftsmith.decoding.backbone.lean.joined import JoinedDecoder
from draftsmith.decoding.backbone.lean.on_cuda import LayerKernels, OnCuda, TorchKernels, TritonKernels, states_in_rows
from draftsmith.decoding.kernels import available
from draftsmith.decoding.tree.tree import Tree, chain
from draftsmith.trainers.packed.masks import row_masks
from draftsmith.trainers.teacher.features import states_of
from helpers.models.random_models import random_model, ready
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from draftsmith.decoding.kernels import attend, layer, product  # noqa: E402

DEVICE = "cuda" if available() else "cpu"
# a kernel's products in fp32 are rounded as tf32 on a GPU, so there it is the type that it is for
KIND = torch.bfloat16 if DEVICE == "cuda" else torch.float32
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
STEPS = {"plain": TorchKernels, "compiled": TritonKernels}


class OnThisDevice(Backbone):
    """Runs the GPU's way of a forward wherever the model is."""

    steps: LayerKernels

    def _layer_runner(self, mask: Any) -> Any:
        return None if mask is None else OnCuda(self.model.model, self._joined, self.model.lm_head, self.steps)


def both(family: str, steps: LayerKernels) -> tuple[OnThisDevice, Backbone]:
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_tree_is_seen_as_the_model_itself_sees_it(family: str, steps: str, static: bool) -> None:
    lean, own = both(family, STEPS[steps]())
    for got, expected in zip(seen(lean, TREE, 3, static=static), seen(own, TREE, 3, static=static), strict=True):
        if DEVICE == "cpu":
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        else:  # in bf16 each way rounds otherwise, some numbers by more than a bit; a fault moves all of them
            assert (got - expected).float().norm() < 0.03 * expected.float().norm()


def test_weights_move_together_once_and_stay_those_of_the_model(tmp_path: Any) -> None:
    model = random_model("qwen2", **GROUPED)
    model.requires_grad_(False)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.inference_mode():  # as the decoder does
        first = JoinedDecoder(model.model)
    places = [each.data_ptr() for each in model.parameters()]
    second = JoinedDecoder(model.model)
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
    x, weight = (torch.randn(shape, device=DEVICE, dtype=KIND) for shape in ((1, rows, inner), (out, inner)))
    bias = torch.randn(out, device=DEVICE, dtype=KIND) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for tiles in (product.Tiles(32, 64, 4, 2), None):
        got = product.product(x, weight, bias, tiles).double()
        torch.testing.assert_close(got, exact, rtol=1e-2 if DEVICE == "cuda" else 1e-5, atol=1e-2)


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "qwen3_moe"])
@torch.no_grad()
def test_whole_rows_are_read_as_the_model_reads_them(family: str) -> None:
    model = random_model(family, **FAMILIES[family]).to(DEVICE, KIND)
    model.requires_grad_(False)
    decoder, own = model.model, copy.deepcopy(model.model)
    documents = torch.tensor([[0] * 9 + [1] * 8 + [-1] * 3, [2] * 20], device=DEVICE)
    positions = torch.tensor([[*range(9), *range(8), *range(3)], [*range(20)]], device=DEVICE)
    ids = torch.arange(40, device=DEVICE).view(2, 20)
    batch = {"input_ids": ids, "documents": documents, "positions": positions}
    inputs = {"input_ids": ids, "position_ids": positions}
    inputs["attention_mask"] = row_masks(decoder.config, documents, positions)
    states = HiddenStates((0, 1, 2, -2), 2)
    states_in_rows(decoder, inputs, states)
    real = documents >= 0
    for got, expected in zip(states.in_order, states_of(own, batch, (0, 1, 2, -2)), strict=True):
        assert (got - expected)[real].float().norm() < (0.02 if DEVICE == "cuda" else 1e-5) * expected.float().norm()


class Launches(TorchDispatchMode):
    """Counts what would be launched: operations of torch that are no views, and kernels, which do not run."""

    MAKES_NOTHING = frozenset(
        [
            "_unsafe_view",
            "alias",
            "as_strided",
            "detach",
            "empty",
            "empty_like",
            "expand",
            "new_empty",
            "select",
            "slice",
            "split",
            "split_with_sizes",
            "squeeze",
            "t",
            "transpose",
            "unsqueeze",
            "view",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.MAKES_NOTHING
        return func(*args, **(kwargs or {}))

    def __getitem__(self, _grid: Any) -> Any:
        def launch(*_args: Any, **_kwargs: Any) -> None:
            self.count += 1

        return launch


def launches(family: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Those of a call of five tokens."""
    settings = FAMILIES[family] | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    decoder = random_model(family, **settings).requires_grad_(False).model
    kv_cache = KVCache(1, 64, static=True)
    kv_cache.aim(torch.tensor([3]), 5)
    runner = OnCuda(decoder, JoinedDecoder(decoder), steps=TritonKernels())
    counted = Launches()
    for module, name in (
        *((layer, f"_{each}_kernel") for each in ("enter", "heads", "gated")),
        *((attend, f"_{each}_kernel") for each in ("parts", "sum")),
    ):
        monkeypatch.setattr(module, name, counted)
    mask = torch.ones(1, 1, 5, 64, dtype=torch.bool)
    tokens = torch.arange(5)[None]
    with torch.inference_mode(), counted:
        lean_states(decoder, runner, tokens, mask, tokens + 3, kv_cache, states=HiddenStates((), layers))
    return counted.count


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are counted, not run, and torch's products stand for ours")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_a_layer_is_ten_launches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products, two sums with the norms behind them, heads, gate, and attention in two."""
    assert launches(family, 4, monkeypatch) - launches(family, 3, monkeypatch) - _zeros_of_a_layer() == 10


@pytest.mark.skipif(DEVICE == "cuda", reason="as above")
def test_a_layer_of_experts_is_seven_launches_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as the module of the library, whose operations are its own."""
    block = type(random_model("qwen3_moe", **FAMILIES["qwen3_moe"]).model.layers[0].mlp)
    monkeypatch.setattr(block, "forward", lambda _self, hidden: hidden)
    grown = launches("qwen3_moe", 4, monkeypatch) - launches("qwen3_moe", 3, monkeypatch)
    assert grown - _zeros_of_a_layer() == 7


def _zeros_of_a_layer() -> int:
    """A KV cache makes room for a layer once, for keys and for values."""
    return 2
