"""What `families.py` names of block drafters: load, draft while training, serve.

Serving engines load a Qwen3 config with the family's own words.
The names of the weights are ours. What an engine would have to guess is written out: which hidden states,
which id stands for the mask, whether a slot sees the later ones. Engines embed the mask as a row of a table:
a vector that the drafter has learnt takes the row of the last id in a copy of the target's embedding. (The
published form has a pickle for such a vector, which this project does not write.)

Read next: `../export.py`, the other families; `net.py`, the network.

Shapes: H hidden size, V target vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...decoding.backbone.hidden_states import check_states
from ...errors import RequestError
from ..config import DrafterConfig
from ..export import Export, Served, ServedTarget, check_layers, llama_words, with_mask, without_map
from ..folder import read_settings
from ..layers.draft_vocabulary import ids_of
from ..projection import check_logits
from ..weights import net_for
from .dspark import DSpark, DSparkNet
from .net import BlockNet, BlockShape
from .proposer import DFlash
from .selected import DFlash2, DFlash2Net, check_tree
from .trees import TreeShape

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone


def dflash(net: BlockNet, target: ServedTarget, how: Served) -> Export:
    """DFlash's form, of which an engine drafts whole blocks: as many tokens as the drafter was trained on.

    Raises:
        RequestError: an engine would hand out other hidden states, or read the slots in another way.
    """
    _check_slots(net.config)
    tensors, words = _of_network(net, target, how)
    config = {**_config(net.config, target, "DFlashDraftModel"), "dflash_config": words}
    return _made(config | {"logit_scale": target.logit_scale}, tensors, uncapped=target.logit_cap)


def dflash_for_sglang(net: BlockNet, target: ServedTarget, how: Served) -> Export:
    """As `dflash`, refused where SGLang would read it differently.

    Raises:
        RequestError: as for `dflash`; or SGLang would draft by another mask, or with another attention between slots.
    """
    _check_sglang(net.config, target)
    return dflash(net, target, how)


def dspark_for_sglang(net: DSparkNet, target: ServedTarget, how: Served) -> Export:
    """As `dspark`, refused where SGLang would read it differently.

    Raises:
        RequestError: as for `dspark`; or SGLang would draft by another mask, with another attention between slots,
            from other logits, or read drafts off other slots.
    """
    _check_sglang(net.config, target)
    if target.logit_scale != 1.0 or target.logit_cap is not None:
        raise RequestError(
            "the drafter is of a target that scales or caps its logits, and SGLang adds what DSpark says of the token "
            "in front to the projection's product as it is: another token would be the likeliest; take another "
            "target, or export it with --format vllm"
        )
    if net.config.layout != "anchor-first":
        raise RequestError(
            f"the drafter's block.layout is {net.config.layout}: its first slot speaks of no token, and SGLang reads "
            "DSpark's first draft there; train one with anchor-first, or export it with --format vllm"
        )
    return dspark(net, target, how)


def dspark(net: DSparkNet, target: ServedTarget, how: Served) -> Export:
    """DSpark's own form, its words on top of the config; readers differ in whether the first slot drafts by default.

    Raises:
        RequestError: an engine would hand out other hidden states.
    """
    tensors, words = _of_network(net, target, how)
    config = {
        **_config(net.config, target, "Qwen3DSparkModel"),
        **words,
        "markov_rank": net.config.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": net.config.confidence,
        "confidence_head_with_markov": net.config.confidence,
        "sample_from_anchor": net.config.layout == "anchor-first",
        "logit_scale": target.logit_scale,
        # its own class asks for the number of blocks that it would train on at once; nothing that drafts reads it
        "num_anchors": 512,
    }
    if "causal" in config:
        config["is_causal"] = config.pop("causal")
    return _made(config, tensors, uncapped=target.logit_cap)


def dflash2(net: DFlash2Net, target: ServedTarget, how: Served) -> Export:
    """DFlash 2's form: DFlash's words, the convolutions' and the selector's.

    The selector adds to logits behind the target's scale and cap, so the form has words for these.

    Raises:
        RequestError: an engine would hand out other hidden states, or read the slots in another way.
    """
    _check_slots(net.config)
    tensors, words = _of_network(net, target, how)
    for table in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{table}"] = tensors.pop(f"candidate_selector.{table}.weight")
    own = {
        "conv_kernel_size": net.config.taps,
        "conv_group_size": net.config.group,
        "selector_rank": net.config.rank,
        "selector_top_k": net.config.candidates,
        **({} if target.logit_scale == 1 else {"output_multiplier": target.logit_scale}),
        **({} if target.logit_cap is None else {"final_logit_softcapping": target.logit_cap}),
    }
    return _made({**_config(net.config, target, "DFlash2DraftModel"), "dflash_config": words | own}, tensors)


def _made(config: dict[str, Any], tensors: dict[str, Tensor], *, uncapped: float | None = None) -> Export:
    """The form; whether it has a table of its own is said beside it."""
    return Export(config, tensors, uncapped=uncapped, own_mask="embed_tokens.weight" in tensors)


def _of_network(net: BlockNet, target: ServedTarget, how: Served) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights, and what is said of hidden states, mask and attention.

    Hidden states are counted by the layer behind which they stand, from 0 on.
    """
    shape = net.config
    check_layers(shape.layers, target.layers, "block.layers", first=1)
    _check_rows(net)
    tensors = without_map(net)
    mask_1H = tensors.pop("mask_embedding.weight")
    mask = shape.mask_token
    if mask is None or target.embedding_scale != 1.0:
        mask = target.vocabulary - 1 if mask is None else mask
        tensors["embed_tokens.weight"] = with_mask(how, target, mask, mask_1H[0])
    layers = [layer - 1 for layer in shape.layers]
    words = {"mask_token_id": mask, "target_layer_ids": layers}
    # where nothing is said, blocks are causal in layers with a window alone
    mixed = any(shape.windows) and shape.causal_windows and not shape.causal
    return tensors, words if mixed else words | {"causal": shape.causal}


