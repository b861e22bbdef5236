"""What `recompute` saves and costs: memory and time of a training step with and without, on equal weights.

On a narrow random target, one document to a row. First the two are compared: loss and gradients have to be equal to
the bit. Then both take the step in turn, forward and backward without an optimiser; the frozen target's pass is left
out. Last the most memory that torch held beyond weights, gradients and what was given, divided by the tokens.

    python benchmarks/recompute.py
    python benchmarks/recompute.py --tokens 64 --hidden 16 --layers 2 --rounds 1     # checks the script
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.peak import peak_bytes
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.random_models import narrow_target
from draftsmith.benchmarks.common.records import Cell, Record, figure, table_of
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.eval.measure.metrics import ratio
from draftsmith.eval.measure.timing import turns
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import distill, eagle3, hydra, medusa, medusa2
from draftsmith.trainers.block import dflash, dflash2, dspark, mtp, pard, peagle
from draftsmith.trainers.teacher.tuned import TunedTarget
from torch import Tensor

VOCABULARY, DRAFTED = 2048, 1024
DRAFTS, SLOTS = 4, 8


class Method(NamedTuple):
    """What is trained, and how its switch is called."""

    module: Any
    objective: Any
    switch: str
    sections: dict[str, Any] = {}


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """By the name of the row."""
    draft = {"layers": args.layers, "hidden": args.hidden, "heads": 2, "kv_heads": 1, "head_size": args.hidden // 2}
    fused = {"layers": [1, 2, 3]}
    block = {"block": {"size": SLOTS, "anchors": args.tokens // SLOTS, "decoder_layers": args.layers, **fused}}
    heads = {"medusa": {"heads": DRAFTS}}
    deep = {"medusa": {"heads": DRAFTS, "layers": 4, "prefix": True}}
    return {
        "distilled draft": Method(distill, distill.DistillObjective, "model.recompute", {"model": draft}),
        "PARD": Method(pard, pard.PardObjective, "model.recompute", {"model": draft, "pard": {"drafts": DRAFTS}}),
        "Medusa-2": Method(medusa2, medusa2.Medusa2Objective, "tune.recompute", heads),
        "EAGLE-3": Method(eagle3, eagle3.Eagle3Objective, "eagle3.recompute", {"eagle3": {"passes": DRAFTS, **fused}}),
        "MTP": Method(mtp, mtp.MtpObjective, "mtp.recompute", {"mtp": {"passes": DRAFTS}}),
        "P-EAGLE": Method(
            peagle,
            peagle.PeagleObjective,
            "peagle.recompute",
            {"peagle": {"depths": DRAFTS, "decoder_layers": args.layers, **fused}},
        ),
        "DFlash": Method(dflash, dflash.DFlashObjective, "block.recompute", block),
        "DSpark": Method(dspark, dspark.DSparkObjective, "block.recompute", block | {"dspark": {"rank": 16}}),
        "DFlash 2": Method(dflash2, dflash2.DFlash2Objective, "block.recompute", block | {"dflash2": {"rank": 16}}),
        "Medusa": Method(medusa, medusa.MedusaObjective, "medusa.recompute", heads),
        "Hydra++": Method(hydra, hydra.HydraObjective, "medusa.recompute", deep),
    }


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    target, batch = target_of(args), one_row(args)
    rows = [row_of(name, method, target, batch, args) for name, method in methods(args).items()]
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


class Arm:
    """A method with or without its switch."""

    def __init__(self, method: Method, target: Any, batch: dict[str, Tensor], on: bool, args: Any) -> None:
        self.batch = batch
        words: dict[str, Any] = {"data": {"sequence_length": args.tokens}, **method.sections}
        words["method"] = method.module.__name__.rpartition(".")[2]
        section, field = method.switch.split(".")
        words[section] = {**words.get(section, {}), field: on}
        recipe = Recipe.model_validate(words)
        torch.manual_seed(0)
        frozen = target()
        drafted = [range(0, VOCABULARY, VOCABULARY // DRAFTED)] if words["method"] in ("eagle3", "peagle") else []
        student = method.module.student(recipe, frozen, *drafted)
        given: Any = (
            TunedTarget(Backbone(frozen, name="random"), recipe.tune, row_tokens=recipe.row_tokens)
            if recipe.tunes_target
            else frozen
        )
        goal = method.objective(recipe, student, given, nowhere)
        self.module, self.teacher_output = goal.module, goal.prepare(batch)
        self.learnt()  # gradients are there from now on, and filled again

    def step(self) -> Tensor:
        """Forward and backward; the loss."""
        self.module.zero_grad(set_to_none=False)
        torch.manual_seed(1)  # dropout of what is put into a target
        loss: Tensor = self.module(self.batch, self.teacher_output)[0]
        loss.backward()
        return loss.detach()

    def learnt(self) -> list[Tensor]:
        """Loss and gradients."""
        loss = self.step()
        return [loss, *(each.grad.clone() for each in self.module.parameters() if each.grad is not None)]


def row_of(
    name: str, method: Method, target: Any, batch: dict[str, Tensor], args: argparse.Namespace
) -> dict[str, Cell]:
    """Both arms: equal numbers, bytes of each, the ratio of the time."""
    arms = {on: Arm(method, target, batch, on, args) for on in (False, True)}
    for one, other in zip(arms[False].learnt(), arms[True].learnt(), strict=True):
        if not torch.equal(one, other):
            raise AssertionError(f"{name}: numbers differ with the switch")
    steps = {"without": arms[False].step, "with": arms[True].step}
    seconds = turns(dict(steps), args.rounds, device=torch.device(args.device))
    held = {name: peak_bytes(step, args.device) / args.tokens for name, step in steps.items()}
    return {
        "trained": name,
        "switch": f"`{method.switch}`",
        **held,
        "memory": held["with"] / held["without"],
        "time": figure(ratio(np.array(seconds["with"]), np.array(seconds["without"])).to_list()),
    }


# ---- what both are given -----------------------------------------------------------------


def target_of(args: argparse.Namespace) -> Any:
    """Makes a random target, the same at every call: one that is tuned moves."""
    return partial(narrow_target, args.hidden, args.tokens, VOCABULARY, args.device)


def one_row(args: argparse.Namespace) -> dict[str, Tensor]:
    """A document as long as the row, all of it labels but its first token."""
    g = torch.Generator().manual_seed(0)
    position_1S = torch.arange(args.tokens)[None]
    row = {
        "input_ids": torch.randint(0, VOCABULARY, (1, args.tokens), generator=g),
        "positions": position_1S,
        "documents": torch.zeros_like(position_1S),
        "loss_mask": position_1S > 0,
    }
    return {name: each.to(args.device) for name, each in row.items()}


def nowhere(_module: object, _folder: object) -> None:
    """Nothing is saved."""


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """A row for each method."""
    heads = {
        "trained": "{trained}",
        "switch": "{switch}",
        "bytes for a token": "{without}",
        "with it": "{with}",
        "ratio": "{memory}",
        "time": "{time}",
    }
    return record_of(
        args,
        title="What computing layers and passes again saves",
        target=None,
        setup=f"fp32, a row of {args.tokens:,} tokens, a random target of 4 layers of {args.hidden} numbers, "
        f"vocabulary {VOCABULARY:,}; drafts, block drafters and P-EAGLE have {args.layers} layers, EAGLE-3 and MTP "
        f"{DRAFTS} passes, Medusa and Hydra++ {DRAFTS} heads of 1 and 4 blocks; a block of {SLOTS} slots for every "
        f"{SLOTS} tokens. Losses and gradients are equal to the bit. On {args.device}.",
        intervals=f"over {args.rounds} steps of each in turn",
        formats={"without": ",.0f", "with": ",.0f", "memory": ".2f", "time": ".2f"},
        rows=rows,
        tables={"recompute": table_of(heads)},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of the row")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6, help="of what has a number of them")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
