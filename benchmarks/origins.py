"""Where drafts come from: cut from the target or made from scratch, at equal size and equal steps.

Four drafts of about as many parameters are cut from the target: layers chosen by measured
acceptance, layers spread evenly as is the habit, all layers narrower, half of them narrower. One
of the same shape as the first begins from scratch. All are distilled for `--steps` steps on the
same rows, once a training seed. Beside them what needs no training: copies of 8 and 4 bits, and
early exits. All draft chains for held-out prompts, and every one is audited. What is measured is
kept row by row in `--out`, so that a run that was cut goes on where it was; other settings than
`--rows`, `--steps` and `--seeds` need another `--out`.

    python benchmarks/origins.py --out runs/origins
    python benchmarks/origins.py --out runs/origins --rows "from scratch,early exit 2" --steps 50
    python benchmarks/origins.py --out runs/origins-3 --seeds 0,1,2 --json origins.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import audited, decoded, mean
from draftsmith.benchmarks.common.kept import file_name, same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.common.runs import (
    QUIET,
    add_audit,
    add_decoding,
    by_seed,
    kept,
    parser_of,
    settings_of,
    trained,
)
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.proposal import Proposer
from draftsmith.drafters.model.early_exit import save_early_exit
from draftsmith.drafters.model.quantised import save_quantised
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.requests import first_turns, make_requests
from draftsmith.eval.measure.speed import bytes_of, measure_costs

DEPTH = 4  # drafted tokens of a chain
RECIPE = "prune-tiny"
LAYERS = 2


@dataclass(frozen=True, eq=False)
class Origin:
    """A row of the table: recipe values of a trained draft, or settings of one that is not."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    bits: int | None = None
    layers: int | None = None

    @property
    def trained(self) -> bool:
        """Whether it takes a run."""
        return bool(self.values)


def evenly(count: int, of: int) -> list[int]:
    """So many layers at equal distances, the first and the last among them."""
    return [round(at * (of - 1) / (count - 1)) for at in range(count)]


# as many parameters in each, 2.0 M of the target's 5.3 M
NARROW = {"model.layers": 8, "model.hidden": 128, "model.intermediate": 352, "model.heads": 2, "model.kv_heads": 1}
HALF = {"model.layers": 4, "model.hidden": 160, "model.intermediate": 560, "model.heads": 2, "model.kv_heads": 1}
SCRATCH = {
    "model.start_from": "",
    "model.layers": LAYERS,
    "model.hidden": 208,
    "model.intermediate": 640,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.head_size": 64,
}
ORIGINS = [
    Origin("layers by acceptance", {"model.layers": LAYERS}),
    Origin("layers evenly", {"model.layers": LAYERS, "model.keep_layers": evenly(LAYERS, 8)}),
    Origin("narrower", NARROW),
    Origin("half the layers and narrower", HALF),
    Origin("from scratch", SCRATCH),
    Origin("8 bits", bits=8),
    Origin("4 bits", bits=4),
    Origin("early exit 2", layers=2),
    Origin("early exit 6", layers=6),
]


def main() -> None:
    args = arguments()
    names = [each.name for each in ORIGINS]
    wanted = names if args.rows is None else args.rows.split(",")
    if set(wanted) - set(names):
        raise SystemExit(f"--rows {args.rows}: known are {', '.join(names)}")
    # --steps is in the names of what is kept
    same_settings(args.out, vars(args), free=("rows", "steps", "seeds", "json"))
    measured = {}
    for origin in ORIGINS:
        if origin.name in wanted:
            parts = by_seed(args) if origin.trained else by_seed(args)[:1]
            measured[origin] = [kept(measured_file(origin, part), partial(measure, origin, part)) for part in parts]
    record = assembled(measured, args)
    print(printed(record))
    finish(record, args.json)


def name_of(origin: Origin, args: argparse.Namespace) -> str:
    """What a row's files are called."""
    return f"{file_name(origin.name)}-{args.steps if origin.trained else 0}"


def measured_file(origin: Origin, args: argparse.Namespace) -> Path:
    """Where a row's measurements of a seed are kept."""
    path: Path = args.out / f"{name_of(origin, args)}.json"
    return path


def folder_of(origin: Origin, target: Backbone, args: argparse.Namespace) -> Path:
    """The drafter's folder, made now if it is not there."""
    folder: Path = args.out / "runs" / name_of(origin, args)
    if origin.trained:
        return train(origin, folder, args) / "drafter"
    if not folder.is_dir():
        if origin.bits is not None:
            save_quantised(folder, target, bits=origin.bits)
        else:
            save_early_exit(folder, target, layers=origin.layers or 0)
    return folder


def train(origin: Origin, folder: Path, args: argparse.Namespace) -> Path:
    """One run: same rows in the same order, same steps, whatever the draft begins with."""
    values = {
        "target.path": args.target,
        "loop.steps": args.steps,
        "loop.batch_rows": args.batch_rows,
        "loop.micro_rows": args.batch_rows,
        "optimizer.lr": args.lr_scratch if "model.start_from" in origin.values else args.lr,
        **origin.values,
    }
    return trained(RECIPE, folder, QUIET | {"loop.validate_rows": 16} | values | settings_of(args))


