"""A run under DeepSpeed whose gradient or loss is not finite in chosen steps, on one of its processes.

accelerate launch --config_file .../zero2.yaml -m faults.deepspeed_steps OUT [RANK PIECE]

With RANK and PIECE no step is poisoned: a weight of that process turns non-finite, in fp32 or in the model's copy.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from draftsmith.errors import TrainingFailed
from draftsmith.trainers.loop.sharding import gathered, held_weights
from faults import toy
from torch import Tensor

STEPS, POISONED, BROKEN = 8, (2, 3, 5, 6), 4


def main(out: Path) -> None:
    loop = toy.loop_in(out, "medusa", steps=STEPS, every=STEPS, validate_every=STEPS, micro_rows=2)
    rank, now, ends = loop.accelerator.process_index, [-1], list[Tensor]()
    assert loop.accelerator.num_processes == 2
    take = loop.train_step

    def train_step(step: int, *rest: Any) -> None:
        now[0] = step
        take(step, *rest)
        with gathered(loop.objective.module):
            ends.append(torch.cat([p.detach().flatten().float() for p in loop.objective.module.parameters()]).clone())

    def behind_forward(_module: Any, _given: Any, made: Any) -> Any:
        # step 2: a loss on process 0; step 3: on process 1; step 5: one whose gradient is finite; step 6: a gradient
        if now[0] in POISONED and rank == (now[0] != 2) and made[0].requires_grad:
            if now[0] == 6:
                made[0].register_hook(lambda gradient: gradient * torch.inf)
                return None
            if now[0] == 5:
                return made[0] + torch.inf, {name: value + torch.inf for name, value in made[1].items()}
            return made[0] * torch.nan, {name: value * torch.nan for name, value in made[1].items()}
        return None

    loop.train_step = train_step  # type: ignore[method-assign]
    loop.objective.module.register_forward_hook(behind_forward)
    loop.run(None)
    assert loop.steps.skipped == len(POISONED), loop.steps.skipped
    for step in range(1, STEPS):
        same = torch.equal(ends[step], ends[step - 1])
        assert same == (step in POISONED), step
    assert all(torch.isfinite(each).all() for each in ends)
    (out / f"done-{rank}").write_text("done")


def broken_weight(out: Path, rank: int, piece: str) -> None:
    """Behind step `BROKEN` a weight of process `rank` is not finite, as memory that flips a bit would have it."""
    loop = toy.loop_in(out, "medusa", steps=STEPS, every=1, keep=20, validate_every=STEPS, micro_rows=2)

    def break_it(step: int) -> None:
        if step == BROKEN and loop.accelerator.process_index == rank:
            copy, in_fp32 = (value for _, value in itertools.islice(held_weights(loop.objective.module), 2))
            (in_fp32 if piece == "fp32" else copy).view(-1)[0] = torch.nan

    try:
        toy.run(loop, watch=break_it)
    except TrainingFailed as error:
        (out / f"failed-{loop.accelerator.process_index}").write_text(str(error))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        broken_weight(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
