"""The width of a draft cut from its target: what is least active on held-out text is removed.

Minitron (Muralidharan et al. 2024, arXiv 2407.14679): feed-forward units, key-value groups with
their query heads, and hidden channels are ranked by the mean size of their activations in one pass.
Norms are scaled for the channels that are gone: a root mean square over fewer channels is another
number. If what was cut was zero, the draft is the target. Read next: `pruning/sizes.py`.

Shapes: R rows, S tokens, H hidden channels, I feed-forward units, Q heads, G groups, D head size;
a draft's own sizes carry a dash in comments (H').
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...decoding.backbone.layers import with_layers
from ..loop.objective import Batch
from ..packed.passes import hidden_states

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass
class Activity:
    """Sums over all tokens, by the name of the module that reads or writes the activations."""

    units: dict[str, Tensor] = field(default_factory=dict)
    """Layer -> |activation| of its units, fp64 [I]."""
    heads: dict[str, Tensor] = field(default_factory=dict)
    """Layer -> norms of its heads' outputs, fp64 [Q]."""
    energy: dict[str, Tensor] = field(default_factory=dict)
    """Norm -> squares of the channels that it reads, fp64 [H]."""
    channels_H: Tensor = field(default_factory=lambda: torch.zeros(()))
    """|output| of all norms together, fp64."""


@dataclass(frozen=True)
class KeptParts:
    """What is kept of one layer: indices in the target, ascending in each group."""

    units: Tensor
    groups: Tensor
    heads: Tensor


def cut_width(
    target: PreTrainedModel, config: PretrainedConfig, layers: Sequence[int], batches: Sequence[Batch]
) -> PreTrainedModel:
    """A model of `config` in fp32, its weights those of the target's `layers`, cut to its sizes."""
    cut: Any = config
    view = with_layers(target, layers)
    activity = measure(view, batches, cut.head_dim)
    channels = _largest(activity.channels_H, cut.hidden_size)
    groups = target.config.num_key_value_heads
    kept = [_kept(activity, f"{at}", cut, groups) for at in range(len(layers))]
    weights = {
        name: _cut(name, weight.float(), channels, kept, cut.head_dim) for name, weight in view.state_dict().items()
    }
    for name, energy_H in activity.energy.items():
        weights[f"model.{name}.weight"] *= _scale(energy_H, channels)
    cut._attn_implementation = "sdpa"
    cut.dtype = torch.float32
    draft: Any = type(target)(cut)
    draft.load_state_dict(weights)
    return draft


@torch.no_grad()
def measure(model: PreTrainedModel, batches: Sequence[Batch], head: int) -> Activity:
    """One pass over the rows; padding does not count."""
    activity = Activity()
    for batch in batches:
        with _watched(model, activity, batch["documents"] >= 0, head):
            hidden_states(model, batch)
    return activity


@contextmanager
def _watched(model: Any, activity: Activity, real_RS: Tensor, head: int) -> Iterator[None]:
    def add(into: dict[str, Tensor], name: str, size_RSX: Tensor) -> None:
        sum_X = size_RSX[real_RS].double().sum(0)
        into[name] = into.get(name, torch.zeros_like(sum_X)) + sum_X

    def units(name: str) -> Callable[..., None]:
        return lambda _module, inputs: add(activity.units, name, inputs[0].abs())

    def heads(name: str) -> Callable[..., None]:
        def hook(_module: Any, inputs: Any) -> None:
            each_RSQD = inputs[0].unflatten(-1, (-1, head))
            add(activity.heads, name, each_RSQD.float().norm(dim=-1))

        return hook

    def norm(name: str) -> Callable[..., None]:
        def hook(_module: Any, inputs: Any, output: Tensor) -> None:
            add(activity.energy, name, inputs[0].float().square())
            sum_H = output[real_RS].abs().double().sum(0)
            activity.channels_H = activity.channels_H.to(sum_H.device) + sum_H

        return hook

    handles = []
    for at, layer in enumerate(model.model.layers):
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(units(f"{at}")))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(heads(f"{at}")))
        for part in ("input_layernorm", "post_attention_layernorm"):
            handles.append(getattr(layer, part).register_forward_hook(norm(f"layers.{at}.{part}")))
    handles.append(model.model.norm.register_forward_hook(norm("norm")))
    try:
        yield
    finally:  # the modules are the target's own, which is used for decoding afterwards
        for handle in handles:
            handle.remove()


def _kept(activity: Activity, layer: str, config: Any, groups: int) -> KeptParts:
    """The most active units and groups, and in each group the most active of its heads."""
    heads_GX = activity.heads[layer].view(groups, -1)
    chosen = _largest(heads_GX.sum(1), config.num_key_value_heads)
    each = config.num_attention_heads // config.num_key_value_heads
    heads = [_largest(heads_GX[group], each) + group * heads_GX.shape[1] for group in chosen]
    units = _largest(activity.units[layer], config.intermediate_size)
    return KeptParts(units, chosen, torch.cat(heads))


def _largest(scores_X: Tensor, count: int) -> Tensor:
    """The numbers of the largest scores, ascending; of equal ones the first."""
    return scores_X.sort(descending=True, stable=True).indices[:count].sort().values


def _cut(name: str, weight: Tensor, channels: Tensor, kept: Sequence[KeptParts], head: int) -> Tensor:
    """One weight of the target: rows are what it writes, columns what it reads."""
    parts = name.split(".")
    module = parts[-2]
    if parts[1] != "layers":  # embedding, last norm, projection: hidden channels come last
        return weight.index_select(-1, channels)
    if module in ("q_norm", "k_norm"):
        return weight
    mine = kept[int(parts[2])]
    if module.endswith("layernorm"):
        return weight.index_select(0, channels)
    heads, groups = _numbers(mine.heads, head), _numbers(mine.groups, head)
    units = mine.units
    rows = {
        "q_proj": heads,
        "k_proj": groups,
        "v_proj": groups,
        "o_proj": channels,
        "gate_proj": units,
        "up_proj": units,
        "down_proj": channels,
    }[module]
    columns = {"o_proj": heads, "down_proj": units}.get(module, channels)
    written = weight.index_select(0, rows)
    return written if parts[-1] == "bias" else written.index_select(1, columns)


def _numbers(heads: Tensor, size: int) -> Tensor:
    """Rows of a projection that belong to the heads."""
    return (heads[:, None] * size + torch.arange(size, device=heads.device)).flatten()


def _scale(energy_H: Tensor, channels: Tensor) -> Tensor:
    """Factor for a norm's weight that keeps x_i / rms(x), on the average, what it was.

    rms'^2 / rms^2 = (kept / H') / (all / H), by the squares that the norm reads.
    """
    whole = energy_H.sum()
    share = energy_H[channels].sum() / whole if whole > 0 else torch.ones_like(whole)
    return (share * len(energy_H) / len(channels)).sqrt().float()
