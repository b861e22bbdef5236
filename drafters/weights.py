"""The weights of a drafter folder: no more than its config describes, of its shapes, all of them finite.

What a folder's config describes is built in shapes first, and compared with what the weights hold: sizes that nobody
has memory for are refused before anything is filled. Read next: `folder.py`, the rest of a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..storage import read_tensors
from .folder import REMEDY, built_from, not_finite
from .layers.draft_vocabulary import ids_of, is_choice
from .published.forms import published
from .published.weights import TargetParts, weights_of

if TYPE_CHECKING:
    from ..decoding.backbone.backbone import Backbone

_Net = TypeVar("_Net", bound=nn.Module)
FILE = "model.safetensors"


def net_of(folder: Path, make: Callable[[], _Net], what: str, target: TargetParts | None = None) -> _Net:
    """The module that `make` builds of a folder's settings, with the folder's weights, fp32, on the CPU.

    Args:
        target: what a published drafter takes of it; our own folders take nothing.

    Raises:
        RequestError: nothing can be built of the settings, or as for `load_weights`.
    """
    with built_from(folder / "config.json", what), torch.device("meta"):
        net = make()
    weights = _checked(net, folder, target)
    net.to_empty(device="cpu")
    net.load_state_dict(weights)
    return net


def net_for(folder: Path, target: Backbone, make: Callable[[], _Net], what: str) -> _Net:
    """As `net_of`, frozen, where and as precise as the target is; its sizes are the target's.

    Raises:
        RequestError: also where it was made for other sizes than the target's.
    """
    net = net_of(folder, make, what, TargetParts.of(target.model))
    _check_sizes(net, target, folder)
    _check_vocabulary(net, target, folder)
    net.requires_grad_(False).eval().to(device=target.device, dtype=target.model.dtype)
    check_finite(net, folder)  # half precision holds no number above 65,504
    return net


def load_weights(module: nn.Module, folder: Path, target: TargetParts) -> None:
    """Put the weights of a drafter's folder into a module that was built before; `target` as of `net_of`.

    Raises:
        RequestError: the folder lacks weights, has others, or of other shapes, or damaged ones, or NaN among them.
    """
    module.load_state_dict(_checked(module, folder, target))


def check_finite(module: nn.Module, folder: Path) -> None:
    """Raise RequestError where weights that came from `folder` hold NaN or infinity."""
    _check_finite(module.state_dict(), folder)


def _checked(module: nn.Module, folder: Path, target: TargetParts | None) -> dict[str, Tensor]:
    """The weights of a folder, once they are found to be those of `module`."""
    path = folder / FILE
    others = published(folder)
    if others is None:
        weights = read_tensors(path, remedy=REMEDY)
    else:
        if target is None:
            raise ValueError("a published drafter is read beside its target")
        weights = weights_of(others, asdict(cast(Any, module).config), target)
    own = module.state_dict()
    odd = next(
        (name for name in sorted(own.keys() | weights.keys()) if _kind(own, name) != _kind(weights, name)), None
    )
    if odd is not None:
        there, here = (_shown(each, odd) for each in (weights, own))
        raise RequestError(
            f"{path} does not hold the weights that its config.json describes: {odd} is {there}, expected {here}; "
            f"{REMEDY}"
        )
    _check_finite(weights, folder)
    return weights


def _kind(tensors: Mapping[str, Tensor], name: str) -> tuple[Any, ...] | None:
    """Shape of a tensor, and whether it holds fractions; None where there is none."""
    tensor = tensors.get(name)
    return None if tensor is None else (tuple(tensor.shape), tensor.is_floating_point())


def _shown(tensors: Mapping[str, Tensor], name: str) -> str:
    tensor = tensors.get(name)
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_finite(tensors: Mapping[str, Tensor], folder: Path) -> None:
    name = not_finite(tensors)
    if name is not None:
        raise RequestError(
            f"the drafter {folder} cannot be used: {name} of its weights holds NaN or infinity; take an earlier "
            "checkpoint's drafter, or train it anew"
        )


def _check_sizes(net: Any, target: Backbone, folder: Path) -> None:
    """Raise RequestError where the net reads or writes other sizes than the target's."""
    hidden = int(target.model.config.get_text_config(decoder=True).hidden_size)
    for name, theirs in {"hidden": hidden, "vocabulary": target.vocabulary}.items():
        wide = getattr(net.config, "target_hidden", None) if name == "hidden" else None
        mine = wide or getattr(net.config, name, theirs)
        if mine != theirs:
            raise RequestError(
                f"{folder / 'config.json'} describes a drafter whose {name} is {mine}, and the target "
                f"{target.name!r} has {theirs}: {REMEDY}"
            )


def _check_vocabulary(net: Any, target: Backbone, folder: Path) -> None:
    """Raise RequestError where a drafted token would be none of the target's, or two of them the same."""
    ids_U, V = ids_of(net), target.vocabulary
    if ids_U is None:
        return
    table_V, known_V = getattr(net, "t2d", None), torch.zeros(V, dtype=torch.bool, device=ids_U.device)
    chosen = is_choice(ids_U, V)
    if chosen:
        known_V[ids_U] = True
    if not chosen or (table_V is not None and not torch.equal(known_V, table_V)):
        raise RequestError(
            f"{folder} holds a draft vocabulary (d2t{' and t2d' * (table_V is not None)}) that is no choice of the "
            f"target's {V:,} tokens, each once; {REMEDY}"
        )
