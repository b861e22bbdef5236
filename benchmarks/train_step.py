"""How fast a training step is, per recipe: tokens/s, use of the device, waits, the target's share.

Every recipe is made into its loop as `draftsmith train` makes it, with real rows; then the loops
take a step each in turn, so that all meet the same machine. Per recipe:

- tokens/s of the rows, with 95 % bootstrap intervals over steps;
- MFU: the time that the step's matrix products and attention would take at the device's peak, as
  a share of the step. The operations are counted in a step of its own (a multiply-add is two, and
  attention counts in full, causal or not); the peak is that of a large product in the same rounds,
  of the target's precision for what the target does, of the run's for the rest;
- data wait: share of the step spent waiting for rows and for features that are read from disk;
- target: share of the step in the frozen target's forward pass, layers and output projection.
  EAGLE computes the projection inside the loss, a chunk at a time; `layers` is the share without.

With `--deep N` EAGLE-1 is also run on a random target of the same widths with N layers.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --recipes eagle-tiny,eagle3-tiny --rounds 20 --deep 32
    python benchmarks/train_step.py --tiny          # checks the script, measures nothing

Read next: `compiled_step.py`, a step with `loop.compile` beside the same without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, figure, table_of
from draftsmith.benchmarks.common.runs import parser_of
from draftsmith.benchmarks.common.unstarted import loop_of
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.metrics import Interval, ratio
from draftsmith.launch.recipe.load import load_recipe, shipped_recipes
from draftsmith.storage import write_text
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.loop.progress import Meter
from draftsmith.trainers.losses.chunked import Teacher
from draftsmith.trainers.student.architecture import fresh_model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

NOTE = "tiny mode: checks the script, measures nothing"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TINY = {"data.sequence_length": "64", "loop.batch_rows": "2", "loop.micro_rows": "2", "data.limit_rows": "40"}


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        arms = {name: Arm(name, Path(folder), args) for name in args.recipes}
        if args.deep:
            target = deep_target(Path(folder) / "target", args)
            name = f"eagle-tiny, {args.deep} layers"
            arms[name] = Arm("eagle-tiny", Path(folder), args, {"target.path": str(target)})
        peaks = measure(arms, args.rounds, args.peak_size)
    results = {name: arm.result(peaks) for name, arm in arms.items()}
    note = [NOTE] if args.tiny else []
    record = assembled(results, peaks, args)
    print("\n".join([*note, printed(record), *note]))
    finish(record, args.json)
    if args.out:
        kept = {"results": results, "peaks": peaks, "environment": environment()}
        write_text(args.out, json.dumps(kept, indent=1) + "\n")


# ---- one recipe ---------------------------------------------------------------------------


@dataclass
class Part:
    """What was measured of a part of the step: seconds of every step, operations of one."""

    seconds: list[float] = field(default_factory=list)
    operations: int = 0


class Arm:
    """A recipe's loop, and what its steps took."""

    def __init__(
        self, recipe: str, folder: Path, args: argparse.Namespace, more: dict[str, str] | None = None
    ) -> None:
        self.loop = loop_of(recipe, folder, {**args.set, **(more or {})})
        resolved = load_recipe(recipe, list(args.set.items())).recipe
        self.precisions = (resolved.target.dtype, resolved.loop.precision_on(cpu=not torch.cuda.is_available()))
        self.parts = {name: Part() for name in ("step", "layers", "projection")}
        self.waited: list[float] = []
        self.tokens = 0
        self._at = 0
        features = getattr(self.loop.objective, "features", None)
        if features is not None:
            features.fetch = self._watched("layers", features.fetch)

    def step(self) -> None:
        """One step, timed."""
        for part in self.parts.values():
            part.seconds.append(0.0)
        arm = self

        class Taken(Meter):
            def add(self, sums: dict[str, Tensor], labels: float, tokens: int, waited: float) -> None:
                arm.tokens = tokens
                arm.waited.append(waited)

        with self._watching_projection():
            take = self._watched("step", self.loop.train_step)
            take(self._at, Taken())
        self._at += 1

    def count(self) -> None:
        """One step whose operations are counted; counting takes time, so its clock is thrown away.

        It also is the first one, in which kernels are made.
        """
        with counter():
            self.step()
        for part in self.parts.values():
            part.seconds.clear()
        self.waited.clear()

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        part = self.parts[name]

        def watched(*given: Any, **more: Any) -> Any:
            before, began = operations_so_far(), now()
            made = call(*given, **more)
            part.seconds[-1] += now() - began
            part.operations += operations_so_far() - before
            return made

        return watched

    @contextlib.contextmanager
    def _watching_projection(self) -> Iterator[None]:
        real = Teacher.logits

        def logits(teacher: Teacher, part: slice) -> Tensor:
            made: Tensor = self._watched("projection", real)(teacher, part)
            return made

        Teacher.logits = logits  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Teacher.logits = real  # type: ignore[method-assign]

    def result(self, peaks: dict[str, float]) -> dict[str, Any]:
        """Intervals of what the table shows."""
        step_S, layers_S, projection_S = (np.array(p.seconds) for p in self.parts.values())
        whole, layers, projection = (part.operations for part in self.parts.values())
        targets, own = (peaks[each] for each in self.precisions)
        ideal = (layers + projection) / targets + (whole - layers - projection) / own
        tokens_S = np.full_like(step_S, self.tokens)
        return {
            "tokens_per_second": listed(ratio(tokens_S, step_S)),
            "mfu": listed(ratio(np.full_like(step_S, ideal), step_S)),
            "data_wait": listed(ratio(np.array(self.waited), step_S)),
            "target": listed(ratio(layers_S + projection_S, step_S)),
            "layers": listed(ratio(layers_S, step_S)),
            "operations": {"step": whole, "layers": layers, "projection": projection},
            "median_seconds": float(np.median(step_S)),
            "steps": len(step_S),
        }


