"""Families of `transformers`: what the decoder computes equals the model's own forward, or is refused.

Each family is tiny and random, beside an untouched copy that runs as `transformers` ships it. Sliding
windows and chunks are longer than the requests, but for the tests that are about them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import VOCABULARY, make_drafter
from draftsmith.benchmarks.common.random_models import DEEPSEEK, EXPERTS, GROUPED, RECURRENT, SEEING, SIZES
from draftsmith.decoding.backbone import backbone
from draftsmith.decoding.backbone.attention import NAME, OWN, use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone, _windowed
from draftsmith.decoding.backbone.hidden_states import decoder_of
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.backbone.stacked import can_stack
from draftsmith.decoding.backbone.windows import Window, Windows
from draftsmith.decoding.devices import multiplies_bf16
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import Tree, chain
from draftsmith.errors import RequestError
from draftsmith.trainers.packed.passes import hidden_states
from helpers.models.random_models import own_text, random_model, ready
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

GREEDY = Warper(0.0)
TREE = Tree((-1, 0, 0, 1, 1, 2, 4))
PATH = [1, 4, 6]
PROMPTS = [[7, 3, 50, 9, 22], [4, 5, 60, 7, 8, 31, 10, 11, 12]]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "mistral": GROUPED | {"sliding_window": None},
    "gemma": GROUPED,
    # caps and scores such that leaving the cap out would be seen
    "gemma2": GROUPED | MIXED | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    "gemma3_text": GROUPED | MIXED | {"query_pre_attn_scalar": 16},
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2},
    "gpt2": {"n_inner": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": GROUPED | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": GROUPED | EXPERTS | {"num_experts": 4},
    "gpt_oss": GROUPED | MIXED | EXPERTS | {"num_local_experts": 4},
    "deepseek_v3": DEEPSEEK,
} | RECURRENT
SLIDING: dict[str, dict[str, Any]] = {
    "mistral": FAMILIES["mistral"],
    "qwen2": GROUPED | {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2": FAMILIES["gemma2"],
    "gemma3_text": FAMILIES["gemma3_text"],
    "gpt_oss": FAMILIES["gpt_oss"],
    "phi3": FAMILIES["phi3"],
    "qwen3": GROUPED | MIXED | {"use_sliding_window": True},
    "mixtral": FAMILIES["mixtral"],
    "cohere2": GROUPED | MIXED | {"logit_scale": 0.5},
    "llama4_text": GROUPED
    | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "intermediate_size_mlp": 64}
    | {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 13},
    "lfm3": RECURRENT["lfm3"],
}
WINDOW = 13


@lru_cache
def pair(family: str) -> tuple[Backbone, PreTrainedModel]:
    """The target, and the same weights as `transformers` runs them."""
    settings = FAMILIES[family]
    window = {"sliding_window": 64} if settings.get("layer_types") == MIXED["layer_types"] else {}
    model = random_model(family, **settings | window)
    return beside(model)


def beside(model: PreTrainedModel) -> tuple[Backbone, PreTrainedModel]:
    """The target of a model, and the model as it is right: transformers 5.17 gives SDPA no cap."""
    target = ready(model)
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return target, model


@lru_cache
def windowed(family: str) -> tuple[Backbone, PreTrainedModel]:
    window = {} if family == "llama4_text" else {"sliding_window": WINDOW}
    return beside(random_model(family, **SLIDING[family] | window))


def last_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0, -1]


def verified(target: Backbone, *, static: bool = False) -> tuple[KVCache, Tensor, Tensor]:
    """Prefill two rows of different lengths and verify a tree: KV cache, tokens and logits."""
    kv_cache = KVCache(2, 40, static=static, rollback=len(TREE))
    target.prefill(PROMPTS, kv_cache)
    g = torch.Generator().manual_seed(1)
    tokens_BN = torch.randint(0, VOCABULARY, (2, len(TREE)), generator=g)
    lengths_B = torch.tensor([len(prompt) for prompt in PROMPTS])
    return kv_cache, tokens_BN, target.forward(tokens_BN, lengths_B, TREE, kv_cache)


def path_to(node: int, tokens_N: Tensor) -> list[int]:
    """Path of a node, itself included."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(tokens_N[node]))
        node = TREE.parents[node]
    return path


