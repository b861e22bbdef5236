"""The MTP module that a target brings: read from the target's own weight files, by the names of its tensors.

`transformers` leaves these tensors out when it loads a model, so they are looked up in the files; no code of the
checkpoint is run. Three ways of naming are known, one a family of checkpoints. Whatever is missing, left over or of
another kind than `net.py` computes (a mixture of experts, compressed attention) is refused by name: a module that is
read in part drafts nonsense. Read next: `net.py`, the network; `serving.py`, the way back.

Shapes: H hidden size, Q query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...decoding.backbone.hub import folder_or_name
from ...decoding.backbone.weights import weight_files
from ...errors import RequestError
from ...storage import read_tensors, tensor_heads
from ..layers.llama import sizes_like
from ..layers.rope import rope_of, rope_words
from .layers import MtpShape
from .net import MtpNet

Shapes = Mapping[str, tuple[int, ...]]
_EXPERTS = (".experts.", ".mlp.gate.weight", ".shared_expert")
_COMPRESSED = (".kv_a_proj", ".q_a_proj", ".kv_b_proj")


@dataclass(frozen=True)
class Naming:
    """How a family of checkpoints names the tensors of its module."""

    example: str
    """Who names them so, for messages."""
    prefix: str
    """What begins every one of them and no other tensor."""
    own: Mapping[str, str]
    """Of the parts around the layer: our name -> theirs, behind the prefix."""
    layer: str
    """In front of the layer's tensors, behind the prefix."""
    hidden_first: bool = False
    """Whether the projection reads the hidden state in front of the embedding."""
    blank_first: bool = False
    """Whether position 0 has no embedding, as engines run these modules."""
    copies: tuple[str, ...] = ()
    """Tensors behind the prefix that are the target's own once more."""

    def theirs(self, name: str) -> str:
        """The checkpoint's name of one of our tensors."""
        part, _, kind = name.rpartition(".")
        if part in self.own:
            return f"{self.prefix}{self.own[part]}.{kind}"
        return f"{self.prefix}{self.layer}{name.removeprefix('layers.0.')}"


