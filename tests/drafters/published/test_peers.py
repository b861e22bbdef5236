"""Drafters that the code of other trainers writes: read here, they make the logits of that code's own forward pass.

Each trainer's code is wanted in a folder of its own, named by an environment variable. `DRAFTSMITH_SPECULATORS`: as
`pip install --no-deps --target FOLDER speculators hs-connectors` makes it; 0.9.0 ran. `DRAFTSMITH_SPECFORGE` and
`DRAFTSMITH_DEEPSPEC`: checkouts of sgl-project/SpecForge and deepseek-ai/DeepSpec; a6b6b02 and afdfa7c ran. Read next:
`test_logits.py`, the same against networks of the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.convert import convert_drafter
from draftsmith.launch.requests import ConvertDrafterRequest
from helpers.models.published_forms import HEADS, HIDDEN, INNER, KV, LAYERS, SIZE, VOCABULARY, WORDS, known, offsets
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, Qwen3Config

TOKENS, STATES = [5, 9, 2, 33, 7, 60, 11, 1, 48, 20, 4, 8], (1, 4, 6)
MASK, BLOCK = 61, 4
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
}
Code = Callable[[str], Any]


def by(peer: str) -> pytest.MarkDecorator:
    variable = f"DRAFTSMITH_{peer.upper()}"
    return pytest.mark.skipif(not os.environ.get(variable), reason=f"needs the code of {peer}: {variable}")


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[Code]:
    """A module of theirs by its name, run as it is written, without a compiler."""
    peers = ("speculators", "hs_connectors", "specforge", "deepspec")
    before = set(sys.modules)

    def module(name: str) -> Any:
        monkeypatch.syspath_prepend(os.environ[f"DRAFTSMITH_{name.split('.')[0].upper()}"])
        return importlib.import_module(name)

    with torch.compiler.set_stance("force_eager"):
        yield module
    for name in set(sys.modules) - before:
        if name.startswith(peers):
            del sys.modules[name]


def drawn(net: Any, deep: Backbone) -> Any:
    """Their network with random weights that half precision holds, beside what it has of the target's."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_((0.3 * torch.randn_like(parameter) + (parameter.ndim == 1)).bfloat16())
        if hasattr(net, "embed_tokens") and net.embed_tokens.weight.shape[1] == HIDDEN:
            net.embed_tokens.weight.copy_(deep.model.get_input_embeddings().weight)
        if hasattr(net, "d2t") and len(net.d2t) == len(WORDS):
            net.d2t.copy_(offsets(WORDS))
            net.t2d.copy_(known(WORDS))
    return net.eval()


