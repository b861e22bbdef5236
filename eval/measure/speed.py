"""The speed model: costs c and c_v measured here, what they predict, bytes that a forward reads.

Of a mixture of experts a verify call reads more, as more nodes reach more of its experts. A call of one token reads
the few experts that its router chooses in each layer; one of N nodes all that any node chooses. Where memory traffic
is the limit, a verify call is slower by that, and the speed model counts it: c_v is measured with real text, and mbsu
divides by the bytes of a verify call. Counted on consecutive tokens of the requests, which is what a chain that is
accepted holds; siblings in a tree may reach more. Letters: T tokens of a text, N nodes, k experts of a token.

Read next: `evaluate.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.cut import held_part
from ...decoding.backbone.experts import expert_count, experts_of
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.backbone.quantised import plain_parts
from ...decoding.tree.tree import chain
from ...drafters.model.adapters import idle_weights
from .timing import Call, recorded, times_as_long, turns

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


_IN_A_ROW = 2
"""Calls of a turn."""
_ROUNDS = {"rounds": 30, "within": 10.0, "at_least": 5}
"""Turns of every call, as many as fit into so many seconds, but some at the least: where others use the machine's
memory too, it takes many to know a cost within a few per cent."""


@dataclass(frozen=True)
class Costs:
    """Forward times relative to a one-token target call at the same context length."""

    target_call_seconds: float
    c: float | None
    """One draft step; None without a drafting model."""
    c_v: dict[int, float]
    """A verify call of the root and K more nodes, by K."""
    experts: Experts | None = None
    """Of a mixture of experts, what calls of several sizes read."""

    def verify(self, nodes: float) -> float:
        """A verify call of so many nodes, on a line between the measured ones."""
        measured = {1: 1.0, **{k + 1: cost for k, cost in self.c_v.items()}}
        return float(np.interp(nodes, sorted(measured), [measured[n] for n in sorted(measured)]))

    def predicted_speedup(self, tau: float, draft_length: int, *, draft_steps: int | None = None) -> float:
        """Of a chain of K tokens: tau / (c_v + steps c), with K steps unless told otherwise.

        Leviathan et al. 2023, theorem 3.8, with the verify cost measured.
        """
        steps = draft_length if draft_steps is None else draft_steps
        return tau / (self.c_v[draft_length] + steps * (self.c or 0.0))


@torch.inference_mode()
def measure_costs(
    target: Backbone,
    draft: Backbone | None,
    lengths: Sequence[int],
    *,
    context: int,
    rounds: int | None = None,
    rows: int = 1,
    text: Sequence[int] = (1,),
) -> Costs:
    """Forward times of `rows` rows behind `context` tokens, all variants in turn in every round.

    Calls of a variant follow each other, as in decoding: behind a call of other shapes the first one finds other
    weights in the cache.

    Args:
        rounds: None for as many as are worth their time.
        text: ids that the calls read, over and over; with one alone, all nodes reach the same experts of a mixture.
    """
    arms = {"target": one_call(target, 0, context, rows, text)}
    if draft is not None:
        # as far as it reads: behind its own context nothing is drafted
        arms["draft"] = one_call(draft, 0, min(context, draft.context - 1), rows, text)
    for length in lengths:
        arms[f"verify {length}"] = one_call(target, length, context, rows, text)
    how: dict[str, Any] = _ROUNDS if rounds is None else {"rounds": rounds}
    times = turns(arms, **how, device=target.device, repeats=_IN_A_ROW)
    base = times["target"]
    c = None if draft is None else times_as_long(times["draft"], base)
    return Costs(median(base), c, {n: times_as_long(times[f"verify {n}"], base) for n in lengths})


def one_call(backbone: Backbone, drafted: int, context: int, rows: int, text: Sequence[int]) -> Call:
    """A forward of the root and `drafted` nodes of each row behind `context` tokens, on CUDA replayed."""
    device = backbone.device
    kv_cache = KVCache(rows, context + drafted + 1, static=device.type == "cuda", rollback=drafted + 1)
    ids = [text[at % len(text)] % backbone.vocabulary for at in range(context + drafted + 1)]
    backbone.prefill([ids[:context]] * rows, kv_cache)
    tokens = torch.tensor([ids[context:]] * rows, device=device)
    lengths = torch.full((rows,), context, device=device)
    return recorded(lambda: backbone.forward(tokens, lengths, chain(drafted), kv_cache), device, insists=False)


def bytes_of(module: nn.Module, adapters: Collection[str] | None = None) -> int:
    """Bytes of weights that a forward reads; shared tensors count once.

    Of a table that is looked up and not multiplied by, a forward reads a row per token: it counts
    nothing. Quantised weights count as they are held, their scales included, and those that lie over
    processes whole. Of adapters those count that are in use, or the named ones.
    """
    unread = idle_weights(module, adapters)
    read = {id(each.weight) for each in module.modules() if isinstance(each, nn.Linear)}
    looked_up = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)} - read
    kept = (p for p in module.parameters() if id(p) not in looked_up | unread)
    seen = {held_part(t).data_ptr(): t.numel() * t.element_size() for p in kept for t in plain_parts(p)}
    return sum(seen.values())