def text_to(node: int, tokens_BN: Tensor, row: int) -> list[int]:
    """Prompt and path of a node, itself included."""
    return PROMPTS[row] + path_to(node, tokens_BN[row])


def paths_forward(model: PreTrainedModel, tokens_BN: Tensor) -> Tensor:
    """What the model itself says behind the path of every node. [B, N, V]."""
    return torch.stack(
        [
            torch.stack([last_logits(model, text_to(node, tokens_BN, row)) for node in range(len(TREE))])
            for row in range(2)
        ]
    )


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_prefill_and_one_token_equal_a_full_forward(family: str, static: bool) -> None:
    target, model = pair(family)
    for prompt in PROMPTS:
        kv_cache = KVCache(1, 20, static=static)
        found = target.prefill([prompt], kv_cache)[0]
        torch.testing.assert_close(found, last_logits(model, prompt), **CLOSE)
        one = target.forward(torch.tensor([[17]]), torch.tensor([len(prompt)]), chain(0), kv_cache)
        torch.testing.assert_close(one[0, 0], last_logits(model, [*prompt, 17]), **CLOSE)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_node_of_a_tree_equals_its_path(family: str, static: bool) -> None:
    target, model = pair(family)
    _, tokens_BN, logits_BNV = verified(target, static=static)
    torch.testing.assert_close(logits_BNV, paths_forward(model, tokens_BN), **CLOSE)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_after_a_commit_the_next_logits_equal_a_fresh_forward(family: str, static: bool) -> None:
    target, model = pair(family)
    kv_cache, tokens_BN, _ = verified(target, static=static)
    lengths_B = torch.tensor([len(prompt) for prompt in PROMPTS])
    # the second row keeps the root's child alone
    kv_cache.commit(lengths_B, torch.tensor([PATH, [2, -1, -1]]))
    kept = [text_to(PATH[-1], tokens_BN, 0), text_to(2, tokens_BN, 1)]
    lengths_B = torch.tensor([len(text) for text in kept])
    next_BN = torch.tensor([[17, 5], [29, 6]])
    found_BNV = target.forward(next_BN, lengths_B, chain(1), kv_cache)
    for row, text in enumerate(kept):
        wanted_NV = model(torch.tensor([text + next_BN[row].tolist()])).logits[0, -2:]
        torch.testing.assert_close(found_BNV[row], wanted_NV, **CLOSE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str, static: bool) -> None:
    target, model = pair(family)
    drafter = make_drafter(target, noise=0.03)
    done = generate(target, drafter, PROMPTS, warper=GREEDY, max_new_tokens=24, static=static)
    assert done.tokens == [own_text(model, prompt, 24) for prompt in PROMPTS]
    # not by repeating one token, nor by drafts that are always right or always wrong
    assert min(len(set(tokens)) for tokens in done.tokens) > 2
    assert {"draft", "correction"} <= set(sum(done.origin, []))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@torch.inference_mode()
def test_half_precision_differs_by_rounding_alone(family: str, dtype: torch.dtype) -> None:
    """Within 4 roundings (eps) of the largest logit; 2.8 were seen."""
    model = copy.deepcopy(pair(family)[1]).to(dtype)
    if model._supports_sdpa:  # as it is loaded: of a cap transformers 5.17 lets it
        model.set_attn_implementation("sdpa")
    target, model = beside(model)
    for static in (False, True):
        _, tokens_BN, logits_BNV = verified(target, static=static)
        wanted_BNV = paths_forward(model, tokens_BN)
        rounding = torch.finfo(dtype).eps * wanted_BNV.abs().max()
        assert (logits_BNV - wanted_BNV).abs().max() <= 4 * rounding


# sliding windows and chunks


