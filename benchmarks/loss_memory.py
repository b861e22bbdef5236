"""Peak memory and time of the chunked distillation loss against the plain one.

Each variant runs in a process of its own; memory is the growth of the process's peak over what it
held before the first loss (weights and inputs), gradients included. Rounds are interleaved.

    python benchmarks/loss_memory.py                      # V = 151,936, S = 2,048
    python benchmarks/loss_memory.py --positions 256 --vocabulary 8000 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time

import psutil


def main() -> None:
    args = _arguments()
    if args.variant:
        print(json.dumps(measure(args)))
        return
    rounds = [
        {variant: _in_a_process(variant, args) for variant in ("plain", "chunked")}
        for _ in range(args.rounds)
    ]
    _show(rounds, args)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One forward and backward of a variant: seconds, GB of growth, the loss."""
    import torch
    from draftsmith.trainers.losses import ChunkedLoss, Distillation, Teacher

    torch.manual_seed(0)
    P, V, H = args.positions, args.vocabulary, args.hidden
    head = torch.nn.Linear(H, V, bias=False, device=args.device)
    teacher = Teacher(
        torch.randn(P, H, device=args.device), torch.randn(V, H, device=args.device) * 0.05
    )
    hidden = torch.randn(P, H, device=args.device).requires_grad_()
    label = torch.randint(0, V, (P,), device=args.device)
    loss = Distillation(1.0, 0.0)
    before = _held(args.device)
    start = time.perf_counter()
    if args.variant == "plain":
        terms = loss(head(hidden).float(), (teacher.hidden_PH @ teacher.weight_VH.T).float(), label)
        total = terms["loss"].sum()
    else:
        total, _ = ChunkedLoss(head, loss, chunk=args.chunk)(hidden, label, teacher)
    (total / P).backward()
    if args.device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "gb": _peak(args.device) - before, "loss": float(total) / P}


def _held(device: str) -> float:
    if device == "cpu":
        return float(psutil.Process().memory_info().rss) / 1e9
    import torch

    return torch.cuda.memory_allocated() / 1e9


def _peak(device: str) -> float:
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    import torch

    return torch.cuda.max_memory_allocated() / 1e9


def _in_a_process(variant: str, args: argparse.Namespace) -> dict[str, float]:
    command = [
        sys.executable, __file__, "--variant", variant, "--positions", str(args.positions),
        "--vocabulary", str(args.vocabulary), "--hidden", str(args.hidden),
        "--chunk", str(args.chunk), "--device", args.device,
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _show(rounds: list[dict[str, dict[str, float]]], args: argparse.Namespace) -> None:
    import torch

    print(f"V = {args.vocabulary:,}, S = {args.positions:,}, H = {args.hidden}, fp32, "
          f"chunk {args.chunk}, {args.rounds} interleaved rounds")  # fmt: skip
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {args.device}")
    best = {}
    for variant in ("plain", "chunked"):
        seconds = sorted(each[variant]["seconds"] for each in rounds)
        gb = max(each[variant]["gb"] for each in rounds)
        best[variant] = (gb, seconds[len(seconds) // 2])
        print(f"{variant:8} peak {gb:7.3f} GB   median {best[variant][1]:7.2f} s   "
              f"range {seconds[0]:.2f} to {seconds[-1]:.2f} s   "
              f"loss {rounds[0][variant]['loss']:.6f}")  # fmt: skip
    memory, duration = (best["chunked"][i] / best["plain"][i] for i in (0, 1))
    print(f"memory {memory:.1%} of plain (at most 25 %), time {duration:.2f}x (at most 1.3x)")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant", choices=["plain", "chunked"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
