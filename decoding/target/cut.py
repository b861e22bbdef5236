"""A frozen model that no process holds whole: the weights of its layers are cut over all processes.

torch's `fully_shard` gathers one layer at a time while rows go through it, each process's own rows, so a forward
pass is one that all processes make together. Embedding, last norm and output projection stay whole: losses and
drafters read them. The layers are cut while they are shapes alone, and `transformers` then reads this process's
share of each weight from the files. Read next: `loading.py`, which asks here;
`trainers/teacher/features.py`, where the passes are kept equal in number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import RequestError
from .hidden_states import decoder_of, layer_count, layers_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of_all(device: str) -> DeviceMesh:
    """All processes of the run in one line; their group has to be joined already."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))


def cut_class(whole: type[nn.Module], mesh: DeviceMesh) -> type[Any]:
    """`whole` whose models are cut as soon as they are made, in front of any weight."""

    def init(self: Any, *given: Any, **named: Any) -> None:
        whole.__init__(self, *given, **named)
        cut_layers(self, mesh)

    return type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})


def cut_layers(model: Any, mesh: DeviceMesh) -> None:
    """Cut the weights of every decoder layer over the processes of `mesh`, in place.

    Raises:
        RequestError: the layers are in no list, or keep a state of the text, for which documents go through
            one by one and processes would make unequal numbers of passes.
    """
    from torch.distributed.fsdp import fully_shard

    from .recurrence.scan import is_recurrent

    decoder = decoder_of(model)
    if is_recurrent(decoder):
        raise RequestError(
            f"target.sharding is fully_shard, and {type(model).__name__} has recurrent layers, which run document by "
            "document: processes have different numbers of these, and a cut target needs equal passes of all. Leave "
            "target.sharding, or have an engine compute the states (features.source)"
        )
    for layer in layers_of(decoder, layer_count(model)):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # the root of all gathering is the decoder, which training calls alone; what it holds itself stays whole
    fully_shard(decoder, mesh=mesh, ignored_params={each for each in decoder.parameters() if not _is_cut(each)})


def is_cut(model: nn.Module) -> bool:
    """Whether no process holds all of it."""
    return any(map(_is_cut, model.parameters()))


def whole(weight: Tensor) -> Tensor:
    """A weight as it is in an uncut model; all processes have to ask for the same one together."""
    cut: Any = weight
    gathered: Tensor = cut.full_tensor() if _is_cut(weight) else weight
    return gathered


def held_numbers(model: nn.Module) -> int:
    """How many numbers of the weights this process holds; tied ones count once."""
    parameters: Any = model.parameters()
    return sum((each.to_local() if _is_cut(each) else each).numel() for each in parameters)


def _is_cut(weight: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)
