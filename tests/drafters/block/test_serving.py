"""Exported block drafters: the words of DFlash's form, and the slots as transformers' own DFlash network makes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.drafters.block.dspark import DSparkNet, DSparkShape
from draftsmith.drafters.block.net import BlockNet, BlockShape
from draftsmith.drafters.block.selected import DFlash2Net, DFlash2Shape
from draftsmith.drafters.export import Export, ServedTarget, export_of, served_form
from draftsmith.errors import RequestError
from draftsmith.launch.engines import Start, command
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

H, V, S, B = 32, 61, 9, 5
SIZES: dict[str, Any] = {
    **{"hidden": H, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_size": 16},
    **{"rope_theta": 50_000.0, "eps": 1e-5, "layers": (2, 4, 6), "decoder_layers": 2, "size": B},
}
SERVED = ServedTarget("org/target", ["Qwen3ForCausalLM"], V, 8, 4096, None, 2)


def block_net(*, layout: str = "fill-in", causal: bool = False, **words: Any) -> BlockNet:
    torch.manual_seed(0)
    net = BlockNet(BlockShape(**(SIZES | {"layout": layout, "causal": causal} | words)))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return net.eval()


def exported(net: BlockNet, place: Path, served: ServedTarget = SERVED, form: str = "vllm", **words: Any) -> Export:
    save_file(net.state_dict(), place / "model.safetensors")
    settings = json.loads(json.dumps(asdict(net.config)))
    return export_of(place, net.family, settings, served, form, dtype="fp32", **words)


def dflash_of_transformers(made: Export, features: Tensor, slots: Tensor) -> Tensor:
    """The network of `transformers` that was written for another checkpoint of the same design."""
    words = {name: value for name, value in made.config.items() if name not in ("model_type", "architectures")}
    ids = words.pop("dflash_config")
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    words |= {"sliding_window": S, "target_layer_ids": ids["target_layer_ids"]}
    model = AutoModel.from_config(AutoConfig.for_model("muse_glimmer_assistant", **words)).eval()
    tensors = {
        next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name): tensor
        for name, tensor in made.tensors.items()
    }
    model.load_state_dict(tensors)
    return model(noise_embeds=slots, context_hidden_states=features).last_hidden_state


def test_slots_are_those_of_transformers(tmp_path: Path) -> None:
    net = block_net(mask_token=7)
    made = exported(net, tmp_path)
    features, root = torch.randn(1, S, 3 * H), torch.randn(1, 1, H)
    positions = torch.arange(S + 1)[None]
    padded = torch.cat((features, torch.zeros(1, 1, 3 * H)), 1)
    with torch.no_grad():
        mine = net.blocks(padded, positions, torch.zeros_like(positions), root, torch.tensor([[S]]))[0, 0]
        theirs = dflash_of_transformers(made, features, net.slots(root[:, 0], B))[0, 1:]
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_what_an_engine_would_guess_is_written_out(tmp_path: Path) -> None:
    made = exported(block_net(mask_token=7), tmp_path)
    assert made.config["architectures"] == ["DFlashDraftModel"]
    # the state behind the k-th layer is number k + 1 of ours
    assert made.config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 3, 5], "causal": False}
    assert (made.config["block_size"], made.config["num_target_layers"], made.config["num_hidden_layers"]) == (B, 8, 2)
    assert made.config["layer_types"] == ["full_attention"] * 2
    assert not {"embed_tokens.weight", "mask_embedding.weight"} & made.tensors.keys()


@pytest.mark.parametrize("scale", [1.0, 5.5])
def test_a_mask_of_its_own_is_a_row_of_the_drafter_s_table(scale: float, tmp_path: Path) -> None:
    net, table = block_net(), torch.randn(V, H)
    served = ServedTarget(**(asdict(SERVED) | {"embedding_scale": scale}))
    made = exported(net, tmp_path, served, table=lambda: table)
    rows = made.tensors["embed_tokens.weight"]
    assert made.config["dflash_config"]["mask_token_id"] == V - 1
    assert torch.equal(rows[:-1], table[:-1] * scale)
    assert torch.equal(rows[-1], net.mask_embedding.weight[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"layout": "anchor-first"}, "block.layout is anchor-first"),
        ({"layers": (0, 4)}, "block.layers"),
        ({"layers": (4, 8)}, "from 1 to 7"),
    ],
)
def test_what_no_engine_reads_is_refused(words: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        exported(block_net(mask_token=7, **words), tmp_path)


def dspark_net(**words: Any) -> DSparkNet:
    own: dict[str, Any] = {"layout": "anchor-first", "causal": False, "mask_token": 7, "vocabulary": V, "rank": 6}
    torch.manual_seed(0)
    net = DSparkNet(DSparkShape(**(SIZES | own | words)))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return net.eval()


def test_sglang_gets_the_same_folder(tmp_path: Path) -> None:
    for net in (block_net(mask_token=7), dspark_net(confidence=True)):
        ours, theirs = (exported(net, tmp_path, form=form) for form in ("vllm", "sglang"))
        assert ours.config == theirs.config
        assert ours.tensors.keys() == theirs.tensors.keys()
        assert "embed_tokens.weight" not in theirs.tensors


def test_sglang_is_told_of_one_pass() -> None:
    for family, steps in (("dspark", 1), ("dflash", 1), ("eagle3", 7)):
        form = served_form(family, "sglang")
        start = Start("org/target", "/run", form.method, 7, sampled=False, parallel=form.parallel)
        words = f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens 8"
        assert words in command("sglang", start)


@pytest.mark.parametrize(
    ("net", "of_target", "message"),
    [
        (lambda: block_net(), {}, "a mask of its own, and SGLang embeds the mask by the target's table alone"),
        (lambda: dspark_net(mask_token=None), {}, "a mask of its own"),
        (lambda: block_net(mask_token=7), {"embedding_scale": 5.5}, "a target that scales its embedding"),
        (lambda: block_net(mask_token=7, causal=True), {}, "in SGLang they see all"),
        (lambda: dspark_net(layout="fill-in"), {}, "SGLang reads DSpark's first draft there"),
        (lambda: dspark_net(), {"logit_scale": 0.125}, "a target that scales or caps its logits"),
        (lambda: dspark_net(), {"logit_cap": 30.0}, "a target that scales or caps its logits"),
    ],
)
def test_what_sglang_would_read_otherwise_is_refused(
    net: Any, of_target: dict[str, float], message: str, tmp_path: Path
) -> None:
    served = ServedTarget(**(asdict(SERVED) | of_target))
    with pytest.raises(RequestError, match=message):
        exported(net(), tmp_path, served, "sglang", table=lambda: torch.randn(V, H))


UNCHECKED = {
    ("dflash", "tensorrt-llm"): "TensorRT-LLM loads DFlash",
    ("dflash", "llama.cpp"): "llama.cpp's converter reads DFlash",
    ("dflash", "speculators"): "vLLM loads DFlash in this form too",
    ("dspark", "tensorrt-llm"): "TensorRT-LLM loads DSpark",
    ("dspark", "llama.cpp"): "llama.cpp loads DSpark",
    ("dspark", "speculators"): "vLLM loads DSpark",
    ("dflash2", "sglang"): "SGLang loads DFlash 2",
    ("dflash2", "speculators"): "vLLM loads DFlash 2",
    ("peagle", "speculators"): "vLLM loads P-EAGLE",
    ("pard", "tensorrt-llm"): "TensorRT-LLM has PARD",
}
LOADED_NOWHERE = {
    ("dflash2", "llama.cpp"): "neither TensorRT-LLM nor llama.cpp has DFlash 2's",
    ("peagle", "sglang"): "other engines call EAGLE-3's network once",
    ("pard", "sglang"): "other engines call a draft model once",
    ("mtp", "speculators"): "out of the target's own checkpoint alone",
}


@pytest.mark.parametrize(("family", "form"), UNCHECKED)
def test_what_others_load_and_was_not_checked_here_says_so(family: str, form: str) -> None:
    """Who loads the family is said, and that nobody has looked at what comes of it."""
    reason = UNCHECKED[family, form]
    message = (
        f"--format is '{form}', in which no {family} drafter .*might be loaded: {reason}.*has not been checked here"
    )
    with pytest.raises(RequestError, match=message):
        served_form(family, form)


@pytest.mark.parametrize(("family", "form"), LOADED_NOWHERE)
def test_what_nobody_loads_says_so(family: str, form: str) -> None:
    message = f"--format is '{form}', .*It cannot be loaded: .*{LOADED_NOWHERE[family, form]}"
    with pytest.raises(RequestError, match=message) as refused:
        served_form(family, form)
    assert "checked" not in str(refused.value)


def test_what_a_target_does_to_its_logits_is_written_where_a_selector_adds_behind_it(tmp_path: Path) -> None:
    plain = exported(dflash2_net(), tmp_path).config["dflash_config"]
    assert not {"output_multiplier", "final_logit_softcapping"} & set(plain)
    shaped = ServedTarget(**(asdict(SERVED) | {"logit_scale": 0.25, "logit_cap": 30.0}))
    words = exported(dflash2_net(), tmp_path, shaped).config["dflash_config"]
    assert words == plain | {"output_multiplier": 0.25, "final_logit_softcapping": 30.0}


def test_the_scale_of_a_target_s_logits_is_a_word_of_its_own_elsewhere(tmp_path: Path) -> None:
    """Engines multiply what the target's projection gives by it, and take 1 where the word is missing."""
    shaped = ServedTarget(**(asdict(SERVED) | {"logit_scale": 0.25, "logit_cap": 30.0}))
    for net in (block_net(mask_token=7), dspark_net()):
        plain, made = exported(net, tmp_path), exported(net, tmp_path, shaped)
        assert (plain.config["logit_scale"], plain.uncapped) == (1.0, None)
        assert made.config == plain.config | {"logit_scale": 0.25}
        assert made.uncapped == 30.0
    made = exported(dflash2_net(), tmp_path, shaped)
    assert ("logit_scale" in made.config, made.uncapped) == (False, None)  # its own words say both