LONG = [[(7 * n * n + 3) % VOCABULARY for n in range(2 * WINDOW + 5)], PROMPTS[0]]
"""A prompt that has left the window already, and one that leaves it while it is answered."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", SLIDING)
def test_greedy_text_of_four_windows_is_that_of_transformers(family: str, static: bool) -> None:
    target, model = windowed(family)
    assert target.context == 128
    new = 4 * WINDOW - len(LONG[0])
    own = [own_text(model, prompt, new) for prompt in LONG]
    assert autoregressive(target, LONG, warper=GREEDY, max_new_tokens=new).tokens == own
    done = generate(target, make_drafter(target, noise=0.03), LONG, warper=GREEDY, max_new_tokens=new, static=static)
    assert done.tokens == own
    assert {"draft", "correction"} <= set(sum(done.origin, []))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("length", [WINDOW - 3, WINDOW - 1, WINDOW, 2 * WINDOW - 2, 4 * WINDOW])
@pytest.mark.parametrize("family", SLIDING)
@torch.inference_mode()
def test_every_node_of_a_tree_behind_the_window_equals_its_path(family: str, length: int) -> None:
    """Rows of two lengths, one and the same, and all slots in view; then what is kept of the tree, and a chain."""
    check_behind_the_window(*windowed(family), length)


def check_behind_the_window(target: Backbone, model: PreTrainedModel, length: int) -> None:
    texts = [[(5 * n * n + n + 1) % VOCABULARY for n in range(length)], [4, 5, 60, 7]]
    g = torch.Generator().manual_seed(1)
    tokens_BN = torch.randint(0, VOCABULARY, (2, len(TREE)), generator=g)
    for rows, static in (([0, 1], False), ([0], False), ([0, 0], False), ([0, 1], True)):
        kv_cache = KVCache(len(rows), 80, static=static, rollback=len(TREE))
        target.prefill([texts[row] for row in rows], kv_cache)
        lengths_B = torch.tensor([len(texts[row]) for row in rows])
        found_BNV = target.forward(tokens_BN[: len(rows)], lengths_B, TREE, kv_cache)
        for at, row in enumerate(rows):
            for node in range(len(TREE)):
                wanted_V = last_logits(model, texts[row] + path_to(node, tokens_BN[at]))
                torch.testing.assert_close(found_BNV[at, node], wanted_V, **CLOSE)
        kv_cache.commit(lengths_B, torch.tensor([PATH] * len(rows)))
        lengths_B = lengths_B + 1 + len(PATH)
        next_BN = torch.tensor([[17, 5]] * len(rows))
        chain_BNV = target.forward(next_BN, lengths_B, chain(1), kv_cache)
        for at, row in enumerate(rows):
            text = [*texts[row], *path_to(PATH[-1], tokens_BN[at]), 17, 5]
            wanted_NV = model(torch.tensor([text])).logits[0, -2:]
            torch.testing.assert_close(chain_BNV[at], wanted_NV, **CLOSE)


@pytest.mark.parametrize("family", SLIDING)
@torch.inference_mode()
def test_one_token_of_one_row_behind_the_window(family: str) -> None:
    """The only call that needs no mask where every layer sees everything."""
    target, model = windowed(family)
    kv_cache = KVCache(1, 60)
    target.prefill(LONG[:1], kv_cache)
    found = target.forward(torch.tensor([[17]]), torch.tensor([len(LONG[0])]), chain(0), kv_cache)
    torch.testing.assert_close(found[0, 0], last_logits(model, [*LONG[0], 17]), **CLOSE)


def slot_for_depth(windows: Windows, mask: Tensor | None, nodes: Any, lengths_B: Tensor, slots: int) -> Any:
    """Siblings counted as if they stood one behind the other."""
    key_BT = torch.arange(slots).expand(len(lengths_B), -1)
    query_BN = lengths_B[:, None] + torch.arange(nodes.depths_BN.shape[1])
    return windows.masks(torch.as_tensor(mask), query_BN, key_BT)


BUGS = {
    "no window": lambda _windows, mask, *_: mask,
    "slots for depths": slot_for_depth,
    "a token too many": lambda windows, *given: _windowed(longer(windows), *given),
}


def longer(windows: Windows) -> Windows:
    """Every window one token longer."""
    kinds = {kind: window and window._replace(size=window.size + 1) for kind, window in windows.kinds.items()}
    return Windows(kinds, windows.by_kind)


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama4_text"])
def test_a_wrong_window_is_seen(family: str, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "_windowed", BUGS[bug])
    with pytest.raises(AssertionError, match="not close"):
        test_every_node_of_a_tree_behind_the_window_equals_its_path(family, 2 * WINDOW - 2)


def test_a_window_that_no_layer_uses() -> None:
    unused = GROUPED | {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 13}
    assert Windows.of(AutoConfig.for_model("qwen2", **SIZES | unused)) is None
    # Mistral's class slides in every layer, whatever layer types its config carries
    listed = GROUPED | {"sliding_window": 13, "layer_types": ["full_attention"] * 2}
    windows = Windows.of(AutoConfig.for_model("mistral", **SIZES | listed))
    assert windows == Windows({"sliding_attention": Window(13)}, by_kind=False)


TEMPERED = SLIDING["llama4_text"] | {"attention_chunk_size": 8, "floor_scale": 6, "attn_scale": 0.5}


@lru_cache
def tempered() -> tuple[Backbone, PreTrainedModel]:
    """Llama 4 whose attention changes its temperature every six tokens, in the middle of chunks and trees."""
    model = random_model("llama4_text", **TEMPERED, attn_temperature_tuning=True)
    return ready(model), model


@pytest.mark.parametrize("static", [False, True])
def test_llama_4_s_temperature_at_four_chunks(static: bool) -> None:
    """Rows of two lengths, so that slots of the KV cache are no positions; the published limit is gone."""
    target, model = tempered()
    assert (target.context, target.context_reason) == (128, "")
    own = [own_text(model, prompt, 35) for prompt in PROMPTS]
    assert len(PROMPTS[0]) + 35 > 4 * TEMPERED["attention_chunk_size"]
    done = generate(target, make_drafter(target, noise=0.03), PROMPTS, warper=GREEDY, max_new_tokens=35, static=static)
    assert done.tokens == own
    assert {"draft", "correction"} <= set(sum(done.origin, []))
    assert autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=35, static=static).tokens == own


@pytest.mark.parametrize("length", [4, 11, 33])
@torch.inference_mode()
def test_llama_4_s_temperature_under_trees_and_after_commits(length: int) -> None:
    target, model = tempered()
    check_behind_the_window(target, model, length)


@torch.inference_mode()
def test_slots_as_positions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the model as it is."""
    monkeypatch.setattr(backbone, "use_positions", lambda _: None)
    with pytest.raises(AssertionError, match="not close"):
        check_behind_the_window(ready(tempered()[1]), tempered()[1], 11)


