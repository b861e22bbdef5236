"""EAGLE drafters in the shapes that serving engines load.

EAGLE-1 and EAGLE-2 have the same weights, under two configs as each engine refuses the other's name. EAGLE-3 has its
native form, which every engine reads, and that of `speculators`, which names its target. P-EAGLE is EAGLE-3's native
form with several layers and the masks: vLLM embeds the mask as a row of a table, so the learnt vector takes the row of
the last id in a copy of the target's embedding (`with_mask` says what that costs where the target writes that very
token). Read next: `../export.py`, what the forms of all families share; `net3.py` and `peagle.py`, the networks.

Shapes: H hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...errors import RequestError
from ..export import Export, Served, ServedTarget, check_layers, llama_words, with_mask, without_map
from ..layers.draft_vocabulary import common, ids_of
from .net import EagleNet
from .net3 import Eagle3Net, Eagle3Shape, fused_layers
from .peagle import PeagleNet


def eagle_for_vllm(net: EagleNet, target: ServedTarget, _how: Served) -> Export:
    """EAGLE-1 and EAGLE-2, whose weights are the same, for vLLM.

    Raises:
        RequestError: the network has a bias, which vLLM leaves out.
    """
    if net.config.fc_bias:
        raise RequestError(
            "the drafter adds a bias behind fc (fc_bias), which vLLM would leave out without a word; export it with "
            "--format sglang"
        )
    return _eagle1(net, target, "LlamaForCausalLM")


def eagle_for_sglang(net: EagleNet, target: ServedTarget, how: Served) -> Export:
    """EAGLE-1 and EAGLE-2, whose weights are the same, for SGLang, which takes a draft vocabulary from a file."""
    hot_U = ids_of(net)
    if how.ids is not None:
        # of shapes alone it is not known which they are
        hot_U = torch.tensor(list(how.ids if hot_U is None or hot_U.is_meta else common(hot_U, how.ids) or ()))
    return replace(_eagle1(net, target, "LlamaForCausalLMEagle"), hot_ids=hot_U)


def _eagle1(net: EagleNet, target: ServedTarget, architecture: str) -> Export:
    """Embedding and head are the target's.

    Engines hand out the rows of the target's embedding as they are, and scale them elsewhere: so
    the scale goes into what reads them, the first half of `fc`.
    """
    own = {"architectures": [architecture], "bias": net.config.fc_bias, "logit_scale": target.logit_scale}
    config = {**llama_words(net.config, target), **own}
    # SGLang always has this bias and would leave it as it came; vLLM never has it
    tensors = {"fc.bias": torch.zeros(net.config.hidden), **without_map(net)}
    scale_2H = torch.ones(2 * net.config.hidden)
    scale_2H[: net.config.hidden] = target.embedding_scale
    tensors["fc.weight"] = tensors["fc.weight"] * scale_2H
    return Export(config, tensors, uncapped=target.logit_cap)


def eagle3(net: Eagle3Net, target: ServedTarget, _how: Served) -> Export:
    """The native form, which vLLM and SGLang load as it is; layers are named only where they are not the default.

    Raises:
        RequestError: an engine would hand out other hidden states.
    """
    check_layers(net.config.layers, target.layers, "eagle3.layers")
    _check_parts(net, "vllm")
    words = _eagle3_words(net.config)
    if not words["norm_output"]:
        # where it is missing engines take false, and SpecForge true: to that one it means a norm in front of the head
        del words["norm_output"]
    config = {**llama_words(net.config, target), **words, "architectures": ["LlamaForCausalLMEagle3"]}
    layers = list(net.config.layers)
    if target.layers < 7 or tuple(layers) != fused_layers(target.layers):
        # two readers, two ways to count: the state in front of layer k, and that behind it
        config["eagle_aux_hidden_state_layer_ids"] = layers
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in layers]}
    return Export(config, net.state_dict())


_PARTS = {
    "head_norms": ("norms of query and key (head_norms)", ("speculators",)),
    "norm_before_fc": ("one norm of all states (norm_before_fc)", ("vllm", "speculators")),
    "target_hidden": ("another hidden size than its target (target_hidden)", ("vllm",)),
}
"""Parts of some published drafters -> what they are, and the formats that have a word for them and were looked at."""


def _check_parts(net: Eagle3Net, form: str) -> None:
    """Raise RequestError for a part that a format does not hold, or that was not looked at there."""
    for name, (what, forms) in _PARTS.items():
        known = () if isinstance(net, PeagleNet) and name != "norm_before_fc" else forms
        if getattr(net.config, name) and form not in known:
            instead = f"export it with --format {' or '.join(known)}" if known else "it decodes here, as it is"
            raise RequestError(f"the drafter has {what}, for which its form in {form} has no place: {instead}")


def eagle3_for_sglang(net: Eagle3Net, target: ServedTarget, how: Served) -> Export:
    """The native form.

    Raises:
        RequestError: as for `eagle3`; or SGLang would add to another state.
    """
    _check_engine(net, "SGLang")
    _check_parts(net, "sglang")
    return eagle3(net, target, how)


def _check_engine(net: Eagle3Net, engine: str) -> None:
    """Raise RequestError for what some engines leave out without a word."""
    if net.config.own_embedding:
        raise RequestError(
            f"the drafter embeds tokens by a table of its own, and {engine} embeds them by the target's; export it "
            "with --format vllm"
        )
    if net.config.norm_before_residual:
        raise RequestError(
            f"the drafter's layer adds to the hidden state behind its norm (norm_before_residual), and {engine} would "
            "add to that in front of it without a word; export it with --format vllm"
        )


def eagle3_for_tensorrt_llm(net: Eagle3Net, target: ServedTarget, how: Served) -> Export:
    """The native form; the states that it reads are named where the engine is started, not here.

    Raises:
        RequestError: the engine would hand out other hidden states.
    """
    _check_engine(net, "TensorRT-LLM")
    _check_parts(net, "tensorrt-llm")
    if 0 in net.config.layers:
        raise RequestError(
            "the drafter fuses the embedding (hidden state 0), which TensorRT-LLM does not hand out; "
            "train one with eagle3.layers from 1 on"
        )
    return eagle3(net, target, how)


LLAMA_CPP_TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")
"""Whose graphs in llama.cpp hand out what goes into a layer, and whose configs its converter reads."""


def eagle3_for_llama_cpp(net: Eagle3Net, target: ServedTarget, how: Served) -> Export:
    """The native form, for llama.cpp's own converter to GGUF.

    Raises:
        RequestError: llama.cpp knows no such drafter, or no hidden states of such a target.
    """
    if net.config.feature_norms or net.config.feeds_back_normed:
        raise RequestError(
            "the drafter has eagle3.feature_norms, which llama.cpp would leave out without a word; train one without"
        )
    _check_parts(net, "llama.cpp")
    if len(net.config.layers) != 3:
        raise RequestError(f"the drafter fuses {len(net.config.layers)} hidden states, and llama.cpp hands out three")
    if not set(target.architectures) & set(LLAMA_CPP_TARGETS):
        raise RequestError(
            f"the target is a {' or '.join(target.architectures)}, whose hidden states llama.cpp does not hand out; "
            f"expected {' or '.join(LLAMA_CPP_TARGETS)}"
        )
    return eagle3(net, target, how)


def speculators(net: Eagle3Net, target: ServedTarget, how: Served) -> Export:
    """The form that names its target, and holds its embedding: `vllm serve DIR` finds it. No `model_type` on top.

    Raises:
        RequestError: an engine would hand out other hidden states.
    """
    check_layers(net.config.layers, target.layers, "eagle3.layers")
    _check_parts(net, "speculators")
    llama = llama_words(net.config, target)
    if net.config.head_norms:
        llama["model_type"] = "qwen3"
    config = {
        "embed_requires_grad": False,
        **_eagle3_words(net.config),
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(net.config.layers),
        "transformer_layer_config": llama,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": how.tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.path, "architectures": target.architectures},
        },
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in net.state_dict().items()}
    if how.table is None:
        raise ValueError("the form of speculators is exported with the target's embedding")
    # its own reader fills a missing table from the target only where it finds the memory of it to be NaN
    table_VH = net.state_dict().get("embed_tokens.weight", how.table().detach())
    return Export(config, tensors | {"embed_tokens.weight": table_VH})


def _eagle3_words(shape: Eagle3Shape) -> dict[str, Any]:
    """What readers would otherwise take different defaults for."""
    return {
        "draft_vocab_size": shape.draft_vocabulary,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        **({"target_hidden_size": shape.target_hidden} if shape.target_hidden else {}),
        "fc_norm": shape.feature_norms,
        "norm_output": shape.feeds_back_normed,
        **({"embed_requires_grad": True} if shape.own_embedding else {}),
    }


def _mask_row(net: PeagleNet, target: ServedTarget) -> int:
    """The row that holds the mask: of an embedding of the network's own that which is the mask, where one is."""
    last, mask_1H = target.vocabulary - 1, net.mask_embedding.weight
    if not net.config.own_embedding or mask_1H.is_meta:
        return last
    same = (net.embed_tokens.weight == mask_1H).all(-1).nonzero()
    return int(same[0]) if len(same) else last