@pytest.mark.parametrize(
    ("family", "words", "shaping"),
    [
        ("qwen3", {}, (1.0, None)),
        ("gemma2", {"final_logit_softcapping": 30.0}, (1.0, 30.0)),
        ("cohere", {"logit_scale": 0.0625}, (0.0625, None)),
        ("granite", {"logits_scaling": 8.0}, (0.125, None)),
    ],
)
def test_scale_and_cap_come_from_the_target_s_config(
    family: str, words: dict[str, float], shaping: tuple[float, float | None]
) -> None:
    target = ServedTarget.of("org/target", AutoConfig.for_model(family, **words))
    assert (target.logit_scale, target.logit_cap) == shaping


def test_dspark_s_slots_and_walk_are_made_anew_from_the_file(tmp_path: Path) -> None:
    """By the published names alone: every slot drafts, the first behind the anchor's token."""
    net = dspark_net(confidence=True)
    read = Read(exported(net, tmp_path))
    features, root, head = torch.randn(S, 3 * H), torch.randn(1, 1, H), torch.randn(V, H)
    positions = torch.arange(S + 1)[None]
    padded = torch.cat((features, torch.zeros(1, 3 * H)))[None]
    with torch.no_grad():
        mine = net.blocks(padded, positions, torch.zeros_like(positions), root, torch.tensor([[S]]))[0, 0]
        theirs = read.slots(features, net.slots(root[0], B)[0])
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        token, walked = torch.tensor(12), []
        for slot, own in zip(theirs, mine, strict=True):
            logits = (
                head @ slot + read.w["markov_head.markov_w2.weight"] @ read.w["markov_head.markov_w1.weight"][token]
            )
            torch.testing.assert_close(logits, head @ own + net.markov_head(token), rtol=1e-4, atol=1e-3)
            token = logits.argmax()
            walked.append(int(token))
    assert len(walked) == B


