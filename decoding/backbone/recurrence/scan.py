"""Recurrent layers under a tree: every node continues from its parent's state, and its own is kept.

The families of `transformers` compute many tokens by a scan that hands out the last state alone. While a tree is
verified, that scan is replaced by the family's own function for one token, node by node, each on the state of its
parent. Projections, norms and everything else still run once for all nodes, so a verify call reads no weight twice,
and a plain call of one token computes the same numbers. A convolution sees the inputs of a node's own path. Prompts
run through the family's own scan. Read next: `recurrent.py`, where the states are kept; `../backbone.py`.

Shapes: B rows, N nodes, C channels of a convolution, K its width, G groups, H heads, P head size, S state size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....errors import RequestError

if TYPE_CHECKING:
    from ...tree.tree import AnyTree, Nodes
    from ..kv_cache import KVCache

STATELESS = {"moe", "mlp"}
"""Layer types that mix no tokens."""
FAMILIES = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "zamba2",
)
"""The folders of `transformers.models` whose recurrent layers are tested here."""
_MODELING = {f"transformers.models.{family}.modeling_{family}" for family in FAMILIES}
_CONVOLUTION = "causal_conv1d_fn"
_NO_LIMIT = (0.0, float("inf"))


class _Step:
    """The forward of one layer: states of the nodes, as far as they are known."""

    def __init__(self, kv_cache: KVCache, nodes: Nodes, like: Tensor) -> None:
        """`like`: [B, ...], shaped as a state."""
        first_B = kv_cache.state_before(like)
        N = nodes.parents_BN.shape[1]
        self._rows_B = torch.arange(len(first_B), device=first_B.device)
        self._parents_BN = nodes.parents_BN
        self._states = first_B.new_empty(len(first_B), N + 1, *first_B.shape[1:])
        self._states[:, 0] = first_B

    def parent_state(self, node: int) -> Tensor:
        """A copy of the state [B, ...] that a node begins at."""
        return self._states[self._rows_B, self._parents_BN[:, node] + 1]

    def keep(self, node: int, state_B: Tensor) -> None:
        self._states[:, node + 1] = state_B

    @property
    def states_BN(self) -> Tensor:
        """The states after every node."""
        return self._states[:, 1:]


def _gated_delta_rule(modeling: Any, kv_cache: KVCache, nodes: Nodes) -> Callable[..., tuple[Tensor, Tensor]]:
    """Gated DeltaNet (Yang et al. 2024) as Qwen3-Next, Qwen3.5 and OLMo hybrids have it."""
    return _delta_rule(modeling.torch_recurrent_gated_delta_rule, kv_cache, nodes)


def _kimi_delta_attention(modeling: Any, kv_cache: KVCache, nodes: Nodes) -> Callable[..., tuple[Tensor, Tensor]]:
    """As in Kimi Linear (Moonshot 2025) and Ling's hybrids: every channel of the state decays by itself."""
    return _delta_rule(modeling.recurrent_kimi_delta_attention, kv_cache, nodes)