@torch.no_grad()
def test_llama_4_s_temperature_in_packed_rows_and_copies(tmp_path: Path) -> None:
    """A document behind another begins at position 0; what is saved tunes as before."""
    target, model = tempered()
    ids, half = torch.randint(0, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(2)), 20
    batch = {"input_ids": ids, "documents": torch.arange(40)[None] // half, "positions": torch.arange(40)[None] % half}
    for made in (target.model, copy.deepcopy(target.model)):
        found = hidden_states(made, batch)
        for part in (slice(0, half), slice(half, 40)):
            torch.testing.assert_close(found[:, part], decoder_of(model)(ids[:, part]).last_hidden_state, **CLOSE)
    target.model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(saved(ids).logits, model(ids).logits, **CLOSE)


def test_the_window_of_a_nested_text_config_is_found() -> None:
    """Gemma 3 from 4B on loads as a model of text and images, its sizes one level down."""
    _, sight = SEEING["gemma3"]
    words = SIZES | FAMILIES["gemma3_text"] | {"sliding_window": WINDOW}
    marks = {"image_token_index": 60, "boi_token_index": 59, "eoi_token_index": 58}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", text_config=words, vision_config=sight, mm_tokens_per_image=4, **marks)
    model = AutoModelForCausalLM.from_config(config).eval()
    target = ready(model)
    new = 2 * WINDOW
    assert autoregressive(target, LONG, warper=GREEDY, max_new_tokens=new).tokens == [
        own_text(model, prompt, new) for prompt in LONG
    ]


def test_rotary_frequencies_that_change_with_the_length_set_a_limit() -> None:
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "rope_theta": 1e4,
        "factor": 8.0,
    }
    model = random_model("phi3", num_key_value_heads=2, rope_parameters=longrope, original_max_position_embeddings=16)
    target = ready(model)
    assert target.context == 16
    assert target.context_reason == ", after which its rotary frequencies change"
    base = autoregressive(target, [PROMPTS[0]], warper=GREEDY, max_new_tokens=11)
    assert base.tokens == [own_text(model, PROMPTS[0], 11)]
    # behind the limit a longer sequence computes its first tokens anew
    text = [(7 * n) % VOCABULARY for n in range(20)]
    with torch.inference_mode():
        first_V = model(torch.tensor([text])).logits[0, 9]
        assert (first_V - last_logits(model, text[:10])).abs().max() > 1e-3