_QWEN = Naming(
    example="Qwen3.5",
    prefix="mtp.",
    own={name: name for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")},
    layer="layers.0.",
)
MIMO_NAMING = Naming(
    example="MiMo",
    prefix="model.mtp_layers.",
    own={
        "fc": "0.input_proj",
        "norm": "0.final_layernorm",
        "pre_fc_norm_embedding": "0.token_layernorm",
        "pre_fc_norm_hidden": "0.hidden_layernorm",
    },
    layer="0.",
    hidden_first=True,
    blank_first=True,
)
_DEEPSEEK = Naming(
    example="DeepSeek",
    prefix="model.layers.",  # and the number of the layer behind the last
    own={"fc": "eh_proj", "norm": "shared_head.norm", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"},
    layer="",
    blank_first=True,
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
_FROM_ONE = ("qwen3_next", "qwen3_5")
"""Prefixes of model types that store norm weights minus 1."""


def own_shape(path: str, config: Any, *, revision: str | None = None, state: str = "behind") -> MtpShape:
    """The sizes of the module that a target brings, from its config and the headers of its weight files.

    Args:
        path: folder or hub name of the target; it has to be here.
        config: the target's `transformers` config.

    Raises:
        RequestError: it brings none, one that is not whole, or one of another kind.
    """
    _, _, shape = _found(path, config, revision)
    return replace(shape, state=state)


def own_weights(path: str, config: Any, *, revision: str | None = None) -> dict[str, Tensor]:
    """The module's weights by the names of `MtpNet`, fp32. Errors as for `own_shape`."""
    files, naming, shape = _found(path, config, revision)
    raw = {
        name: tensor.float()
        for file in files
        for name, tensor in read_tensors(file, remedy=_remedy(path), only=_is_of(naming)).items()
    }
    names = [naming.theirs(name) for name in _names(shape)]
    theirs = {ours: raw[name] for ours, name in zip(_names(shape), names, strict=True) if name in raw}
    return _as_ours(theirs, shape, naming, from_one=_is_from_one(config))


def _is_of(naming: Naming) -> Any:
    return lambda name: name.startswith(naming.prefix)


def _remedy(path: str) -> str:
    return f"copy {path} again"


def _found(path: str, config: Any, revision: str | None) -> tuple[list[Path], Naming, MtpShape]:
    """The files that hold the module, its names, its sizes."""
    whole = {
        file: {name: head.shape for name, head in tensor_heads(file, remedy=_remedy(path)).items()}
        for file in weight_files(path, _folder(path, revision))
    }
    everything = {name: shape for held in whole.values() for name, shape in held.items()}
    naming = _naming(path, config, everything)
    held = {name: shape for name, shape in everything.items() if name.startswith(naming.prefix)}
    shape = _shape(path, config, naming, held)
    files = [file for file, names in whole.items() if any(name in held for name in names)]
    return files, naming, shape


def _folder(path: str, revision: str | None) -> Path:
    """Where a target's weight files are."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(folder_or_name(path))
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise RequestError(
            f"mtp.from_target reads a folder with safetensors, and {path!r} is a GGUF file, of which no MTP module is "
            "read; set mtp.from_target to false for a fresh module"
        )
    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise RequestError(
            f"mtp.from_target reads the target's weight files, and {path!r} is not here; fetch it first, or set "
            "mtp.from_target to false for a fresh module"
        )
    return Path(found).parent


def _naming(path: str, config: Any, names: Iterable[str]) -> Naming:
    """Which names the checkpoint has.

    Raises:
        RequestError: none that is known.
    """
    last = int(config.get_text_config(decoder=True).num_hidden_layers)
    behind = replace(_DEEPSEEK, prefix=f"{_DEEPSEEK.prefix}{last}.")
    there = list(names)
    for naming in (_QWEN, MIMO_NAMING, behind):
        if any(name.startswith(naming.prefix) for name in there):
            return naming
    shown = ", ".join(f"{each.prefix}* ({each.example})" for each in (_QWEN, MIMO_NAMING, behind))
    raise RequestError(
        f"mtp.from_target is true, and the weights of {path!r} hold no MTP module: looked for {shown}. Set it to "
        "false for a fresh module, or name the checkpoint as it was published: what transformers has written anew "
        "has lost its module"
    )


def _shape(path: str, config: Any, naming: Naming, held: Shapes) -> MtpShape:
    """The module's sizes; every tensor that `held` has is one of its own, and of its size."""
    _check_kind(path, held)
    own = config.get_text_config(decoder=True)
    sizes = sizes_like(config)
    rotary = _rotary(own, sizes["head_size"])
    sizes["rope_theta"], sizes["rope_scaling"] = rope_of(own, rotary)
    up = held.get(naming.theirs("layers.0.mlp.up_proj.weight"))
    query = held.get(naming.theirs("layers.0.self_attn.q_proj.weight"))
    if up is not None:
        sizes["intermediate"] = up[0]
    width = sizes["heads"] * sizes["head_size"]
    shape = MtpShape(
        **sizes,
        rotary=rotary,
        query_norm=naming.theirs("layers.0.self_attn.q_norm.weight") in held,
        gated=query is not None and query[0] == 2 * width,
        bias=naming.theirs("layers.0.self_attn.q_proj.bias") in held,
        blank_first=naming.blank_first,
    )
    _check_held(path, naming, shape, held)
    return shape


def _check_kind(path: str, held: Shapes) -> None:
    """Raise RequestError for a layer that `net.py` does not compute."""
    kinds = {"a feed-forward part of a mixture of experts": _EXPERTS, "compressed (MLA) attention": _COMPRESSED}
    for what, marks in kinds.items():
        found = next((name for name in sorted(held) if any(mark in name for mark in marks)), None)
        if found is not None:
            raise RequestError(
                f"the MTP module of {path!r} has {what} ({found}); read is one of a dense layer with ordinary "
                "attention alone. Set mtp.from_target to false for a fresh module, which has such a layer; engines "
                "run the target's own as it is"
            )


def _rotary(config: Any, head_size: int) -> int:
    """Numbers of a head that are turned."""
    share = rope_words(config).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return head_size if share is None else int(head_size * float(share))


def _check_held(path: str, naming: Naming, shape: MtpShape, held: Shapes) -> None:
    """Raise RequestError where tensors are missing, left over or of other sizes."""
    wanted = _wanted(naming, shape)
    copies = {naming.prefix + name for name in naming.copies}
    missing = sorted(wanted.keys() - held.keys())
    over = sorted(held.keys() - wanted.keys() - copies)
    odd = sorted(name for name in wanted.keys() & held.keys() if wanted[name] != held[name])
    if not (missing or over or odd):
        return
    parts = [
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} others' * (len(names) > 3)}"
        for what, names in (("lacks", missing), ("also has", over))
        if names
    ]
    parts += [f"has {name} of {list(held[name])} where {list(wanted[name])} is expected" for name in odd[:1]]
    raise RequestError(
        f"the MTP module of {path!r} ({naming.prefix}*) {'; '.join(parts)}; read is one whole module of a dense "
        "layer. Set mtp.from_target to false for a fresh module"
    )


def _wanted(naming: Naming, shape: MtpShape) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors that make a module of this shape, and their sizes."""
    with torch.device("meta"):
        own = {name: tuple(tensor.shape) for name, tensor in MtpNet(shape).state_dict().items()}
    if shape.gated:  # in the checkpoint beside the queries, head by head
        rows, width = own.pop(_GATE)
        own[_QUERY] = (2 * rows, width)
    return {naming.theirs(name): size for name, size in own.items()}


_QUERY, _GATE = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.gate_proj.weight"


def _names(shape: MtpShape) -> list[str]:
    with torch.device("meta"):
        return list(MtpNet(shape).state_dict())


def _is_from_one(config: Any) -> bool:
    return str(config.get_text_config(decoder=True).model_type).startswith(_FROM_ONE)


def _as_ours(theirs: dict[str, Tensor], shape: MtpShape, naming: Naming, *, from_one: bool) -> dict[str, Tensor]:
    """Weights under our names as `MtpNet` reads them."""
    ours = dict(theirs)
    if naming.hidden_first:
        ours["fc.weight"] = ours["fc.weight"].roll(shape.hidden, 1)
    if from_one:
        ours |= {name: weight + 1 for name, weight in ours.items() if "norm" in name}
    if shape.gated:
        query_Q2DH = ours[_QUERY].unflatten(0, (shape.heads, 2, shape.head_size))
        ours[_QUERY], ours[_GATE] = (query_Q2DH[:, k].flatten(0, 1).contiguous() for k in range(2))
    return ours
