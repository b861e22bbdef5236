"""The network of block drafters against one that is written out: every block alone, every weight of attention drawn."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.block.net import BlockNet, BlockShape, spread_layers
from draftsmith.drafters.layers import spans
from helpers.models.shaped_targets import shaped
from helpers.models.small_drafters import small_block_net, small_dflash2_net, small_dspark_net
from helpers.operation_counts import Largest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
KINDS = list(itertools.product(("fill-in", "anchor-first"), (False, True)))
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 6 + [-1], [0] * 3 + [1] * 13])
POSITIONS = torch.tensor([[*range(9), *range(6), 0], [*range(3), *range(13)]])
ANCHORS = torch.tensor([[2, 8, 9, 12], [0, 1, 5, 15]])  # a document's first and last tokens among them


def net_for(target: Backbone, layout: str, causal: bool, *, seed: int = 0, **chosen: Any) -> BlockNet:
    torch.manual_seed(seed)
    net = small_block_net(target.model, layout=layout, causal=causal, **chosen)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return net.requires_grad_(False)


def given_rows(net: BlockNet, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of the rows, and embeddings of every token of them."""
    g = torch.Generator().manual_seed(seed)
    R, S, H = *DOCUMENTS.shape, net.config.hidden
    return torch.randn(R, S, H * len(net.config.layers), generator=g), torch.randn(R, S, H, generator=g)


def roots_of(embeds_RSH: Tensor, anchor_RA: Tensor) -> Tensor:
    return embeds_RSH.gather(1, anchor_RA[..., None].expand(-1, -1, embeds_RSH.shape[2]))


def packed(
    net: BlockNet, features: Tensor, embeds: Tensor, anchors: Tensor = ANCHORS, *, masked: bool = True
) -> Tensor:
    return net.blocks(features, POSITIONS, DOCUMENTS, roots_of(embeds, anchors), anchors, masked=masked)


def turned(x_GND: Tensor, position_N: Tensor, theta: float) -> Tensor:
    """Rotary positions as complex numbers: dimension d of the first half turns with that of the second."""
    left, right = x_GND.double().chunk(2, -1)
    half = left.shape[-1]
    angle_ND = position_N[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned_GND = torch.complex(left, right) * torch.polar(torch.ones_like(angle_ND), angle_ND)
    return torch.cat((turned_GND.real, turned_GND.imag), -1).float()


def normed(x: Tensor, norm: Any) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def one_block(net: BlockNet, features_TF: Tensor, root_H: Tensor) -> Tensor:
    """A block behind T states, token by token and head by head. [K, H]."""
    shape, T = net.config, len(features_TF)
    B, D = shape.size, shape.head_size
    fused_TH = normed(features_TF @ net.fc.weight.T, net.hidden_norm)
    x_BH = torch.stack([root_H, *[net.mask_embedding.weight[0]] * (B - 1)])
    at_T, at_B = torch.arange(T), torch.arange(T, T + B)
    for number, layer in enumerate(net.layers):
        part: Any = layer.self_attn
        read_BH = normed(x_BH, layer.input_layernorm)

        def heads(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight.T).unflatten(-1, (-1, D)).transpose(0, 1)

        query = turned(normed(heads(read_BH, part.q_proj.weight), part.q_norm), at_B, shape.rope_theta)
        both_XH, at_X = torch.cat((fused_TH, read_BH)), torch.cat((at_T, at_B))
        key = turned(normed(heads(both_XH, part.k_proj.weight), part.k_norm), at_X, shape.rope_theta)
        value = heads(both_XH, part.v_proj.weight)
        out = []
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            score_BX = query[head] @ key[shared].T / D**0.5
            window, causal = shape.windows[number] if shape.windows else None, shape.causal
            if causal or (window is not None and shape.causal_windows):
                score_BX = score_BX.masked_fill(at_X > at_B[:, None], -torch.inf)
            if window is not None:
                score_BX = score_BX.masked_fill(at_B[:, None] - at_X >= window, -torch.inf)
            out.append(score_BX.softmax(-1) @ value[shared])
        x_BH = x_BH + torch.cat(out, -1) @ part.o_proj.weight.T
        mlp, read_BH = layer.mlp, normed(x_BH, layer.post_attention_layernorm)
        inner = F.silu(read_BH @ mlp.gate_proj.weight.T) * (read_BH @ mlp.up_proj.weight.T)
        x_BH = x_BH + inner @ mlp.down_proj.weight.T
    return normed(x_BH, net.norm)[shape.first :]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        *({"layout": layout, "causal": causal} for layout, causal in KINDS),
        {"layout": "fill-in", "causal": False, "windows": (6, None), "causal_windows": True},
        {"layout": "fill-in", "causal": False, "windows": (None, 5)},
        {"layout": "anchor-first", "causal": True, "windows": (7, 5)},
    ],
)
def test_packed_blocks_are_each_block_alone(
    kind: dict[str, Any], masked: bool, target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "BLOCK", 8)  # several of them, each with slots of two blocks
    net, layout = net_for(target, **kind), kind["layout"]
    features, embeds = given_rows(net)
    out_RAKH = packed(net, features, embeds, masked=masked)
    assert out_RAKH.shape == (2, 4, 4 if layout == "fill-in" else 5, net.config.hidden)
    for row, anchors in enumerate(ANCHORS.tolist()):
        for number, anchor in enumerate(anchors):
            start = anchor - int(POSITIONS[row, anchor])
            alone = one_block(net, features[row, start:anchor], embeds[row, anchor])
            torch.testing.assert_close(out_RAKH[row, number], alone, **CLOSE)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("layout", "causal"), KINDS)
