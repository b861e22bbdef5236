"""A frozen model that no process holds whole: the weights of its layers lie over several processes.

There are two ways. By layers, torch's `fully_shard` gathers one layer at a time while rows go through it. Each process
has rows of its own, so all processes make every forward pass together. By products (tensor parallelism), the processes
of a team compute their parts of every product of a layer, for the same rows, and add them up, by the plan that
`transformers` has for the model. In both ways embedding, last norm and output projection stay whole, because losses
and drafters read them. The layers are cut while they are shapes alone, and `transformers` then reads this process's
share of each weight from the files. Read next: `loading.py`, which asks here; `trainers/teacher/features.py`, where
the passes are kept equal in number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import EnvironmentFailure, RequestError
from .hidden_states import decoder_of, layer_count, layers_of
from .recurrence.scan import is_recurrent

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Cut:
    """How the weights of a target lie over processes; their group exists already."""

    team: int = 1
    """Processes that compute each product together (`target.tensor_parallel`); 1: layers are cut over all."""
    offload: bool = False
    """Keep the share in the host's memory, if layers are cut over all processes (`target.offload`)."""
    bound: timedelta | None = None
    """How long one process of a team waits for another (`loop.stall_seconds`); None: as long as torch does by default.
    Layers that are cut over all are waited for as long as their group, that of all processes, says."""

    def mesh(self, device: str) -> DeviceMesh:
        """The processes that hold the target together: this one's team, or all of them.

        Raises:
            RequestError: they are no whole number of teams.
        """
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        kind, world = torch.device(device).type, torch.distributed.get_world_size()
        if self.team == 1:
            return init_device_mesh(kind, (world,))
        teams(world, self.team)  # of which none may be left over
        # neighbours by rank; the groups that a mesh makes by itself know no bound
        group, _ = torch.distributed.new_subgroups(self.team, timeout=self.bound)
        return DeviceMesh.from_group(group, kind, mesh_dim_names=("part",))

    def apply(self, model: Any, mesh: DeviceMesh) -> None:
        """Cut the weights of every decoder layer, in place.

        Raises:
            RequestError: the layers are in no list, or of products: keep a state of the text, or do not divide.
        """
        if self.team == 1:
            _cut_layers(model, mesh, offload=self.offload)
        else:
            _cut_products(model, mesh)


def teams(processes: int, team: int) -> int:
    """How many teams of `team` processes there are.

    Raises:
        RequestError: one would be left over.
    """
    if processes % team:
        raise RequestError(
            f"target.tensor_parallel is {team}, and {processes} process{'es are' if processes > 1 else ' is'} no "
            f"multiple of it; launch {team * max(1, processes // team)} (accelerate launch --num_processes), or set "
            "--target.tensor_parallel 1"
        )
    return processes // team


def cut_class(whole: type[nn.Module], cut: Cut, mesh: DeviceMesh) -> type[Any]:
    """The class `whole`, whose models are cut as soon as they are made, before any weight is read."""

    def init(self: Any, *given: Any, **named: Any) -> None:
        whole.__init__(self, *given, **named)
        cut.apply(self, mesh)

    return type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})


def _cut_layers(model: Any, mesh: DeviceMesh, *, offload: bool) -> None:
    """Lay each layer over all processes."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    check_layers(model)
    decoder = decoder_of(model)
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for layer in layers_of(decoder, layer_count(model)):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    # the root of all gathering is the decoder, which training calls alone; what it holds itself stays whole
    outside = {each for each in decoder.parameters() if not _is_cut(each)}
    fully_shard(decoder, mesh=mesh, ignored_params=outside, offload_policy=policy)


def check_layers(model: Any) -> None:
    """Raise RequestError for a model whose layers' shares `transformers` would read wrongly.

    If it joins weights of a checkpoint, or splits one, along rows, it takes the share of each piece by itself, which
    is no share of the whole: it reads wrong numbers silently. Experts, merged along a dimension of their own, are read
    right.

    Args:
        model: in shapes alone is enough.
    """
    odd = next((name for each in _conversions(model) for name in _made_by(each, model)), None)
    if odd is not None:
        raise RequestError(
            f"target.sharding is fully_shard, and {type(model).__name__} makes {odd} of other weights than its "
            "checkpoint has, of which transformers reads wrong shares. Leave target.sharding, or have an engine "
            "compute the states (features.source)"
        )


def _conversions(model: Any) -> list[Any]:
    """The conversions of a checkpoint's weights that mix their rows, or may do so."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return [
        each
        for each in get_model_conversion_mapping(model)
        if any(not _keeps_rows(step) for step in getattr(each, "operations", ()))
    ]


def _keeps_rows(step: Any) -> bool:
    name = type(step).__name__
    return name == "MergeModulelist" or (name == "Concatenate" and step.dim != 0)