def _check_rows(net: BlockNet) -> None:
    """Raise RequestError for tables of a draft vocabulary's rows, where engines read one of every token."""
    ids_U = ids_of(net)
    if ids_U is not None and isinstance(net, (DSparkNet, DFlash2Net)):
        raise RequestError(
            f"the drafter was trained to draft {len(ids_U):,} tokens (block.vocabulary), and engines read a row for "
            f"each of the target's {net.config.vocabulary:,} in what sees the token in front: train one without "
            "block.vocabulary. Here such a one drafts fewer tokens by drafter.draft_vocabulary"
        )


def _check_sglang(shape: BlockShape, target: ServedTarget) -> None:
    """Raise RequestError where SGLang would compute something else, and say nothing."""
    why = None
    if shape.mask_token is None:
        why = "has a mask of its own, and SGLang embeds the mask by the target's table alone: set block.mask_token"
    elif target.embedding_scale != 1.0:
        why = (
            "is of a target that scales its embedding, and SGLang hands a block drafter rows of the target's table as "
            "they are: take another target"
        )
    elif any(shape.windows):
        why = "has layers with a window, and what SGLang makes of these has not been tried: take one without"
    elif shape.causal:
        why = "has slots that see earlier ones alone, and in SGLang they see all: set block.causal to false"
    if why is not None:
        raise RequestError(f"the drafter {why} and train one, or export this one with --format vllm")


def _check_slots(shape: BlockShape) -> None:
    if shape.layout != "fill-in":
        raise RequestError(
            f"the drafter's block.layout is {shape.layout}: its first slot speaks of a token, and engines read drafts "
            "off the slots behind it; train one with fill-in. `draftsmith eval` decodes with it as it is"
        )


def _config(shape: BlockShape, target: ServedTarget, architecture: str) -> dict[str, Any]:
    sizes = {each for each in shape.windows if each is not None}
    if len(sizes) > 1:
        raise RequestError(f"the drafter's layers have windows of {sorted(sizes)}, and the form has a word for one")
    windows = shape.windows or [None] * shape.decoder_layers
    return {
        **llama_words(shape, target),
        "model_type": "qwen3",
        "architectures": [architecture],
        "num_hidden_layers": shape.decoder_layers,
        "layer_types": ["full_attention" if each is None else "sliding_attention" for each in windows],
        "sliding_window": next(iter(sizes), None),
        "num_target_layers": target.layers,
        "block_size": shape.size,
    }


_DRAFTERS: dict[str, tuple[type[BlockNet], type[DFlash]]] = {
    DFlash.family: (BlockNet, DFlash),
    DSpark.family: (DSparkNet, DSpark),
    DFlash2.family: (DFlash2Net, DFlash2),
}
"""By the family: network and proposer."""


def load_block_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> DFlash:
    """A block drafter of a folder, which drafts `draft_length` tokens or as many as its block has.

    Raises:
        RequestError: the folder is no block drafter, or was made for another target; or the target makes
            logits in a way of its own.
    """
    family, sizes = read_settings(folder, target, *_DRAFTERS)
    check_logits(target.model)  # whose projection it drafts by
    net = net_for(folder, target, lambda: _DRAFTERS[family][0].from_settings(sizes), "a block drafter")
    check_states(net.config.layers, target.model, folder / "config.json")
    _check_mask(net, target, folder)
    return _drafting(net, target, draft_length, config)


def _check_mask(net: BlockNet, target: Backbone, folder: Path) -> None:
    """Raise RequestError where the mask is not the embedding of its token, which engines take for it."""
    token = net.config.mask_token
    if token is None:
        return
    table: Any = target.model.get_input_embeddings()
    known = len(table.weight)
    if token < known:
        row_H, mask_H = table(torch.tensor(token, device=target.device)), net.mask_embedding.weight[0]
        # either may have been rounded to half precision
        if torch.allclose(row_H.float(), mask_H.float(), rtol=0.02, atol=1e-3):
            return
    what = "weights whose mask is another vector" if token < known else f"a target with ids 0 to {known - 1}"
    raise RequestError(
        f"{folder / 'config.json'}: mask_token is {token}, beside {what}; the folder is damaged, or the drafter is of "
        "another target"
    )


def draft_by_block(module: nn.Module, target: Backbone, draft_length: int) -> DFlash:
    """A block drafter in training."""
    return _drafting(cast(BlockNet, module), target, draft_length, DrafterConfig())


def _drafting(net: BlockNet, target: Backbone, draft_length: int, config: DrafterConfig) -> DFlash:
    longest = min(draft_length, net.config.most)
    make = _DRAFTERS[net.family][1]
    how: dict[str, Any] = {"policy": config.policy, "factors": config.temperature_factors, "least": config.confidence}
    how["ids"] = config.draft_ids
    if config.block.tree == "tree":
        shape = TreeShape(config.block.nodes, config.block.children)
        how["tree"] = shape.of_leaves(longest) if make is DFlash else shape
        if isinstance(net, DFlash2Net):
            check_tree(config.block.children, net.config.candidates)
    return make(net, target, draft_length=longest, **how)
