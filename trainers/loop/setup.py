"""From plan to finished run: accelerator, resume decision, loop, outcome.

Shared by every method; `target.py` and `distill.py` call it with their objective.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ...decoding.devices import runs_on_cpu
from ...errors import EnvironmentFailure, RequestError
from ...storage import fault
from ..config import LoopConfig, OptimizerConfig
from . import checkpoint
from .compiled import check_compiler, check_no_deepspeed
from .loop import Loop, Plan, Probe, RunOutcome, TrainingRows
from .memory import keep_freed_memory
from .objective import Objective
from .order import group_count
from .progress import begin_trackers
from .sharding import leave_kernels_uncompiled

_log = logging.getLogger(__name__)


def make_accelerator(loop: LoopConfig, optimizer: OptimizerConfig, out: Path) -> Accelerator:
    """The accelerator of this run, checked against the recipe's batch."""
    on_cpu = runs_on_cpu()
    if on_cpu:
        keep_freed_memory()
        # otherwise DeepSpeed, where it is installed, guesses and warns
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    check_machine(loop, on_cpu=on_cpu)
    check_compiler(loop, on_cpu=on_cpu)
    precision = loop.precision_on(cpu=on_cpu)
    _check_no_fsdp()
    # the state is shared by all runs of a process, and an earlier one may have had another precision
    AcceleratorState._reset_state()
    wants_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if wants_deepspeed:
        check_no_deepspeed(loop)
    if wants_deepspeed and on_cpu:
        leave_kernels_uncompiled()
    accelerator = Accelerator(
        # with cpu=True accelerate leaves DeepSpeed out silently
        mixed_precision="no" if precision == "fp32" else precision,
        cpu=on_cpu and not wants_deepspeed,
        kwargs_handlers=_group_of(loop, on_cpu=on_cpu),
        log_with=list(loop.trackers) or None,
        project_dir=str(out),
    )
    micro_batches = accumulation(loop, accelerator.num_processes)
    kind = str(accelerator.distributed_type.value)
    if wants_deepspeed:
        kind += f" ZeRO-{_set_deepspeed(accelerator, loop, optimizer, micro_batches)}"
    if accelerator.num_processes > 1 or wants_deepspeed:
        _log.info("%d processes: %s", accelerator.num_processes, kind)
    if loop.trackers:
        begin_trackers(accelerator, loop.trackers, out)
    return accelerator


def _check_no_fsdp() -> None:
    """Raise RequestError for a launch that has accelerate shard what is trained."""
    asked = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config"}
    for variable, what in asked.items():
        if os.environ.get(variable, "").lower() in {"1", "true", "yes"}:
            raise RequestError(
                f"the launch asks for {what} ({variable}). On a CPU accelerate makes plain data parallelism of FSDP, "
                "or processes that add up no gradients, without a word; elsewhere checkpoints would hold shards. For "
                "a large target set target.sharding to fully_shard; for a large drafter launch with "
                "launch/configs/zero2.yaml or zero3.yaml"
            )


def _group_of(loop: LoopConfig, *, on_cpu: bool) -> list[Any]:
    """How several processes are joined, and how long one waits for another."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        # with a named backend a single process is taken for one of a group that was never started
        return []
    # accelerate takes a time that equals its own default for none given
    bound = timedelta(seconds=loop.stall_seconds, milliseconds=1)
    # without a named backend DeepSpeed on CPU treats every rank as the only one
    joined = InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=bound)
    return [joined, *_buckets_of(world)]


def _buckets_of(world: int) -> list[Any]:
    """DDP's buckets of gradients as its first step has them, where their order decides how sums are rounded.

    Behind its first step it orders them anew, unless it has to look for unused parameters. The sum of three numbers
    and more is rounded in the order of the buckets: the first step of a resumed run would differ in its last bits.
    """
    if world < 3:
        return []
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified in DDP constructor")
    return [DistributedDataParallelKwargs(find_unused_parameters=True)]


def check_machine(loop: LoopConfig, *, on_cpu: bool) -> None:
    """Check that this machine has the precision and the trackers of the recipe.

    Raises:
        RequestError: fp16 without a GPU. EnvironmentFailure: a tracker is not installed, which
            accelerate would leave out silently.
    """
    if loop.precision == "fp16" and on_cpu:
        raise RequestError("loop.precision is fp16, which needs a GPU (gradient scaling); use bf16 or fp32 here")
    installed = {str(getattr(each, "value", each)) for each in get_available_trackers()}
    missing = [name for name in loop.trackers if name not in installed]
    if missing:
        raise EnvironmentFailure(
            f"loop.trackers names {missing[0]}, which is not installed: pip install {missing[0]}, "
            "or leave it out (metrics.jsonl is always written)"
        )


def check_optimizer(optimizer: OptimizerConfig, *, where: str = "") -> None:
    """Raise RequestError for an optimiser that DeepSpeed does not support; `where` says what asks for DeepSpeed."""
    if optimizer.name != "adamw":
        raise RequestError(
            f"optimizer.name is {optimizer.name!r}{where}; DeepSpeed takes one optimiser: use adamw, or no DeepSpeed"
        )


def _set_deepspeed(accelerator: Accelerator, loop: LoopConfig, optimizer: OptimizerConfig, micro_batches: int) -> int:
    """Give DeepSpeed the recipe's batch, accumulation and clipping; returns the ZeRO stage."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        raise RequestError(
            "the launch asks for DeepSpeed, and ACCELERATE_USE_CPU makes accelerate leave it out; "
            "unset that variable, and on a machine without a GPU set DS_ACCELERATOR=cpu"
        )
    check_optimizer(optimizer)
    # else transformers shards every model while it is made, the frozen target too
    unset_hf_deepspeed_config()
    accelerator.gradient_accumulation_steps = micro_batches
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = loop.micro_rows
    plugin.deepspeed_config["gradient_accumulation_steps"] = micro_batches
    plugin.deepspeed_config["gradient_clipping"] = optimizer.clip
    return int(plugin.zero_stage)