def test_dspark_s_own_class_finds_every_number_that_it_asks_for(tmp_path: Path) -> None:
    """DeepSpec's Qwen3DSparkModel reads these off its config without a default."""
    made = exported(dspark_net(confidence=True), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(made.config))
    config = AutoConfig.from_pretrained(tmp_path)
    asked = ("block_size", "num_anchors", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    asked += ("enable_confidence_head", "confidence_head_with_markov", "num_target_layers")
    assert [name for name in asked if getattr(config, name, None) is None] == []
    assert config.num_anchors >= 1


def test_a_folder_that_other_readers_of_the_form_misread_says_so(tmp_path: Path) -> None:
    """A mask of its own is the last row of a table, which z-lab's, SpecForge's and speculators' classes leave out."""
    table = torch.randn(V, H)
    assert exported(block_net(), tmp_path, table=lambda: table).own_mask
    assert exported(dspark_net(mask_token=None), tmp_path, table=lambda: table).own_mask
    assert not exported(block_net(mask_token=7), tmp_path).own_mask
    scaled = ServedTarget(**(asdict(SERVED) | {"embedding_scale": 5.5}))
    assert exported(block_net(mask_token=7), tmp_path, scaled, table=lambda: table).own_mask


@pytest.mark.parametrize("sure", [False, True])
def test_dspark_says_that_its_first_slot_drafts(sure: bool, tmp_path: Path) -> None:
    words: dict[str, Any] = {"layout": "anchor-first", "causal": True, "mask_token": 7, "vocabulary": V, "rank": 6}
    net = DSparkNet(DSparkShape(**(SIZES | words), confidence=sure))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    made = exported(net, tmp_path)
    assert made.config["architectures"] == ["Qwen3DSparkModel"]
    wanted = {"mask_token_id": 7, "target_layer_ids": [1, 3, 5], "is_causal": True, "sample_from_anchor": True}
    wanted |= {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": sure, "block_size": B}
    wanted |= {"confidence_head_with_markov": sure}
    assert {name: made.config[name] for name in wanted} == wanted
    first, second = made.tensors["markov_head.markov_w1.weight"], made.tensors["markov_head.markov_w2.weight"]
    assert (first.shape, second.shape) == ((V, 6), (V, 6))
    token = torch.arange(V)
    torch.testing.assert_close(first[token] @ second.T, net.markov_head(token).detach())
    assert ("confidence_head.proj.weight" in made.tensors) == sure
    if sure:
        slot = torch.randn(V, H)
        weight, bias = made.tensors["confidence_head.proj.weight"], made.tensors["confidence_head.proj.bias"]
        said = torch.cat([slot, first[token]], -1) @ weight.T + bias
        torch.testing.assert_close(said[:, 0], net.confidence(slot, token).detach())


# ---- DFlash 2 ---------------------------------------------------------------------------------


def dflash2_net() -> DFlash2Net:
    torch.manual_seed(0)
    own: dict[str, Any] = {"vocabulary": V, "rank": 6, "candidates": 4, "group": 8, "mask_token": 7}
    net = DFlash2Net(DFlash2Shape(**(SIZES | {"layout": "fill-in", "causal": False} | own)))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return net.eval()


class Read:
    """The published form read by its names alone: one block behind S known states, without the project's network."""

    def __init__(self, made: Export) -> None:
        self.w, self.words = made.tensors, made.config.get("dflash_config", {})
        self.config = made.config

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.w[name]

    def turned(self, x: Tensor, at: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rope = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        angle = at[:, None] * rope ** (-torch.arange(half) / half)
        cos, sin = (torch.cat((f(angle), f(angle)), -1)[:, None] for f in (torch.cos, torch.sin))
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def attention(self, x: Tensor, fused: Tensor, at: str) -> Tensor:
        heads, groups, width = (
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
            self.config["head_dim"],
        )
        known, slots = len(fused), len(x)
        both, place = torch.cat((fused, x)), torch.arange(known + slots)
        q = self.norm((x @ self.w[f"{at}.q_proj.weight"].T).view(slots, heads, width), f"{at}.q_norm.weight")
        k = self.norm((both @ self.w[f"{at}.k_proj.weight"].T).view(-1, groups, width), f"{at}.k_norm.weight")
        v = (both @ self.w[f"{at}.v_proj.weight"].T).view(-1, groups, width)
        q, k = self.turned(q, place[known:]), self.turned(k, place)
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) / width**0.5
        out = torch.einsum("hqk,khd->qhd", score.softmax(-1), v).flatten(1)
        return out @ self.w[f"{at}.o_proj.weight"].T

    def conv(self, x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
        width = self.words["conv_group_size"]
        out = torch.zeros_like(x)
        for tap in range(self.words["conv_kernel_size"]):
            before = torch.cat((torch.zeros(tap, x.shape[1]), x[: len(x) - tap]))
            out = out + (base[tap] + delta[:, tap].repeat_interleave(width, -1)) * before
        return out

    def around(self, y: Tensor, at: str, sublayer: Any) -> Tensor:
        taps = self.words.get("conv_kernel_size", 0)
        if not taps:
            return sublayer(y)
        delta = (y @ self.w[f"{at}.kernel_projection.weight"].T).view(len(y), 2, taps, -1)
        base = self.w[f"{at}.base_kernel"]
        return self.conv(sublayer(self.conv(y, delta[:, 0], base[0])), delta[:, 1], base[1])

    def slots(self, features: Tensor, x: Tensor) -> Tensor:
        fused = self.norm(features @ self.w["fc.weight"].T, "hidden_norm.weight")
        for number in range(self.config["num_hidden_layers"]):
            at = f"layers.{number}"
            y = self.norm(x, f"{at}.input_layernorm.weight")
            x = x + self.around(
                y, f"{at}.attention_conv", lambda each, at=at: self.attention(each, fused, f"{at}.self_attn")
            )
            y = self.norm(x, f"{at}.post_attention_layernorm.weight")
            x = x + self.around(y, f"{at}.mlp_conv", lambda each, at=at: self.feed(each, f"{at}.mlp"))
        return self.norm(x, "norm.weight")

    def feed(self, x: Tensor, at: str) -> Tensor:
        gate, up, down = (self.w[f"{at}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def edges(self, token: int, slot: Tensor, best: Tensor) -> Tensor:
        table = "candidate_selector"
        asked = self.w[f"{table}.predecessor_codebook"][token] * (self.w[f"{table}.hidden_projection.weight"] @ slot)
        return self.w[f"{table}.successor_codebook"][best] @ asked


def test_dflash2_is_read_by_the_published_names(tmp_path: Path) -> None:
    """Its slots and its choices, made anew from the exported file."""
    net = dflash2_net()
    made = exported(net, tmp_path)
    assert made.config["architectures"] == ["DFlash2DraftModel"]
    own = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    assert made.config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 3, 5], "causal": False} | own
    assert {name for name in made.tensors if "selector" in name} == {
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight",
    }
    assert made.tensors["layers.1.mlp_conv.base_kernel"].shape == (2, 2, H)
    features, root = torch.randn(S, 3 * H), torch.randn(1, 1, H)
    positions = torch.arange(S + 1)[None]
    padded = torch.cat((features, torch.zeros(1, 3 * H)))[None]
    read, best = Read(made), torch.tensor([3, 50, 9, 17])
    with torch.no_grad():
        mine = net.blocks(padded, positions, torch.zeros_like(positions), root, torch.tensor([[S]]))[0, 0]
        theirs = read.slots(features, net.slots(root[0], B)[0])[1:]
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        chosen = net.candidate_selector(torch.tensor(12), mine[0], best)
        torch.testing.assert_close(chosen, read.edges(12, mine[0], best), rtol=1e-4, atol=1e-5)