def _delta_rule(
    one_token: Callable[..., tuple[Tensor, Tensor]], kv_cache: KVCache, nodes: Nodes
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The scan of a delta rule, by the function that computes one token of it."""

    # the KV cache has the states of all nodes: what the model says of a first and a last one is passed over
    def scan(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = True,
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        B, N, H, P = value.shape
        step = _Step(kv_cache, nodes, value.new_empty(B, H, key.shape[-1], P, dtype=torch.float32))
        outs = []
        for n in range(N):
            inputs = (each[:, n : n + 1] for each in (query, key, value, g, beta))
            query_n, key_n, value_n, g_n, beta_n = inputs
            out_B1, state_B = one_token(
                query_n,
                key_n,
                value_n,
                g=g_n,
                beta=beta_n,
                initial_state=step.parent_state(n),
                output_final_state=True,
                **more,
            )
            outs.append(out_B1)
            step.keep(n, state_B)
        return torch.cat(outs, 1), step.states_BN

    return scan


def _mamba2_scan(modeling: Any, kv_cache: KVCache, nodes: Nodes) -> Callable[..., tuple[Tensor, Tensor]]:
    """Mamba-2 (Dao and Gu 2024) as Nemotron-H, Falcon-H1, Granite 4, Bamba and Zamba2 have it."""
    one_token = modeling.mamba2_selective_state_update

    # as above; and one token makes no chunks
    def scan(
        x_BNHP: Tensor,
        dt_BNH: Tensor,
        A_H: Tensor,
        B_BNGS: Tensor,
        C_BNGS: Tensor,
        *,
        D: Tensor,
        dt_bias: Tensor,
        dt_softplus: bool = True,
        chunk_size: int = 0,
        initial_states: Tensor | None = None,
        return_final_states: bool = True,
        dt_limit: tuple[float, float] = _NO_LIMIT,
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        B, N, H, P = x_BNHP.shape
        S = B_BNGS.shape[-1]
        bias: Tensor | None = dt_bias[:, None].expand(-1, P)
        if tuple(dt_limit) != _NO_LIMIT:
            # the function for one token knows no limit, and the state must be that of a prompt
            dt_BNH, bias = F.softplus(dt_BNH + dt_bias.to(dt_BNH.dtype)).clamp(*dt_limit), None
        step = _Step(kv_cache, nodes, x_BNHP.new_empty(B, H, P, S, dtype=torch.float32))
        outs = []
        for n in range(N):
            state_BHPS = step.parent_state(n)
            out_BHP = one_token(
                state_BHPS,  # is changed in place
                x_BNHP[:, n],
                dt_BNH[:, n, :, None].expand(-1, -1, P),
                A_H[:, None, None].expand(-1, P, S),
                B_BNGS[:, n],
                C_BNGS[:, n],
                D[:, None].expand(-1, P),
                dt_bias=bias,
                dt_softplus=bias is not None,
                **more,
            )
            outs.append(out_BHP)
            step.keep(n, state_BHPS)
        return torch.stack(outs, 1), step.states_BN

    return scan


_SCANS = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _kimi_delta_attention,
    "mamba2_chunk_scan": _mamba2_scan,
}
"""The scans of `transformers` that hand out the last state alone, and what runs in their place."""


def _along_paths(modeling: Any, nodes: Nodes) -> Callable[..., Tensor]:
    """A causal convolution in which every node sees the inputs of its own path."""
    convolve = getattr(modeling, _CONVOLUTION)

    def convolution(inputs_BCX: Tensor, weight: Tensor, *more: Any, **settings: Any) -> Tensor:
        B, C, _ = inputs_BCX.shape
        K = weight.shape[-1]
        window_BX = _windows(nodes.parents_BN, K).flatten(1).expand(B, -1)
        windows_BCX = inputs_BCX.gather(2, window_BX[:, None].expand(-1, C, -1))
        out: Tensor = convolve(windows_BCX, weight, *more, **settings)
        return out[..., K - 1 :: K]

    return convolution


def _windows(parents_BN: Tensor, width: int) -> Tensor:
    """Columns of the last K inputs up to each node, [B, N, K], where K - 1 inputs precede the root's."""
    N = parents_BN.shape[1]
    node_BN = torch.arange(N, device=parents_BN.device).expand_as(parents_BN)
    columns = [node_BN]
    for _ in range(width - 1):
        # before the root, or a node that is none, the text itself goes back
        node_BN = torch.where(node_BN < 0, node_BN - 1, parents_BN.gather(1, node_BN.clamp_min(0)))
        columns.append(node_BN)
    return torch.stack(columns[::-1], -1) + width - 1


class Recurrence:
    """The recurrent layers of a model, run node by node on request."""

    def __init__(self, mixers: list[nn.Module]) -> None:
        self._modeling = {sys.modules[type(mixer).__module__] for mixer in mixers}

    @contextmanager
    def by_node(self, kv_cache: KVCache, tree: AnyTree, nodes: Nodes) -> Iterator[None]:
        """Inside, a forward computes the nodes of `tree` and writes the state of each to the KV cache."""
        before = []
        try:
            for modeling in self._modeling:
                for name, made in self._replaced(modeling, kv_cache, tree, nodes).items():
                    before.append((modeling, name, getattr(modeling, name)))
                    setattr(modeling, name, made)
            yield
        finally:
            for modeling, name, own in before:
                setattr(modeling, name, own)

    @staticmethod
    def _replaced(modeling: Any, kv_cache: KVCache, tree: AnyTree, nodes: Nodes) -> dict[str, Callable[..., Any]]:
        made: dict[str, Callable[..., Any]] = {
            name: make(modeling, kv_cache, nodes) for name, make in _SCANS.items() if hasattr(modeling, name)
        }
        if not tree.is_chain:
            made[_CONVOLUTION] = _along_paths(modeling, nodes)
        return made


def recurrence(model: nn.Module) -> Recurrence | None:
    """The recurrent layers of a model that `check_recurrent` lets pass; None where it has none."""
    mixers = _mixers(model)
    return Recurrence(mixers) if mixers else None


def check_recurrent(model: nn.Module, name: str, types: set[str]) -> None:
    """Raise RequestError if it is unknown how a model's recurrent layers hand out their state per token.

    Args:
        name: of the model, for the message.
        types: of its layers, those that keep a state among them.
    """
    mixers = _mixers(model)
    if not mixers or any(type(mixer).__module__ not in _MODELING for mixer in mixers):
        raise RequestError(
            f"{name} has layers of type {', '.join(sorted(types))}, whose state cannot be rolled back "
            "after a rejection; expected attention, full or through a sliding window, in every layer, or the "
            f"recurrent layers of {', '.join(FAMILIES)}"
        )


def is_recurrent(model: nn.Module) -> bool:
    """Whether layers fold the text into a state, which no mask keeps from other texts in the same row."""
    return recurrent_layers(model) > 0


def recurrent_layers(model: nn.Module) -> int:
    """How many layers fold the text into a state."""
    return len(_mixers(model))


def _mixers(model: nn.Module) -> list[nn.Module]:
    """The layers' parts that mix tokens through a state: all of these begin with a short convolution."""
    return [each for each in model.modules() if hasattr(each, "layer_idx") and hasattr(each, "conv_kernel_size")]
