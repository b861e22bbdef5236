"""Medusa's heads in the shape that vLLM loads: the reference's names, a chain of each head's likeliest token.

Read next: `../export.py`, what all forms share; `medusa.py`, the heads.
"""

from __future__ import annotations

from ...errors import RequestError
from ..export import Export, Served, ServedTarget
from .medusa import MedusaHeads


def medusa(heads: MedusaHeads, target: ServedTarget, how: Served) -> Export:
    """The reference's names, {head}.{layer}.linear, and the words that vLLM asks for.

    Raises:
        RequestError: the heads share a projection with a bias, for which the form has no room.
    """
    shape, own = heads.config, heads.state_dict()
    if shape.shared_head and target.biased:
        raise RequestError(
            f"the output projection of {target.path!r} has a bias, and the form holds the weight alone of a head that "
            "is shared: train heads with projections of their own (medusa.shared_head: false)"
        )
    tensors = {
        f"{k}.{layer}.linear.{part}": own[f"blocks.{k}.layers.{layer}.{part}"]
        for k in range(shape.heads)
        for layer in range(shape.layers)
        for part in ("weight", "bias")
    }
    for k in range(0 if shape.shared_head else shape.heads):
        tensors[f"{k}.{shape.layers}.weight"] = own[f"lm_heads.{k}.weight"]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocabulary,
        "num_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "medusa_fc_bias": True,  # without the word biases are dropped
    }
    if shape.shared_head:
        if how.head_VH is None:
            raise ValueError("shared heads are exported with the target's projection")
        config["original_lm_head"] = True
        tensors["lm_head.weight"] = how.head_VH
    return Export(config, tensors)
