"""P-EAGLE in the shape that vLLM loads: EAGLE-3's native form with several layers and the masks.

vLLM embeds the mask as a row of a table, so the learnt vector takes the row of the last id in a copy of the target's
embedding (`../export.py` says what that costs where the target writes that very token). Read next:
`../export.py`, EAGLE-3's form; `peagle.py`, the network.
"""

from __future__ import annotations

from ..export import Export, Served, ServedTarget, eagle3, with_mask
from .peagle import PeagleNet


def peagle(net: PeagleNet, target: ServedTarget, how: Served) -> Export:
    """EAGLE-3's words, the number of layers and the mask's id; read with `parallel_drafting` switched on.

    Raises:
        RequestError: an engine would hand out other hidden states.
    """
    made = eagle3(net, target, how)
    mask = target.vocabulary - 1
    tensors = dict(made.tensors)
    masks = {name: tensors.pop(f"{name}.weight") for name in ("mask_hidden", "mask_embedding")}
    for name in [name for name in tensors if name.startswith("deeper.")]:
        _, number, part = name.split(".", 2)
        name_there = f"layers.{int(number) + 1}."
        tensors[name_there + part] = tensors.pop(name)
        if part == "input_layernorm.weight":  # engines have both in every layer, and differ in which one they read
            tensors[f"{name_there}hidden_norm.weight"] = tensors[name_there + part].clone()
    tensors["mask_hidden"] = masks["mask_hidden"][None]  # [1, 1, F]
    tensors["embed_tokens.weight"] = with_mask(how, target, mask, masks["mask_embedding"][0])
    words = {"num_hidden_layers": net.config.decoder_layers, "pard_token": mask}
    return Export({**made.config, **words}, tensors)