def accumulation(loop: LoopConfig, processes: int) -> int:
    """Micro-batches per process and step; the recipe's batch must divide evenly."""
    groups = group_count(processes, loop.context_parallel)
    each = loop.micro_rows * groups
    if loop.batch_rows % each:
        what = "processes" if loop.context_parallel == 1 else f"groups of {loop.context_parallel} processes"
        raise RequestError(
            f"loop.batch_rows is {loop.batch_rows}, which is not a multiple of loop.micro_rows "
            f"({loop.micro_rows}) x {what} ({groups}) = {each}; "
            f"try --loop.batch_rows {max(1, round(loop.batch_rows / each)) * each}"
        )
    return loop.batch_rows // each


def make_deterministic(loop: LoopConfig) -> None:
    """Seed the initial weights and, if the recipe says so, forbid kernels that depend on timing.

    cuBLAS has read what it needs for that when `decoding/devices.py` was imported.
    """
    torch.manual_seed(loop.seed)
    if loop.deterministic:
        torch.use_deterministic_algorithms(True)


@contextmanager
def own_kernels() -> Iterator[None]:
    """A context of one run, behind which kernels are chosen as before: decoding would pay for nothing.

    cuDNN's attention is left out: the gradient that it makes beside a mask may be NaN (torch 2.11, pytorch#196678).
    Nor is memory filled with NaN before it is written, which deterministic kernels do by default: an operation more
    for nearly each of a step's.
    """
    deterministic, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    memory: Any = torch.utils.deterministic  # its one name is made when it is imported
    filled = memory.fill_uninitialized_memory
    torch.backends.cuda.enable_cudnn_sdp(False)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        memory.fill_uninitialized_memory = filled
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def resume_from(out: Path, resume: str) -> Path | None:
    """The checkpoint to resume from, by `auto` (newest complete, if any), `never`, or a path.

    Raises:
        RequestError: `never` in a folder with checkpoints, or a path without a complete one.
    """
    if resume == "never":
        if any((out / "checkpoints").glob("step-*")):
            raise RequestError(
                f"{out} holds checkpoints and --resume is never; use --resume auto to resume, or another --out"
            )
        return None
    if resume == "auto":
        return checkpoint.newest(out / "checkpoints")
    reason = fault(Path(resume))
    if reason is not None:
        raise RequestError(
            f"--resume {resume}: {reason}; expected a folder like RUN/checkpoints/step-00000100, or auto, or never"
        )
    return Path(resume)


def run_loop(
    objective: Objective,
    train: TrainingRows,
    validation: TrainingRows,
    plan: Plan,
    accelerator: Accelerator,
    *,
    out: Path,
    export_to: Path,
    probe: Probe | None,
    resume: str,
    by_validation: bool = False,
    probe_together: bool = False,
) -> RunOutcome:
    """Train to the last step and report how it ended. Arguments are those of `Loop`."""
    start = resume_from(out, resume)
    loop = Loop(
        objective,
        train,
        validation,
        plan,
        accelerator,
        out=out,
        export_to=export_to,
        probe=probe,
        by_validation=by_validation,
        probe_together=probe_together,
    )
    outcome = loop.run(start)
    if accelerator.trackers:
        accelerator.end_training()
    return outcome
