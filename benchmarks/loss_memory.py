"""Peak memory and time of the losses in chunks against plain ones that hold all logits.

Forward and backward of what is trained, with the same weights and rows in both variants:

- `distill`: a head and the distillation loss;
- `medusa`: Medusa's heads, with a projection each, and their cross-entropies;
- `eagle3`: EAGLE-3's network over its own outputs, and the loss of every step.

Memory is the most that torch held at once beyond what it held before (weights, inputs, the
target's states), gradients and the kernels' own buffers included; with `--device cuda` it is what
CUDA's allocator says. Plain is the textbook: the logits of all labelled positions of a head or
step at once, and automatic differentiation keeps what it keeps. A plain loss that would not fit
into the free memory is refused.

    python benchmarks/loss_memory.py                      # V = 151,936, S = 2,048
    python benchmarks/loss_memory.py --positions 256 --vocabulary 8000
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.peak import peak_bytes
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.drafters.projection import Projection
from draftsmith.launch.recipe.model import Recipe
from draftsmith.storage import write_text
from draftsmith.trainers import eagle3, medusa
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.labels import has_label
from draftsmith.trainers.losses.chunked import ChunkedLoss, Teacher
from draftsmith.trainers.losses.mix import Mix
from draftsmith.trainers.method_config import Eagle3Config, MedusaConfig
from draftsmith.trainers.student.architecture import fresh_model
from torch import Tensor, nn

Run = Callable[[], Tensor]


class Pair(NamedTuple):
    """A family's loss in both variants, and the module whose gradients they make."""

    module: nn.Module
    plain: Run
    chunked: Run


def main() -> None:
    args = arguments()
    summaries: dict[str, Any] = {}
    for family in args.families:
        summaries[family] = measured(family, args)
    record = assembled(summaries, args)
    print(printed(record))
    finish(record, args.json)
    if args.out:
        write_text(args.out, json.dumps(summaries, indent=1) + "\n")


# ---- the losses ----------------------------------------------------------------------------


def distill_pair(args: argparse.Namespace) -> Pair:
    """A head against a teacher of the same size."""
    P, V, H = args.positions, args.vocabulary, args.hidden
    head = nn.Linear(H, V, bias=False, device=args.device)
    teacher = Teacher(torch.randn(P, H, device=args.device), Projection(torch.randn(V, H, device=args.device) * 0.05))
    hidden = torch.randn(P, H, device=args.device).requires_grad_()
    label = torch.randint(0, V, (P,), device=args.device)
    loss = Mix(kl=1.0)

    def plain() -> Tensor:
        target = teacher.projection.logits(teacher.hidden_PH)
        return loss(head(hidden).float(), target, label)["loss"].sum()

    return Pair(head, plain, lambda: ChunkedLoss(head, loss, chunk=args.chunk)(hidden, label, teacher)[0])


def medusa_pair(args: argparse.Namespace) -> Pair:
    """Medusa-1's own loss, sum_k 0.8^k CE_k, of one row."""
    config = MedusaConfig(heads=args.heads)
    objective = ObjectiveConfig(kl=0.0, ce=1.0, chunk=args.chunk)
    recipe, target = (
        Recipe.model_validate({"method": "medusa", "medusa": config, "objective": objective}),
        random_target(args),
    )
    goal = medusa.MedusaObjective(recipe, medusa.student(recipe, target), target, nowhere)
    goal.module.to(args.device)
    batch = one_row(args)
    teacher_output = goal.prepare(batch)
    heads: Any = goal.draft()

    def plain() -> Tensor:
        total = torch.zeros((), device=args.device)
        for k in range(1, args.heads + 1):
            counts = has_label(batch, k + 1)
            hidden = heads.head(k, teacher_output.hidden_RSH[:, : -(k + 1)][counts])
            logits = heads.lm_heads[k - 1](hidden).float()
            label = batch["input_ids"][:, k + 1 :][counts]
            total = total + config.decay**k * F.cross_entropy(logits, label, reduction="sum")
        return total

    return Pair(goal.module, plain, lambda: goal.module(batch, teacher_output)[0])


def eagle3_pair(args: argparse.Namespace) -> Pair:
    """EAGLE-3's own loss over its steps, of one row; the plain one makes the target's distribution once."""
    config = Eagle3Config(passes=args.passes, layers=(0, 1, 2))
    every = args.vocabulary // args.draft_vocabulary
    ids = range(0, every * args.draft_vocabulary, every)
    recipe = Recipe.model_validate(
        {"method": "eagle3", "eagle3": config, "objective": ObjectiveConfig(chunk=args.chunk)}
    )
    target = random_target(args)
    goal = eagle3.Eagle3Objective(recipe, eagle3.student(recipe, target, ids), target, nowhere)
    goal.module.to(args.device)
    batch = one_row(args)
    teacher_output = goal.prepare(batch)
    net: Any = goal.draft()

    def plain() -> Tensor:
        target_RSV = (teacher_output.hidden_RSH @ target.get_output_embeddings().weight.T).float()
        probs_RSU = target_RSV[..., net.ids_U].softmax(-1)
        drafted_RS = net.t2d[target_RSV.argmax(-1)]
        del target_RSV
        outputs = net.unroll(
            net.fuse(teacher_output.fused_RSF),
            teacher_output.embeds_RSH,
            batch["positions"],
            batch["documents"],
            args.passes,
        )
        total = torch.zeros((), device=args.device)
        for j, out_RSH in enumerate(outputs):
            log_q = net.head(out_RSH[:, : -(2 + j)]).float().log_softmax(-1)
            each = -(probs_RSU[:, 1 + j : -1] * log_q).sum(-1) * drafted_RS[:, 1 + j : -1]
            total = total + config.decay**j * (each * has_label(batch, 2 + j)).sum()
        return total

    return Pair(goal.module, plain, lambda: goal.module(batch, teacher_output)[0])


