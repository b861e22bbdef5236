"""A block drafter in the shape that serving engines load: DFlash's own, a Qwen3 config and a `dflash_config`.

The names of the weights are ours. What an engine would have to guess is written out: which hidden states,
which id stands for the mask, whether a slot sees the later ones. Engines embed the mask as a row of a table:
a vector that the drafter has learnt takes the row of the last id in a copy of the target's embedding. Where
the target writes that very token, the drafts behind it are made from the mask: fewer are accepted, the text
stays the target's. (The published form has a pickle for such a vector, which this project does not write.)
Read next: `../export.py`, the other families; `net.py`, the network.

Shapes: H hidden size, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import RequestError
from ..export import Export, Served, ServedTarget, check_layers, llama_words
from .net import BlockNet, BlockShape


def dflash(net: BlockNet, target: ServedTarget, how: Served) -> Export:
    """DFlash's form, of which an engine drafts whole blocks: as many tokens as the drafter was trained on.

    Raises:
        RequestError: an engine would hand out other hidden states, or read the slots in another way.
    """
    shape = net.config
    _check_slots(shape)
    check_layers(shape.layers, target.layers, "block.layers", first=1)
    tensors = net.state_dict()
    mask_1H = tensors.pop("mask_embedding.weight")
    mask = shape.mask_token
    if mask is None or target.embedding_scale != 1.0:
        mask = target.vocabulary - 1 if mask is None else mask
        tensors["embed_tokens.weight"] = _with_mask(how, target, mask, mask_1H[0])
    return Export({**_config(shape, target), "dflash_config": _words(shape, mask)}, tensors)


def _check_slots(shape: BlockShape) -> None:
    if shape.layout != "fill-in":
        raise RequestError(
            f"the drafter's block.layout is {shape.layout}: its first slot speaks of a token, and engines read drafts "
            "off the slots behind it; train one with fill-in. `draftsmith eval` decodes with it as it is"
        )


def _config(shape: BlockShape, target: ServedTarget) -> dict[str, Any]:
    return {
        **llama_words(shape, target),
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": shape.decoder_layers,
        "layer_types": ["full_attention"] * shape.decoder_layers,
        "sliding_window": None,
        "num_target_layers": target.layers,
        "block_size": shape.size,
    }


def _words(shape: BlockShape, mask: int) -> dict[str, Any]:
    """Hidden states are counted by the layer behind which they stand, from 0 on."""
    return {"mask_token_id": mask, "target_layer_ids": [layer - 1 for layer in shape.layers], "causal": shape.causal}


def _with_mask(how: Served, target: ServedTarget, mask: int, mask_H: Tensor) -> Tensor:
    """The rows that the drafter reads, [V, H]: those of the target as its own layers read them, and the mask's."""
    if how.table is None:
        raise ValueError("a mask of the drafter's own is exported with the target's embedding")
    table_VH = how.table().detach().float() * target.embedding_scale
    table_VH[mask] = mask_H.float()
    return table_VH
