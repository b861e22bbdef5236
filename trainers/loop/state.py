"""The parts of a resumable checkpoint as tensors: weights, moments and averages, in full precision.

No random state is saved: every step seeds its generators from (seed, step, rank), and the row order
is a function of (seed, step), so the number of the step is enough. Read next: `snapshot.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as safetensors; tensors that share storage are written once per name."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers by name; a shared parameter under its first name."""
    # a shared parameter is frozen under each of its names
    each_name = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in each_name if not p.requires_grad}
    seen: set[int] = set()
    tensors = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in frozen or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        tensors[name] = tensor.detach()
    return tensors


def load_trainable(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy saved tensors into `module`; ValueError unless the names are those of `trainable`."""
    own = trainable(module)
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())[:5]
        raise ValueError(f"the checkpoint holds other weights than the model: {odd}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class SavedOptimizer(NamedTuple):
    """An optimiser's state as torch numbers it, parameters counted through its groups."""

    state: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]


def save_optimizers(folder: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Moments as tensors, the rest (step counts, hyper-parameters) as JSON."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    write_optimizers(folder, [SavedOptimizer(each["state"], each["param_groups"]) for each in states])


def write_optimizers(folder: Path, optimizers: Sequence[SavedOptimizer]) -> None:
    """`save_optimizers`, of states that were put together elsewhere."""
    for number, saved in enumerate(optimizers):
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for index, state in saved.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{index}.{key}"] = value
                else:
                    plain[f"{index}.{key}"] = value
        save_tensors(folder / f"optimizer-{number}.safetensors", tensors)
        content = {"plain": plain, "groups": saved.groups}
        (folder / f"optimizer-{number}.json").write_text(json.dumps(content))


def read_optimizer(folder: Path, number: int = 0) -> SavedOptimizer:
    """What `save_optimizers` wrote of one optimiser."""
    content = json.loads((folder / f"optimizer-{number}.json").read_text())
    state: dict[int, dict[str, Any]] = {}
    tensors = load_file(folder / f"optimizer-{number}.safetensors")
    for name, value in [*tensors.items(), *content["plain"].items()]:
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    return SavedOptimizer(state, content["groups"])


def load_optimizers(folder: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The inverse of `save_optimizers`, bit for bit."""
    for number, optimizer in enumerate(optimizers):
        saved = read_optimizer(folder, number)
        # which kernel steps is this machine's choice, not that of the one that saved
        own = [{key: group[key] for key in ("fused", "foreach") if key in group} for group in optimizer.param_groups]
        groups = [group | kernel for group, kernel in zip(saved.groups, own, strict=True)]
        optimizer.load_state_dict({"state": saved.state, "param_groups": groups})


class Average:
    """Exponential moving average of the trained weights (Polyak averaging), in fp32."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: t.float().clone() for name, t in trainable(module).items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from a saved average, on the device where the weights lie."""
        for name, mine in self.tensors.items():
            mine.copy_(saved[name])

    @torch.no_grad()
    def update(self, module: nn.Module, where: Tensor | None = None) -> None:
        """Move towards the module's weights; `where`: a scalar on their device that says whether to."""
        for name, tensor in trainable(module).items():
            mine = self.tensors[name]
            if where is None:
                mine.lerp_(tensor.float(), 1 - self.decay)
            else:
                mine.copy_(torch.where(where, mine.lerp(tensor.float(), 1 - self.decay), mine))

    @contextlib.contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """A context in which `module` has the averaged weights."""
        trained = {name: t.clone() for name, t in trainable(module).items()}
        load_trainable(module, self.tensors)
        try:
            yield
        finally:
            load_trainable(module, trained)