def deep_target(folder: Path, args: argparse.Namespace) -> Path:
    """The recipes' target with other weights, and as many layers as a large one has."""
    target = load_target(load_recipe("eagle-tiny").recipe.target.path)
    torch.manual_seed(0)
    like: Any = target.model.config
    sizes = ModelConfig(
        layers=args.deep,
        hidden=like.hidden_size,
        heads=like.num_attention_heads,
        kv_heads=like.num_key_value_heads,
        head_size=like.head_dim,
        intermediate=like.intermediate_size,
    )
    model: Any = fresh_model(sizes, vocabulary=like.vocab_size, eos=like.eos_token_id, like=like)
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


# ---- measuring ----------------------------------------------------------------------------


def measure(arms: dict[str, Arm], rounds: int, size: int) -> dict[str, float]:
    """Steps of all arms in turn; operations per second of a large product, by precision."""
    for arm in arms.values():
        arm.count()
    device = next(iter(arms.values())).loop.accelerator.device
    needed = sorted({each for arm in arms.values() for each in arm.precisions})
    peaks: dict[str, float] = dict.fromkeys(needed, 0.0)
    for _ in range(rounds):
        for name in needed:
            peaks[name] = max(peaks[name], product_speed(DTYPES[name], device, size))
        for arm in arms.values():
            arm.step()
    return peaks


def product_speed(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """Operations per second of a product of two square matrices, the best of three."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(3):
        began = now()
        left @ right
        best = max(best, 2 * size**3 / (now() - began))
    return best


def now() -> float:
    """Seconds; on a GPU when all that was asked for is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


_counters: list[FlopCounterMode] = []


@contextlib.contextmanager
def counter() -> Iterator[None]:
    """Count operations inside the block; `operations_so_far` reads the count."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    kernels: dict[Any, Any] = {flash: attention_operations, back: attention_back_operations}
    with FlopCounterMode(display=False, custom_mapping=kernels) as mode:
        _counters.append(mode)
        try:
            yield
        finally:
            _counters.pop()


def operations_so_far() -> int:
    """Since the innermost `counter` began; 0 outside of any."""
    return _counters[-1].get_total_flops() if _counters else 0


def attention_operations(query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Q K^T and its product with V, as torch counts them for the kernels that it knows."""
    B, Q, N, D = query
    return 4 * B * Q * N * int(key[2]) * D


def attention_back_operations(_grad: Any, query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Five products where the forward pass has two."""
    return 5 * attention_operations(query, key) // 2


# ---- showing ------------------------------------------------------------------------------


def assembled(results: dict[str, dict[str, Any]], peaks: dict[str, float], args: argparse.Namespace) -> Record:
    """One row per recipe."""
    heads = {
        "recipe": "{recipe}",
        "tokens/s": "{tokens_per_second}",
        "MFU": "{mfu}",
        "data wait": "{data_wait}",
        "target": "{target}",
        "of it layers": "{layers}",
    }
    shown = ", ".join(f"{name} {speed / 1e9:.0f} GFLOP/s" for name, speed in peaks.items())
    return record_of(
        args,
        title="Training step",
        target=target_weights(str(load_recipe(args.recipes[0], list(args.set.items())).recipe.target.path)),
        setup=f"Peak of a product of {args.peak_size}: {shown}; {args.rounds} interleaved rounds.",
        intervals="95 % bootstrap intervals over steps",
        formats={"tokens_per_second": ",.0f", "data_wait": ".2%", **dict.fromkeys(("mfu", "target", "layers"), ".1%")},
        rows=[row_of(name, row) for name, row in results.items()],
        tables={"train-step": table_of(heads)},
    )


def row_of(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """A recipe's cells; a tuned target has no frozen part."""
    frozen = row["operations"]["layers"] > 0
    return {
        "recipe": name,
        "tokens_per_second": figure(row["tokens_per_second"]),
        "mfu": figure(row["mfu"]),
        "data_wait": row["data_wait"][0],
        **{part: figure(row[part]) if frozen else None for part in ("target", "layers")},
    }


def listed(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]


def families() -> list[str]:
    """The shipped recipes of quickstart size that train a drafter."""
    names = [path.stem for path in shipped_recipes() if path.stem.endswith("-tiny")]
    return [name for name in names if load_recipe(name).recipe.method != "target"]


def arguments() -> argparse.Namespace:
    parser = parser_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=families())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--deep", type=int, default=32, help="layers of a second target; 0: none")
    parser.add_argument("--peak-size", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="write operations and intervals as they are")
    args = parser.parse_args()
    values = {"data.limit_rows": "400", "probe.prompts": "1", **(TINY if args.tiny else {})}
    args.set = {**values, **dict(args.set)}
    if args.tiny:
        args.rounds, args.deep, args.peak_size = 2, 9, 64
    return args


if __name__ == "__main__":
    main()
