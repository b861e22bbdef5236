"""What DeepSpeed needs of the loop, and weights that ZeRO-3 shards gathered for decoding and export.

With ZeRO-3 a parameter of the trained module is an empty tensor between its uses. Decoding and
export need ordinary weights on one process, without DeepSpeed's hooks. Read next: `loop.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...errors import RequestError
from .state import SavedOptimizer, trainable

_BUCKET = 500_000_000  # DeepSpeed's own default
DEEPSPEED_FOLDER = "deepspeed"
"""Of a checkpoint: DeepSpeed's own files."""


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed holds the weights and takes the optimiser's steps."""
    return accelerator.state.deepspeed_plugin is not None


def has_stepped(engine: Any) -> bool:
    """Whether DeepSpeed's last step changed the weights; it leaves out one whose gradient is not finite."""
    return bool(engine.was_step_applied())


def visible_to_deepspeed(loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
    """The loss, whose gradient is not finite where a value is not.

    DeepSpeed updates inside of the backward pass, and leaves out a step by its gradient alone. Of values
    that are finite the factor is 1, which changes no bit.
    """
    finite = torch.stack([torch.isfinite(each.detach()).all() for each in (loss, *terms.values())]).all()
    return loss * torch.where(finite, 1.0, torch.nan)


def without_padding(piece: Tensor, weight: Any) -> Tensor:
    """Those numbers of this process's piece that are the weight's. Pieces are alike in size, and what lies behind the
    last number is memory as DeepSpeed found it, non-finite as often as not."""
    begin = torch.distributed.get_rank(weight.ds_process_group) * piece.numel()
    return piece.view(-1)[: max(int(weight.ds_numel) - begin, 0)]


def held_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of what this process holds of the trained weights: its copy or piece, and that in fp32."""
    from deepspeed.utils import safe_get_local_fp32_param

    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            continue
        if hasattr(weight, "ds_tensor"):  # ZeRO-3
            for piece in (weight.ds_tensor, safe_get_local_fp32_param(weight)):
                yield name, without_padding(piece.detach(), weight)
            continue
        yield name, weight.detach()
        piece = getattr(weight, "_hp_mapping", None)
        if piece is not None:  # none of it is this process's
            yield name, piece.get_hp_fragment().detach()


def whole_optimizer(engine: Any) -> Any | None:
    """DeepSpeed's optimiser of ZeRO-1 or ZeRO-2, whose pieces can be put together; None under ZeRO-3."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    zero = engine.optimizer
    return zero if isinstance(zero, DeepSpeedZeroOptimizer) else None


def put_together(zero: Any, module: nn.Module) -> tuple[dict[str, Tensor], SavedOptimizer]:
    """All trained weights in fp32 and the optimiser's state, as a run without DeepSpeed holds them; on the CPU.

    All processes have to call it together; each piece is summed over them.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    weights = {name: each.cpu() for name, each in trainable(module).items()}
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            weights[name] = safe_get_full_fp32_param(weight).cpu()
    _link(zero)
    moments: dict[int, dict[str, Any]] = {}
    groups = []
    for group, piece, params in _groups(zero):
        first = len(moments)
        known = zero.optimizer.state.get(piece, {})  # nothing in front of the first step
        for index, weight in enumerate(params, first):
            moments[index] = {
                name: deepcopy(value) if name == "step" else safe_get_full_optimizer_state(weight, name).cpu()
                for name, value in known.items()
            }
        values = {name: value for name, value in group.items() if name != "params"}
        groups.append(values | {"params": list(range(first, len(moments)))})
    return weights, SavedOptimizer(moments, groups)


def take_apart(zero: Any, module: nn.Module, weights: Mapping[str, Tensor], saved: SavedOptimizer) -> None:
    """The inverse of `put_together`, for any number of processes: each keeps its pieces."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    for name, weight in module.named_parameters():
        if weight.requires_grad:
            safe_set_full_fp32_param(weight, weights[name].float())
    zero.update_lp_params()
    first = 0
    for group, piece, params in _groups(zero):
        known = saved.state.get(first, {})
        state = zero.optimizer.state.setdefault(piece, {})
        for name, value in known.items():
            if name != "step":
                state.setdefault(name, torch.zeros_like(piece))
                continue
            # where torch keeps it: on the device for kernels that read it there
            there = piece.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            state["step"] = value.clone().to(there) if isinstance(value, Tensor) else value
        first += len(params)
    if not any(saved.state.values()):
        return
    _link(zero)
    for index, weight in enumerate(weight for _, _, params in _groups(zero) for weight in params):
        for name, value in saved.state[index].items():
            if name != "step":
                safe_set_full_optimizer_state(weight, value, name)


def _link(zero: Any) -> None:
    """Let each weight know its part of the state.

    DeepSpeed does so once, behind the first step of its first group, when the others have no state yet.
    """
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def _groups(zero: Any) -> Iterator[tuple[dict[str, Any], Tensor, list[nn.Parameter]]]:
    """Each group of the optimiser: its values, this process's flat piece, and its parameters."""
    return zip(zero.optimizer.param_groups, zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)


def fit_buckets(accelerator: Accelerator, module: nn.Module) -> None:
    """Make DeepSpeed's buckets no larger than what is trained, unless a configuration sets their size.

    By default each holds 5e8 numbers, 2 GB in fp32, even for a small model.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return
    zero = plugin.deepspeed_config["zero_optimization"]
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    trained += trained % 2  # ZeRO-2 refuses an odd number
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero.get(name, "auto") == "auto":
            zero[name] = min(_BUCKET, max(2, trained))


def leave_kernels_uncompiled() -> None:
    """On CPUs, keep DeepSpeed from compiling collectives that only its inference uses.

    Compiling needs a compiler, and a minute at the first start of every environment.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def is_sharded(module: nn.Module) -> bool:
    """Whether ZeRO-3 holds the parameters."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def check_no_average(decay: float | None) -> None:
    """Raise RequestError for a moving average of sharded weights."""
    if decay is not None:
        raise RequestError("loop.ema is set, but ZeRO-3 shards the weights; use ZeRO-2 or less")


def gathered(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """A context in which every process has whole parameters; all processes must enter together."""
    if not is_sharded(module):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(module.parameters()))


def standalone(model: nn.Module) -> nn.Module:
    """`model`, or its copy without DeepSpeed's hooks. Call it inside `gathered`."""
    if not is_sharded(model):
        return model
    source: Any = model
    with torch.device("meta"):
        copy = type(source)(source.config)
    copy.to_empty(device=next(source.parameters()).device)
    if hasattr(copy, "tie_weights"):  # what was one weight has become two
        copy.tie_weights()
    copy.load_state_dict({name: t.detach().clone() for name, t in source.state_dict().items()})
    # buffers that are not saved (rotary frequencies) were made empty
    for (_, mine), (_, theirs) in zip(copy.named_buffers(), source.named_buffers(), strict=True):
        mine.copy_(theirs)
    return copy.eval()


def check_whole(folder: Path) -> None:
    """Raise RequestError for a checkpoint in DeepSpeed's pieces, which a run without it cannot read."""
    if in_pieces(folder):
        raise RequestError(
            f"{folder} was written under DeepSpeed ({_pieces(folder)} processes), and this run is without it; "
            "launch with the same configuration (launch/configs/zero2.yaml or zero3.yaml) to go on"
        )


def check_pieces(folder: Path, processes: int) -> None:
    """Raise RequestError for a checkpoint without DeepSpeed's state, or of another number of processes.

    DeepSpeed itself would go on without weights, silently, where it finds none.
    """
    if not in_pieces(folder):
        raise RequestError(
            f"{folder} was written without DeepSpeed, and this run is under it; launch as it was launched "
            "to go on, or begin in another --out"
        )
    if (pieces := _pieces(folder)) != processes:
        raise RequestError(
            f"{folder} holds DeepSpeed's state in {pieces} pieces, and this run has {processes} processes. ZeRO-3 "
            "cuts each weight over its processes and cannot put other pieces together, as ZeRO-2 does: launch with "
            f"--num_processes {pieces} to go on"
        )


def in_pieces(folder: Path) -> bool:
    """Whether a checkpoint holds DeepSpeed's own files."""
    return (folder / DEEPSPEED_FOLDER).is_dir()


def _pieces(folder: Path) -> int:
    """How many processes hold a piece of the optimiser's state."""
    return len([*(folder / DEEPSPEED_FOLDER).glob("*_optim_states.pt")])
