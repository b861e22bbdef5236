"""What a forward of a target costs: verify calls of N nodes behind one context, and whole autoregressive answers.

Bytes of a call are the fewest that it needs: the weights (of a table that is looked up nothing) and the keys and
values of the text so far. Arms take turns: the forward that the decoder takes by itself, `transformers`' own where
the two differ, both SDPA choices, and each launched one by one. Read next: `speculation.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import median

import torch
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.on_gpu.arms import Arms, why
from draftsmith.benchmarks.on_gpu.card import copy_bandwidth, row
from draftsmith.benchmarks.on_gpu.setting import Setting, cudnn_attention
from draftsmith.benchmarks.on_gpu.shapes import Shape, target_of
from draftsmith.decoding import kernels
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.backbone.lean import on_cuda
from draftsmith.decoding.engine import Generation, autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import chain
from draftsmith.eval.measure.speed import bytes_of
from draftsmith.eval.measure.timing import Call, nothing_to_collect

GREEDY = Warper(0.0)
SLOTS = 128
"""A KV cache has a multiple of so many slots."""
CALLS = {
    "nodes": "{nodes}",
    "call": "{call} ms",
    "T(N)/T(1)": "{ratio}",
    "torch's products": "{products} ms",
    "torch's attention": "{sdpa} ms",
    "torch alone": "{torch} ms",
    "without cuDNN": "{uncudnn} ms",
    "stock forward": "{stock} ms",
    "stock, without cuDNN": "{stockun} ms",
    "eager": "{eager} ms",
}
COLUMNS = ("call", "products", "sdpa", "torch", "uncudnn", "stock", "stockun", "eager")
FEW = (1, 5)
"""Nodes of every arm, beside the most; others are measured of what the decoder takes and of torch alone."""
FIGURES = {"": "{quantity}", "goal": "{goal}", "estimate": "{estimate}", "measured": "{measured}"}

Answer = Callable[[int], Generation]


def measure(setting: Setting, name: str) -> Iterator[Record]:
    """Calls first; then the answers too."""
    shape = setting.shapes[name]
    target = made(setting, shape)
    stock = stock_of(target)
    arms = Arms(setting)
    with torch.inference_mode():
        add_calls(arms, setting, target, stock)
        times = arms.times()
    arms.calls.clear()
    rows = [*call_rows(setting, times), *shares(setting, shape, target, times)]
    notes = [*arms.problems]
    yield assembled(setting, shape, rows, notes)
    for label, each in {"": target, "stock forward, ": stock}.items():
        rows += answer_rows(setting, shape, each, label, notes)
        yield assembled(setting, shape, rows, notes)


def made(setting: Setting, shape: Shape) -> Backbone:
    """The target, with room for whatever is measured of it."""
    positions = setting.context + max(*setting.answers, *setting.steps) + 2 * SLOTS
    return target_of(shape, setting.device, setting.dtype, positions=positions)


def stock_of(target: Backbone) -> Backbone:
    """The same weights by `transformers`' own forward."""
    stock = Backbone(target.model, name=f"{target.name}, stock forward")
    stock.lean = False
    return stock


# ---- calls -------------------------------------------------------------------------------------


def add_calls(arms: Arms, setting: Setting, target: Backbone, stock: Backbone) -> None:
    """Every arm by the name of its column and its number of nodes."""
    few = [nodes for nodes in setting.nodes if nodes in (*FEW, max(setting.nodes))]
    own, other = forwards_of(arms, setting, target), forwards_of(arms, setting, stock)
    for nodes in setting.nodes:
        arms.add(f"call {nodes}", partial(own, nodes))
    for nodes in setting.nodes:
        arms.add(f"torch {nodes}", within(torch_alone, own, nodes))
    for nodes in few:
        if kernels.available():
            arms.add(f"products {nodes}", within(partial(with_torchs, "product"), own, nodes))
            arms.add(f"sdpa {nodes}", within(partial(with_torchs, "attend"), own, nodes))
        arms.add(f"uncudnn {nodes}", within(torch_alone, within(without_cudnn, own, nodes)))
        arms.add(f"stock {nodes}", partial(other, nodes))
        arms.add(f"stockun {nodes}", within(without_cudnn, other, nodes))
        arms.add(f"eager {nodes}", partial(own, nodes), replay=False)