def text_of(deep: Backbone, states: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens [1, S] and the target's hidden states side by side [1, S, F]."""
    ids = torch.tensor([TOKENS])
    seen = deep.model(ids, output_hidden_states=True).hidden_states
    return ids, torch.cat([seen[number] for number in states], -1)


def same(folder: Path, deep: Backbone, states: Sequence[int], theirs: Sequence[Tensor], words: list[int]) -> None:
    """The drafter of a folder reads these states, and its logits for `words` are `theirs`, by depth."""
    ids, features_1SF = text_of(deep, states)
    drafter: Any = load_drafter(folder, deep, draft_length=len(theirs))
    assert drafter.layers == tuple(states)
    mine = list(drafter.teacher_forced(features_1SF[0], ids[0], len(theirs)))
    assert len(mine) == len(theirs) > 1
    for depth, (own, their) in enumerate(zip(mine, theirs, strict=True)):
        rows = len(TOKENS) - 2 - depth
        torch.testing.assert_close(own[:rows, words], their[:rows], rtol=2e-4, atol=2e-4)


def block_depths(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Of the blocks [K, V] behind each token from the second on: rows by depth, of those whose token is known."""
    return [torch.stack([block[k] for block in blocks[: len(blocks) - k]]) for k in range(len(blocks[0]))]


# ---- speculators ------------------------------------------------------------------------------------

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "a layer of Llama": (LlamaConfig, {}),
    "a layer of Qwen3": (Qwen3Config, {}),
    "a residual behind the norm": (LlamaConfig, {"norm_before_residual": True}),
    "a norm in front of fc": (Qwen3Config, {"norm_before_fc": True}),
    "3.1": (LlamaConfig, {"fc_norm": True, "norm_output": True}),
    "a norm of what is fed back": (LlamaConfig, {"norm_output": True}),
}


@by("speculators")
@pytest.mark.parametrize("kind", KINDS)
def test_what_speculators_writes_has_its_logits(kind: str, deep: Backbone, tmp_path: Path, code: Code) -> None:
    made = _of_speculators(kind, deep, code)
    made.save_pretrained(tmp_path / "d")
    seen: list[Tensor] = []
    made.lm_head.register_forward_hook(lambda _module, _given, out: seen.append(out[0].detach()))
    ids, features_1SF = text_of(deep, STATES)
    with torch.no_grad():  # beside the state of t it is given the token behind t
        made(features_1SF[:, :-1], ids[:, 1:], torch.zeros_like(ids[:, 1:]), ttt_steps=2)
    assert len(seen) == 2
    same(tmp_path / "d", deep, STATES, seen, WORDS)


def _of_speculators(kind: str, deep: Backbone, code: Code) -> Any:
    eagle3, configs = code("speculators.models.eagle3"), code("speculators.config")
    config, flags = KINDS[kind]
    beside = configs.SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[code("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=configs.VerifierConfig(name_or_path=deep.name, architectures=["Qwen3ForCausalLM"]),
    )
    settings = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=config(**SIZES, num_hidden_layers=1, attn_implementation="eager"),
        draft_vocab_size=len(WORDS),
        eagle_aux_hidden_state_layer_ids=list(STATES),
        speculators_config=beside,
        **flags,
    )
    return drawn(eagle3.Eagle3DraftModel(settings), deep)


# ---- SpecForge --------------------------------------------------------------------------------------

NESTED = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [state - 1 for state in STATES]}}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = SCALED | {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}
SPECFORGE3: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "the default's states": ({"draft_vocab_size": len(WORDS)}, (2, 4, 5)),
    "states that are named": ({"draft_vocab_size": len(WORDS)} | NESTED, STATES),
    "a whole vocabulary": ({"rope_theta": 500_000.0} | NESTED, STATES),
    "positions of Llama 3": ({"rope_scaling": LLAMA3} | NESTED, STATES),
    "positions by YaRN": ({"rope_scaling": YARN} | NESTED, STATES),
}


@by("specforge")
@pytest.mark.parametrize("kind", SPECFORGE3)
def test_what_specforge_writes_as_eagle3_has_its_logits(kind: str, deep: Backbone, tmp_path: Path, code: Code) -> None:
    words, states = SPECFORGE3[kind]
    net = _of_specforge("LlamaForCausalLMEagle3", words, deep, tmp_path, code)
    theirs = _passes_of_specforge(net, *text_of(deep, states))
    same(tmp_path / "d", deep, states, theirs, WORDS if "draft_vocab_size" in words else [*range(VOCABULARY)])


def _of_specforge(architecture: str, words: dict[str, Any], deep: Backbone, place: Path, code: Code) -> Any:
    """A network of theirs, written into `d` there by their exporter from a checkpoint as their training makes it."""
    config = place / "config.json"
    plain = {"architectures": [architecture], "num_hidden_layers": 1, "hidden_act": "silu", "rope_theta": 10_000.0}
    config.write_text(json.dumps(SIZES | plain | {"max_position_embeddings": 32, "pad_token_id": None} | words))
    auto = code("specforge.modeling.auto")
    net = drawn(auto.AutoDraftModel.from_config(auto.AutoDraftModelConfig.from_file(str(config))), deep)
    weights = {name: tensor for name, tensor in net.state_dict().items() if "embed" not in name}
    torch.save({"draft_state_dict": weights}, place / "training_state.pt")
    export = code("specforge.export.to_hf").export_to_hf
    export(str(place / "training_state.pt"), str(config), str(place / "d"), embedding_source=deep.name)
    return net


@torch.no_grad()
def _passes_of_specforge(net: Any, ids: Tensor, features_1SF: Tensor) -> list[Tensor]:
    """Logits of two passes, the second over what the first made, as their training runs them."""
    hidden, tokens = net.project_hidden_states(features_1SF[:, :-1]), ids[:, 1:]
    S, cache, made = tokens.shape[1], [[], []], []
    mask = net.prepare_decoder_attention_mask(torch.ones_like(tokens, dtype=torch.bool), hidden, 1, S, 0)
    for _ in range(2):
        hidden = net.backbone(net.embed_input_ids(tokens), hidden, cache, mask, torch.arange(S)[None])
        made.append(net.compute_logits(hidden)[0])
        tokens = torch.cat((tokens[:, 1:], tokens[:, :1]), 1)
    return made


@by("specforge")
def test_specforge_feeds_back_no_norm_where_engines_do(deep: Backbone, tmp_path: Path, code: Code) -> None:
    """Its 3.1 is served in another loop than it was trained in; read as it was trained, the logits are its own."""
    words = {"draft_vocab_size": len(WORDS), "fc_norm": True, "norm_output": True, **NESTED}
    net = _of_specforge("LlamaForCausalLMEagle3", words, deep, tmp_path, code)
    theirs = _passes_of_specforge(net, *text_of(deep, STATES))
    with pytest.raises(AssertionError, match="not close"):
        same(tmp_path / "d", deep, STATES, theirs, WORDS)
    as_trained = "output_norm false"
    convert_drafter(ConvertDrafterRequest(str(tmp_path / "d"), deep.name, tmp_path / "ours", reading=as_trained))
    same(tmp_path / "ours", deep, STATES, theirs, WORDS)


@by("specforge")
@pytest.mark.parametrize("normed", [False, True])
def test_no_norm_in_front_of_the_head_is_refused(normed: bool, deep: Backbone, tmp_path: Path, code: Code) -> None:
    words = {"draft_vocab_size": len(WORDS), "fc_norm": normed, "norm_output": False}
    _of_specforge("LlamaForCausalLMEagle3", words, deep, tmp_path, code)
    with pytest.raises(RequestError, match="no norm in front of its head"):
        load_drafter(tmp_path / "d", deep)


@by("specforge")
def test_what_specforge_writes_as_peagle_has_its_logits(deep: Backbone, tmp_path: Path, code: Code) -> None:
    """Its config does not say which token the mask is, which its training was told: whoever has the folder adds it."""
    words, states = {"num_hidden_layers": 2, "draft_vocab_size": len(WORDS)}, (2, 4, 5)
    net = _of_specforge("PEagleDraftModel", words, deep, tmp_path, code)
    with pytest.raises(RequestError, match="'mask_token_id' is missing"):
        load_drafter(tmp_path / "d", deep)
    config = tmp_path / "d" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mask_token_id": MASK}))
    ids, features_1SF = text_of(deep, states)
    tokens, seen = ids[:, 1:], []
    S, mask = tokens.shape[1], torch.ones_like(tokens)
    row_H = net.embed_tokens.weight.data[MASK]
    row_H.copy_(row_H.bfloat16())  # as the folder has it, from which it is read
    net.lm_head.register_forward_hook(lambda _module, _given, out: seen.append(out[0]))
    every_chain = {"num_depths": 2, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    training = code("specforge.algorithms.peagle.model").OnlinePEagleModel(net, MASK, **every_chain)
    with torch.no_grad():
        training(tokens, mask, torch.zeros(1, S, VOCABULARY), mask, features_1SF[:, :-1])
    (all_rows,) = seen
    same(tmp_path / "d", deep, states, [all_rows[:S], all_rows[S:]], WORDS)


HEADS_OF_DSPARK = {"markov_rank": 6, "markov_head_type": "vanilla"}
CONFIDENT = HEADS_OF_DSPARK | {"enable_confidence_head": True, "confidence_head_alpha": 1.0}
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "DFlash": ("DFlashDraftModel", {}),
    "DSpark": ("DSparkDraftModel", HEADS_OF_DSPARK),
    "DSpark with confidence": ("DSparkDraftModel", CONFIDENT | {"confidence_head_with_markov": True}),
    "DSpark, confidence of the state alone": ("DSparkDraftModel", CONFIDENT),
    "DSpark without a head": ("DSparkDraftModel", {}),
}


@by("specforge")
@pytest.mark.parametrize("kind", BLOCKS)
def test_what_specforge_writes_as_blocks_has_its_logits(kind: str, deep: Backbone, tmp_path: Path, code: Code) -> None:
    architecture, words = BLOCKS[kind]
    beside = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
        "block_size": BLOCK,
        "dflash_config": words | {"mask_token_id": MASK, "target_layer_ids": [state - 1 for state in STATES]},
    }
    net = _of_specforge(architecture, beside, deep, tmp_path, code)
    net.set_attn_implementation("eager")
    first = int(architecture == "DFlashDraftModel")  # DSpark is trained to draft from the anchor's slot on
    ids, features_1SF = text_of(deep, STATES)
    anchors = range(1, len(TOKENS) - 1)
    blocks = [_block_of_specforge(net, deep, ids, features_1SF[:, :anchor], first) for anchor in anchors]
    same(tmp_path / "d", deep, STATES, block_depths(blocks), [*range(VOCABULARY)])


@torch.no_grad()
def _block_of_specforge(net: Any, deep: Backbone, ids: Tensor, context: Tensor, first: int) -> Tensor:
    """Logits of a block behind the token after the context, each behind the text's own token in front."""
    anchor = context.shape[1]
    slots = torch.full((1, BLOCK), MASK)
    slots[0, 0] = ids[0, anchor]
    hidden = net(torch.arange(anchor + BLOCK)[None], None, deep.model.get_input_embeddings()(slots), context)
    hidden = hidden[:, first:]
    ahead = torch.cat((ids[:, anchor:], ids[:, :BLOCK]), 1)[:, : hidden.shape[1]]
    product = deep.model.get_output_embeddings()(hidden)
    return net.apply_logits_head(product, prev_token_ids=ahead, hidden_states=hidden)[0]


# ---- DeepSpec ---------------------------------------------------------------------------------------

BEHIND = [state - 1 for state in STATES]
DEEPSPEC: dict[str, dict[str, Any]] = {
    "DFlash": {"markov_rank": 0, "confidence_head_alpha": 0.0},
    "DSpark": HEADS_OF_DSPARK | {"confidence_head_alpha": 0.0},
    "DSpark with confidence": CONFIDENT | {"confidence_head_with_markov": True},
    "DSpark, confidence of the state alone": CONFIDENT | {"confidence_head_with_markov": False},
}


@by("deepspec")
@pytest.mark.parametrize("kind", DEEPSPEC)
def test_what_deepspec_writes_has_its_logits(kind: str, deep: Backbone, tmp_path: Path, code: Code) -> None:
    qwen = code("deepspec.modeling.dspark.qwen3")
    sizes = {"num_draft_layers": 2, "block_size": BLOCK, "mask_token_id": MASK, "num_anchors": 99}
    net = _of_deepspec(qwen, "Qwen3DSparkModel", DEEPSPEC[kind] | sizes | {"target_layer_ids": BEHIND}, deep, tmp_path)
    ids, features_1SF = text_of(deep, STATES)
    with torch.no_grad():  # a block behind every token
        blocks = net(ids, features_1SF, torch.ones_like(ids)).draft_logits[0]
    same(tmp_path / "d", deep, STATES, block_depths([*blocks[1 : len(TOKENS) - 1]]), [*range(VOCABULARY)])


@by("deepspec")
def test_what_deepspec_writes_as_eagle3_has_its_logits(deep: Backbone, tmp_path: Path, code: Code) -> None:
    qwen, states = code("deepspec.modeling.eagle3.qwen3"), (1, 2, 4, 5, 7)
    words = {"target_layer_ids": [state - 1 for state in states], "ttt_length": 2, "step_loss_decay": 0.8}
    words |= {"draft_num_hidden_layers": 1, "target_model_name_or_path": deep.name}
    net = _of_deepspec(qwen, "Qwen3Eagle3Model", words, deep, tmp_path)
    ids, features_1SF = text_of(deep, states)
    hidden, tokens, cache, theirs = features_1SF[:, :-1], ids[:, 1:], DynamicCache(), []
    how = {"use_cache": True, "attention_mask": torch.ones_like(tokens), "rope_cache_step_offset": True}
    for _ in range(2):  # as its trainer runs them
        with torch.no_grad():
            made = net(hidden, tokens, past_key_values=cache, return_logits=True, **how)
        hidden, tokens = made.hidden_states, torch.cat((tokens[:, 1:], tokens[:, :1]), 1)
        theirs.append(made.draft_logits[0])
    same(tmp_path / "d", deep, states, theirs, [*range(VOCABULARY)])


def _of_deepspec(module: Any, name: str, words: dict[str, Any], deep: Backbone, place: Path) -> Any:
    """A network of theirs beside the target's embedding and head, written into `d` there as its trainer saves it."""
    arguments: Any = type("Arguments", (dict,), {"__getattr__": dict.__getitem__})(words)
    config = module.build_draft_config(target_config=deep.model.config, model_args=arguments)
    net = drawn(getattr(module, name)(config), deep)
    table, head = deep.model.get_input_embeddings(), deep.model.get_output_embeddings()
    net.initialize_embeddings_and_head(embed_tokens=table, lm_head=head)
    net.save_pretrained(place / "d", state_dict=net.state_dict())
    return net