# attention that SDPA cannot compute


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@torch.inference_mode()
def test_soft_caps_and_sinks_are_seen_by_these_tests(family: str) -> None:
    """Scores as plain SDPA would make them are far off."""
    target, model = pair(family)
    assert model.config._attn_implementation == "eager"
    assert target.model.config._attn_implementation == OWN
    plain = copy.deepcopy(model)
    for layer in plain.model.layers:
        if family == "gemma2":
            layer.self_attn.attn_logit_softcapping = None
        else:
            layer.self_attn.sinks.fill_(-1e4)
    difference = last_logits(plain, PROMPTS[1]) - last_logits(model, PROMPTS[1])
    assert difference.abs().max() > 1e-2


def test_a_loaded_model_gets_an_attention_that_is_right(tmp_path: Path) -> None:
    for family, implementation in (("gemma2", OWN), ("llama", NAME)):
        pair(family)[1].save_pretrained(tmp_path / family)
        target = load_target(str(tmp_path / family), device="cpu")
        assert target.model.config._attn_implementation == implementation


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="says nothing; see test_loading.py")
@torch.inference_mode()
def test_a_soft_cap_is_never_ignored() -> None:
    model = copy.deepcopy(pair("gemma2")[1])
    for implementation in ("sdpa", NAME):
        with pytest.raises(ValueError, match="does not support"):
            model.set_attn_implementation(implementation)
    model.config._attn_implementation = NAME
    with pytest.raises(ValueError, match="does not support `softcap`"):
        verified(Backbone(model, name="capped"))


@pytest.mark.parametrize("family", ["afmoe", "doge"])
@torch.inference_mode()
def test_families_that_pass_the_mask_by_name(family: str) -> None:
    if family == "doge" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this release computes it wrongly, and it is refused; see test_loading.py")
    model = random_model(family, **GROUPED | EXPERTS | {"num_experts": 4, "sliding_window": 64})
    _, tokens_BN, logits_BNV = verified(ready(model))
    torch.testing.assert_close(logits_BNV, paths_forward(model, tokens_BN), **CLOSE)


# what is refused

SMALL = SIZES | {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, r"MambaForCausalLM \(mamba\)"),
    "rwkv": ({"attention_hidden_size": 16}, r"RwkvForCausalLM \(rwkv\) keeps a recurrent"),
    "jamba": (
        {"num_experts": 2, "mamba_dt_rank": 4},
        "Jamba.*layers of type linear_attention.*recurrent layers of bailing_hybrid, bamba",
    ),
    "minimax": (
        {"num_local_experts": 2, "head_dim": 8},
        "MiniMax.*linear_attention.*recurrent layers of bailing_hybrid, bamba",
    ),
    "recurrent_gemma": ({}, "RecurrentGemma.*linear_attention|RecurrentGemma.*recurrent"),
    # no attention interface, so a mask would be added as 0 and 1, or positions be ignored
    "gptj": ({"rotary_dim": 4}, "GPTJ.*'eager', which does not read the mask of a tree"),
    "mpt": ({"d_model": 16, "n_heads": 2, "n_layers": 1}, "Mpt.*'eager'"),
    "xglm": ({"d_model": 16, "num_layers": 1, "attention_heads": 2}, "XGLM.*'eager'"),
    "bert": ({}, "BertLMHeadModel.*attends to what comes later"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_the_decoder_cannot_do_is_refused_by_name(family: str) -> None:
    settings, message = REFUSED[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | settings))
    with pytest.raises(RequestError, match=message):
        Backbone(model, name=family)


