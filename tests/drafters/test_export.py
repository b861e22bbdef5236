"""Exported drafters: names, shapes and words of each format, and the logits they stand for.

The logits are made anew from the exported files alone, by the Llama parts of `transformers`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.drafters.eagle.net import EagleNet, EagleShape
from draftsmith.drafters.eagle.net3 import Eagle3Net, Eagle3Shape
from draftsmith.drafters.export import ServedTarget, export_of, served_form
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.heads.medusa import MedusaHeads, MedusaShape
from draftsmith.drafters.projection import Projection
from draftsmith.errors import RequestError
from helpers.models.random_models import random_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

H, INNER, V, U = 32, 96, 61, 20
WORDS = list(range(0, 60, 3))
SIZES = {
    "hidden": H,
    "intermediate": INNER,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 16,
    "rope_theta": 50_000.0,
    "eps": 1e-5,
}
SERVED = ServedTarget("org/target", ["Qwen3ForCausalLM"], V, 8, 4096, None, 2)
S = 12
TABLE = torch.randn(V, H, generator=torch.Generator().manual_seed(3))
"""The target's embedding."""


@pytest.fixture(scope="module", autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def shaken(net: nn.Module) -> nn.Module:
    """Weights that are none of the values which they begin with."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return net.eval()


def saved(net: Any, place: Path) -> dict[str, Any]:
    """The weights of a drafter checkpoint in `place`, and the settings of its config."""
    save_file(net.state_dict(), place / "model.safetensors")
    return json.loads(json.dumps(asdict(net.config)))


def exported(
    net: Any, family: str, form: str, place: Path, served: ServedTarget = SERVED, **words: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors, as read from the files of an export of a saved drafter."""
    if form == "speculators":
        words |= {"table": lambda: TABLE}
    made = export_of(place, family, saved(net, place), served, form, **words)
    (place / "out").mkdir()
    (place / "out" / "config.json").write_text(json.dumps(made.config))
    save_file(made.tensors, place / "out" / "model.safetensors")
    return made.config, load_file(place / "out" / "model.safetensors")


LAYER = {
    "self_attn.o_proj.weight": [H, 64],
    "mlp.gate_proj.weight": [INNER, H],
    "mlp.up_proj.weight": [INNER, H],
    "mlp.down_proj.weight": [H, INNER],
    "post_attention_layernorm.weight": [H],
}


def shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


# ---- EAGLE-1 and EAGLE-2 ------------------------------------------------------------------


@pytest.mark.parametrize(("form", "name"), [("vllm", "LlamaForCausalLM"), ("sglang", "LlamaForCausalLMEagle")])
def test_eagle(form: str, name: str, tmp_path: Path) -> None:
    net = shaken(EagleNet(EagleShape(**SIZES)))
    config, tensors = exported(net, "eagle", form, tmp_path, dtype="fp32")
    assert shapes(tensors) == {
        "fc.weight": [H, 2 * H],
        "fc.bias": [H],
        "layers.0.self_attn.q_proj.weight": [64, H],
        "layers.0.self_attn.k_proj.weight": [32, H],
        "layers.0.self_attn.v_proj.weight": [32, H],
        **{f"layers.0.{each}": shape for each, shape in LAYER.items()},
    }
    assert config["architectures"] == [name]
    assert (config["num_hidden_layers"], config["bias"]) == (1, False)
    features, embeds = torch.randn(2, S, H), torch.randn(2, S, H)
    positions = torch.arange(S).expand(2, -1)
    with torch.no_grad():
        mine = net(features, embeds, positions, None)
        theirs = eagle_of_transformers(tmp_path / "out", features, embeds, positions)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma", "gemma3_text"])
def test_engines_hand_out_the_rows_of_the_embedding(architecture: str, tmp_path: Path) -> None:
    """Gemma multiplies them by the root of H; an engine does so elsewhere, and a drafter reads
    what is in the table."""
    sizes = {
        "vocab_size": V,
        "hidden_size": H,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    embedding = model.get_input_embeddings()
    served = ServedTarget.of("org/target", model.config, model)
    assert served.embedding_scale == pytest.approx(H**0.5 if "gemma" in architecture else 1.0)
    net = shaken(EagleNet(EagleShape(**SIZES)))
    exported(net, "eagle", "vllm", tmp_path, served, dtype="fp32")
    features, positions = torch.randn(2, S, H), torch.arange(S).expand(2, -1)
    ids = torch.randint(0, V, (2, S))
    with torch.no_grad():
        mine = net(features, embedding(ids), positions, None)
        theirs = eagle_of_transformers(tmp_path / "out", features, embedding.weight[ids], positions)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_what_the_target_does_to_its_logits_is_said_of_those_that_eagle_drafts_by(form: str, tmp_path: Path) -> None:
    """Its scale in a word; for a cap there is none, which whoever starts the engine is told."""
    settings = saved(shaken(EagleNet(EagleShape(**SIZES))), tmp_path)
    plain = export_of(tmp_path, "eagle", settings, SERVED, form)
    assert (plain.config["logit_scale"], plain.uncapped) == (1.0, None)
    shaped = export_of(tmp_path, "eagle", settings, replace(SERVED, logit_scale=0.125, logit_cap=30.0), form)
    assert (shaped.config["logit_scale"], shaped.uncapped) == (0.125, 30.0)


def test_a_projection_of_its_own_is_not_scaled_again(tmp_path: Path) -> None:
    """EAGLE-3's own is trained on the target's distribution, its scale within."""
    settings = saved(eagle3_net(), tmp_path)
    made = export_of(tmp_path, "eagle3", settings, replace(SERVED, logit_scale=0.125, logit_cap=30.0), "vllm")
    assert ("logit_scale" in made.config, made.uncapped) == (False, None)


def test_an_unknown_embedding_is_refused() -> None:
    class Other(nn.Embedding):
        pass

    model = random_model("qwen3")
    model.set_input_embeddings(Other(V, H))
    with pytest.raises(RequestError, match="embedding is a Other"):
        ServedTarget.of("org/target", model.config, model)


def eagle_of_transformers(folder: Path, features: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
    """fc over [embedding; feature], then a Llama layer that has no norm in front."""
    config, tensors = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    own = {name[9:]: t for name, t in tensors.items() if name.startswith("layers.0.")}
    layer.load_state_dict(own)
    pair = F.linear(torch.cat([embeds, features], -1), tensors["fc.weight"], tensors["fc.bias"])
    turn = LlamaRotaryEmbedding(config)(pair, positions)
    out = layer(pair, attention_mask=causal(), position_embeddings=turn)
    return out[0] if isinstance(out, tuple) else out


def causal() -> Tensor:
    return torch.full((S, S), -torch.inf).triu(1)[None, None]


# ---- EAGLE-3 ------------------------------------------------------------------------------


def eagle3_net(layers: tuple[int, ...] = (2, 4, 5), **words: Any) -> Eagle3Net:
    shape = Eagle3Shape(**SIZES, layers=layers, vocabulary=V, draft_vocabulary=U, **words)
    return shaken(Eagle3Net(shape, WORDS))


EAGLE3_FORMS = list(FAMILIES["eagle3"].exports)
# llama.cpp knows no norms behind `fc`
WITH_NORMS = [
    *((form, False) for form in EAGLE3_FORMS),
    *((form, True) for form in EAGLE3_FORMS if form != "llama.cpp"),
]


@pytest.mark.parametrize(("form", "norms"), WITH_NORMS)
def test_eagle3(form: str, norms: bool, tmp_path: Path) -> None:
    net = eagle3_net(feature_norms=norms)
    config, tensors = exported(net, "eagle3", form, tmp_path, dtype="fp32")
    layer = "layers.0" if form == "speculators" else "midlayer"
    extra = {f"fc_norm.{i}.weight": [H] for i in range(3 * norms)}
    extra |= {"embed_tokens.weight": [V, H]} if form == "speculators" else {}
    assert shapes(tensors) == {
        "fc.weight": [H, 3 * H],
        "norm.weight": [H],
        "lm_head.weight": [U, H],
        "d2t": [U],
        "t2d": [V],
        f"{layer}.input_layernorm.weight": [H],
        f"{layer}.hidden_norm.weight": [H],
        f"{layer}.self_attn.q_proj.weight": [64, 2 * H],
        f"{layer}.self_attn.k_proj.weight": [32, 2 * H],
        f"{layer}.self_attn.v_proj.weight": [32, 2 * H],
        **{f"{layer}.{each}": shape for each, shape in LAYER.items()},
        **extra,
    }
    # an offset, as every engine adds it; ascending, and the same tokens as in the mask
    ids = tensors["d2t"] + torch.arange(U)
    assert tensors["d2t"].dtype == torch.int64
    assert ids.tolist() == WORDS == tensors["t2d"].nonzero()[:, 0].tolist()
    words = ("norm_before_residual", "norm_before_fc", "fc_norm")
    assert [config[word] for word in words] == [False, False, norms]
    # engines take false where the native form does not have the word; SpecForge does not, to which it is another word
    assert config.get("norm_output", False) is norms
    assert config["draft_vocab_size"] == U
    llama = config["transformer_layer_config"] if form == "speculators" else config
    assert llama["rope_parameters"] == {"rope_type": "default", "rope_theta": 50_000.0}
    states, ids = torch.randn(2, S, 3 * H), torch.randint(V, (2, S))
    embeds, positions = F.embedding(ids, TABLE), torch.arange(S).expand(2, -1)
    # speculators' class embeds by the folder's own table, and may find anything where it has none
    table = tensors["embed_tokens.weight"] if form == "speculators" else TABLE
    with torch.no_grad():
        mine = net.head(net(net.fuse(states), embeds, positions, None))
        theirs = eagle3_of_transformers(llama, config, tensors, states, F.embedding(ids, table), positions)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norms", [False, True])
def test_specforge_reads_the_native_form_alike(norms: bool, tmp_path: Path) -> None:
    """Its `norm_output` says whether there is a norm in front of the head, and there is one where the word is missing."""
    net = eagle3_net(feature_norms=norms)
    config, tensors = exported(net, "eagle3", "vllm", tmp_path, dtype="fp32")
    states, embeds = torch.randn(2, S, 3 * H), torch.randn(2, S, H)
    positions = torch.arange(S).expand(2, -1)
    with torch.no_grad():
        mine = net.head(net(net.fuse(states), embeds, positions, None))
        normed = config.get("norm_output", True)
        theirs = eagle3_of_transformers(config, config, tensors, states, embeds, positions, normed=normed)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_a_scaled_drafter_is_read_with_its_scaling(form: str, tmp_path: Path) -> None:
    """At positions behind the original context, by the Llama parts of `transformers` alone."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
    net = eagle3_net(rope_scaling=yarn)
    served = replace(SERVED, words={"max_position_embeddings": 16})
    config, tensors = exported(net, "eagle3", form, tmp_path, served, dtype="fp32")
    llama = config["transformer_layer_config"] if form == "speculators" else config
    assert (llama["rope_scaling"], llama["rope_theta"], llama["max_position_embeddings"]) == (yarn, 50_000.0, 16)
    states, embeds = torch.randn(2, S, 3 * H), torch.randn(2, S, H)
    positions = torch.arange(S).expand(2, -1)
    plain = {**llama, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}
    with torch.no_grad():
        mine = net.head(net(net.fuse(states), embeds, positions, None))
        theirs = eagle3_of_transformers(llama, config, tensors, states, embeds, positions)
        unscaled = eagle3_of_transformers(plain, config, tensors, states, embeds, positions)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(mine, unscaled, atol=1e-3)


def eagle3_of_transformers(
    llama: dict[str, Any],
    words: dict[str, Any],
    tensors: dict[str, Tensor],
    states: Tensor,
    embeds: Tensor,
    positions: Tensor,
    *,
    normed: bool = True,
) -> Tensor:
    """Logits over the draft vocabulary of a first pass, in the words of the format; `normed`: the head's input."""
    config = AutoConfig.for_model(**llama)
    config._attn_implementation = "eager"
    part = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}

    def norm(name: str, x: Tensor) -> Tensor:
        made = LlamaRMSNorm(H, config.rms_norm_eps)
        made.load_state_dict({"weight": part[f"{name}.weight"]})
        return made(x)

    if words["fc_norm"]:
        states = torch.cat([norm(f"fc_norm.{i}", x) for i, x in enumerate(states.chunk(3, -1))], -1)
    hidden = F.linear(states, part["fc.weight"])
    read = torch.cat([norm("layers.0.input_layernorm", embeds), norm("layers.0.hidden_norm", hidden)], -1)
    attention, mlp = LlamaAttention(config, 0), LlamaMLP(config)
    for each in (attention.q_proj, attention.k_proj, attention.v_proj):
        each.weight = nn.Parameter(torch.empty(each.out_features, 2 * H))
    for module, name in ((attention, "layers.0.self_attn."), (mlp, "layers.0.mlp.")):
        own = {key.removeprefix(name): t for key, t in part.items() if key.startswith(name)}
        module.load_state_dict(own)
    turn = LlamaRotaryEmbedding(config)(hidden, positions)
    hidden = hidden + attention(read, position_embeddings=turn, attention_mask=causal())[0]
    hidden = hidden + mlp(norm("layers.0.post_attention_layernorm", hidden))
    return F.linear(norm("norm", hidden) if normed else hidden, part["lm_head.weight"])


@pytest.mark.parametrize(
    ("layers", "count", "message"),
    [((2, 4, 5), 8, False), ((1, 4, 6), 8, True), ((0, 1, 2), 3, True), ((2, 3, 4), 7, False)],
)
def test_layers_are_named_where_they_are_not_the_default(
    layers: tuple[int, ...], count: int, message: bool, tmp_path: Path
) -> None:
    """One key counts states from the embedding, the other layers from behind the first."""
    served = ServedTarget("t", [], V, count, 4096, None, 2)
    config, _ = exported(eagle3_net(layers), "eagle3", "vllm", tmp_path, served)
    if not message:
        assert not {"eagle_aux_hidden_state_layer_ids", "eagle_config"} & config.keys()
        return
    assert config["eagle_aux_hidden_state_layer_ids"] == list(layers)
    nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert nested == [layer - 1 for layer in layers]


@pytest.mark.parametrize("form", EAGLE3_FORMS)
@pytest.mark.parametrize("layers", [(2, 4, 8), (2, 4, 9), (2, 4, 4), (4, 2, 5)])
def test_states_that_engines_do_not_hand_out_are_refused(layers: tuple[int, ...], form: str, tmp_path: Path) -> None:
    """Behind the last norm, of no layer, twice, in another order: `fc` would read other states."""
    settings = saved(eagle3_net(layers), tmp_path)
    with pytest.raises(RequestError, match="low to high, from 0 to 7 .* train one with"):
        export_of(tmp_path, "eagle3", settings, SERVED, form)


@pytest.mark.parametrize(
    ("form", "net", "served", "message"),
    [
        ("llama.cpp", {"feature_norms": True}, {}, "has eagle3.feature_norms, which llama.cpp would leave out"),
        ("llama.cpp", {"layers": (2, 5)}, {}, "fuses 2 hidden states, and llama.cpp hands out three"),
        ("llama.cpp", {}, {"architectures": ["Qwen2ForCausalLM"]}, "is a Qwen2ForCausalLM, whose hidden states"),
        ("tensorrt-llm", {"layers": (0, 2, 4)}, {}, "which TensorRT-LLM does not hand out"),
    ],
)
def test_what_one_engine_cannot_do_is_refused(
    form: str, net: dict[str, Any], served: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The drafter loads, or converts, and then drafts by other states than it was trained on."""
    settings = saved(eagle3_net(**net), tmp_path)
    with pytest.raises(RequestError, match=message):
        export_of(tmp_path, "eagle3", settings, replace(SERVED, **served), form)


def test_speculators_name_their_target(tmp_path: Path) -> None:
    config, _ = exported(eagle3_net(), "eagle3", "speculators", tmp_path)
    assert "model_type" not in config  # by its absence the format is known
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    found = config["speculators_config"]
    assert found["verifier"] == {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]}
    assert found["proposal_methods"][0]["speculative_tokens"] > 0
    assert config["transformer_layer_config"]["vocab_size"] == V


# ---- Medusa -------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_medusa(shared: bool, tmp_path: Path) -> None:
    heads = shaken(MedusaHeads(MedusaShape(3, 2, H, V, shared)))
    head_VH = torch.randn(V, H)
    words = {"head_VH": head_VH} if shared else {}
    config, tensors = exported(heads, "medusa", "vllm", tmp_path, dtype="fp32", **words)
    blocks = {
        f"{k}.{layer}.linear.{part}": shape
        for k in range(3)
        for layer in range(2)
        for part, shape in (("weight", [H, H]), ("bias", [H]))
    }
    own = {f"{k}.2.weight": [V, H] for k in range(3)}
    assert shapes(tensors) == blocks | ({"lm_head.weight": [V, H]} if shared else own)
    assert config["architectures"] == ["MedusaModel"]
    assert config["medusa_fc_bias"] is True
    assert config.get("original_lm_head", False) is shared
    # a key with both words in it would be taken for the number of heads
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    hidden = torch.randn(5, H)
    with torch.no_grad():
        mine = heads.logits(heads(hidden), Projection(head_VH))
        for k in range(config["num_heads"]):
            x = hidden
            for layer in range(config["num_hidden_layers"]):
                name = f"{k}.{layer}.linear"
                x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
            projection = tensors["lm_head.weight" if shared else f"{k}.2.weight"]
            torch.testing.assert_close(mine[:, k], F.linear(x, projection), rtol=1e-5, atol=1e-5)


def test_medusa_over_some_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The heads' rows, and which tokens these are; vLLM lays the logits out by it, where it loads the map."""
    ids = [2, 3, V - 1]
    heads = shaken(MedusaHeads(MedusaShape(2, 1, H, V, False, draft_vocabulary=3), ids))
    config, tensors = exported(heads, "medusa", "vllm", tmp_path, dtype="fp32")
    assert (config["truncated_vocab_size"], config["vocab_size"]) == (3, V)
    assert tensors["token_map"].tolist() == ids
    hidden = torch.randn(5, H)
    with torch.no_grad():
        mine = heads.logits(heads(hidden), Projection(torch.randn(V, H)))
        for k, block in enumerate(heads.blocks):
            wide = torch.full((5, V), -torch.inf)
            wide[:, tensors["token_map"]] = F.linear(block(hidden), tensors[f"{k}.1.weight"])
            torch.testing.assert_close(mine[:, k], wide, rtol=1e-5, atol=1e-5)
    assert "vLLM 0.32 refuses heads that draft some tokens alone" in caplog.text


def test_medusa_over_some_rows_of_the_targets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The target's whole projection, which vLLM loads in every version, and a word of what that costs."""
    caplog.set_level("INFO")
    ids, head_VH = [2, 3, V - 1], torch.randn(V, H)
    heads = shaken(MedusaHeads(MedusaShape(2, 1, H, V, True, draft_vocabulary=3), ids))
    config, tensors = exported(heads, "medusa", "vllm", tmp_path, dtype="fp32", head_VH=head_VH)
    assert not {"token_map", "truncated_vocab_size"} & {*tensors, *config}
    assert torch.equal(tensors["lm_head.weight"], head_VH)
    hidden = torch.randn(5, H)
    with torch.no_grad():
        mine = heads.logits(heads(hidden), Projection(head_VH))
        for k, block in enumerate(heads.blocks):
            wide = F.linear(block(hidden), tensors["lm_head.weight"])
            torch.testing.assert_close(mine[:, k, ids], wide[:, ids], rtol=1e-5, atol=1e-5)
    assert "trained to draft 3 tokens, and vllm reads no map of these" in caplog.text


def test_eagle_over_some_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang takes the ids from a file, or those of them that are asked for; vLLM knows of none."""
    caplog.set_level("INFO")
    settings = saved(shaken(EagleNet(EagleShape(**SIZES, draft_vocabulary=3), [2, 3, 9])), tmp_path)
    for asked, left in ((None, [2, 3, 9]), ([3, 4, 9], [3, 9])):
        made = export_of(tmp_path, "eagle", settings, SERVED, "sglang", ids=asked)
        assert made.hot_ids is not None
        assert made.hot_ids.tolist() == left
        assert "d2t" not in made.tensors
    assert "reads no map of these" not in caplog.text
    assert "d2t" not in export_of(tmp_path, "eagle", settings, SERVED, "vllm").tensors
    assert "trained to draft 3 tokens, and vllm reads no map of these" in caplog.text


def test_shared_heads_of_a_projection_with_a_bias_are_refused(tmp_path: Path) -> None:
    """The form holds a weight alone; heads of their own were trained without the bias."""
    phi = random_model("phi")
    served = replace(ServedTarget.of("org/phi", phi.config, phi), vocabulary=V)
    assert served.biased
    settings = saved(shaken(MedusaHeads(MedusaShape(2, 1, H, V, True))), tmp_path)
    with pytest.raises(RequestError, match="projection of 'org/phi' has a bias"):
        export_of(tmp_path, "medusa", settings, served, "vllm", head_VH=torch.randn(V, H))


# ---- words of all, and refusals -----------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_weights_are_halved_and_numbers_are_not(dtype: str, name: str, tmp_path: Path) -> None:
    config, tensors = exported(eagle3_net(), "eagle3", "vllm", tmp_path, dtype=dtype)
    assert config["dtype"] == config["torch_dtype"] == name
    types = {tensor.dtype for tensor in tensors.values()}
    assert types == {getattr(torch, name), torch.int64, torch.bool}


def test_transformers_reads_the_config(tmp_path: Path) -> None:
    exported(eagle3_net(), "eagle3", "vllm", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.model_type == "llama"
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers) == (H, 16, 1)
    assert config.max_position_embeddings == 4096
    assert config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("family", "form", "reason"),
    [
        ("hydra", "vllm", "no serving engine loads drafters of family 'hydra'"),
        ("bpd", "vllm", "no serving engine loads"),
        ("medusa", "sglang", "expected vllm"),
        ("eagle", "speculators", "expected vllm or sglang"),
        ("draft_model", "speculators", "expected vllm or sglang"),
    ],
)
def test_what_nobody_loads_is_refused(family: str, form: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        served_form(family, form)


def test_a_drafter_with_a_missing_weight_is_refused(tmp_path: Path) -> None:
    """An engine would load it without a word and draft garbage."""
    settings = saved(eagle3_net(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["midlayer.hidden_norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match="hidden_norm"):
        export_of(tmp_path, "eagle3", settings, SERVED, "vllm")
