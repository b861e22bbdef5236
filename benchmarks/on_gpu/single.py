"""The parts of a layer one by one, by torch and by kernels of our own: products, attention, and what stands between.

Each call reads tensors of its own, as layers do: a weight that is read twice in a row would lie in the card's cache.
What gains here is worth taking in the forward, and what does not goes. Read next: `calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.on_gpu.arms import Arms
from draftsmith.benchmarks.on_gpu.calls import SLOTS, rounded_up
from draftsmith.benchmarks.on_gpu.setting import Setting
from draftsmith.benchmarks.on_gpu.shapes import Shape
from draftsmith.decoding import kernels
from draftsmith.decoding.backbone.lean.on_cuda import LayerKernels, TorchKernels, TritonKernels
from draftsmith.eval.measure.timing import interleaved
from torch import Tensor

NODES = (1, 5, 16)
CACHE = 400_000_000
"""Bytes that calls go through before they come back to the same, several times what a card's cache holds."""
HEADS = {
    "part of a layer": "{what}",
    "nodes": "{nodes}",
    "torch": "{torch} us",
    "our kernel": "{own} us",
    "torch over ours": "{ratio}",
    "read by the faster": "{rate} GB/s",
}

Ways = dict[str, Callable[[Any], object]]


@torch.inference_mode()
def measure(setting: Setting, name: str) -> Iterator[Record]:
    """A row for each part and number of nodes."""
    shape = setting.shapes[name]
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    for what, nodes, given, ways, size in parts(setting, shape):
        rows.append(row_of(setting, what, nodes, given, ways, size, notes))
        yield assembled(setting, name, rows, notes)


def parts(setting: Setting, shape: Shape) -> Iterator[tuple[str, int, Sequence[Any], Ways, int]]:
    """Name, nodes, what calls take in turn, the ways of computing it, and the bytes that one reads."""
    for nodes in NODES:
        for what, out, inner in products(shape):
            size = out * inner * setting.dtype.itemsize
            weights = many(setting, size, partial(new, setting, out, inner))
            yield f"product, {what}", nodes, weights, product_ways(new(setting, 1, nodes, inner)), size
        yield from between(setting, shape, nodes)


def products(shape: Shape) -> list[tuple[str, int, int]]:
    """Numbers put out and read by each product of a layer, and by the head."""
    attended = shape.heads * shape.head_size
    return [
        ("query, key, value", attended + 2 * shape.kv_heads * shape.head_size, shape.hidden),
        ("attention's output", shape.hidden, attended),
        ("gate, up", 2 * shape.intermediate, shape.hidden),
        ("down", shape.hidden, shape.intermediate),
        ("head", shape.vocabulary, shape.hidden),
    ]


def product_ways(x: Tensor) -> Ways:
    """A library's product, and ours for a few rows."""
    ways: Ways = {"torch": lambda weight: F.linear(x, weight)}
    if kernels.available():
        compiled = TritonKernels()
        ways["own"] = lambda weight: compiled.product(x, weight, None)
    return ways


def between(setting: Setting, shape: Shape, nodes: int) -> Iterator[tuple[str, int, Sequence[Any], Ways, int]]:
    """Attention under a mask; and norm, heads and gate."""
    slots, heads = rounded_up(setting.context + SLOTS // 2), shape.heads + 2 * shape.kv_heads
    size = 2 * shape.kv_heads * slots * shape.head_size * setting.dtype.itemsize

    def stores() -> tuple[Tensor, Tensor]:
        pair = new(setting, 2, shape.kv_heads, slots, shape.head_size)
        return pair[:1].contiguous(), pair[1:].contiguous()

    query = new(setting, 1, shape.heads, nodes, shape.head_size)
    mask = torch.ones(1, 1, nodes, slots, dtype=torch.bool, device=setting.device).tril(slots - nodes)
    scale = shape.head_size**-0.5
    held = many(setting, size, stores)
    yield "attention", nodes, held, of_steps(lambda s, kv: s.attend(query, kv[0], kv[1], mask, slots, scale)), size
    hidden, out, weight = (
        new(setting, 1, nodes, shape.hidden),
        new(setting, 1, nodes, shape.hidden),
        new(setting, shape.hidden),
    )
    enter = of_steps(lambda s, _: s.enter(hidden, out, None, weight, 1e-6, from_one=False))
    yield "residual and norm", nodes, [None], enter, 0
    joined = new(setting, 1, nodes, heads * shape.head_size)
    norm = new(setting, shape.head_size)
    turn = (torch.ones(1, nodes, shape.head_size, device=setting.device, dtype=setting.dtype),) * 2
    slots_BN = torch.arange(nodes, device=setting.device)[None]
    place = of_steps(lambda s, kv: s.place_heads(joined, (norm, norm), turn, kv, slots_BN, 1e-6, from_one=False))
    yield "heads: norm, turn, store", nodes, held, place, 0
    both = new(setting, 1, nodes, 2 * shape.intermediate)
    yield "gate", nodes, [None], of_steps(lambda s, _: s.gated(both, by_tanh=False)), 0


def of_steps(call: Callable[[LayerKernels, Any], object]) -> Ways:
    """A step of the lean forward by torch alone, and by our kernels."""
    plain = TorchKernels()
    ways: Ways = {"torch": lambda given: call(plain, given)}
    if kernels.available():
        compiled = TritonKernels()
        ways["own"] = lambda given: call(compiled, given)
    return ways


def new(setting: Setting, *sizes: int) -> Tensor:
    """Random numbers on the device."""
    return torch.randn(sizes, device=setting.device, dtype=setting.dtype)


def many(setting: Setting, size: int, make: Callable[[], Any]) -> list[Any]:
    """So many of them that none lies in the cache when its turn comes again."""
    return [make() for _ in range(2 if setting.tiny else max(2, min(64, CACHE // size)))]


def row_of(
    setting: Setting, what: str, nodes: int, given: Sequence[Any], ways: Ways, size: int, notes: list[str]
) -> dict[str, Cell]:
    """Microseconds of a call, each way many of them in a graph."""
    count = max(len(given), setting.repeats)
    arms = Arms(setting)
    for name, way in ways.items():

        def all_of_them(way: Callable[[Any], object] = way) -> None:
            turns = cycle(given)
            for _ in range(count):
                way(next(turns))

        arms.add(name, all_of_them)
    notes += [f"{what}, {nodes} nodes, {problem}" for problem in arms.problems]
    times = interleaved(arms.calls, setting.rounds, device=setting.device, repeats=2)
    each = {name: seconds / count for name, seconds in times.items()}
    torchs, own = each.get("torch"), each.get("own")
    return {
        "what": what,
        "nodes": str(nodes),
        "torch": None if torchs is None else 1e6 * torchs,
        "own": None if own is None else 1e6 * own,
        "ratio": None if torchs is None or own is None else torchs / own,
        "rate": size / min(each.values()) / 1e9 if size and each else "",
    }


def assembled(setting: Setting, name: str, rows: list[dict[str, Cell]], notes: list[str]) -> Record:
    """The record as far as it goes."""
    return setting.record(
        list(rows),
        f"Of a layer of {name}'s shape in {setting.dtype}, batch 1, {setting.context:,} tokens of context; replayed, "
        f"medians of {setting.rounds} interleaved rounds.",
        title="The parts of a layer",
        formats={"torch": ".1f", "own": ".1f", "ratio": ".2f", "rate": ",.0f"},
        tables={"gpu-layer": table_of(HEADS)},
        notes=list(notes),
    )
