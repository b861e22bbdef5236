"""What the card itself does: a copy, a product in bf16, and what one launch costs inside a graph.

Every share of the other sections is of these. Read next: `calls.py`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import torch
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.on_gpu.arms import Arms
from draftsmith.benchmarks.on_gpu.setting import Setting
from draftsmith.eval.measure.timing import Call, interleaved

LAUNCHES = 500
HEADS = {"": "{quantity}", "goal": "{goal}", "estimate": "{estimate}", "measured": "{measured}"}


@torch.inference_mode()
def measure(setting: Setting) -> Iterator[Record]:
    """A row for each figure."""
    device, side = setting.device, setting.product
    left, right = (torch.randn(side, side, device=device, dtype=setting.dtype) for _ in range(2))
    small = torch.zeros(1024, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            small.add_(1)

    arms = Arms(setting)
    arms.add("copy", copied(setting), replay=False)
    arms.add("product", lambda: left @ right, replay=False)
    arms.add("launches", many)
    arms.add("eager", many, replay=False)
    times = arms.times()
    setting.known["copy"] = 2 * setting.copied / times["copy"]
    nominal = setting.nominal
    rows = [
        row("bandwidth by the maker", "", "", "unknown" if nominal is None else f"{nominal / 1e9:,.0f} GB/s"),
        row("a copy on the card, bytes read and written", "", "3,000", f"{setting.known['copy'] / 1e9:,.0f} GB/s"),
        row(f"a product of {side:,} x {side:,}", "", "750", f"{2 * side**3 / times['product'] / 1e12:,.1f} TFLOP/s"),
        row("a small kernel in a graph", "", "2", f"{times['launches'] / LAUNCHES * 1e6:.2f} us"),
        row("a small kernel launched alone", "", "4", f"{times['eager'] / LAUNCHES * 1e6:.2f} us"),
        row("clocks, power, memory, driver", "", "", clocks()),
    ]
    yield setting.record(
        rows,
        f"Copies of {setting.copied / 1e9:.1f} GB, products in {setting.dtype}, {LAUNCHES} kernels in a row; medians "
        f"of {setting.rounds} interleaved rounds of {setting.repeats}. Estimates are of an H100.",
        title="The card",
        tables={"gpu-card": table_of(HEADS)},
        notes=arms.problems,
    )


def copied(setting: Setting) -> Call:
    """A copy on the device: as many bytes are read, and as many written."""
    source = torch.randint(256, (setting.copied,), dtype=torch.uint8, device=setting.device)
    to = torch.empty_like(source)
    return lambda: to.copy_(source)


def copy_bandwidth(setting: Setting) -> float:
    """Bytes a second of a copy, measured where no section has done so."""
    if "copy" not in setting.known:
        times = interleaved({"copy": copied(setting)}, 3, device=setting.device, repeats=setting.repeats)
        setting.known["copy"] = 2 * setting.copied / times["copy"]
    return setting.known["copy"]


def row(quantity: str, goal: str, estimate: str, measured: str) -> dict[str, Cell]:
    """A figure with what counts as good, and what was estimated."""
    return {"quantity": quantity, "goal": goal, "estimate": estimate, "measured": measured}


def clocks() -> str:
    """What the driver says of clocks, power and memory."""
    asked = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,memory.total,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]