def within(setting: Callable[[], AbstractContextManager[None]], call: Callable[..., object], *given: int) -> Call:
    """A call under a setting, which what is recorded of it keeps."""

    def work() -> object:
        with setting():
            return call(*given)

    return work


def torch_alone() -> AbstractContextManager[None]:
    """The lean forward without kernels of our own."""
    return _steps(on_cuda.TorchKernels())


def with_torchs(step: str) -> AbstractContextManager[None]:
    """The lean forward by our kernels, but for one step, which is torch's."""
    steps = on_cuda.TritonKernels()
    setattr(steps, step, getattr(on_cuda.TorchKernels(), step))
    return _steps(steps)


def without_cudnn() -> AbstractContextManager[None]:
    """Torch's attention without cuDNN's kernels among those that it chooses from."""
    return cudnn_attention(False)


@contextmanager
def _steps(steps: on_cuda.LayerKernels) -> Iterator[None]:
    before = on_cuda._steps
    on_cuda._steps = lambda: steps  # type: ignore[assignment]
    try:
        yield
    finally:
        on_cuda._steps = before


def forwards_of(arms: Arms, setting: Setting, target: Backbone) -> Callable[[int], object]:
    """A forward of so many nodes behind the context; all see the same slots, so nodes are all that differs."""
    kv_cache = KVCache(1, rounded_up(setting.context + max(setting.nodes)), static=True)
    prompt = setting.prompt(target.vocabulary)
    try:
        target.prefill([prompt], kv_cache)
    except Exception as error:  # noqa: BLE001
        # the arms then say the same, one by one; other forwards go on
        arms.problems.append(f"prefill of {target.name}: {why(error)}")
    inputs = {nodes: torch.tensor([prompt[:1] * nodes], device=target.device) for nodes in setting.nodes}
    lengths_B = torch.tensor([setting.context], device=target.device)
    return lambda nodes: target.forward(inputs[nodes], lengths_B, chain(nodes - 1), kv_cache)