def test_nothing_at_or_behind_the_anchor_and_no_other_document_is_seen(
    layout: str, causal: bool, masked: bool, target: Backbone
) -> None:
    net = net_for(target, layout, causal)
    features, embeds = given_rows(net)
    before = packed(net, features, embeds, masked=masked)
    for number in range(ANCHORS.shape[1]):
        anchor_R1 = ANCHORS[:, number, None]
        same_RS = DOCUMENTS.gather(1, anchor_R1) == DOCUMENTS
        hidden_RS = ~same_RS | (torch.arange(DOCUMENTS.shape[1]) >= anchor_R1)
        changed = torch.where(hidden_RS[..., None], 7.0, features)
        assert torch.equal(packed(net, changed, embeds, masked=masked)[:, number], before[:, number])
        seen_RS = ~hidden_RS
        if seen_RS.any():
            moved = packed(net, torch.where(seen_RS[..., None], 7.0, features), embeds, masked=masked)[:, number]
            assert not torch.allclose(moved[1 if number > 0 else 0], before[1 if number > 0 else 0, number])


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)), st.sampled_from(KINDS))
def test_blocks_do_not_see_each_other(order: list[int], kind: tuple[str, bool]) -> None:
    net = net_for(make_target("qwen3"), *kind)
    features, embeds = given_rows(net)
    whole = packed(net, features, embeds)
    torch.testing.assert_close(packed(net, features, embeds, ANCHORS[:, order]), whole[:, order], **CLOSE)
    torch.testing.assert_close(packed(net, features, embeds, ANCHORS[:, order[:1]]), whole[:, order[:1]], **CLOSE)


def test_slots_see_later_ones_unless_the_block_is_causal(target: Backbone) -> None:
    """One slot less at the end: of a causal block the others are as they were."""
    for causal in (False, True):
        net = net_for(target, "anchor-first", causal)
        shorter = BlockNet(dataclasses.replace(net.config, size=4))
        shorter.load_state_dict(net.state_dict())
        features, embeds = given_rows(net)
        same = torch.allclose(packed(shorter, features, embeds), packed(net, features, embeds)[:, :, :4], atol=1e-6)
        assert same == causal


