"""The tensors of a published drafter as our networks have them: renamed, and what is told otherwise told as ours.

Nothing is transposed in any form. What a folder holds of the target once more, its embedding or its head, has to be
the target's: our drafters read that one. What a form leaves to the target, such as the row that stands for the mask,
is taken from it here. Read next: `forms.py`, the names; `../weights.py`, which fills a network.

Shapes: V vocabulary, U tokens of it that can be drafted, H hidden size, R rank, F numbers of the fused states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ...decoding.backbone.hidden_states import layer_count
from ...errors import RequestError
from ...storage import read_tensors
from ..layers.draft_vocabulary import is_choice
from ..projection import Shaping
from .files import REMEDY
from .forms import Published, PublishedForm, need_tensors
from .sizes import mask_id

_RELATIVE, _ABSOLUTE = 0.02, 1e-3
"""Either side may have been rounded to half precision."""


@dataclass(frozen=True)
class TargetParts:
    """What a published drafter takes of its target."""

    embedding: Callable[[], Tensor]
    """Rows of the table, [V, H]."""
    head: Callable[[], Tensor]
    """Of the output projection, [V, H]."""
    layers: int
    scale: float = 1.0
    """What the embedding multiplies its rows by."""
    shaping: Shaping = Shaping()

    @classmethod
    def of(cls, target: Any) -> Self:
        """Of a causal LM of `transformers`."""
        table, head = target.get_input_embeddings(), target.get_output_embeddings()
        scale, count = float(getattr(table, "scalar_embed_scale", 1.0)), layer_count(target)
        return cls(lambda: table.weight, lambda: head.weight, count, scale, Shaping.of(target))


Weights = dict[str, Tensor]


def weights_of(found: Published, settings: dict[str, Any], target: TargetParts) -> Weights:
    """By our names, fp32, of the drafter of these settings, for a target.

    Raises:
        RequestError: a tensor is damaged, or none of the form's, or does what our network does not; or what is said to
            be the target's is not.
    """
    names = need_tensors(found)
    _check_biases(found, names)
    _check_shaping(found, target)
    _check_last(found, settings, target)
    ours = {ours: tensor_of(found, theirs) for ours, theirs in names.items()}
    if settings.get("own_embedding"):
        ours["embed_tokens.weight"] = tensor_of(found, "embed_tokens.weight")
    making = _Making(found, settings, target, ours)
    _check_copies(making)
    remade = found.form.remade
    return ours if remade is None else _REMADE[remade](making)


@dataclass(frozen=True)
class _Making:
    """What the functions that remake weights are told."""

    found: Published
    settings: dict[str, Any]
    target: TargetParts
    ours: Weights

    @property
    def folder(self) -> Path:
        return self.found.files.folder


def tensor_of(found: Published, name: str) -> Tensor:
    """A tensor by its name there, without a prefix; fractions in fp32."""
    file, stored = found.files.stored[name]
    (tensor,) = read_tensors(file, remedy=REMEDY, only=lambda each: each == stored).values()
    return tensor.float() if tensor.is_floating_point() else tensor


def _check_biases(found: Published, names: dict[str, str]) -> None:
    """Raise RequestError for a bias that says something, and that the form does not read."""
    for name in found.files.heads:
        if name.endswith(".bias") and name not in names.values() and bool(tensor_of(found, name).any()):
            raise RequestError(
                f"{found.files.folder} is a drafter in the form of {found.form.title} with a bias ({name}), which no "
                "network here has at that place: read without it, it would draft nonsense"
            )


def _check_shaping(found: Published, target: TargetParts) -> None:
    """Raise RequestError where what stands behind the projection is said, and is not the target's."""
    own = {"output_multiplier": target.shaping.scale, "final_logit_softcapping": target.shaping.cap}
    for name, theirs in own.items():
        said = found.files.word(name)
        if said is not None and said != theirs:
            raise RequestError(
                f"{found.files.folder / 'config.json'} says {name} {said}, and the target has {theirs}: the drafter "
                "is of another target"
            )
    if found.form.plain_rows and target.scale != 1:
        raise RequestError(
            f"{found.files.folder} is a drafter in the form of {found.form.title}, which does not say whether it "
            f"reads the rows of the target's embedding as they are or times {target.scale:g}, as this target's layers "
            "read them; it is read for targets that do not scale them"
        )


def _check_last(found: Published, settings: dict[str, Any], target: TargetParts) -> None:
    """Raise RequestError for a state behind the last layer: forms do not say on which side of the norm it is read."""
    if any(layer >= target.layers for layer in _states(settings)):
        raise RequestError(
            f"{found.files.folder / 'config.json'} names the hidden states {list(settings['layers'])}, counted from "
            f"the embedding, 0, and the target's last of {target.layers} layers makes number {target.layers}: its "
            "form does not say on which side of the last norm that is; or the drafter is of a deeper target"
        )


