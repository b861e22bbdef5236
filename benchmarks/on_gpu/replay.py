"""What one replayed call is made of: kernels by name, how often, how long; launches; which attention it took.

It runs in a process of its own, behind everything that is timed: a profiler that has looked once makes every later
launch dearer. Read next: `calls.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.on_gpu.calls import call_of_one, made, stock_of, torch_alone, without_cudnn
from draftsmith.benchmarks.on_gpu.setting import Setting
from draftsmith.eval.measure.timing import Call
from draftsmith.storage import write_text
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MOST = 15
ATTENTION = ("attention", "sdpa", "fmha", "flash", "cudnn_generated_fort")
HEADS = {"forward": "{forward}", "kernel": "{kernel}", "times": "{count}", "us in all": "{us}", "share": "{share}"}
SUMS = {"forward": "{forward}", "launches": "{launches}", "us in kernels": "{us}", "us a launch": "{each}"}


@dataclass
class Kernels:
    """Of one call, by name."""

    counts: Counter[str]
    microseconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.microseconds.values())

    @property
    def largest(self) -> list[str]:
        """Names, those that take longest first."""
        return sorted(self.microseconds, key=lambda name: -self.microseconds[name])


@torch.inference_mode()
def measure(setting: Setting, name: str) -> Iterator[Record]:
    """A replay of each forward, and of the stock one without cuDNN's attention."""
    target = made(setting, setting.shapes[name])
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    for label, each, under in (
        ("decoder's", target, nullcontext),
        ("torch alone", target, torch_alone),
        ("stock", stock_of(target), nullcontext),
        ("stock, without cuDNN", stock_of(target), without_cudnn),
    ):
        call, problems = call_of_one(setting, each, under)
        kernels = looked_at(call, setting)
        rows += rows_of(label, kernels, MOST if label == "decoder's" else 6)
        notes += [f"{label}: {problem}" for problem in problems] + [attention_of(label, kernels)]
        write_text(setting.out / f"profile-{label.replace(' ', '-').replace(',', '')}.txt", text_of(kernels))
        yield assembled(setting, name, rows, notes)


def looked_at(call: Call, setting: Setting) -> Kernels:
    """The kernels of one call; on a CPU its operations."""
    activity, kind = (
        (ProfilerActivity.CUDA, DeviceType.CUDA) if setting.cuda else (ProfilerActivity.CPU, DeviceType.CPU)
    )
    call()
    with profile(activities=[ProfilerActivity.CPU, activity] if setting.cuda else [activity]) as seen:
        call()
        if setting.cuda:
            torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    microseconds: dict[str, float] = defaultdict(float)
    for event in seen.events() or []:
        if event.device_type == kind:
            counts[event.name] += 1
            microseconds[event.name] += event.time_range.elapsed_us()
    if not counts:
        raise RuntimeError("the profiler saw no kernel: this machine does not let it look")
    return Kernels(counts, dict(microseconds))


def rows_of(label: str, kernels: Kernels, most: int) -> list[dict[str, Cell]]:
    """A sum, and the largest kernels."""
    launches = kernels.counts.total()
    sums: dict[str, Cell] = {"launches": float(launches), "us": kernels.total, "each": kernels.total / launches}
    rows: list[dict[str, Cell]] = [{"part": "sums", "forward": label, **sums}]
    for name in kernels.largest[:most]:
        us = kernels.microseconds[name]
        cells: dict[str, Cell] = {"count": float(kernels.counts[name]), "us": us, "share": us / kernels.total}
        rows.append({"part": "kernels", "forward": label, "kernel": f"`{name[:90]}`", **cells})
    return rows


def attention_of(label: str, kernels: Kernels) -> str:
    """Which kernel attends."""
    found = [name for name in kernels.largest if any(word in name.lower() for word in ATTENTION)]
    return f"Attention, {label}: {', '.join(f'`{name[:90]}`' for name in found) or 'no kernel is named after it'}."


def text_of(kernels: Kernels) -> str:
    """All kernels, a line each, with whole names."""
    lines = [f"{kernels.microseconds[each]:10.1f} us {kernels.counts[each]:6d} x {each}" for each in kernels.largest]
    return "\n".join([f"{kernels.total:10.1f} us {kernels.counts.total():6d} launches", *lines]) + "\n"


def assembled(setting: Setting, name: str, rows: list[dict[str, Cell]], notes: list[str]) -> Record:
    """The record as far as it goes."""
    return setting.record(
        list(rows),
        f"One replayed call of one node of {name}'s shape behind {setting.context:,} tokens, in {setting.dtype}, as "
        f"torch's profiler sees it; the {MOST} kernels that take longest.",
        title="One replay",
        formats={"launches": ".0f", "count": ".0f", "us": ",.1f", "each": ".2f", "share": ".1%"},
        tables={"sums": table_of(SUMS, {"part": "sums"}), "kernels": table_of(HEADS, {"part": "kernels"})},
        notes=list(notes),
    )