@pytest.mark.parametrize(("layout", "causal"), KINDS)
def test_half_precision_is_as_exact_as_half_precision(layout: str, causal: bool, target: Backbone) -> None:
    """The sink's score is not rounded: bf16 stays near fp32 where scores are large."""
    net = net_for(target, layout, causal)
    features, embeds = given_rows(net)
    exact, rough = packed(net, features, embeds), packed(net.bfloat16(), features, embeds)
    assert (rough.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("made", [small_block_net, small_dspark_net, small_dflash2_net])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_grows_with_the_square_of_all_slots(causal: bool, made: Any, target: Backbone) -> None:
    """More slots than tokens: no tensor, forward or backward, has a number for every pair of slots."""
    net = made(target.model, causal=causal).requires_grad_(True)
    S, B, H = 16, net.config.size, net.config.hidden
    features = torch.randn(1, S, H * len(net.config.layers), requires_grad=True)
    at_1S = torch.arange(S)[None]
    found = {}
    for A in (64, 128):
        assert A * B > S
        anchors = torch.arange(A)[None] % S
        with Largest() as seen:
            net.blocks(features, at_1S, torch.zeros_like(at_1S), torch.randn(1, A, H), anchors).sum().backward()
        found[A] = seen.numbers
        assert seen.numbers < (A * B) ** 2
    assert found[128] == 2 * found[64]


def test_without_a_mask_nothing_grows_with_slots_times_states(
    target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a block for every two tokens: four times the row, four times the largest tensor."""
    monkeypatch.setattr(spans, "BLOCK", 8)
    net, found = small_block_net(target.model).requires_grad_(True), []
    for length in (128, 512):
        at_1A, one = torch.arange(0, length, 2)[None], torch.zeros(1, length, dtype=torch.long)
        features = torch.randn(1, length, net.config.hidden * len(net.config.layers))
        roots = torch.randn(1, at_1A.shape[1], net.config.hidden)
        with Largest() as largest:
            net.blocks(features, torch.arange(length)[None], one, roots, at_1A, masked=False).sum().backward()
        found.append(largest.numbers)
    assert found[1] <= 4 * found[0]


def test_gradients_reach_everything_that_is_trained(target: Backbone) -> None:
    net = small_block_net(target.model).requires_grad_(True)
    features, embeds = given_rows(net)
    packed(net, features, embeds).pow(2).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in net.parameters())


def test_a_mask_is_learnt_or_is_the_embedding_of_an_unused_id(target: Backbone) -> None:
    own, named = small_block_net(target.model), small_block_net(target.model, mask_token=5)
    assert own.mask_embedding.weight.requires_grad
    assert not named.mask_embedding.weight.requires_grad
    table: Any = target.model.get_input_embeddings()
    assert torch.equal(named.mask_embedding.weight[0], table.weight[5])
    slots = named.slots(table.weight[3], 3)
    assert torch.equal(slots, table.weight[[3, 5, 5]])


def test_a_mask_is_as_loud_as_what_the_target_reads_of_a_token() -> None:
    """Gemma's embedding multiplies its rows: the mask is one of what comes out, or as loud."""
    model: Any = shaped("gemma2")
    embedding = model.get_input_embeddings()
    read_VH = embedding(torch.arange(len(embedding.weight))).detach()
    assert read_VH.std() > 2 * embedding.weight.std()
    assert torch.equal(small_block_net(model, mask_token=5).mask_embedding.weight[0], read_VH[5])
    own = [small_block_net(model).mask_embedding.weight.std() / read_VH.std() for _ in range(20)]
    assert 0.7 < torch.stack(own).mean() < 1.3


@pytest.mark.parametrize(
    ("count", "layers"),
    [(36, (2, 10, 18, 26, 34)), (26, (2, 7, 13, 19, 24)), (20, (2, 6, 10, 14, 18)), (2, (0, 1)), (1, (0,))],
)
def test_layers_by_default(count: int, layers: tuple[int, ...]) -> None:
    assert spread_layers(count) == layers


def test_layers_by_default_are_different_and_leave_the_last_out() -> None:
    for count in range(1, 130):
        layers = spread_layers(count)
        assert list(layers) == sorted(set(layers))
        assert layers[-1] < count


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 1}, "a slot that speaks of a token"),
        ({"layout": "other"}, "fill-in or anchor-first"),
        ({"layers": ()}, "expected the numbers of hidden states"),
        ({"layers": (0, 0)}, "expected the numbers of different hidden states, low to high"),
        ({"layers": (1, 0)}, "expected the numbers of different hidden states, low to high"),
        ({"size": 10**9}, "slots make 1,000,000,000 parts"),
        ({"causal": 1}, "true or false"),
        ({"mask_token": -1}, "the id of a token"),
        ({"decoder_layers": 0}, "decoder_layers is 0"),
        ({"decoder_layers": 5000}, "parts"),
    ],
)
def test_sizes_that_no_network_has_are_refused(wrong: dict[str, Any], message: str, target: Backbone) -> None:
    chosen: dict[str, Any] = {"layers": (0, 1), "decoder_layers": 1, "size": 4, "layout": "fill-in", "causal": False}
    with pytest.raises(ValueError, match=message):
        BlockShape.of(target.model.config, **(chosen | wrong))


@pytest.mark.parametrize("theta", [2**70, float("inf"), float("nan"), -1, "1", True])
def test_angles_that_no_tensor_has_are_refused(theta: Any, target: Backbone) -> None:
    shape = BlockShape.of(target.model.config, layers=(0, 1), decoder_layers=1, size=4, layout="fill-in", causal=False)
    with pytest.raises(ValueError, match=r"rope_theta is .*; expected a number from 0 to 1e\+15"):
        BlockShape.from_settings(dataclasses.asdict(shape) | {"rope_theta": theta})