def measure(origin: Origin, args: argparse.Namespace) -> dict[str, Any]:
    """Sums of every prompt at every temperature, the audit's verdict, sizes and costs."""
    config = eval_config(args)
    target = load_target(args.target)
    folder = folder_of(origin, target, args)
    drafter = load_drafter(folder, target, draft_length=DEPTH)
    prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed)
    requests = make_requests(target, prompts, config)
    ids = [each.ids for each in requests]
    report = audited(target, drafter, first_turns(requests), args)
    if report.failures:  # a draft that fails has no place in a table
        raise SystemExit(report.text())
    arm = Arm(origin.name, drafter)
    context = sorted(map(len, ids))[len(ids) // 2] + config.max_new_tokens // 2
    measured = {"max_new_tokens": config.max_new_tokens, "seed": config.seed}
    return {
        "sums": {f"{at:g}": decoded(target, drafter, ids, at, **measured) for at in config.temperatures},
        "verdict": report.verdict,
        "parameters": parameters(drafter),
        "kept": layers_kept(folder),
        "c": measure_costs(target, arm.backbone, [DEPTH], context=context).c,
        "bytes": arm.draft_bytes,
        "proposal_bytes": arm.proposal_bytes,
        "target_bytes": bytes_of(target.model),
        "drafter": str(folder),
    }


def eval_config(args: argparse.Namespace) -> EvalConfig:
    return EvalConfig(
        prompts=args.prompts,
        limit=args.limit,
        max_new_tokens=args.max_new_tokens,
        prompt_tokens=args.prompt_tokens,
        draft_length=DEPTH,
        sweep=[],
        repeats=1,
    )


def parameters(drafter: Proposer) -> int:
    """Numbers of the model that drafts, shared ones once, whoever they belong to."""
    module: Any = getattr(drafter, "module")  # noqa: B009 - proposers at large have none
    return sum(each.numel() for each in module.parameters())


def layers_kept(folder: Path) -> str | None:
    """The layers that a run's search left; None where nothing was cut."""
    search = folder.parent / "pruning.json"
    return " ".join(map(str, json.loads(search.read_text())["kept"])) if search.is_file() else None


# ---- the record -------------------------------------------------------------------------------

MEASURES = ("alpha_hat", "tau", "mbsu")


def assembled(measured: dict[Origin, list[dict[str, Any]]], args: argparse.Namespace) -> Record:
    """A row per origin, alpha_hat, tau and mbsu at each temperature."""
    temperatures = eval_config(args).temperatures
    drafters = {
        f"{origin.name}, seed {seed}" if origin.trained else origin.name: Path(part["drafter"])
        for origin, parts in measured.items()
        for seed, part in zip(args.seeds, parts)
    }
    heads = {
        "draft": "{draft}",
        "parameters": "{parameters} M",
        "bytes, of the target's": "{bytes_share}",
        "c": "{c}",
        "layers kept": "{layers_kept}",
        **{f"{name} T={at:g}": f"{{{name}_T{at:g}}}" for at in temperatures for name in MEASURES},
        "verdict": "{verdict}",
    }
    return record_of(
        args,
        title="Where drafts come from",
        target=target_weights(args.target),
        drafters=drafter_weights(drafters),
        setup=f"{args.steps} steps of {args.batch_rows} rows of 256 tokens where trained; {args.limit} prompts of "
        f"{args.prompts}, {args.max_new_tokens} new tokens, chains of {DEPTH}, fp32.",
        intervals="95 % bootstrap intervals over prompts",
        formats={"parameters": ".2f", "bytes_share": ".0%", "c": ".2f"}
        | {f"{name}_T{at:g}": ".2f" for at in temperatures for name in MEASURES},
        rows=[row_of(origin, parts, temperatures) for origin, parts in measured.items()],
        tables={"origins": table_of(heads)},
    )


def row_of(origin: Origin, parts: Sequence[dict[str, Any]], temperatures: Sequence[float]) -> dict[str, Any]:
    """A row's cells; mbsu is tau's mean over what its weights cost to read."""
    first = parts[0]
    row = {
        "draft": origin.name,
        "parameters": first["parameters"] / 1e6,
        "bytes_share": first["bytes"] / first["target_bytes"],
        "c": first["c"],
        "layers_kept": first["kept"] or "",
        "verdict": ", ".join(sorted({part["verdict"] for part in parts})),
    }
    for at in temperatures:
        sums = [part["sums"][f"{at:g}"] for part in parts]
        tau = mean(sums, "tau")
        row |= {f"alpha_hat_T{at:g}": mean(sums, "alpha_hat"), f"tau_T{at:g}": tau}
        row[f"mbsu_T{at:g}"] = (
            None if tau is None else tau.value / (1 + first["proposal_bytes"] / first["target_bytes"])
        )
    return row


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/origins")
    parser.add_argument("--rows", help="names with commas between; default: all")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="of what is cut from the target")
    parser.add_argument("--lr-scratch", type=float, default=5e-3, help="of fresh weights")
    add_decoding(parser, limit=16)
    add_audit(parser, tokens=2_000, sequences=50_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
