"""Hidden states as decoding takes them, against `transformers`' own list of them, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from draftsmith.benchmarks.common.random_models import GROUPED
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import LAST, HiddenStates
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.tree.tree import Tree
from draftsmith.errors import RequestError
from helpers.models.random_models import random_model

PROMPT = [7, 3, 50, 9, 22]
TREE = Tree((-1, 0, 0, 1, 1, 2, 4))
FAMILIES = {
    "llama": GROUPED,
    "qwen3": GROUPED,
    "gemma2": GROUPED | {"sliding_window": 64, "query_pre_attn_scalar": 16},
    "gpt2": {"n_inner": 64},
    # its decoder projects the last state to another width, and that is what the output projection reads
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}
LEAN = {"llama", "qwen3"}


def backbone(family: str) -> Backbone:
    model = random_model(family, **FAMILIES[family])
    use_grouped_attention(model)
    return Backbone(model, name="random")


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers(family: str, lean: bool) -> None:
    target = backbone(family)
    if lean and family not in LEAN:
        assert not target._is_lean
        return
    target.__dict__["_is_lean"] = lean
    plain = copy.deepcopy(target.model)  # asked for all states, `transformers` leaves hooks behind
    layers = (2, 0, LAST, 1)
    features: list[torch.Tensor] = []
    kv_cache = KVCache(1, 16)
    target.prefill([PROMPT], kv_cache, layers=layers, features=features)
    states = plain(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    assert len(states) == 3
    expected = torch.cat([states[layer] for layer in layers], -1)[0]
    torch.testing.assert_close(features[0], expected, rtol=1e-5 if lean else 0, atol=1e-5 if lean else 0)

    tokens_1N = torch.tensor([[11, 4, 60, 8, 31, 2, 5]])
    seen = target.see(tokens_1N, torch.tensor([len(PROMPT)]), TREE, kv_cache, layers=layers)
    assert seen.features_BNF is not None
    for node in range(len(TREE)):
        path = [node]
        while TREE.parents[path[0]] >= 0:
            path.insert(0, TREE.parents[path[0]])
        text = torch.tensor([[*PROMPT, *tokens_1N[0, path].tolist()]])
        states = plain(text, output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0, -1] for layer in layers], -1)
        torch.testing.assert_close(seen.features_BNF[0, node], expected, rtol=1e-5, atol=1e-5)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in target.model.modules())


def test_nothing_is_taken_that_nobody_asked_for() -> None:
    target = backbone("gpt2")
    features: list[torch.Tensor] = []
    target.prefill([PROMPT], KVCache(1, 16), features=features)
    assert not features
    states = HiddenStates((1,), 2)
    for number in range(3):
        states.take(number, torch.full((1, 1, 4), float(number)))
    assert states.side_by_side is not None
    assert states.side_by_side.tolist() == [[[1.0] * 4]]


@pytest.mark.parametrize("layer", [3, -3])
def test_a_state_that_no_layer_has_is_refused(layer: int) -> None:
    with pytest.raises(RequestError, match=f"hidden state {layer} is asked for; a model of 2 layers has the states 0"):
        backbone("llama").prefill([PROMPT], KVCache(1, 16), layers=(0, layer))
