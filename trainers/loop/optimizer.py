"""Optimisers and the learning-rate schedule, from the recipe's section, and steps that they leave out by themselves.

Read at once, whether a step was finite would make the host wait for the whole step, and the next one could not be
launched meanwhile. AdamW's fused form takes a flag that lies on the device, and changes neither weight nor moment
where it is set; Muon is given one here. So the flags are kept there, and read together with the next report. Read
next: `step.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...decoding.devices import multiplies_bf16
from ..config import OptimizerConfig


@dataclass(frozen=True)
class Pace:
    """How a parameter's learning rate differs from the recipe's."""

    factor: float = 1.0
    """The rate is multiplied by this."""
    first_step: int = 0
    """The rate is 0 before this step, and begins with a warm-up of its own."""


@runtime_checkable
class Paced(Protocol):
    """A module whose parameters have different learning rates."""

    def pace(self, name: str) -> Pace:
        """The pace of the parameter of that name in the module."""


def build(module: nn.Module, config: OptimizerConfig, *, fused: bool = False) -> list[torch.optim.Optimizer]:
    """One AdamW, or Muon for the hidden matrices and AdamW for everything else.

    `fused`: AdamW in one kernel, which leaves out a step by a flag on the device; other bits than the plain one's.

    Muon (Jordan 2024) is torch's own; `match_rms_adamw` (Liu et al. 2025) lets both share `lr`.
    """
    embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)} | {
        id(p) for name, p in module.named_parameters() if "head" in name
    }
    matrices, hidden, vectors = _Groups(module), _Groups(module), _Groups(module)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            vectors.add(name, parameter)
        elif config.name == "muon" and parameter.ndim == 2 and id(parameter) not in embeddings:
            hidden.add(name, parameter)
        else:
            matrices.add(name, parameter)
    decay = config.weight_decay
    adamw = torch.optim.AdamW(
        [*matrices.listed(weight_decay=decay), *vectors.listed(weight_decay=0.0)],
        lr=config.lr,
        betas=config.betas,
        fused=fused,
    )
    groups = hidden.listed(weight_decay=decay)
    if not groups:
        return [adamw]
    emulated = not fused and not multiplies_bf16()  # the parameters may still lie on the host that they leave
    muon = MuonInFp32 if emulated else MuonByFlag
    return [adamw, muon(groups, lr=config.lr, adjust_lr_fn="match_rms_adamw")]


def fuses(device: torch.device) -> bool:
    """Whether AdamW takes its fused form there: where the host would wait for the device if it read each step."""
    return device.type == "cuda"


class MuonByFlag(torch.optim.Muon):
    """Torch's own, which leaves out a step by a flag on the device too, as AdamW's fused form does.

    Then it goes matrix by matrix: what one was and what its momentum was are kept meanwhile, and put back by the flag.
    """

    found_inf: Tensor | None = None
    """Torch's name for the flag: above 0, the step changes nothing. None: it is taken in any case."""

    def step(self, closure: Any = None) -> Any:
        if self.found_inf is None:
            return super().step(closure)
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    self.param_groups = [{**group, "params": [parameter]}]
                    self._step_by_flag(parameter, self.found_inf > 0)
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _step_by_flag(self, parameter: Tensor, left_out: Tensor) -> None:
        if parameter.grad is None:
            return
        momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
        held = [(each, each.clone()) for each in (parameter, momentum)]
        super().step()
        for each, before in held:
            each.copy_(torch.where(left_out, before, each))


class MuonInFp32(MuonByFlag):
    """The same without a rounding: torch's own has an update in bf16 before it makes it orthogonal.

    A CPU without instructions for bf16 takes far longer for its products than for those of fp32, and most of a small
    drafter's step.
    """

    def step(self, closure: Any = None) -> Any:
        with _NotRounded():
            return super().step(closure)


class _NotRounded(TorchFunctionMode):
    """Where numbers would be rounded to bf16 they are copied."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class _Groups:
    """Parameters of one kind, grouped by pace."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_pace: dict[Pace, list[nn.Parameter]] = defaultdict(list)

    def add(self, name: str, parameter: nn.Parameter) -> None:
        pace = self._module.pace(name) if isinstance(self._module, Paced) else Pace()
        self._by_pace[pace].append(parameter)

    def listed(self, *, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser; it keeps the entries of `Pace` for `group_rate`."""
        return [{"params": each, "weight_decay": weight_decay, **asdict(pace)} for pace, each in self._by_pace.items()]


def rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of `step` (from 0) of `steps`: a pure function, so nothing has to be saved."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "linear":
        share = 1 - done
    elif config.schedule == "wsd":
        share = min(1.0, (1 - done) / config.decay_share)
    else:
        share = 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.final_share + (1 - config.final_share) * share)


def group_rate(group: dict[str, Any], step: int, lr: float, config: OptimizerConfig) -> float:
    """The learning rate of a group of `build`: `rate` times its factor, 0 before its first step."""
    first = group["first_step"]
    if step < first:
        return 0.0
    begun = step - first + 1
    share = min(1.0, begun / config.warmup_steps) if first and config.warmup_steps else 1.0
    return float(lr * group["factor"] * share)


# ---- steps that are left out ------------------------------------------------------------------


class LeftOut(NamedTuple):
    """What was left out between two readings."""

    left_out: int
    row: int
    """Steps in a row that end with the last one."""
    longest_row: int


class Unread:
    """Flags of steps, on the device."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []

    def note(self, is_finite: Tensor) -> None:
        """Keep a step's flag; `is_finite`: bool, a scalar on the device."""
        self._flags.append(is_finite)

    def read(self, row: int) -> LeftOut | None:
        """What was left out since the last reading, by one copy to the host; None where no step was taken.

        Args:
            row: steps in a row that were left out up to the last reading.
        """
        if not self._flags:
            return None
        flags = torch.stack(self._flags).tolist()
        self._flags.clear()
        longest = 0
        for is_finite in flags:
            row = 0 if is_finite else row + 1
            longest = max(longest, row)
        return LeftOut(flags.count(False), row, longest)


def leaves_out_by_itself(optimizers: Sequence[Any], device: torch.device) -> bool:
    """Whether reading a device costs something, and every optimiser leaves a step out without the host."""
    own = [each.optimizer for each in optimizers]
    return device.type != "cpu" and all(isinstance(each, MuonByFlag) or each.defaults.get("fused") for each in own)