def test_encoder_decoders_are_refused_by_name() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(RequestError, match="T5ForConditionalGeneration.*encoder state"):
        Backbone(T5ForConditionalGeneration(config), name="t5")


def chosen_eager() -> PreTrainedModel:
    model = copy.deepcopy(pair("qwen3")[1])
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("make", [chosen_eager, lambda: pair("gemma2")[1]], ids=["chosen", "only"])
def test_an_attention_that_would_add_a_boolean_mask_is_refused(make: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(RequestError, match="'eager', which does not read the mask of a tree"):
        Backbone(make(), name="eager")


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_lean_forward_is_the_models_own(family: str, stacked: bool) -> None:
    """The logits of prompt and tree are as near to those in fp64 as the model's own forward is."""
    model = random_model(family, **FAMILIES[family]).requires_grad_(False)
    use_grouped_attention(model)
    found = {}
    for kind, made in {"lean": model, "own": model, "exact": copy.deepcopy(model).double()}.items():
        target = Backbone(made, name="random")
        assert target._is_lean == (kind != "exact")
        target.__dict__["_is_lean"] = kind == "lean"
        target.__dict__["_can_stack"] = stacked
        found[kind] = prompt_and_tree(target)
        assert (target._stacked is not None) == (stacked and kind == "lean")
    for lean, own, exact in zip(*found.values(), strict=True):
        rounding = (own - exact).abs().max()
        assert (lean - exact).abs().max() <= 2 * rounding
        torch.testing.assert_close(lean, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_lean_forward_in_bf16_is_the_models_own_to_the_bit(family: str, biased: bool) -> None:
    settings = FAMILIES[family] | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    if biased and family != "qwen2":  # which has biases of its own
        settings["attention_bias"] = True
    model = random_model(family, **settings).to(torch.bfloat16).requires_grad_(False)
    use_grouped_attention(model)
    lean, own = Backbone(model, name="lean"), Backbone(model, name="own")
    own.lean = False
    for got, expected in zip(prompt_and_tree(lean), prompt_and_tree(own), strict=True):
        assert torch.equal(got, expected)
    assert (lean._stacked is not None) == multiplies_bf16()
    with torch.inference_mode():  # of a drafter that is in training, and in fp32
        hidden_BNH = torch.randn(1, 2, 256)
        assert torch.equal(lean.project(hidden_BNH), own.project(hidden_BNH))


def prompt_and_tree(target: Backbone) -> tuple[torch.Tensor, torch.Tensor]:
    tree = Tree((-1, 0, 0, 1))
    kv_cache = KVCache(2, 40)
    with torch.inference_mode():
        first = target.prefill([[1, 2, 3], [4, 5, 6, 7, 8]], kv_cache)
        tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
        return first, target.forward(tokens, torch.tensor([3, 5]), tree, kv_cache)


def change_in_place(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.mul_(1.5)


def put_elsewhere(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.data * 1.5


@pytest.mark.parametrize("change", [change_in_place, put_elsewhere])
def test_stacked_projections_follow_the_weights(change: Callable[[Any], None]) -> None:
    model = random_model("qwen3", **FAMILIES["qwen3"]).requires_grad_(False)
    use_grouped_attention(model)
    target = Backbone(model, name="random")
    before = prompt_and_tree(target)
    change(model)
    after, fresh = prompt_and_tree(target), prompt_and_tree(Backbone(model, name="random"))
    assert not torch.allclose(before[1], after[1])
    for each, expected in zip(after, fresh, strict=True):
        assert torch.equal(each, expected)


def test_what_learns_or_is_no_plain_layer_is_not_stacked() -> None:
    model = random_model("qwen3", **FAMILIES["qwen3"]).requires_grad_(False)
    assert can_stack(model)
    layer = model.model.layers[1].mlp
    layer.up_proj.weight.requires_grad_(True)
    assert not can_stack(model)
    layer.up_proj.weight.requires_grad_(False)
    layer.up_proj.register_forward_hook(lambda *_: None)
    assert not can_stack(model)
