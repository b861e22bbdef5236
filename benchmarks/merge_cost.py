"""What an ensemble's merging and masking cost: their share of a decode step.

Drafts of the quickstart's size on the embedded target, or an ensemble that was trained
(`--drafter`). Drawn from fresh drafts (T = 1) trees are as large as they can be; at T = 0 fresh
drafts may well agree.

    python benchmarks/merge_cost.py
    python benchmarks/merge_cost.py --drafter runs/boost-tiny/drafter
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.backbone import backbone
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model import ensemble
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.ensemble import Ensemble, join
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.student.draft import draft_model

PARTS = ((ensemble, "merge"), (ensemble, "compact"), (backbone, "tree_mask"))


def main() -> None:
    args = arguments()
    target = load_target(args.target)
    prompts = load_prompts("stdlib", limit=args.prompts)
    ids = [render(prompt, target.tokenizer, limit=256) for prompt in prompts]
    rows = []
    for members in args.members:
        drafter = drafter_of(target, members, args)
        rows += [row(target, drafter, ids, temperature, args) for temperature in (0.0, 1.0)]
    record = assembled(rows, len(ids), args)
    print(printed(record))
    finish(record, args.json)


def assembled(rows: list[dict[str, float]], prompts: int, args: argparse.Namespace) -> Record:
    """One row per size and temperature."""
    heads = {
        "members": "{members}",
        "T": "{T}",
        "nodes": "{nodes}",
        "step, ms": "{step_ms}",
        "merging and masking, ms": "{merging_ms}",
        "share": "{share}",
    }
    return record_of(
        args,
        title="Merging the trees of an ensemble",
        target=target_weights(args.target),
        setup=f"{prompts} prompts, {args.max_new_tokens} new tokens, chains of {args.draft_length}; "
        f"{args.drafter or 'fresh drafts'}.",
        formats={"nodes": ".1f", "step_ms": ".2f", "merging_ms": ".2f", "share": ".1%"},
        rows=rows,
        tables={"merge-cost": table_of(heads)},
    )


def drafter_of(target: Backbone, members: int, args: argparse.Namespace) -> Ensemble:
    """The first members of the trained ensemble, or fresh drafts."""
    if args.drafter is None:
        return join([fresh(target, seed, args.draft_length) for seed in range(members)])
    generations = load_drafter(args.drafter, target, draft_length=args.draft_length)
    if not isinstance(generations, Ensemble):
        raise RequestError(f"{args.drafter} is no ensemble; name the drafter of a `boost` run")
    return Ensemble(generations.members[:members])


def fresh(target: Backbone, seed: int, draft_length: int) -> DraftModel:
    """An untrained draft of the quickstart's size."""
    torch.manual_seed(seed)
    config = load_recipe("distill-tiny").recipe.model
    model = draft_model(config, target.model, target.tokenizer).eval()
    return DraftModel(Backbone(model, name="fresh"), target.vocabulary, draft_length=draft_length)


def row(
    target: Backbone, drafter: Ensemble, ids: list[list[int]], temperature: float, args: argparse.Namespace
) -> dict[str, float]:
    """One row of the table, all prompts together; the first prompt warms up."""
    how: dict[str, Any] = {"warper": Warper(temperature), "max_new_tokens": args.max_new_tokens}
    generate(target, drafter, ids[:1], **how)
    with timed() as spent:
        generations = [generate(target, drafter, [each], **how) for each in ids]
    calls = sum(each.target_calls for each in generations)
    seconds = sum(each.decode_seconds for each in generations)
    nodes = sum(each.nodes for each in generations)
    own = sum(spent.values())
    return {
        "members": len(drafter.members),
        "T": temperature,
        "nodes": nodes / calls,
        "step_ms": 1e3 * seconds / calls,
        "merging_ms": 1e3 * own / calls,
        "share": own / seconds,
    }


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Seconds spent in each of PARTS inside the block."""
    spent = dict.fromkeys((name for _, name in PARTS), 0.0)

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*given, **named)
            spent[name] += time.perf_counter() - start
            return result

        return watch

    before = {name: getattr(module, name) for module, name in PARTS}
    for module, name in PARTS:
        setattr(module, name, watched(name, before[name]))
    try:
        yield spent
    finally:
        for module, name in PARTS:
            setattr(module, name, before[name])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", type=Path, default=None)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