def _states(settings: dict[str, Any]) -> Sequence[int]:
    """The hidden states that a drafter reads; heads of Medusa count layers of their own by that name."""
    layers = settings.get("layers", ())
    return layers if isinstance(layers, Sequence) else ()


# ---- what is the target's -------------------------------------------------------------------------


def _check_copies(making: _Making) -> None:
    """Raise RequestError where the folder has an embedding or a head that is not the target's own."""
    found, target = making.found, making.target
    ids_U = _drafted(making)
    for name, part in found.form.copies.items():
        if (
            name not in found.files.heads
            or name in making.ours
            or (part == "head" and making.settings.get("shared_head") is False)
        ):
            continue
        own_VH = (target.embedding if part == "embedding" else target.head)().detach().float().cpu()
        if part == "head" and ids_U is not None:
            own_VH = own_VH[ids_U]
        skipped = _mask_of(found) if part == "embedding" else None
        _check_same(found, name, tensor_of(found, name), own_VH, skipped)


def _check_same(found: Published, name: str, theirs_VH: Tensor, own_VH: Tensor, skipped: int | None) -> None:
    what = f"{found.files.folder} holds {name} {list(theirs_VH.shape)}"
    if theirs_VH.shape != own_VH.shape:
        raise RequestError(
            f"{what}, and the target has {list(own_VH.shape)}: the drafter was made for {found.says_target}; name that"
        )
    near_V = theirs_VH.isclose(own_VH, rtol=_RELATIVE, atol=_ABSOLUTE).all(-1)
    if skipped is not None and skipped < len(near_V):
        near_V[skipped] = True
    if not bool(near_V.all()):
        odd = int((~near_V).nonzero()[0])
        gap = float((theirs_VH[odd] - own_VH[odd]).abs().max())
        raise RequestError(
            f"{what}, of which {int((~near_V).sum()):,} rows are not the target's (row {odd} differs by {gap:.3g}): "
            f"it was made for {found.says_target}, or trained a table of its own; a drafter reads the target's here"
        )


def _mask_of(found: Published) -> int | None:
    """The row of an embedding that need not be the target's."""
    return mask_id(found.files) if found.form.masked else None


def _mask_row(making: _Making) -> Tensor:
    """The embedding of the mask, [1, H]: of the folder's own table, or the target's."""
    files, mask = making.found.files, mask_id(making.found.files)
    own = "embed_tokens.weight" in files.heads
    table_VH = tensor_of(making.found, "embed_tokens.weight") if own else making.target.embedding().detach()
    if not 0 <= mask < len(table_VH):
        raise RequestError(
            f"{files.folder / 'config.json'} says that the mask is token {mask}, and the embedding has "
            f"{len(table_VH):,} rows: the drafter was made for {making.found.says_target}"
        )
    return table_VH[mask : mask + 1].float().cpu().clone()


# ---- what is told otherwise -----------------------------------------------------------------------


def _drafted(making: _Making) -> Tensor | None:
    """Target ids of a folder's draft vocabulary, in the order of its rows; None: it has none.

    A `d2t` is an offset for every row, and a few writers put the ids themselves there: `t2d`, or the target's
    vocabulary, says which it is; both fit for offsets alone where neither tells.

    Raises:
        RequestError: it is no choice of the target's tokens.
    """
    if not making.settings.get("draft_vocabulary") or "d2t" not in making.ours:
        return None
    V, known_V = len(making.target.embedding()), making.ours.get("t2d")
    if fitting := choices(making.found.form, making.ours["d2t"].long(), known_V, V):
        return fitting[0]
    raise RequestError(
        f"{making.folder} holds a draft vocabulary (d2t{' and t2d' * (known_V is not None)}) that is no choice of the "
        f"target's {V:,} tokens, each once, neither as offsets nor as ids; the folder is damaged, or of another target"
    )


def choices(form: PublishedForm, said_U: Tensor, known_V: Tensor | None, V: int) -> list[Tensor]:
    """The target ids that a map can mean: of its entries as offsets first, where the form has them, then as ids."""
    readings = [said_U] if form.d2t_is_ids else [said_U + torch.arange(len(said_U)), said_U]
    found = [ids_U for ids_U in readings if is_choice(ids_U, V)]
    return [ids_U for ids_U in found if known_V is None or torch.equal(known_V.nonzero()[:, 0], ids_U.sort().values)]


