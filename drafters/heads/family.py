"""What `families.py` names of the families that draft by heads: load, draft while training, serve.

Medusa's heads are served in the shape that vLLM loads: the reference's names, a chain of each head's likeliest token.
Hydra's go to their authors' code alone.

Read next: `medusa.py`, `hydra.py`, `bpd.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...decoding.tree.search import Path as IndexPath
from ...errors import RequestError
from ..config import CHAIN_TREE, DrafterConfig
from ..export import Export, Served, ServedTarget, without_map
from ..folder import read_entry
from ..layers.draft_vocabulary import ids_of
from ..tree_file import named_tree
from .bpd import Bpd, BpdHeads, load_bpd
from .hydra import Hydra, HydraHeads, hydra_on, load_hydra
from .medusa import Medusa, MedusaHeads, load_medusa

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone

_log = logging.getLogger(__name__)


def load_medusa_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> Medusa:
    """Errors as for `load_medusa`; a tree says how much is drafted, of a chain `draft_length`."""
    return load_medusa(folder, target, **_how(folder, config, draft_length))


def load_hydra_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> Hydra:
    """Errors as for `load_hydra`; a tree says how much is drafted, of a chain `draft_length`."""
    return load_hydra(folder, target, **_how(folder, config, draft_length))


def load_bpd_folder(folder: Path, target: Backbone, *, draft_length: int, config: DrafterConfig) -> Bpd:
    """Errors as for `load_bpd`; its default is a chain of the block, and `draft_length` says nothing."""
    paths = None if config.tree == CHAIN_TREE else named_tree(config.tree, folder, draft_length)
    return load_bpd(folder, target, paths=paths, ids=config.draft_ids)


def _how(folder: Path, config: DrafterConfig, draft_length: int) -> dict[str, Any]:
    """How heads draft, as the recipe has it."""
    tree = _tree(folder, config, draft_length)
    return {"paths": tree, "nodes": config.medusa.nodes, "ids": config.draft_ids}


def _tree(folder: Path, config: DrafterConfig, draft_length: int) -> tuple[IndexPath, ...] | None:
    """The tree asked for; a chain is no longer than there are heads."""
    if config.tree == CHAIN_TREE:
        draft_length = min(draft_length, int(read_entry(folder)["settings"]["heads"]))
    return named_tree(config.tree, folder, draft_length)


def draft_by_medusa(module: nn.Module, target: Backbone, _draft_length: int) -> Medusa:
    """Medusa's heads in training, on their default tree."""
    return Medusa(cast(MedusaHeads, module), target)


def draft_by_hydra(module: nn.Module, target: Backbone, _draft_length: int) -> Hydra:
    """Hydra's or Hydra++'s heads in training, on their default tree."""
    return hydra_on(cast(HydraHeads, module), target)


def draft_by_bpd(module: nn.Module, target: Backbone, _draft_length: int) -> Bpd:
    """BPD's layer in training, a chain of its whole block."""
    return Bpd(cast(BpdHeads, module), target)


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
    ids_U = ids_of(heads)
    if shape.shared_head:
        if how.head_VH is None:
            raise ValueError("shared heads are exported with the target's projection")
        config["original_lm_head"] = True
        tensors["lm_head.weight"] = how.head_VH  # all rows: see below
    elif ids_U is not None:
        config["truncated_vocab_size"] = len(ids_U)
        tensors["token_map"] = ids_U
        _log.warning(
            "vLLM 0.32 refuses heads that draft some tokens alone, as its check of weights does not know the "
            "`token_map` that its own loader reads; if yours does too, train with medusa.shared_head true or without "
            "medusa.vocabulary"
        )
    return Export(config, tensors)


def hydra(heads: HydraHeads, target: ServedTarget, _how: Served) -> Export:
    """The names and words of the authors' own code, which is no serving engine.

    Raises:
        RequestError: the heads lack a part of theirs; or have what that code would not tell apart.
    """
    shape, own = heads.config, without_map(heads)
    if not shape.as_published or shape.draft_vocabulary is not None:
        raise RequestError(
            "the authors' code has a linear map, biases and a norm that these heads lack, and reads no draft "
            "vocabulary: train heads with medusa.as_published and without medusa.vocabulary"
        )
    _check_repeated(heads)
    step, head = (1, "hydra_lm_head.{}") if shape.prefix is None else (2, "hydra_lm_head.{}.1")
    tensors = {}
    for name, tensor in own.items():
        part, number, *rest = name.split(".")
        if part == "lm_heads":
            tensors[".".join([head.format(number), *rest])] = tensor
        elif part == "prefix":
            behind = name.removeprefix("prefix.")
            there = behind if number == "norm" else f"layers.0.{behind}"
            tensors[f"prefix_embeding_layer.{there}"] = tensor
        else:
            at = 0 if rest[0] in ("first", "passed") else 1 + int(rest[2])
            kind = "res_connection" if rest[0] == "passed" else "linear"
            tensors[f"hydra_mlp.{number}.{step * (at + 1) - 1}.{kind}.{rest[-1]}"] = tensor
    config = {
        "hydra_num_heads": shape.heads,
        "hydra_num_layers": shape.layers,
        "hydra_head_arch": "mlp" if shape.prefix is None else "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": target.path,
    }
    return Export(config, tensors)


def _check_repeated(heads: HydraHeads) -> None:
    """Raise RequestError where a head's further blocks differ, of which that code has one, as often as there are."""
    for k, block in enumerate(heads.blocks, 1):
        parts = [each.weight for each in cast(Any, block).rest.layers]
        if any(not each.is_meta and not torch.equal(each, parts[0]) for each in parts):
            raise RequestError(
                f"head {k} has {heads.config.layers - 1} blocks behind its first that differ, and the authors' code "
                "has one block there, run so often: it would read the last of them in all places. Train heads with "
                "medusa.layers 2 or 1"
            )
