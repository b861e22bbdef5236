"""A run under DeepSpeed whose gradient or loss is not finite in chosen steps, on one of its processes.

accelerate launch --config_file .../zero2.yaml tests/faults/deepspeed_steps.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from draftsmith.trainers.loop.sharding import gathered
from faults import toy
from torch import Tensor

STEPS, POISONED = 8, (2, 3, 6)


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
        # step 2: a loss on process 0; step 3: on process 1; step 6: a gradient on process 1
        if now[0] in POISONED and rank == (now[0] != 2) and made[0].requires_grad:
            if now[0] == 6:
                made[0].register_hook(lambda gradient: gradient * torch.inf)
                return None
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