def _offsets(ids_U: Tensor) -> Tensor:
    return ids_U - torch.arange(len(ids_U))


def _of_eagle(making: _Making) -> Weights:
    ours = dict(making.ours)
    if "fc.bias" in ours and not making.settings.get("fc_bias") and bool(ours.pop("fc.bias").any()):
        raise RequestError(
            f"{making.folder / 'config.json'} says that there is no bias, and fc.bias is not zero: {REMEDY}"
        )
    return ours


def _of_eagle3(making: _Making) -> Weights:
    V, target, ours = making.settings["vocabulary"], making.target, dict(making.ours)
    if "lm_head.weight" not in ours:
        ours["lm_head.weight"] = target.head().detach().float().cpu() * target.shaping.scale
    ids_U, rows = _drafted(making), len(ours["lm_head.weight"])
    if ids_U is None and rows != V:
        raise RequestError(
            f"{making.folder} has a head of {rows:,} rows for {V:,} tokens, and no d2t that says which: {REMEDY}"
        )
    if ids_U is None:
        ids_U = torch.arange(V)
    if bool((ids_U.diff() <= 0).any()):  # training looks labels up among ascending ids
        ids_U, order_U = ids_U.sort()
        ours["lm_head.weight"] = ours["lm_head.weight"][order_U]
    known_V = torch.zeros(V, dtype=torch.bool)
    known_V[ids_U] = True
    return ours | {"d2t": _offsets(ids_U), "t2d": known_V}


def _of_peagle(making: _Making) -> Weights:
    made = _of_eagle3(making)
    for name in [name for name in made if name.startswith("layers.")]:
        _, number, part = name.split(".", 2)
        tensor, there = made.pop(name), f"deeper.{int(number) - 1}."
        if part != "hidden_norm.weight":
            made[there + part] = tensor
        elif f"layers.{number}.input_layernorm.weight" not in making.ours:  # most have both, of equal values
            made[f"{there}input_layernorm.weight"] = tensor
    made["mask_hidden.weight"] = made["mask_hidden.weight"].flatten()[None]  # of [1, 1, F]
    return made | {"mask_embedding.weight": _mask_row(making)}


def _of_block(making: _Making) -> Weights:
    made = {name: tensor for name, tensor in making.ours.items() if name not in ("d2t", "t2d")}
    ids_U = _drafted(making)
    if ids_U is not None:
        made["d2t"] = _offsets(ids_U)
    return made | {"mask_embedding.weight": _mask_row(making)}


def _of_dspark(making: _Making) -> Weights:
    made = _of_block(making)
    weight = made.get("confidence_head.proj.weight")
    H, R = making.settings["hidden"], making.settings["rank"]
    if weight is not None and weight.shape == (1, H):  # it does not look at the token in front
        made["confidence_head.proj.weight"] = torch.cat((weight, torch.zeros(1, R)), 1)
    return made


def _of_medusa(making: _Making) -> Weights:
    made = dict(making.ours)
    for name in [name for name in made if name.startswith("blocks.") and name.endswith(".weight")]:
        made.setdefault(f"{name.removesuffix('weight')}bias", torch.zeros(len(made[name])))
    ids_U = _drafted(making)
    return made if ids_U is None else made | {"d2t": _offsets(ids_U)}


def _of_hydra(making: _Making) -> Weights:
    """Blocks stand between places for dropout, or do not: the first of a head is the one that reads tokens."""
    made = dict(making.ours)
    places: dict[str, list[int]] = {}
    for match in (re.fullmatch(r"blocks\.(\d+)\.(\d+)\.weight", name) for name in making.ours):
        if match:
            places.setdefault(match[1], []).append(int(match[2]))
    for head, numbers in places.items():
        for rank, number in enumerate(sorted(numbers)):
            there = f"blocks.{head}.first" if rank == 0 else f"blocks.{head}.rest.layers.{rank - 1}"
            for part in ("weight", "bias"):
                if (name := f"blocks.{head}.{number}.{part}") in made:
                    made[f"{there}.{part}"] = made.pop(name)
    return made


def _of_mimo(making: _Making) -> Weights:
    """Its projection reads the hidden state in front of the embedding."""
    return making.ours | {"fc.weight": making.ours["fc.weight"].roll(making.settings["hidden"], 1)}


_REMADE: dict[str, Callable[[_Making], Weights]] = {
    "of_eagle": _of_eagle,
    "of_eagle3": _of_eagle3,
    "of_peagle": _of_peagle,
    "of_block": _of_block,
    "of_dspark": _of_dspark,
    "of_medusa": _of_medusa,
    "of_hydra": _of_hydra,
    "of_mimo": _of_mimo,
}
