"""Peak memory and time of the losses in chunks against plain ones that hold all logits.

Forward and backward of what is trained, each variant in a process of its own:

- `distill`: a head and the distillation loss;
- `medusa`: Medusa's heads, with a projection each, and their cross-entropies;
- `eagle3`: EAGLE-3's network over its own outputs, and the loss of every step.

Memory is the most that torch held at once beyond what it held before (weights, inputs, the
target's states), gradients and the kernels' own buffers included; `--device cuda` asks CUDA's
allocator. Plain is the textbook: the logits of all labelled positions of a head or step at once,
and automatic differentiation keeps what it keeps. Both variants must have the same loss.

    python benchmarks/loss_memory.py                      # V = 151,936, S = 2,048
    python benchmarks/loss_memory.py --positions 256 --vocabulary 8000
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
from draftsmith.eval.environment import processor

FAMILIES = ("distill", "medusa", "eagle3")
VARIANTS = ("plain", "chunked")
SIZES = ("positions", "vocabulary", "draft_vocabulary", "hidden", "heads", "passes", "chunk")


def main() -> None:
    args = arguments()
    if args.variant:
        print(json.dumps(measure(args)))
        return
    lines = [
        "| | plain | chunked | share | time, chunked / plain | loss |",
        "|---|---|---|---|---|---|",
    ]
    for family in args.families:
        refuse_too_large(family, args)
        rounds = [
            {variant: in_a_process(family, variant, args) for variant in VARIANTS}
            for _ in range(args.rounds)
        ]
        lines.append(row(family, rounds))
    print("\n".join([heading(args), "", *lines]))


# ---- one variant, in its own process -------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One forward and backward of a variant: seconds, GB at the peak, the loss."""
    import torch

    torch.manual_seed(0)
    make = {"distill": distill, "medusa": medusa, "eagle3": eagle3}[args.families[0]]
    work = make(args, plain=args.variant == "plain")
    found: dict[str, float] = {}

    def run() -> None:
        began = time.perf_counter()
        loss = work()
        loss.backward()
        if args.device != "cpu":
            torch.cuda.synchronize()
        found.update(seconds=time.perf_counter() - began, loss=float(loss.detach()))

    return {"gb": peak_bytes(run, args.device) / 1e9, **found}


def peak_bytes(work: Callable[[], None], device: str) -> int:
    """The most bytes that torch held at once while at work, beyond what it held before."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def distill(args: argparse.Namespace, *, plain: bool) -> Callable[[], Any]:
    """A head against a teacher of the same size."""
    import torch
    from draftsmith.trainers.losses import ChunkedLoss, Distillation, Teacher

    P, V, H = args.positions, args.vocabulary, args.hidden
    head = torch.nn.Linear(H, V, bias=False, device=args.device)
    teacher = Teacher(
        torch.randn(P, H, device=args.device), torch.randn(V, H, device=args.device) * 0.05
    )
    hidden = torch.randn(P, H, device=args.device).requires_grad_()
    label = torch.randint(0, V, (P,), device=args.device)
    loss = Distillation(1.0, 0.0)
    if not plain:
        return lambda: ChunkedLoss(head, loss, chunk=args.chunk)(hidden, label, teacher)[0] / P

    def run() -> Any:
        target = (teacher.hidden_PH @ teacher.weight_VH.T).float()
        return loss(head(hidden).float(), target, label)["loss"].sum() / P

    return run


def medusa(args: argparse.Namespace, *, plain: bool) -> Callable[[], Any]:
    """Medusa-1's own loss, sum_k 0.8^k CE_k, of one row."""
    import torch.nn.functional as F
    from draftsmith.trainers.config import MedusaConfig, ObjectiveConfig
    from draftsmith.trainers.medusa import build, counted

    config = MedusaConfig(heads=args.heads)
    goal = build(
        config, ObjectiveConfig(kl=0.0, ce=1.0, chunk=args.chunk), random_target(args), nowhere
    )
    goal.module.to(args.device)
    batch = one_row(args)
    lesson = goal.prepare(batch)
    if not plain:
        return lambda: goal.module(batch, lesson)[0] / args.positions
    heads: Any = goal.draft()

    def run() -> Any:
        total = 0.0
        for k in range(1, args.heads + 1):
            counts = counted(batch, k)
            hidden = heads.head(k, lesson.hidden_RSH[:, : -(k + 1)][counts])
            logits = heads.lm_heads[k - 1](hidden).float()
            label = batch["input_ids"][:, k + 1 :][counts]
            total = total + config.decay**k * F.cross_entropy(logits, label, reduction="sum")
        return total / args.positions

    return run