def rounded_up(slots: int) -> int:
    """To a whole number of `SLOTS`."""
    return -(-slots // SLOTS) * SLOTS


def call_rows(setting: Setting, times: dict[str, float]) -> list[dict[str, Cell]]:
    """Milliseconds by nodes, a dash where an arm is missing."""
    one = times.get("call 1")
    rows: list[dict[str, Cell]] = []
    for nodes in setting.nodes:
        of = {column: times.get(f"{column} {nodes}") for column in COLUMNS}
        cells: dict[str, Cell] = {column: None if each is None else 1e3 * each for column, each in of.items()}
        call = of["call"]
        ratio = None if one is None or call is None else call / one
        rows.append({"part": "calls", "nodes": str(nodes), "ratio": ratio, **cells})
    return rows


def shares(setting: Setting, shape: Shape, target: Backbone, times: dict[str, float]) -> list[dict[str, Cell]]:
    """Bandwidth of a call of one node, what more nodes cost, and the gain over the stock forward."""
    needed = bytes_of(target.model) + shape.kv_bytes(setting.context, setting.dtype)
    rows = [row("bytes of a call of one node", "", "", f"{needed / 1e9:.3f} GB")]
    for label, name in (("", "call 1"), ("torch alone, ", "torch 1"), ("stock forward, ", "stock 1")):
        if name in times:
            goal, estimate = ("", "") if label else (f"at least {shape.goal:.0%} of nominal", shape.estimate)
            rows.append(row(f"{label}call of one node", goal, estimate, bandwidth(setting, needed, times[name])))
    if {"call 1", "call 5"} <= times.keys():
        rows.append(row("T(5)/T(1)", "at most 1.15", "1.02 to 1.12", f"{times['call 5'] / times['call 1']:.3f}"))
    if {"call 1", "stock 1"} <= times.keys():
        ratio = times["stock 1"] / times["call 1"]
        rows.append(row("stock forward over the decoder's own", "", "1.4", f"{ratio:.2f}"))
    return [{"part": "figures", **each} for each in rows]


def bandwidth(setting: Setting, needed: float, seconds: float) -> str:
    """Time, bytes a second, and their shares of nominal bandwidth and of a copy."""
    achieved = needed / seconds
    nominal = "unknown" if setting.nominal is None else f"{achieved / setting.nominal:.1%}"
    return f"{1e3 * seconds:.3f} ms, {nominal} of nominal, {achieved / copy_bandwidth(setting):.1%} of a copy"


# ---- answers -----------------------------------------------------------------------------------


def answer_rows(
    setting: Setting, shape: Shape, target: Backbone, label: str, notes: list[str]
) -> list[dict[str, Cell]]:
    """A token of an autoregressive answer, replayed; eager where that fails."""

    def answer(count: int, *, graphs: bool = setting.cuda) -> Generation:
        prompts = [setting.prompt(target.vocabulary)]
        return autoregressive(target, prompts, warper=GREEDY, max_new_tokens=count, static=True, graphs=graphs)

    what = f"{label}a token of an answer"
    try:
        seconds = seconds_a_call(answer, setting.answers, setting.whole_rounds, setting.device)
    except Exception as error:  # noqa: BLE001
        notes.append(f"{what}: not replayed, so eager: {why(error)}")
        what += ", eager"
        seconds = seconds_a_call(lambda count: answer(count, graphs=False), setting.eager_steps, 1, setting.device)
    length = setting.context + sum(setting.answers) / 2
    needed = bytes_of(target.model) + shape.kv_bytes(length, setting.dtype)
    goal = "" if label else f"at least {shape.goal:.0%} of nominal"
    measured = f"{bandwidth(setting, needed, seconds)}, {1 / seconds:.1f} tokens/s"
    return [{"part": "figures", **row(what, goal, "", measured)}]


def seconds_a_call(answer: Answer, lengths: tuple[int, int], rounds: int, device: torch.device) -> float:
    """Of a call of the target behind the first ones: two answers' difference, the median over rounds."""
    short, long = lengths
    found = []
    with nothing_to_collect():
        for number in range(rounds + 1):
            (less, first), (more, last) = timed(answer, short, device), timed(answer, long, device)
            if number:  # the first round warms up
                found.append((more - less) / (last - first))
    return median(found)


def timed(answer: Answer, count: int, device: torch.device) -> tuple[float, int]:
    """Seconds to the end of the device's work, and calls of the target."""
    began = time.perf_counter()
    calls = answer(count).target_calls
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, calls


def assembled(setting: Setting, shape: Shape, rows: list[dict[str, Cell]], notes: list[str]) -> Record:
    """The record as far as it goes."""
    sizes = (
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads of {shape.head_size} ({shape.kv_heads} "
        f"for keys), MLP {shape.intermediate}, vocabulary {shape.vocabulary:,}{', tied' if shape.tied else ''}"
    )
    return setting.record(
        rows,
        f"{shape.name}'s shape with random weights in {setting.dtype}: {sizes}. Batch 1, context "
        f"{setting.context:,}; medians of {setting.rounds} interleaved rounds of {setting.repeats} calls. Goals are "
        "shares of nominal bandwidth; estimates are of an H100 and by arithmetic.",
        title=f"A call of {shape.name}",
        formats=dict.fromkeys((*COLUMNS, "ratio"), ".3f"),
        tables={"calls": table_of(CALLS, {"part": "calls"}), "figures": table_of(FIGURES, {"part": "figures"})},
        notes=list(notes),
    )


def call_of_one(
    setting: Setting, target: Backbone, under: Callable[[], AbstractContextManager[None]]
) -> tuple[Call, list[str]]:
    """A call of one node, replayed where that can be, and what went wrong."""
    arms = Arms(setting)
    arms.add("call", within(under, forwards_of(arms, setting, target), 1))
    return arms.calls["call"], arms.problems
