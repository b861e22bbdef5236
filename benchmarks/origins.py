"""Where drafts come from: cut from the target or made from scratch, at equal size and equal steps.

Four drafts of about as many parameters are cut from the target: layers chosen by measured
acceptance, layers spread evenly as is the habit, all layers narrower, half of them narrower. One
of the same shape as the first begins from scratch. All are distilled for `--steps` steps on the
same rows. Beside them what needs no training: copies of 8 and 4 bits, and early exits. All draft
chains for held-out prompts, in turn with plain decoding, and every one is audited. What is
measured is kept row by row in `--out`, so that a run that was cut goes on where it was; other
settings than `--rows` and `--steps` need another `--out`.

    python benchmarks/origins.py --out runs/origins
    python benchmarks/origins.py --out runs/origins --rows "from scratch,early exit 2" --steps 50
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.kept import file_name, same_settings
from draftsmith.data.prompts import load_prompts
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.model.early_exit import save_early_exit
from draftsmith.drafters.model.quantised import save_quantised
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import first_turns, make_requests
from draftsmith.eval.measure.speed import bytes_of
from draftsmith.eval.report.tables import interval, number
from draftsmith.storage import write_text

DEPTH = 4  # drafted tokens of a chain
RECIPE = "prune-tiny"
LAYERS = 2


@dataclass(frozen=True)
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
    same_settings(args.out, vars(args), free=("rows", "steps"))
    chosen = [each for each in ORIGINS if each.name in wanted]
    for origin in chosen:
        if not place(origin, args).is_file():
            found = measure(origin, args)
            write_text(place(origin, args), json.dumps(found, indent=1) + "\n")
    print("\n".join(table([json.loads(place(each, args).read_text()) for each in chosen], args)))


def place(origin: Origin, args: argparse.Namespace) -> Path:
    """Where a row's measurements are kept."""
    return args.out / f"{file_name(origin.name)}-{args.steps if origin.trained else 0}.json"


def folder_of(origin: Origin, target: Backbone, args: argparse.Namespace) -> Path:
    """The drafter's folder, made now if it is not there."""
    name = f"{file_name(origin.name)}-{args.steps if origin.trained else 0}"
    folder: Path = args.out / "runs" / name
    if origin.trained:
        status = folder / "status.json"
        if not status.is_file() or json.loads(status.read_text())["state"] != "finished":
            train(origin, folder, args)
        return folder / "drafter"
    if not folder.is_dir():
        if origin.bits is not None:
            save_quantised(folder, target, bits=origin.bits)
        else:
            save_early_exit(folder, target, layers=origin.layers or 0)
    return folder


def train(origin: Origin, folder: Path, args: argparse.Namespace) -> None:
    """One run: same rows in the same order, same steps, whatever the draft begins with."""
    values = {
        "target.path": args.target,
        "loop.steps": args.steps,
        "loop.batch_rows": args.batch_rows,
        "loop.micro_rows": args.batch_rows,
        "loop.validate_every": 100_000,
        "loop.validate_rows": 16,
        "probe.every_steps": "",
        "probe.prompts": 2,
        "optimizer.lr": args.lr_scratch if "model.start_from" in origin.values else args.lr,
        **origin.values,
        **dict(args.set),
    }
    words = [word for key, value in values.items() for word in (f"--{key}", f"{value}")]
    command = [sys.executable, "-m", "draftsmith.launch.train", RECIPE, "--out", str(folder)]
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        done = subprocess.run([*command, *words], stdout=stream, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{origin.name}: training failed, see {log}")


def measure(origin: Origin, args: argparse.Namespace) -> dict[str, Any]:
    """Results at every temperature, the audit's verdict among them."""
    config = EvalConfig(
        prompts=args.prompts,
        limit=args.limit,
        max_new_tokens=args.max_new_tokens,
        draft_length=DEPTH,
        sweep=[],
        repeats=1,
    )
    target = load_target(args.target)
    folder = folder_of(origin, target, args)
    drafter = load_drafter(folder, target, draft_length=DEPTH)
    prompts = load_prompts(config.prompts, limit=config.limit, seed=config.seed)
    requests = make_requests(target, prompts, config)
    verdict = verdict_of(target, drafter, first_turns(requests), args)
    found = evaluate(target, [Arm(origin.name, drafter, verdict)], requests, config)
    return {
        "name": origin.name,
        "parameters": parameters(drafter),
        "rows": found["rows"],
        "untrained": untrained(folder),
        "bytes": found["draft"]["bytes"],
        "target_bytes": bytes_of(target.model),
        "settings": config.model_dump(),
        "environment": environment(),
    }


def verdict_of(target: Backbone, drafter: Proposer, ids: Sequence[Sequence[int]], args: argparse.Namespace) -> str:
    """The audit's verdict; a draft that fails it has no place in a table."""
    evidence = AuditConfig(tokens=args.audit_tokens, sequences=args.audit_sequences, prompts=min(24, len(ids)))
    report = audit(target, drafter, ids, evidence)
    if report.failures:
        raise SystemExit(report.text())
    return report.verdict


def parameters(drafter: Proposer) -> int:
    """Numbers of the model that drafts, shared ones once, whoever they belong to."""
    module: Any = getattr(drafter, "module")  # noqa: B009 - proposers at large have none
    return sum(each.numel() for each in module.parameters())


def untrained(folder: Path) -> dict[str, Any] | None:
    """What the run's search saw: the layers that stay, and alpha_hat before training."""
    found = folder.parent / "pruning.json"
    return json.loads(found.read_text()) if found.is_file() else None


def table(found: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """Markdown: a row per origin, alpha_hat, tau and mbsu at each temperature."""
    where, settings = found[0]["environment"], found[0]["settings"]
    temperatures = settings["temperatures"]
    measured = [f"{name} T={at:g}" for at in temperatures for name in ("alpha_hat", "tau", "mbsu")]
    head = ["draft", "parameters", "bytes, of the target's", "c", "layers kept"]
    head += [*measured, "verdict"]
    lines = [
        f"{where['processor']}, {where['threads']} threads, torch {torch.__version__}; "
        f"{args.steps} steps of {args.batch_rows} rows of 256 tokens where trained; "
        f"{settings['limit']} prompts of {settings['prompts']}, {settings['max_new_tokens']} new "
        f"tokens, chains of {DEPTH}, fp32; 95 % intervals over prompts.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    return lines + [line_of(each) for each in found]


def line_of(found: dict[str, Any]) -> str:
    """One row of the table."""
    kept = found["untrained"]
    cells = [
        found["name"],
        f"{found['parameters'] / 1e6:.2f} M",
        f"{found['bytes'] / found['target_bytes']:.0%}",
        number(found["rows"][0]["c"]),
        " ".join(map(str, kept["kept"])) if kept else "",
    ]
    for row in found["rows"]:
        cells += [interval(row["alpha_hat"]), interval(row["tau"]), number(row["mbsu"])]
    return "| " + " | ".join([*cells, found["rows"][0]["verdict"]]) + " |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/origins"))
    parser.add_argument("--rows", help="names with commas between; default: all")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="of what is cut from the target")
    parser.add_argument("--lr-scratch", type=float, default=5e-3, help="of fresh weights")
    parser.add_argument("--prompts", default="stdlib")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--audit-tokens", type=int, default=2_000)
    parser.add_argument("--audit-sequences", type=int, default=50_000)
    parser.add_argument(
        "--set",
        type=lambda word: tuple(word.split("=", 1)),
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="a value for every trained row",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