def eagle3(args: argparse.Namespace, *, plain: bool) -> Callable[[], Any]:
    """EAGLE-3's own loss over its steps, of one row; the target's law is made once if plain."""
    from draftsmith.trainers.config import Eagle3Config, ObjectiveConfig
    from draftsmith.trainers.eagle import counted
    from draftsmith.trainers.eagle3 import build

    config = Eagle3Config(passes=args.passes, layers=(0, 1, 2))
    ids = range(0, args.vocabulary, args.vocabulary // args.draft_vocabulary)
    target = random_target(args)
    goal = build(
        config, ObjectiveConfig(chunk=args.chunk), target, ids[: args.draft_vocabulary], nowhere
    )
    goal.module.to(args.device)
    batch = one_row(args)
    lesson = goal.prepare(batch)
    if not plain:
        return lambda: goal.module(batch, lesson)[0] / args.positions
    net: Any = goal.draft()

    def run() -> Any:
        target_RSV = (lesson.hidden_RSH @ lesson.head_VH.T).float()
        law_RSU = target_RSV[..., net.ids_U].softmax(-1)
        drafted_RS = net.t2d[target_RSV.argmax(-1)]
        del target_RSV
        outputs = net.unroll(
            net.fuse(lesson.features_RSF), lesson.embeds_RSH, batch["positions"],
            batch["documents"], args.passes,
        )  # fmt: skip
        total = 0.0
        for j, out_RSH in enumerate(outputs):
            log_q = net.head(out_RSH[:, : -(2 + j)]).float().log_softmax(-1)
            each = -(law_RSU[:, 1 + j : -1] * log_q).sum(-1) * drafted_RS[:, 1 + j : -1]
            total = total + config.decay**j * (each * counted(batch, 2 + j)).sum()
        return total / args.positions

    return run


def random_target(args: argparse.Namespace) -> Any:
    """Two layers of the given width over the whole vocabulary, random."""
    from draftsmith.trainers.architecture import fresh_model
    from draftsmith.trainers.config import ModelConfig

    sizes = ModelConfig(
        architecture="llama", layers=2, hidden=args.hidden, heads=2, kv_heads=1,
        head_size=max(8, args.hidden // 2), max_positions=args.positions,
    )  # fmt: skip
    return fresh_model(sizes, vocabulary=args.vocabulary, eos=None).eval().to(args.device)


def one_row(args: argparse.Namespace) -> dict[str, Any]:
    """A document as long as the row, all of it labels."""
    import torch

    S = args.positions
    row = {
        "input_ids": torch.randint(0, args.vocabulary, (1, S)),
        "positions": torch.arange(S)[None],
        "documents": torch.zeros(1, S, dtype=torch.long),
        "loss_mask": torch.arange(S)[None] > 0,
    }
    return {name: t.to(args.device) for name, t in row.items()}


def nowhere(_module: object, _folder: object) -> None:
    """Nothing is saved."""


# ---- both variants -------------------------------------------------------------------------


def refuse_too_large(family: str, args: argparse.Namespace) -> None:
    """Leave rather than push a machine out of its memory; a plain loss needs a great deal."""
    if args.device != "cpu":
        return
    whole = 4 * args.positions * args.vocabulary
    small = 4 * args.positions * args.draft_vocabulary
    copies = {"distill": 11 * whole, "medusa": (args.heads + 4) * whole,
              "eagle3": 2 * whole + (2 * args.passes + 4) * small}  # fmt: skip
    needed, free = copies[family] / 1e9, psutil.virtual_memory().available / 1e9
    if needed > 0.9 * free:
        fits = int(args.positions * 0.8 * free / needed)
        sys.exit(
            f"{family}: the plain loss needs about {needed:.1f} GB and {free:.1f} GB are free; "
            f"take --positions {fits} (both variants grow with it), or a machine with more"
        )


def in_a_process(family: str, variant: str, args: argparse.Namespace) -> dict[str, float]:
    """A variant's figures, from a process that holds nothing else."""
    words = [word for name in SIZES
             for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, "--families", family, "--variant", variant,
         "--device", args.device, *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{family}, {variant}, failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(family: str, rounds: list[dict[str, dict[str, float]]]) -> str:
    """A line of the table; memory is the same in every round, time is the median."""
    plain, chunked = (rounds[0][variant] for variant in VARIANTS)
    if not math.isclose(plain["loss"], chunked["loss"], rel_tol=1e-4):
        sys.exit(f"{family}: the losses differ, {plain['loss']} and {chunked['loss']}")
    times = sorted(each["chunked"]["seconds"] / each["plain"]["seconds"] for each in rounds)
    return (
        f"| {family} | {plain['gb']:.3f} GB | {chunked['gb']:.3f} GB "
        f"| {chunked['gb'] / plain['gb']:.1%} | {times[len(times) // 2]:.2f} "
        f"| {chunked['loss']:.4f} |"
    )


def heading(args: argparse.Namespace) -> str:
    import torch

    return (
        f"V = {args.vocabulary:,}, S = {args.positions:,}, H = {args.hidden}, fp32, chunks of "
        f"{args.chunk}; medusa: {args.heads} heads; eagle3: {args.passes} steps, draft vocabulary "
        f"{args.draft_vocabulary:,}; {args.rounds} interleaved rounds; torch {torch.__version__}, "
        f"{processor() if args.device == 'cpu' else torch.cuda.get_device_name()}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--families", type=lambda text: text.split(","), default=list(FAMILIES),
        help="of " + ", ".join(FAMILIES),
    )  # fmt: skip
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--draft-vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant", choices=VARIANTS)
    args = parser.parse_args()
    unknown = set(args.families) - set(FAMILIES)
    if unknown:
        parser.error(f"no family is called {', '.join(sorted(unknown))}")
    # at least every second token can be drafted where the vocabulary is made small
    args.draft_vocabulary = min(args.draft_vocabulary, max(2, args.vocabulary // 2))
    return args


if __name__ == "__main__":
    main()
