"""An MTP module in vLLM's forms: every tensor under the name that is loaded there, and what would not fit is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.drafters.export import Export, ServedTarget, export_of
from draftsmith.drafters.mtp.layers import MtpShape
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.drafters.mtp.own import own_shape, own_weights
from draftsmith.errors import RequestError
from draftsmith.launch.engines import Start, command
from safetensors.torch import save_file
from transformers import AutoConfig

SIZES: dict[str, Any] = {
    "hidden": 32,
    "intermediate": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 16,
    "rope_theta": 10_000.0,
    "eps": 1e-6,
    "rotary": 16,
}
CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "layer_types": ["full_attention"] * 2,
}
MIMO: dict[str, Any] = {"query_norm": False, "bias": True, "blank_first": True, "head_size": 8, "rotary": 8}


def served(**words: Any) -> ServedTarget:
    return ServedTarget("org/target", ["Qwen3ForCausalLM"], 61, 2, 256, None, 2, words=CONFIG | words)


def exported(folder: Path, target: ServedTarget, **chosen: Any) -> tuple[Export, MtpNet]:
    torch.manual_seed(0)
    net = MtpNet(MtpShape(**(SIZES | chosen)))
    folder.mkdir(exist_ok=True)
    save_file(net.state_dict(), folder / "model.safetensors")
    return export_of(folder, "mtp", asdict(net.config), target, "vllm", dtype="fp32"), net


@pytest.mark.parametrize(
    ("chosen", "architecture"), [({}, "ExaoneMoEForCausalLM"), (MIMO, "MiMoForCausalLM")], ids=["plain", "mimo"]
)
def test_what_is_written_is_the_module_that_is_read_back(
    chosen: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    """By `own.py`, which reads checkpoints of these names; the config is one that `transformers` knows."""
    made, net = exported(tmp_path / "drafter", served(head_dim=8 if chosen else 16), **chosen)
    assert made.config["architectures"] == [architecture]
    assert made.config["num_nextn_predict_layers"] == 1
    back = tmp_path / "back"
    back.mkdir()
    save_file(made.tensors, back / "model.safetensors")
    config = AutoConfig.for_model(**made.config)
    config.num_hidden_layers = 2
    assert own_shape(str(back), config) == net.config
    weights = own_weights(str(back), config)
    assert weights.keys() == net.state_dict().keys()
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(weights[name], weight)
    assert config.rope_parameters["rope_theta"] == 10_000.0
    if not chosen:
        assert (config.layer_types, config.mlp_layer_types) == (["full_attention"], ["dense"])


@pytest.mark.parametrize("chosen", [{}, MIMO], ids=["plain", "mimo"])
def test_a_scale_of_the_targets_logits_stands_in_the_last_norm(chosen: dict[str, Any], tmp_path: Path) -> None:
    """No class has a word for it. What is fed back is scaled too, and normed before anything reads it."""
    scaled = replace(served(head_dim=8 if chosen else 16), logit_scale=0.125)
    made, net = exported(tmp_path / "drafter", scaled, **chosen)
    back = tmp_path / "back"
    back.mkdir()
    save_file(made.tensors, back / "model.safetensors")
    config = AutoConfig.for_model(**made.config)
    config.num_hidden_layers = 2
    theirs = MtpNet(own_shape(str(back), config))
    theirs.load_state_dict(own_weights(str(back), config))
    state, embeds = torch.randn(2, 1, 9, 32)
    positions = torch.arange(9)[None]
    with torch.no_grad():
        mine, there = (each(state, embeds, positions, None) for each in (net, theirs))
        torch.testing.assert_close(there, mine / 8)
        again, fed_back = net(mine, embeds, positions, None), theirs(there, embeds, positions, None)
    torch.testing.assert_close(fed_back, again / 8, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"state": "before"}, "reads states before the last norm"),
        ({"gated": True}, "has a gate or heads that are turned in part"),
        ({"rotary": 8}, "has a gate or heads that are turned in part"),
        ({"bias": True}, "has norms of query and key beside biases"),
        ({"query_norm": False}, "has a layer without norms of query and key and without biases"),
        (MIMO | {"head_size": 16, "rotary": 16}, "has 4 heads of 16, and MiMo's class in vLLM makes 32"),
    ],
)
def test_what_no_class_of_vllm_computes_is_refused(chosen: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=why):
        exported(tmp_path, served(), **chosen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"intermediate_size": 64}, "intermediate_size of 'org/target' is 64, where the module has 48"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type of 'org/target' is 'llama3'"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta of 'org/target' is 500000.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor of 'org/target' is 0.5"),
        ({"attention_bias": True}, "attention_bias of 'org/target' is True"),
    ],
)
def test_sizes_that_vllm_would_take_from_the_target_are_the_modules(
    words: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        exported(tmp_path, served(**words))


def test_a_quantised_target_is_refused(tmp_path: Path) -> None:
    """vLLM would wait for weights of fewer bits; one that reads images too says so in front of its text part."""
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2, **CONFIG)
    config.quantization_config = {"quant_method": "fp8"}
    target = ServedTarget.of("org/target", config)
    message = "'org/target' is quantised .fp8.*builds a module's layers like the target's.*EAGLE-3 drafter is served"
    with pytest.raises(RequestError, match=message):
        exported(tmp_path, target)


def test_the_text_part_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "llama", "num_hidden_layers": 2, **CONFIG}
    config = AutoConfig.for_model("llava", text_config=text)
    assert config.get_text_config(decoder=True).hidden_size == CONFIG["hidden_size"]
    with pytest.raises(RequestError, match="is the text part of a larger model .llava., and vLLM reads"):
        exported(tmp_path, ServedTarget.of("org/target", config))
    whole = AutoConfig.for_model("llava", text_config=text)
    whole.quantization_config = {"quant_method": "awq", "bits": 4}
    with pytest.raises(RequestError, match="is quantised .awq 4 bits"):
        exported(tmp_path, ServedTarget.of("org/target", whole))


def test_what_the_targets_config_lacks_is_said_where_vllm_is_started(tmp_path: Path) -> None:
    made, _ = exported(tmp_path, served())
    start = Start("TARGET", "FOLDER", "mtp", 3, sampled=True, of_target=made.of_target)
    *_, flag, told = shlex.split(command("vllm", start))
    assert flag == "--hf-overrides"
    assert json.loads(told) == {"mlp_layer_types": ["dense"], "mtp_layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"layer_types": None}, {"layer_types": ["full_attention"] * 2}),  # Llama, Granite
        (
            {"layer_types": None, "model_type": "granite"},
            {"layer_types": ["full_attention"] * 2, "attention_sinks": False},
        ),
        ({"layer_types": None, "sliding_window": 64}, {"layer_types": ["sliding_attention"] * 2}),  # Mistral
        (
            {"layer_types": None, "sliding_window": 64, "use_sliding_window": False},
            {"layer_types": ["full_attention"] * 2},
        ),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}),
        ({"mlp_layer_types": ["dense", "sparse"]}, {"mlp_layer_types": None}),  # EXAONE-MoE's own
        ({"mtp_layer_types": ["full_attention"]}, {"mtp_layer_types": None}),
        ({"mtp_layer_types": ["sliding_attention"]}, {}),
    ],
)
def test_what_the_targets_config_says_of_its_layers_stays(
    words: dict[str, Any], told: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM's class reads the kinds of the target's layers, which many a config has no word for; others mean theirs."""
    always = {"mlp_layer_types": ["dense"], "mtp_layer_types": ["full_attention"]}
    made, _ = exported(tmp_path, served(**words))
    assert made.of_target == {name: value for name, value in (always | told).items() if value is not None}


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    named = (
        "in which no mtp drafter is exported; expected vllm. It cannot be loaded: other engines take a module out of"
    )
    with pytest.raises(RequestError, match=named):
        export_of(tmp_path, "mtp", {}, served(), "sglang")
