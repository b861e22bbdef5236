"""How much of a mixture of experts a verify call reads: more nodes reach more of its experts.

A call of one token reads the few experts that its router chooses in each layer; one of N nodes all that any node
chooses. Where memory traffic is the limit, a verify call is slower by that, and the speed model counts it: c_v is
measured with real text, and mbsu divides by the bytes of a verify call. Counted on consecutive tokens of the
requests, which is what a chain that is accepted holds; siblings in a tree may reach more. Read next: `../speed.py`.

Letters: T tokens of a text, N nodes, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....decoding.backbone.backbone import Backbone
from ....decoding.backbone.experts import expert_count, experts_of
from ....decoding.backbone.quantised import plain_parts
from ..speed import bytes_of

_TOKENS = 256
"""Of the text that are looked at."""


@dataclass(frozen=True)
class Experts:
    """What calls of several sizes read of a model with experts."""

    of: float
    """Experts of a layer; the mean over layers."""
    read: dict[int, float]
    """Distinct experts that a call reads in a layer, by its nodes; the mean over layers and places in the text."""
    call_bytes: dict[int, float]
    """Bytes of weights that it reads in all, by its nodes."""

    def growth(self, nodes: float) -> float:
        """Bytes of a call of so many nodes against one of one token, on a line between the measured ones."""
        sizes = sorted(self.call_bytes)
        return float(np.interp(nodes, sizes, [self.call_bytes[n] for n in sizes])) / self.call_bytes[1]

    def to_dict(self) -> dict[str, Any]:
        """As `target.experts` of `results.json`."""
        return {
            "of": self.of,
            "read": {str(n): count for n, count in self.read.items()},
            "call_bytes": {str(n): count for n, count in self.call_bytes.items()},
        }


@torch.inference_mode()
def experts_read(target: Backbone, text: Sequence[int], nodes: Sequence[int]) -> Experts | None:
    """Send `text` through the target once, and count over every place in it; None for a model without experts.

    Args:
        text: ids; the first 256 are taken.
        nodes: sizes of calls; one token is always among them, and none is larger than the text.
    """
    parts = dict(experts_of(target.model))
    if not parts:
        return None
    ids_T = torch.tensor(list(text)[:_TOKENS], device=target.device)
    chosen = _chosen(target, parts, ids_T)
    sizes = sorted({1, *(min(each, len(ids_T)) for each in nodes)})
    totals = {name: float(expert_count(part)) for name, part in parts.items()}
    weights = {name: _bytes(part) for name, part in parts.items()}
    dense = bytes_of(target.model) - sum(weights.values())
    read = {n: {name: _distinct(chosen[name], n, totals[name]) for name in parts} for n in sizes}
    return Experts(
        of=float(np.mean([*totals.values()])),
        read={n: float(np.mean([*each.values()])) for n, each in read.items()},
        call_bytes={n: dense + sum(weights[m] * each[m] / totals[m] for m in parts) for n, each in read.items()},
    )


def _bytes(part: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for each in part.parameters() for t in plain_parts(each))


def _chosen(target: Backbone, parts: dict[str, nn.Module], ids_T: Tensor) -> dict[str, Tensor | None]:
    """The experts [T, k] of each token, by layer; None where the layer is given no choice and computes all."""
    chosen: dict[str, Tensor | None] = dict.fromkeys(parts)

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            chosen[name] = next((each for each in given if not each.is_floating_point()), None)

        return hook

    hooks = [part.register_forward_pre_hook(watch(name), with_kwargs=True) for name, part in parts.items()]
    try:
        target.model(input_ids=ids_T[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return chosen


def _distinct(chosen_Tk: Tensor | None, nodes: int, of: float) -> float:
    """Distinct experts of `nodes` tokens in a row, the mean over all places."""
    if chosen_Tk is None:
        return of
    windows = chosen_Tk.flatten(1).unfold(0, nodes, 1).flatten(1).sort(-1).values
    return float(1 + (windows.diff(dim=-1) != 0).sum(-1).float().mean())
