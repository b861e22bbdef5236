"""P-EAGLE's exported folder, read again by its names alone: true and mask pairs as transformers' own Llama makes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.drafters.eagle.peagle import PeagleNet, PeagleShape
from draftsmith.drafters.export import Export, ServedTarget, export_of
from draftsmith.errors import RequestError
from draftsmith.launch.engines import Start, command
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

H, V, S, K = 32, 61, 6, 3
WORDS = list(range(0, V, 2))
SIZES: dict[str, Any] = {
    **{"hidden": H, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_size": 16, "rope_theta": 50_000.0},
    **{"eps": 1e-5, "layers": (2, 4, 5), "vocabulary": V, "draft_vocabulary": len(WORDS), "decoder_layers": 3},
}
SERVED = ServedTarget("org/target", ["LlamaForCausalLM"], V, 8, 4096, None, 2)


def net() -> PeagleNet:
    torch.manual_seed(0)
    made = PeagleNet(PeagleShape(**SIZES), WORDS)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return made.eval().requires_grad_(False)


def exported(made: PeagleNet, place: Path, form: str = "vllm") -> tuple[Export, Tensor]:
    save_file(made.state_dict(), place / "model.safetensors")
    settings, table = json.loads(json.dumps(asdict(made.config))), torch.randn(V, H)
    return export_of(place, "peagle", settings, SERVED, form, dtype="fp32", table=lambda: table), table


def read_again(made: Export, states: Tensor, tokens: list[int]) -> Tensor:
    """Logits of the true pairs and, behind them, of K - 1 mask pairs, in the words of the format."""
    part = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in made.tensors.items()}
    config = AutoConfig.for_model(**made.config)
    config._attn_implementation = "eager"

    def norm(name: str, x: Tensor) -> Tensor:
        own = LlamaRMSNorm(H, config.rms_norm_eps)
        own.load_state_dict({"weight": part[f"{name}.weight"]})
        return own(x)

    ids = torch.tensor([tokens + [made.config["pard_token"]] * (K - 1)])
    states = torch.cat([states, part["mask_hidden"].expand(-1, K - 1, -1)], 1)
    embeds, hidden = part["embed_tokens.weight"][ids], F.linear(states, part["fc.weight"])
    read = torch.cat([norm("layers.0.input_layernorm", embeds), norm("layers.0.hidden_norm", hidden)], -1)
    N = ids.shape[1]
    turn = LlamaRotaryEmbedding(config)(hidden, torch.arange(N)[None])
    later = torch.full((N, N), -torch.inf).triu(1)[None, None]
    for number in range(made.config["num_hidden_layers"]):
        name = f"layers.{number}"
        attention, mlp = LlamaAttention(config, number), LlamaMLP(config)
        read = read if number == 0 else norm(f"{name}.input_layernorm", hidden)
        for each in (attention.q_proj, attention.k_proj, attention.v_proj):
            each.weight = nn.Parameter(torch.empty(each.out_features, read.shape[-1]))
        for module, inner in ((attention, f"{name}.self_attn."), (mlp, f"{name}.mlp.")):
            module.load_state_dict({key.removeprefix(inner): t for key, t in part.items() if key.startswith(inner)})
        hidden = hidden + attention(read, position_embeddings=turn, attention_mask=later)[0]
        hidden = hidden + mlp(norm(f"{name}.post_attention_layernorm", hidden))
    return F.linear(norm("norm", hidden), part["lm_head.weight"])


@torch.inference_mode()
def test_true_and_mask_pairs_are_those_of_the_exported_names(tmp_path: Path) -> None:
    mine = net()
    made, table = exported(mine, tmp_path)
    states, tokens = torch.randn(1, S, 3 * H), [5, 9, 2, 33, 7, 1]
    outputs = mine.drafts(
        mine.fuse(states),
        table[torch.tensor([tokens])],
        torch.arange(S)[None],
        torch.zeros(1, S, dtype=torch.long),
        torch.tensor([[S - 1]]),
        [1] * (K - 1),
    )
    torch.testing.assert_close(
        mine.head(torch.cat(outputs, 1)), read_again(made, states, tokens), rtol=1e-4, atol=1e-4
    )


def test_the_words_of_the_config(tmp_path: Path) -> None:
    made, table = exported(net(), tmp_path)
    wanted = {"architectures": ["LlamaForCausalLMEagle3"], "pard_token": V - 1, "num_hidden_layers": 3}
    wanted |= {"norm_before_residual": False, "norm_before_fc": False, "draft_vocab_size": len(WORDS)}
    assert {name: made.config[name] for name in wanted} == wanted
    assert made.tensors["mask_hidden"].shape == (1, 1, 3 * H)
    own = made.tensors["embed_tokens.weight"]
    assert torch.equal(own[:-1], table[:-1])
    assert not torch.equal(own[-1], table[-1])
    assert not [name for name in made.tensors if name.startswith(("deeper", "mask_embedding"))]
    for layer in (1, 2):  # engines differ in which of the two they read
        norms = [made.tensors[f"layers.{layer}.{name}.weight"] for name in ("input_layernorm", "hidden_norm")]
        assert torch.equal(*norms)


@pytest.mark.parametrize("form", ["sglang", "speculators", "tensorrt-llm", "llama.cpp"])
def test_engines_that_draft_token_by_token_are_refused(form: str, tmp_path: Path) -> None:
    named = f"--format is '{form}', in which no peagle drafter is exported; expected vllm. "
    why = (
        "It might be loaded: .* not been checked here"
        if form == "speculators"
        else "It cannot be loaded: other engines"
    )
    with pytest.raises(RequestError, match=named + why):
        exported(net(), tmp_path, form)


def test_vllm_is_told_that_drafts_come_out_of_one_pass() -> None:
    start = Start("org/target", "/run/vllm", "eagle3", 4, sampled=False, parallel=True)
    assert '"parallel_drafting": true' in command("vllm", start)
    assert "parallel" not in command("vllm", Start("org/target", "/run/vllm", "eagle3", 4, sampled=False))
