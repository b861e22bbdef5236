"""MTP modules behind and before the target's last norm: what either choice drafts, and what the wrong one costs.

`mtp.state` says where a module's states are taken and its own are fed back. A module is trained with each, once a
training seed, and drafts chains for held-out prompts with the state that it was trained with, and with the other one:
what an engine does that takes a module for one of the other kind. All of them are audited, for a module that is read
wrongly still drafts losslessly, only badly.

    python benchmarks/mtp_state.py --out runs/mtp-state --seeds 0,1,2
    python benchmarks/mtp_state.py --out runs/mtp-state-long --steps 800
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import Sums, audited, gain, mean, n_alpha
from draftsmith.benchmarks.common.kept import same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.benchmarks.common.runs import add_audit, add_decoding, by_seed, kept, parser_of
from draftsmith.benchmarks.common.shapes import DEPTH, FAMILIES
from draftsmith.benchmarks.families import at_temperatures, eval_config, prompts_of, target_of, train
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.mtp.family import Mtp
from draftsmith.drafters.mtp.layers import STATES
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.measure.requests import first_turns
from draftsmith.launch.recipe.load import load_recipe

(MODULE,) = (each for each in FAMILIES if each.name == "MTP")
# what a module was trained with, and what it drafts with
PAIRS = [(trained, drafts) for trained in STATES for drafts in STATES]
DEFAULT = STATES[0]
Measured = Mapping[tuple[str, str], Sequence[dict[str, Any]]]
"""By trained and drafting state, a measurement a seed."""


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("seeds", "json"))
    parts = by_seed(args)
    measured = {
        (trained, drafts): [
            kept(part.out / f"{trained}-{drafts}.json", partial(measure, trained, drafts, part)) for part in parts
        ]
        for trained, drafts in PAIRS
    }
    record = assembled(measured, args)
    print(printed(record))
    finish(record, args.json)


def measure(trained: str, drafts: str, args: argparse.Namespace) -> dict[str, Any]:
    """Sums of the chain at every temperature and its audit; the module is trained now if it is not there."""
    run = train(MODULE, trained_with(trained, args), args.steps)
    config, target = eval_config(args), target_of(run)
    drafter = drafting_with(drafts, run / "drafter", target)
    requests = prompts_of(target, config)
    report = audited(target, drafter, first_turns(requests), args)
    if report.failures:
        raise SystemExit(f"trained {trained}, drafts {drafts}: the audit failed: {'; '.join(report.failures)}")
    return {
        "sums": at_temperatures(target, drafter, [each.ids for each in requests], config),
        "audit": [report.verdict, report.rosenblatt.detectable],
        "run": str(run),
    }


def trained_with(state: str, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of the runs of one state, in a folder of their own."""
    return argparse.Namespace(**{**vars(args), "out": args.out / state, "set": [*args.set, ("mtp.state", state)]})


def drafting_with(state: str, folder: Path, target: Backbone) -> Mtp:
    """A trained module, on a chain, taken for one of `state`."""
    loaded: Any = load_drafter(folder, target, draft_length=DEPTH)
    net: MtpNet = loaded.module
    net.config = replace(net.config, state=state)
    return Mtp(net, target, tree="chain", draft_length=DEPTH)


# ---- the record -------------------------------------------------------------------------------


def assembled(measured: Measured, args: argparse.Namespace) -> Record:
    """A row per trained and drafting state and temperature, one table a temperature."""
    temperatures = [f"{at:g}" for at in eval_config(args).temperatures]
    drafters = {
        f"{trained} the norm, seed {seed}": Path(each["run"]) / "drafter"
        for trained in STATES
        for seed, each in zip(args.seeds, measured[trained, trained], strict=True)
    }
    heads = {
        "trained": "{trained} the norm",
        "drafts": "{drafts} the norm",
        "tau": "{tau}",
        "n-alpha": "{n_alpha}",
        f"tau less that {DEFAULT} it": "{tau_less_default}",
        "tau less that with its own state": "{tau_less_own}",
        "verdict": "{verdict} (sees {sees})",
    }
    return record_of(
        args,
        title="MTP modules behind and before the last norm",
        target=target_weights(load_recipe(MODULE.recipe, args.set).recipe.target.path),
        drafters=drafter_weights(drafters),
        setup=f"{args.steps} steps of {args.batch_rows} rows; {args.limit} prompts of {args.prompts}, "
        f"{args.max_new_tokens} new tokens, fp32; a chain of {DEPTH}",
        intervals="95 % bootstrap intervals over prompts; differences are paired by prompt and training seed",
        audit={"verdict": "of each row", "sees": "the smallest total variation seen stands behind it"},
        formats={"tau": ".2f", "n_alpha": ".2f", "tau_less_default": "+.2f", "tau_less_own": "+.2f", "sees": ".3f"},
        rows=[row_of(*pair, at, measured) for at in temperatures for pair in PAIRS],
        tables={f"T{at}": table_of(heads, where={"T": at}) for at in temperatures},
    )


def row_of(trained: str, drafts: str, temperature: str, measured: Measured) -> dict[str, Any]:
    """A pair's cells: with its own state a module is compared with the default's, with the other one with itself."""
    own = trained == drafts
    mine, itself, default = (
        sums_of(measured[pair], temperature) for pair in ((trained, drafts), (trained, trained), (DEFAULT, DEFAULT))
    )
    audits = [each["audit"] for each in measured[trained, drafts]]
    return {
        "trained": trained,
        "drafts": drafts,
        "T": temperature,
        "tau": mean(mine, "tau"),
        "n_alpha": n_alpha(mine),
        "tau_less_default": gain(mine, default, "tau") if own and trained != DEFAULT else None,
        "tau_less_own": None if own else gain(mine, itself, "tau"),
        "verdict": ", ".join(sorted({verdict for verdict, _ in audits})),
        "sees": max(sees for _, sees in audits),
    }


def sums_of(of_seeds: Sequence[dict[str, Any]], temperature: str) -> list[Sums]:
    """A state's sums at a temperature, one a seed."""
    return [each["sums"][temperature] for each in of_seeds]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, out="runs/mtp-state")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.set_defaults(repeats=1)
    add_decoding(parser, limit=24)
    add_audit(parser, tokens=1000, sequences=20_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
