"""One process and two on this machine, and what a stated model says of more.

1. A recipe is launched through the real command line with one process and with two, in turn, a thread each, the
   target whole and (`--target.sharding fully_shard`) cut; tokens a second are the run's own, over all processes.
2. The model: a step takes `fixed + each * rows of a process + bytes sent / bandwidth`. `fixed` and `each` come from
   one process with the whole batch and with half of it; the bandwidth from sums over two processes of this machine. A
   process sends 2 (n - 1) / n of the gradients' bytes a step, as a ring does, and receives (n - 1) / n of the cut
   layers' bytes a forward pass. Nothing is overlapped, which makes a step longer than it need be; but each process has
   a machine of its own, and every collective the whole bandwidth and no latency, which makes it shorter. So it is a
   bound on neither side. What two processes of this machine took stands beside what it says of two; it was more.
3. The same model for devices and links that are named, with the time of a step that the caller names: reasoned.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --recipe eagle-tiny --rounds 5 --steps 40
    python benchmarks/scaling.py --rounds 1 --steps 4 --set data.limit_rows=40      # checks the script
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftsmith
import numpy as np
import torch
import torch.distributed as dist
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, figure, table_of
from draftsmith.benchmarks.common.runs import QUIET, as_setting, parser_of
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.measure.metrics import ratio
from draftsmith.launch.recipe.load import load_recipe
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn

CONFIGS = Path(draftsmith.__file__).parent / "launch" / "configs"
WARM = 2
"""Reports at the beginning of a run that are left out."""
GAIN = 1.5
"""Twice as many processes that bring less than this are where a run stops scaling."""


@dataclass(frozen=True)
class Setup:
    """How a run is launched."""

    name: str
    processes: int
    settings: dict[str, Any]
    rows: int


@dataclass(frozen=True)
class Model:
    """Seconds of a step from its parts."""

    fixed: float
    each: float
    """Of a row of a process."""
    gradients: int
    """Bytes that a sum over processes is of."""
    gathered: int
    """Bytes of the cut layers that a forward pass of the target gathers; 0 where every process has all of them."""
    bandwidth: float
    """Bytes a second between processes."""

    def seconds(self, processes: int, rows: int) -> float:
        others = (processes - 1) / processes
        sent = others * (2 * self.gradients + self.gathered)
        return self.fixed + self.each * rows / processes + sent / self.bandwidth


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as place:
        speeds = measured(setups(args), args, Path(place))
        sizes = bytes_of(args, Path(place))
    record = assembled(speeds, sizes, bandwidth(sizes["gradients"]), args)
    print(printed(record))
    finish(record, args.json)


def setups(args: argparse.Namespace) -> list[Setup]:
    rows, cut = args.batch_rows, {"target.sharding": "fully_shard"}
    return [
        Setup("1 process", 1, {}, rows),
        Setup("1 process, half of the rows", 1, {}, rows // 2),
        Setup("2 processes", 2, {}, rows),
        Setup("2 processes, target cut", 2, cut, rows),
    ]


# ---- measuring --------------------------------------------------------------------------------


def measured(chosen: Sequence[Setup], args: argparse.Namespace, place: Path) -> dict[str, list[float]]:
    """Tokens a second of every setup, one figure a round; all setups in turn."""
    speeds: dict[str, list[float]] = {setup.name: [] for setup in chosen}
    for number in range(args.rounds):
        for setup in chosen:
            out = place / f"{setup.name.replace(' ', '-')}-{number}"
            launch(setup, out, args)
            speeds[setup.name].append(speed_of(out))
    return speeds


def launch(setup: Setup, out: Path, args: argparse.Namespace) -> None:
    """One run through the command line that users have."""
    share = {"loop.batch_rows": setup.rows, "loop.micro_rows": max(1, setup.rows // setup.processes)}
    values = {"loop.steps": args.steps, "loop.log_every": 2, **QUIET, **share, **setup.settings, **dict(args.set)}
    words = [word for key, value in values.items() for word in (f"--{key}", as_setting(value))]
    config = CONFIGS / ("cpu.yaml" if setup.processes == 1 else "multi_cpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["-m", "draftsmith.launch.train", args.recipe, "--out", str(out), *words]
    own = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{setup.name}: training failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def speed_of(run: Path) -> float:
    """The median of the tokens a second that a run reports, over all its processes."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    reported = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    return float(np.median(reported[WARM:] or reported))


def bytes_of(args: argparse.Namespace, place: Path) -> dict[str, int]:
    """Bytes of the gradients, in fp32, and of the target's layers, of which a pass gathers each."""
    drafter = next(place.glob("1-process-0/drafter"))
    gradients = 4 * sum(tensor.numel() for tensor in load_file(drafter / "model.safetensors").values())
    target: Any = load_target(target_of(args)).model
    layers = target.get_decoder().layers
    return {"gradients": gradients, "gathered": sum(p.numel() * p.element_size() for p in layers.parameters())}


def target_of(args: argparse.Namespace) -> str:
    return load_recipe(args.recipe, args.set).recipe.target.path


def bandwidth(size: int, *, rounds: int = 10) -> float:
    """Bytes a second that each of two processes of this machine sends while gradients of `size` bytes are added up."""
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "seconds"
        given = (2, f"file://{place}/meeting", size, rounds, str(answer))
        spawn(_add_up, args=given, nprocs=2)
        seconds = float(answer.read_text())
    return size / seconds  # of two processes each sends 2 (2 - 1) / 2 of the bytes