def _made_by(conversion: Any, model: Any) -> list[str]:
    """Weights of the decoder's layers that a conversion makes."""
    decoder = decoder_of(model)
    layers = layers_of(decoder, layer_count(model))
    ends = [re.sub(r"[\\^$]", "", pattern).rpartition("*")[2] for pattern in conversion.target_patterns]
    return sorted(
        {name for layer in layers for name, _ in layer.named_parameters() for end in ends if end in f".{name}"}
    )


def _cut_products(model: Any, mesh: DeviceMesh) -> None:
    """Lay the products of each layer over a team, by the plan of the model's own class."""
    check_team(model, mesh.size())
    found = metadata.version("transformers")
    older = EnvironmentFailure(
        f"target.tensor_parallel needs a newer transformers than {found}: pip install -U transformers"
    )
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise older from error
    if not hasattr(model, "_expand_parallel_plan"):
        raise older
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(_plan(model)))


def check_team(model: Any, team: int) -> None:
    """Raise RequestError for a model whose layers a team of so many processes cannot share.

    Args:
        model: in shapes alone is enough.
    """
    name, flag = type(model).__name__, f"target.tensor_parallel is {team}"
    other = "set --target.tensor_parallel 1 and --target.sharding fully_shard"
    if is_recurrent(decoder_of(model)):
        raise RequestError(
            f"{flag}, and {name} has recurrent layers, whose state is not divided here; set --target.tensor_parallel 1"
        )
    if not _plan(model):
        raise RequestError(f"{flag}, and transformers has no plan of how {name} is divided; {other}")
    config = model.config.get_text_config(decoder=True)
    heads = {name: int(getattr(config, name, None) or 0) for name in ("num_attention_heads", "num_key_value_heads")}
    odd = next((name for name, count in heads.items() if count % team), None)
    if odd is not None:
        raise RequestError(
            f"{flag}, which does not divide the target's {odd}, {heads[odd]}; take a divisor, or {other}"
        )


def _plan(model: Any) -> dict[str, str]:
    """How `transformers` divides a layer's products; what losses and drafters read is left out of it."""
    ends = ("embed_tokens", "lm_head")
    return {name: how for name, how in (model.tp_plan or {}).items() if name.rpartition(".")[2] not in ends}


def is_cut(model: nn.Module) -> bool:
    """Whether no process holds all of it."""
    return any(map(_is_cut, model.parameters()))


def team_of(model: nn.Module) -> torch.distributed.ProcessGroup | None:
    """The processes that compute each product of its layers together; None if each makes passes of its own rows."""
    from torch.distributed.fsdp import FSDPModule

    parameters: Any = model.parameters()
    cut = next(filter(_is_cut, parameters), None)
    if cut is None or any(isinstance(each, FSDPModule) for each in model.modules()):
        return None
    group: torch.distributed.ProcessGroup = cut.device_mesh.get_group()
    return group


def gathers_layers(model: nn.Module) -> bool:
    """Whether all processes make each pass together, each with rows of its own."""
    return is_cut(model) and team_of(model) is None


def passes_of_others(model: nn.Module, own: int) -> int:
    """How many more passes another process will make than this one's `own`; 0 where each makes them by itself.

    Processes whose layers are cut over all make their passes together, and a process that makes fewer would let the
    rest wait. All processes ask this before the first pass.
    """
    if not gathers_layers(model):
        return 0
    parameters: Any = model.parameters()
    mesh = next(filter(_is_cut, parameters)).device_mesh
    most = torch.tensor(own, device=mesh.device_type)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    return int(most) - own


def check_alike(written: Sequence[Sequence[int]], team: torch.distributed.ProcessGroup) -> None:
    """Raise EnvironmentFailure where the processes of a team have not decoded the same tokens.

    They draw and add up the same numbers, so the tokens agree, unless a machine's sums differ by process.
    """
    from torch.distributed import all_gather_object, get_world_size

    found: list[Any] = [None] * get_world_size(team)
    all_gather_object(found, [list(row) for row in written], group=team)
    if any(each != found[0] for each in found):
        raise EnvironmentFailure(
            "the processes that hold the target together have decoded different tokens: their sums differ, so what "
            "they decode is not one text. Decode where the target is whole (--target.tensor_parallel 1)"
        )


def whole(weight: Tensor) -> Tensor:
    """A weight as in an uncut model; all processes have to ask for the same weight together."""
    cut: Any = weight
    gathered: Tensor = cut.full_tensor() if _is_cut(weight) else weight
    return gathered


def held_part(weight: Tensor) -> Tensor:
    """The part of a weight that lies in this process: all of it, if it is not cut."""
    cut: Any = weight
    part: Tensor = cut.to_local() if _is_cut(weight) else weight
    return part


def held_numbers(model: nn.Module) -> int:
    """How many numbers of the weights this process holds; tied ones count once."""
    return sum(held_part(each).numel() for each in model.parameters())


def move_whole_parts(model: nn.Module, device: str) -> None:
    """Put the uncut parts of an offloaded target on a device; its shares stay in the host's memory."""
    for weight in model.parameters():
        if not _is_cut(weight):
            weight.data = weight.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _is_cut(weight: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)
