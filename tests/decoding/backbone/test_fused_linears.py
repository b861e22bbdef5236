"""Linear layers as one product: their own numbers, as long as they are what they were when it was made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.decoding import devices
from draftsmith.decoding.backbone import stacked
from draftsmith.decoding.backbone.stacked import FusedLinear, PackedLinear, SharedInputLinears, as_one
from torch import Tensor, nn


class Owner(nn.Module):
    """Two layers that read the same."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 12, bias=bias), nn.Linear(16, 20, bias=bias)
        self.both = SharedInputLinears(self, "one", "two")
        self.requires_grad_(False)

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


def given() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def assert_same(owner: Owner, *, joined: bool) -> None:
    x = given()
    with torch.inference_mode():
        for mine, other in zip(owner.both(x), owner.apart(x), strict=True):
            torch.testing.assert_close(mine, other)
    assert (owner.both._joined is not None) == joined


@pytest.mark.parametrize("bias", [True, False])
def test_frozen_layers_are_one_product(bias: bool) -> None:
    assert_same(Owner(bias=bias), joined=True)


def double(owner: Owner) -> None:
    owner.one.weight.mul_(2)


def shift(owner: Owner) -> None:
    assert owner.two.bias is not None
    owner.two.bias.add_(1)


def load(owner: Owner) -> None:
    owner.load_state_dict({name: each * 3 for name, each in owner.state_dict().items()})


def replace(owner: Owner) -> None:
    owner.two = nn.Linear(16, 20).requires_grad_(False)


def swap_data(owner: Owner) -> None:
    owner.one.weight.data = torch.randn(12, 16)


@pytest.mark.parametrize("change", [double, shift, load, replace, swap_data])
def test_it_follows_the_weights(change: Callable[[Owner], None]) -> None:
    owner = Owner()
    assert_same(owner, joined=True)
    change(owner)
    assert_same(owner, joined=True)


def test_a_copy_reads_its_own_weights() -> None:
    owner = Owner()
    assert_same(owner, joined=True)
    copied = copy.deepcopy(owner)
    copied.one.weight.mul_(2)
    assert_same(copied, joined=True)
    assert_same(owner, joined=True)


def wrapped(owner: Any) -> None:
    owner.one = nn.Sequential(owner.one)


def hooked(owner: Any) -> None:
    owner.one.register_forward_hook(lambda _module, _given, out: out + 1)


def learning(owner: Any) -> None:
    owner.one.requires_grad_(True)


@pytest.mark.parametrize("change", [wrapped, hooked, learning])
def test_what_is_no_plain_frozen_layer_runs_itself(change: Callable[[Any], None]) -> None:
    owner = Owner()
    assert_same(owner, joined=True)
    change(owner)
    assert_same(owner, joined=False)


def test_training_has_its_gradients() -> None:
    owner = Owner().requires_grad_(True)
    sum(each.sum() for each in owner.both(given())).backward()
    assert owner.one.weight.grad is not None
    assert owner.two.weight.grad is not None
    assert owner.both._joined is None


def test_autocast_is_the_layers_own() -> None:
    owner = Owner()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert owner.both(given())[0].dtype == torch.bfloat16
    assert owner.both._joined is None


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_one_product_where_the_processor_multiplies_it(
    kind: torch.dtype, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked, "multiplies_bf16", lambda: multiplies)
    half = Owner().to(kind)
    with torch.inference_mode():
        for mine, other in zip(half.both(given().to(kind)), half.apart(given().to(kind)), strict=True):
            assert torch.equal(mine, other)
    assert (half.both._joined is not None) == (multiplies and kind == torch.bfloat16)


def test_layers_of_two_types_are_apart() -> None:
    mixed = Owner()
    mixed.two.to(torch.bfloat16)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="same dtype"):
        mixed.both(given())
    assert mixed.both._joined is None


@pytest.mark.skipif(not devices.multiplies_bf16(), reason="this processor does not multiply bf16")
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 64, 80])
@pytest.mark.parametrize("bias", [True, False])
def test_in_bf16_the_layout_changes_no_bit(bias: bool, rows: int) -> None:
    layers = [wide(outputs, bias=bias).to(torch.bfloat16) for outputs in (333, 2600)]
    joined = as_one(layers, small=True)
    assert isinstance(joined, PackedLinear)
    x = torch.randn(1, rows, 208, generator=torch.Generator().manual_seed(rows)).bfloat16()
    with torch.inference_mode():
        assert torch.equal(joined(x), torch.cat([layer(x) for layer in layers], -1))


@pytest.mark.parametrize("rows", [1, 5, 80])
def test_a_large_model_has_one_copy(rows: int) -> None:
    layers = [wide(outputs, bias=True) for outputs in (333, 2600)]
    joined = as_one(layers, small=False)
    assert isinstance(joined, PackedLinear if torch.backends.mkldnn.is_available() else FusedLinear)
    x = torch.randn(1, rows, 208, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        torch.testing.assert_close(joined(x), torch.cat([layer(x) for layer in layers], -1))


def wide(outputs: int, *, bias: bool, inputs: int = 208) -> nn.Linear:
    """A layer that is large enough for oneDNN's layout, with outputs that its blocks do not divide."""
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 32, 80])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [40, 333, 2600])
@pytest.mark.parametrize("processor", ["amx", "avx512", "narrower"])
def test_products_in_another_layout_are_the_same(
    processor: str, outputs: int, bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked, "kind", lambda: processor)
    layers = [wide(outputs, bias=bias), wide(333, bias=bias)]
    joined = FusedLinear.of(layers)
    packs = processor != "amx" or outputs == 2600
    assert (joined.packed is not None) == (packs and torch.backends.mkldnn.is_available())
    x = torch.randn(2, rows + 3, 208, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        for given_x in (x[:1, :rows], x[:, -rows:], x.transpose(0, 1)[:rows]):
            expected = torch.cat([layer(given_x) for layer in layers], -1)
            torch.testing.assert_close(joined(given_x), expected)
    assert FusedLinear.of([nn.Linear(16, 12)]).packed is None


@pytest.mark.parametrize("processor", ["amx", "avx512", "narrower"])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 80])
def test_a_layer_that_reads_more_than_it_writes(rows: int, processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "kind", lambda: processor)
    layer = wide(208, bias=True, inputs=640)
    joined = FusedLinear.of([layer])
    narrower = processor == "narrower"
    assert joined.weight.is_contiguous() == narrower  # for one token
    assert (joined.rowwise is not None) == narrower
    x = torch.randn(1, rows, 640, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        torch.testing.assert_close(joined(x), layer(x))


@pytest.mark.parametrize(("outputs", "turned"), [(40, False), (400, True), (2600, False)])
def test_few_rows_are_turned_without_avx512(outputs: int, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is small, and for an output projection."""
    monkeypatch.setattr(stacked, "kind", lambda: "narrower")
    assert (FusedLinear.of([wide(outputs, bias=False)]).rowwise is not None) == turned


@pytest.mark.parametrize(
    ("found", "known"),
    [
        ({"amx_tile": True, "avx512_f": True}, "amx"),
        ({"amx_tile": False, "avx512_f": True}, "avx512"),
        ({"avx512_f": False}, "narrower"),
        ({}, "avx512"),
    ],
)
def test_the_kind_of_a_processor(found: dict[str, bool], known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_capabilities", lambda: found)
    assert devices.kind() == known
