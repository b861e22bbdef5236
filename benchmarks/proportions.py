"""What a drafter's layer costs beside a call of its target, by depth, width and vocabulary of a small one.

Models of random weights, a batch of one behind 128 tokens, all arms of a shape in turn. A drafter of
one layer reads that layer and the target's projection for every token that it drafts; its share of a
target call decides whether it may pay.

    python benchmarks/proportions.py --json docs/results/proportions.json
    python benchmarks/proportions.py --shapes 8x208x4096,20x208x4096 --rounds 5
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.eval.measure.speed import Costs, measure_costs
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model

SHAPES = "8x208x4096,20x208x4096,20x208x8192,24x128x4096,24x160x4096,32x112x4096,32x160x4096"
HEAD = 16
CONTEXT, DRAFTED = 128, 4


class Shape(NamedTuple):
    """Sizes of a target."""

    layers: int
    hidden: int
    vocabulary: int


def main() -> None:
    args = arguments()
    record = assembled([row(shape, args) for shape in args.shapes], args)
    print(printed(record))
    finish(record, args.json)


def row(shape: Shape, args: argparse.Namespace) -> dict[str, Cell]:
    """Sizes of a shape and milliseconds of its calls."""
    target, layer = backbone(shape), backbone(shape._replace(layers=1))
    with torch.inference_mode():
        costs: Costs = measure_costs(target, layer, [DRAFTED], context=CONTEXT, rounds=args.rounds)
    call = 1e3 * costs.target_call_seconds
    weights = sum(p.numel() for p in target.model.parameters())
    return {
        **{name: float(size) for name, size in shape._asdict().items()},
        "parameters": weights / 1e6,
        "file": 2 * weights / 1e6,
        "call_ms": call,
        "verify_ms": call * costs.c_v[DRAFTED],
        "layer_ms": call * (costs.c or 0.0),
        "share": 100 * (costs.c or 0.0),
    }


def backbone(shape: Shape) -> Backbone:
    """A model of a shape with random weights, its projection tied to its embedding."""
    torch.manual_seed(0)
    sizes = ModelConfig(
        architecture="qwen3",
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.hidden // HEAD,
        kv_heads=shape.hidden // HEAD,
        head_size=HEAD,
        max_positions=512,
        tied=True,
    )
    return Backbone(fresh_model(sizes, vocabulary=shape.vocabulary, eos=None).eval(), name="random")


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """All figures as a record."""
    heads = {
        "layers": "{layers}",
        "hidden size": "{hidden}",
        "vocabulary": "{vocabulary}",
        "parameters": "{parameters} M",
        "file in bf16": "{file} MB",
        "call of 1 token": "{call_ms} ms",
        "of 5": "{verify_ms} ms",
        "one layer with the projection": "{layer_ms} ms",
        "share of a call": "{share} %",
    }
    return record_of(
        args,
        title="Proportions of small targets",
        target=None,
        setup=(
            f"Random weights, fp32, batch 1 behind {CONTEXT} tokens, medians of {args.rounds} interleaved rounds. The "
            "share is that of one layer with the projection in a call of one token."
        ),
        formats={name: ".0f" for name in ("layers", "hidden", "vocabulary", "share")}
        | {name: ".1f" for name in ("parameters", "file", "call_ms", "verify_ms", "layer_ms")},
        rows=rows,
        tables={"proportions": table_of(heads)},
    )


def shapes_of(text: str) -> list[Shape]:
    """`LAYERSxHIDDENxVOCABULARY`, comma-separated."""
    shapes = [Shape(*map(int, each.split("x"))) for each in text.split(",")]
    for shape in shapes:
        if shape.hidden % HEAD:
            raise argparse.ArgumentTypeError(f"hidden size {shape.hidden}; expected a multiple of {HEAD}")
    return shapes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shapes_of, default=shapes_of(SHAPES), help="layers x hidden x vocabulary")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
