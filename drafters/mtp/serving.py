"""An MTP module in the shapes that vLLM loads, beside the target that it was trained for.

vLLM runs a target's own module out of the target's checkpoint, by one class per family of targets, which takes its
weights from the folder that the speculative config names and its sizes from the *target's* config. Two of these
classes compute what `net.py` does: EXAONE-MoE's, whose layer has norms of query and key, as a fresh module has; and
MiMo's, whose layer has biases instead. So a module can be served whose sizes are what the target's config says;
where one differs, vLLM would compute something else, and the export is refused. Embedding and projection are the
target's. Read next: `own.py`, the names; `net.py`; `../export.py`, what all forms share.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import RequestError
from ..export import Export, Served, ServedTarget, llama_words, without_map
from ..layers.rope import PLAIN
from .layers import MtpShape
from .net import MtpNet
from .own import MIMO_NAMING


def vllm(net: MtpNet, target: ServedTarget, _how: Served) -> Export:
    """The form whose class in vLLM computes the same.

    Raises:
        RequestError: there is none, or it would take other sizes from the target's config, or cannot read that.
    """
    shape = net.config
    _check_served(shape)
    _check_read(target)
    _check_same(shape, target)
    words: dict[str, Any] = llama_words(shape, target) | {"num_nextn_predict_layers": 1}
    weights, cap = _scaled(net, target.logit_scale), target.logit_cap
    if not shape.query_norm:
        return Export(words | _MIMO, _as_mimo(weights, shape), {"num_nextn_predict_layers": 1}, cap)
    tensors = {f"mtp.{name}": tensor for name, tensor in weights.items()}
    # a window is asked for as a number, and of no layer
    return Export(words | _EXAONE | _LAYER | {"sliding_window": target.positions}, tensors, _of_target(target), cap)


def _scaled(net: MtpNet, scale: float) -> dict[str, Tensor]:
    """The weights, the last norm's times what the target multiplies its logits by, for which the classes have no word.

    The state that is fed back is as many times as long, and goes through a norm first, which takes that out again but
    for its epsilon.
    """
    weights = without_map(net)
    return weights | {"norm.weight": weights["norm.weight"] * scale}


_LAYER: dict[str, Any] = {"mlp_layer_types": ["dense"], "mtp_layer_types": ["full_attention"]}
"""A module's layer is dense and attends to everything: words that the class looks for in the target's config."""


def _of_target(target: ServedTarget) -> dict[str, Any]:
    """Those that the target's config lacks: what it says of its own layers is read for these too, and stays.

    The class looks for the kinds of the target's layers, whatever the module's own layer is.
    """
    words = target.words
    windows = words.get("sliding_window") and words.get("use_sliding_window", True)
    kind = "sliding_attention" if windows else "full_attention"
    needed = _LAYER | {"layer_types": [kind] * target.layers}
    missing = {name: value for name, value in needed.items() if not words.get(name)}
    if "layer_types" in missing and words.get("model_type") == "granite":
        missing["attention_sinks"] = False  # Granite's own class takes layer_types to mean that there are some
    own = words.get("mtp_layer_types") or _LAYER["mtp_layer_types"]
    # of the module alone: a checkpoint's own one may have a window, which this one has not
    return missing if own[0] == "full_attention" else missing | {"mtp_layer_types": _LAYER["mtp_layer_types"]}


_EXAONE: dict[str, Any] = {
    "architectures": ["ExaoneMoEForCausalLM"],
    "model_type": "exaone_moe",
    "layer_types": ["full_attention"],
    "sliding_window_pattern": 1,
    "first_k_dense_replace": 1,
}
# MiMo's layer is Qwen2's, and `transformers` has no config of the name mimo
_MIMO: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


def _as_mimo(weights: dict[str, Tensor], shape: MtpShape) -> dict[str, Tensor]:
    """MiMo's names; its projection reads the hidden state in front of the embedding."""
    swapped = weights | {"fc.weight": weights["fc.weight"].roll(shape.hidden, 1)}
    return {MIMO_NAMING.theirs(name): tensor for name, tensor in swapped.items()}


_REMEDY = "; `draftsmith eval` decodes with this module as it is, and an EAGLE-3 drafter is served beside any target"


def _check_served(shape: MtpShape) -> None:
    """Raise RequestError for a module that no class of vLLM's computes."""
    why = None
    if shape.state == "before":
        why = "reads states before the last norm, and vLLM hands out and feeds back those behind it"
    elif shape.gated or shape.rotary != shape.head_size:
        why = "has a gate or heads that are turned in part, which vLLM runs out of a Qwen3.5 checkpoint alone"
    elif shape.query_norm and (shape.bias or shape.blank_first):
        why = "has norms of query and key beside biases or an empty first position, which no class of vLLM's has"
    elif not shape.query_norm and not (shape.bias and shape.blank_first):
        why = "has a layer without norms of query and key and without biases, which no class of vLLM's has"
    elif not shape.query_norm and shape.head_size * shape.heads != shape.hidden:
        why = f"has {shape.heads} heads of {shape.head_size}, and MiMo's class in vLLM makes {shape.hidden} of them"
    if why is not None:
        raise RequestError(
            f"the MTP module {why}; nothing is written that would draft otherwise there. Train a fresh one with "
            f"mtp.from_target false and mtp.state behind{_REMEDY}"
        )


def _check_read(target: ServedTarget) -> None:
    """Raise RequestError for a target whose config says something else to vLLM's classes than it does to us."""
    why = None
    if target.quantisation is not None:
        why = (
            f"is quantised ({target.quantisation}), and vLLM builds a module's layers like the target's, for weights "
            "that are quantised in the same way; these are not"
        )
    elif target.whole is not None:
        why = (
            f"is the text part of a larger model ({target.whole}), and vLLM reads a module's sizes off the whole "
            "model's config, which has none"
        )
    if why is not None:
        raise RequestError(f"the target {target.path!r} {why}: the MTP module cannot be loaded there{_REMEDY}")


def _check_same(shape: MtpShape, target: ServedTarget) -> None:
    """Raise RequestError where vLLM would take other sizes than the module's from the target's config."""
    words, rope = target.words, target.words.get("rope_parameters") or {}
    scaling = shape.rope_scaling or {"rope_type": PLAIN}
    mine = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
    }
    theirs = {name: words.get(name) for name in mine}
    theirs["head_dim"] = theirs["head_dim"] or shape.hidden // shape.heads
    turned = {"rope_theta": shape.rope_theta, "partial_rotary_factor": 1.0}
    mine |= scaling | turned
    plain = {"rope_type": PLAIN, "partial_rotary_factor": words.get("partial_rotary_factor") or 1.0}
    told = {"factor": scaling.get("factor")}  # a target may leave it to what its other words make of it
    theirs |= {name: (plain | told | rope).get(name) for name in scaling | turned}
    if shape.query_norm:  # by the first of these that is there, the layer gets biases
        mine |= {name: False for name in ("attention_bias", "bias", "mlp_bias")}
        theirs |= {name: bool(words.get(name)) for name in ("attention_bias", "bias", "mlp_bias")}
    odd = next((name for name in mine if mine[name] != theirs[name]), None)
    if odd is not None:
        raise RequestError(
            f"vLLM takes the sizes of an MTP module from the target's config, and {odd} of {target.path!r} is "
            f"{theirs[odd]!r}, where the module has {mine[odd]!r}: it would draft otherwise there{_REMEDY}"
        )
