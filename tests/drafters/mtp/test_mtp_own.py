"""The module that a target brings: read from its files, and the same numbers as `transformers`' own module makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.drafters.mtp.own import own_shape, own_weights
from draftsmith.errors import RequestError
from helpers.models.random_models import random_model
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HIDDEN, LENGTH = 32, 7
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
QWEN_NAMES = {**{f"{theirs}.": f"mtp.{ours}." for theirs, ours in QWEN.items()}, "mtp_block.": "mtp.layers.0."}
DEEPSEEK_NAMES = {
    **{f"{name}.": f"model.layers.2.{name}." for name in ("eh_proj", "enorm", "hnorm")},
    "post_norm.": "model.layers.2.shared_head.norm.",
    "mtp_block.": "model.layers.2.",
}


def model_of(family: str) -> Any:
    extra: dict[str, Any] = {"layer_types": ["full_attention"] * 2} if family == "qwen3_5_text" else {}
    if family == "scaled":
        family, extra = "qwen3", {"rope_parameters": YARN | {"rope_theta": 5e5}, "max_position_embeddings": 16}
    return random_model(family, **SIZES, **extra)


def layer_of(model: Any, *, seed: int = 0) -> MtpLayer:
    """`transformers`' own MTP layer for the model, with weights that say something."""
    torch.manual_seed(seed)
    block = model.get_decoder().layers[0]
    norm = type(block.input_layernorm)
    made = MtpLayer(model.config, type(block), norm, 0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return made.eval()


def written(folder: Path, tensors: dict[str, Tensor], names: dict[str, str], **more: Tensor) -> str:
    """A folder with the module under a checkpoint's names, and with a tensor of the target's."""
    renamed = {
        names[begin] + name.removeprefix(begin): tensor.detach().clone()
        for name, tensor in tensors.items()
        for begin in names
        if name.startswith(begin)
    }
    assert len(renamed) == len(tensors)
    folder.mkdir(exist_ok=True)
    save_file(renamed | more | {"model.norm.weight": torch.ones(HIDDEN)}, folder / "model.safetensors")
    return str(folder)


def net_of(path: str, config: Any) -> MtpNet:
    net = MtpNet(own_shape(path, config))
    net.load_state_dict(own_weights(path, config))
    return net.eval()


def given() -> tuple[Tensor, Tensor]:
    both: Tensor = torch.randn(2, 1, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(5))
    return both[0], both[1]


@pytest.mark.parametrize(
    ("family", "names", "parts"),
    [
        ("qwen3_5_text", QWEN_NAMES, {"gated": True, "query_norm": True, "rotary": 4}),
        ("qwen3", QWEN_NAMES, {"gated": False, "query_norm": True, "rotary": 16}),
        ("llama", DEEPSEEK_NAMES, {"gated": False, "query_norm": False, "blank_first": True}),
        ("scaled", QWEN_NAMES, {"rope_theta": 5e5, "rope_scaling": YARN}),
    ],
)
@torch.no_grad()
def test_one_step_is_that_of_transformers(
    family: str, names: dict[str, str], parts: dict[str, Any], tmp_path: Path
) -> None:
    model = model_of(family)
    theirs = layer_of(model)
    copy = {"model.layers.2.embed_tokens.weight": torch.zeros(61, HIDDEN)} if names is DEEPSEEK_NAMES else {}
    net = net_of(written(tmp_path, theirs.state_dict(), names, **copy), model.config)
    assert {name: getattr(net.config, name) for name in parts} == parts
    state, embed = given()
    positions = torch.arange(LENGTH)[None]
    if net.config.blank_first:
        embed[:, 0] = 0  # which is as engines run it; `transformers` leaves it to the weights
    places = positions.expand(3, 1, -1) if family.startswith("qwen3_5") else positions  # of text, height and width
    turn = model.get_decoder().rotary_emb(state, places)
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    wanted = theirs(embed, state, turn, mask, positions, None)
    torch.testing.assert_close(net(state, embed, positions, None), wanted, **CLOSE)
    assert not torch.allclose(net(embed, state, positions, None), wanted, atol=0.1)  # the halves are not alike


@torch.no_grad()
def test_mimos_projection_reads_the_state_first(tmp_path: Path) -> None:
    """By the module written down here: Qwen2's layer of `transformers`, with MiMo's names and order."""
    model = random_model("qwen2", **(SIZES | {"num_attention_heads": 4}))
    model.config.head_dim = getattr(model.config, "head_dim", None) or HIDDEN // 4
    g, block = torch.Generator().manual_seed(1), model.get_decoder().layers[1]
    norms = {name: 1 + 0.3 * torch.randn(HIDDEN, generator=g) for name in ("token", "hidden", "final")}
    projection = 0.3 * torch.randn(HIDDEN, 2 * HIDDEN, generator=g)
    tensors = {f"model.mtp_layers.0.{name}": weight.clone() for name, weight in block.state_dict().items()}
    tensors |= {f"model.mtp_layers.0.{name}_layernorm.weight": weight for name, weight in norms.items()}
    tensors["model.mtp_layers.0.input_proj.weight"] = projection
    save_file(tensors, tmp_path / "model.safetensors")
    net = net_of(str(tmp_path), model.config)
    assert net.config.bias
    assert not net.config.query_norm
    state, embed = given()
    positions = torch.arange(LENGTH)[None]

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), norms[name], 1e-6)

    blank = embed.clone()
    blank[:, 0] = 0
    pair = torch.cat((norm(state, "hidden"), norm(blank, "token")), -1) @ projection.T
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    turn = model.get_decoder().rotary_emb(state, positions)
    out = block(pair, attention_mask=mask, position_embeddings=turn, position_ids=positions)
    torch.testing.assert_close(net(state, embed, positions, None), norm(out, "final"), **CLOSE)


def test_what_is_missing_left_over_or_of_another_size_is_one_error(tmp_path: Path) -> None:
    model = model_of("qwen3")
    tensors = layer_of(model).state_dict()
    less = {name: tensor for name, tensor in tensors.items() if "down_proj" not in name}
    path = written(tmp_path / "less", less, QWEN_NAMES, **{"mtp.layers.1.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(RequestError, match=r"lacks mtp.layers.0.mlp.down_proj.weight; also has mtp.layers.1.mlp"):
        own_shape(path, model.config)
    odd = tensors | {"eh_proj.weight": torch.zeros(HIDDEN, HIDDEN)}
    with pytest.raises(RequestError, match=r"has mtp.fc.weight of \[32, 32\] where \[32, 64\] is expected"):
        own_shape(written(tmp_path / "odd", odd, QWEN_NAMES), model.config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mtp.layers.0.mlp.experts.0.up_proj.weight", "has a feed-forward part of a mixture of experts"),
        ("mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight", r"has compressed \(MLA\) attention"),
    ],
)
def test_layers_of_other_kinds_are_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    model = model_of("qwen3")
    path = written(tmp_path, layer_of(model).state_dict(), QWEN_NAMES, **{name: torch.zeros(2, 2)})
    with pytest.raises(RequestError, match=message):
        own_shape(path, model.config)


def test_a_target_without_a_module_and_one_that_is_not_here_are_told_so(tmp_path: Path) -> None:
    model = model_of("qwen3")
    with pytest.raises(RequestError, match=r"hold no MTP module: looked for mtp.\* \(Qwen3.5\), model.mtp_layers"):
        own_shape(written(tmp_path, {}, QWEN_NAMES), model.config)
    with pytest.raises(RequestError, match=r"'nobody/nothing' is not here; fetch it first"):
        own_shape("nobody/nothing", model.config)