FAMILIES: dict[str, Callable[[argparse.Namespace], Pair]] = {
    "distill": distill_pair,
    "medusa": medusa_pair,
    "eagle3": eagle3_pair,
}


def random_target(args: argparse.Namespace) -> Any:
    """Two layers of the given width over the whole vocabulary, random."""
    sizes = ModelConfig(
        architecture="llama",
        layers=2,
        hidden=args.hidden,
        heads=2,
        kv_heads=1,
        head_size=max(8, args.hidden // 2),
        max_positions=args.positions,
    )
    return fresh_model(sizes, vocabulary=args.vocabulary, eos=None).eval().to(args.device)


def one_row(args: argparse.Namespace) -> dict[str, Tensor]:
    """A document as long as the row, all of it labels."""
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


# ---- measuring -----------------------------------------------------------------------------


def measured(family: str, args: argparse.Namespace) -> dict[str, float]:
    """All rounds of a family; the first of several loads kernels, and does not count."""
    check_size(family, args)
    torch.manual_seed(0)
    pair = FAMILIES[family](args)
    rounds = [measure_both(pair, args.device) for _ in range(args.rounds)]
    return summary(family, rounds[1:] or rounds)


def measure_both(pair: Pair, device: str) -> dict[str, dict[str, float]]:
    """One round: both variants in turn, from the same state."""
    variants = {"plain": pair.plain, "chunked": pair.chunked}
    return {name: measure(run, pair.module, device) for name, run in variants.items()}


def measure(run: Run, module: nn.Module, device: str) -> dict[str, float]:
    """One forward and backward: GB at the peak, seconds, the loss."""
    summaries: dict[str, float] = {}
    module.zero_grad(set_to_none=True)

    def work() -> None:
        began = time.perf_counter()
        loss = run()
        loss.backward()
        summaries["loss"] = float(loss.detach())  # on a GPU this waits for the end
        summaries["seconds"] = time.perf_counter() - began

    return {"gb": peak_bytes(work, device) / 1e9, **summaries}


def check_size(family: str, args: argparse.Namespace) -> None:
    """Leave rather than push a machine out of its memory; a plain loss needs a great deal."""
    if args.device != "cpu":
        return
    whole = 4 * args.positions * args.vocabulary
    small = 4 * args.positions * args.draft_vocabulary
    copies = {
        "distill": 11 * whole,
        "medusa": (args.heads + 4) * whole,
        "eagle3": 2 * whole + (2 * args.passes + 4) * small,
    }
    needed, free = copies[family] / 1e9, psutil.virtual_memory().available / 1e9
    if needed > 0.9 * free:
        fits = int(args.positions * 0.8 * free / needed)
        sys.exit(
            f"{family}: the plain loss needs about {needed:.1f} GB and {free:.1f} GB are free; "
            f"take --positions {fits} (both variants grow with it), or a machine with more"
        )


# ---- showing -------------------------------------------------------------------------------


def summary(family: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Peaks, their share, the median ratio of times, and the loss, which must be the same."""
    plain, chunked = rounds[0]["plain"], rounds[0]["chunked"]
    if not math.isclose(plain["loss"], chunked["loss"], rel_tol=1e-4):
        sys.exit(f"{family}: the losses differ, {plain['loss']} and {chunked['loss']}")
    times = sorted(each["chunked"]["seconds"] / each["plain"]["seconds"] for each in rounds)
    return {
        "plain_gb": plain["gb"],
        "chunked_gb": chunked["gb"],
        "share": chunked["gb"] / plain["gb"],
        "time": times[len(times) // 2],
        "loss": chunked["loss"],
    }


def assembled(summaries: dict[str, dict[str, float]], args: argparse.Namespace) -> Record:
    """One row per family."""
    heads = {
        "loss": "{loss}",
        "plain": "{plain_gb} GB",
        "chunked": "{chunked_gb} GB",
        "share (goal: 25 %)": "{share}",
        "time, chunked / plain": "{time}",
    }
    return record_of(
        args,
        title="Loss memory",
        target=None,
        setup=f"V = {args.vocabulary:,}, S = {args.positions:,}, H = {args.hidden}, fp32, chunks of {args.chunk}; "
        f"medusa: {args.heads} heads; eagle3: {args.passes} steps, draft vocabulary {args.draft_vocabulary:,}; "
        f"{args.rounds} interleaved rounds on {args.device}.",
        formats={"plain_gb": ".3f", "chunked_gb": ".3f", "share": ".1%", "time": ".2f"},
        rows=[{**row, "loss": family} for family, row in summaries.items()],
        tables={"loss-memory": table_of(heads)},
    )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--families", type=lambda text: text.split(","), default=list(FAMILIES), help="of " + ", ".join(FAMILIES)
    )
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--draft-vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the bytes and seconds as they are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    args = parser.parse_args(argv)
    unknown = set(args.families) - set(FAMILIES)
    if unknown:
        parser.error(f"no family is called {', '.join(sorted(unknown))}")
    # at most every second token can be drafted, however small the vocabulary is made
    args.draft_vocabulary = min(args.draft_vocabulary, max(2, args.vocabulary // 2))
    return args


if __name__ == "__main__":
    main()