def peagle(net: PeagleNet, target: ServedTarget, how: Served) -> Export:
    """EAGLE-3's words, the number of layers and the mask's id; read with `parallel_drafting` switched on.

    Raises:
        RequestError: an engine would hand out other hidden states.
    """
    made = eagle3(net, target, how)
    mask = _mask_row(net, target)
    tensors = dict(made.tensors)
    masks = {name: tensors.pop(f"{name}.weight") for name in ("mask_hidden", "mask_embedding")}
    for name in [name for name in tensors if name.startswith("deeper.")]:
        _, number, part = name.split(".", 2)
        name_there = f"layers.{int(number) + 1}."
        tensors[name_there + part] = tensors.pop(name)
        if part == "input_layernorm.weight":  # engines have both in every layer, and differ in which one they read
            tensors[f"{name_there}hidden_norm.weight"] = tensors[name_there + part].clone()
    tensors["mask_hidden"] = masks["mask_hidden"][None]  # [1, 1, F]
    if net.config.own_embedding:
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].clone()
        tensors["embed_tokens.weight"][mask] = masks["mask_embedding"][0]
    else:
        tensors["embed_tokens.weight"] = with_mask(how, target, mask, masks["mask_embedding"][0])
    words = {"num_hidden_layers": net.config.decoder_layers, "pard_token": mask}
    return Export({**made.config, **words}, tensors)