def _add_up(rank: int, world: int, meeting: str, size: int, rounds: int, answer: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    numbers, best = torch.ones(size // 4), float("inf")
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        best = min(best, time.perf_counter() - start)
    if rank == 0:
        Path(answer).write_text(str(best))
    dist.destroy_process_group()


# ---- the record -------------------------------------------------------------------------------


def assembled(speeds: dict[str, list[float]], sizes: dict[str, int], sent: float, args: argparse.Namespace) -> Record:
    rows = args.batch_rows
    tokens = load_recipe(args.recipe, args.set).recipe.row_tokens
    whole, half = (float(np.median(speeds[name])) for name in ("1 process", "1 process, half of the rows"))
    seconds, half_seconds = rows * tokens / whole, rows // 2 * tokens / half
    # what does not grow with the rows is small here, and no less than nothing
    each = min((seconds - half_seconds) / (rows - rows // 2), seconds / rows)
    here = Model(seconds - each * rows, each, sizes["gradients"], 0, sent)
    cut = Model(here.fixed, each, sizes["gradients"], sizes["gathered"], sent)
    named = Model(0.0, args.step_seconds, args.gradient_bytes, 0, args.link)
    named_cut = Model(0.0, args.step_seconds, args.gradient_bytes, args.gathered_bytes, args.link)
    model_rows = [
        *predicted("this machine, target whole", here, rows),
        *predicted("this machine, target cut", cut, rows),
        *predicted("named devices, target whole", named, args.rows),
        *predicted("named devices, target cut", named_cut, args.rows),
    ]
    says = {"2 processes": here.seconds(2, rows), "2 processes, target cut": cut.seconds(2, rows)}
    return record_of(
        args,
        title="Processes",
        target=target_weights(target_of(args)),
        setup=f"{args.recipe}, {rows} rows of {tokens} tokens a step over all processes, a thread each, {args.steps} "
        f"steps, {args.rounds} interleaved rounds. Gradients of {sizes['gradients'] / 1e6:.1f} MB, layers of "
        f"{sizes['gathered'] / 1e6:.1f} MB, {sent / 1e9:.2f} GB/s between two processes. Named devices: "
        f"{args.step_seconds:g} s a row, {args.rows} rows a step, gradients of {args.gradient_bytes / 1e9:g} GB, "
        f"layers of {args.gathered_bytes / 1e9:g} GB, links of {args.link / 1e9:g} GB/s: assumed, not measured.",
        intervals="95 % bootstrap intervals over rounds",
        formats={"tokens_per_second": ".0f", "times": ".2f", "model": ".2f", "share": ".0f"},
        rows=[*measured_rows(speeds, says, seconds), *model_rows],
        tables={
            "processes": table_of(
                {
                    "launched": "{setup}",
                    "tokens/s": "{tokens_per_second}",
                    "times one process": "{times}",
                    "the model says": "{model}",
                },
                where={"kind": "measured"},
            ),
            "model": table_of(
                {"where": "{where}", "times one process with 2, 4, 8, 16, 32, 64": "{gains}", "stops": "{stops}"},
                where={"kind": "model"},
            ),
        },
        notes=[
            f"`stops`: the number of processes beyond which twice as many are less than {GAIN:g} times as fast.",
            "The model gives every process a machine of its own. Processes that share a machine's memory and caches "
            "are slower than it says: that is the difference from what was measured.",
        ],
    )


def measured_rows(speeds: dict[str, list[float]], says: dict[str, float], seconds: float) -> Iterator[dict[str, Cell]]:
    alone = np.array(speeds["1 process"])
    for name, values in speeds.items():
        row: dict[str, Cell] = {"kind": "measured", "setup": name, "tokens_per_second": float(np.median(values))}
        if name in says:
            faster = ratio(np.array(values), alone)
            row |= {"times": figure(faster.to_list()), "model": seconds / says[name]}
        yield row


def predicted(where: str, model: Model, rows: int) -> Iterator[dict[str, Cell]]:
    """The speed-up over one process for ever more of them, at equal rows a step, and where it stops."""
    counts = [2**power for power in range(7)]
    seconds = [model.seconds(count, rows) for count in counts]
    gains = ", ".join(f"{seconds[0] / each:.2f}" for each in seconds[1:])
    doubled = zip(counts, seconds, seconds[1:], strict=False)
    stops = next((count for count, one, two in doubled if one / two < GAIN), None)
    yield {"kind": "model", "where": where, "gains": gains, "stops": "beyond 64" if stops is None else str(stops)}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="eagle-tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    named = parser.add_argument_group("devices and links that the model is asked about")
    named.add_argument("--step-seconds", type=float, default=0.1, help="of a device for one row, forward and backward")
    named.add_argument("--rows", type=int, default=128, help="of a step over all devices")
    named.add_argument("--gradient-bytes", type=float, default=1.7e9, help="EAGLE-3 at 8B, in fp32")
    named.add_argument("--gathered-bytes", type=float, default=14e9, help="layers of an 8B target, in bf16")
    named.add_argument("--link", type=float, default=50e9, help="bytes a second between devices")
    return parser.parse_args()


if __name__ == "__main__":
    main()
