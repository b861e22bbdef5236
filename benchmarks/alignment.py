"""Every divergence on every source of data: one draft, equal steps, one table.

A shared draft (`distill-tiny`, or none with `--from-scratch`) is trained on with each divergence on
each kind of rows: the corpus (`gold`), the target's continuations of it (`target`, written once by
`draftsmith generate` at temperature 1), its greedy ones (`greedy`), the draft's own words
(`student`), half of the rows these and half the target's (`request`), either model's words token by
token (`token`), and what the target put in the place of the shared draft's rejected tokens while
the two decoded (`replay`). A row of `student` and `token` has as many labels as prompts with
`--new-tokens` fit, one of `replay` as many as there were corrections: fewer than other rows, so
compare divergences within a source before sources with each other. Held out are rows
of the corpus, their first tokens as prompts, and what the target says behind these at temperature
1. Measured for each: the exact acceptance sum_v min(p, q) on held-out text and on the target's
held-out words, `alpha_hat` and tau of decoding at T = 0 and 1, and the paired difference to forward
KL on the same rows. Intervals are bootstraps over prompts, those of differences over the same ones
of both. A cell that was measured is not measured again, so that a run that was cut goes on; other
settings than `--losses` and `--sources` need another `--out`.

    python benchmarks/alignment.py --out runs/alignment
    python benchmarks/alignment.py --out runs/alignment-40 --steps 40 --sources gold,student
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.benchmarks.kept import is_finished, same_settings
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.prepare import prepare, training_texts
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.environment import environment
from draftsmith.eval.measure.metrics import Counts, Interval, counts_of, difference, ratio
from draftsmith.eval.report.tables import interval as shown
from draftsmith.launch.cli import main as draftsmith
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.train import train
from draftsmith.storage import write_text
from draftsmith.trainers.loop.objective import Batch, hidden_states, labelled

LOSSES: dict[str, dict[str, float]] = {
    "kl": {},
    "reverse_kl": {"kl": 0.0, "reverse_kl": 1.0},
    "jsd": {"kl": 0.0, "jsd": 1.0},
    "tv": {"kl": 0.0, "tv": 1.0},  # which begins with KL by itself
    "lk_alpha": {"kl": 0.0, "lk_alpha": 1.0},
    "lk_lambda": {"kl": 0.0, "lk_lambda": 1.0},
    "ce": {"kl": 0.0, "ce": 1.0},
}
AIMED = ("tv", "lk_alpha", "lk_lambda")
SOURCES: dict[str, dict[str, Any]] = {
    "gold": {},
    "target": {},
    "greedy": {},
    "replay": {},
    "student": {"share": 1.0, "by": "student"},
    "request": {"share": 0.5, "by": "student"},
    "token": {"share": 1.0, "by": "mixed"},
}
# what writes the rows of a source before training: the target alone, or beside the shared draft
ANSWERS = {"target": "answers", "request": "answers", "greedy": "greedy", "replay": "replay"}
DEPTH = 4
MEASURES = ("text", "words", "alpha_hat_0", "tau_0", "alpha_hat_1", "tau_1")
COMPARED = ("words", "tau_0", "alpha_hat_1")
HEADS = ("alpha on text", "alpha on the target's words", "alpha_hat T=0", "tau T=0", "alpha_hat T=1", "tau T=1")


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows, what the target says behind their beginnings, and its distribution on both."""

    prompts: list[list[int]]
    tokens: int
    """New ones that are decoded behind a prompt."""
    draws: int
    """Decodes of a prompt at T = 1, each with random numbers of its own."""
    text: list[Batch]
    words: list[Batch]
    distributions: dict[str, list[torch.Tensor]]
    """By the name of the rows, for each batch the target's distribution at its labels, [P, V]."""


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("losses", "sources"))
    logging.basicConfig(level=logging.WARNING)
    cells = [(source, loss) for source in args.sources for loss in args.losses]
    wanted = [args.out / "start.json", *(cell_file(args, *cell) for cell in cells)]
    if not all(path.is_file() for path in wanted):
        measure_missing(cells, args)
    found = {path.stem: json.loads(path.read_text()) for path in wanted}
    print("\n".join(table(found, cells, args)))
    print("\n".join(verdicts(found, cells)))


def measure_missing(cells: Sequence[tuple[str, str]], args: argparse.Namespace) -> None:
    """Train and measure what no file of `--out` holds yet."""
    start = shared_start(args)
    written = {ANSWERS[each] for each in args.sources if each in ANSWERS}
    answers = {kind: target_words(kind, start, args) for kind in sorted(written)}
    target = load_target(target_path(args))
    held_out = hold_out(target, args)
    if not (args.out / "start.json").is_file():
        found = measure(target, start, held_out)
        found |= {"verdict": verdict_of(target, start, held_out, args), **environment()}
        write_text(args.out / "start.json", json.dumps(found) + "\n")
    for source, loss in cells:
        if not cell_file(args, source, loss).is_file():
            drafter = train_cell(source, loss, start, answers, args)
            found = measure(target, drafter, held_out)
            write_text(cell_file(args, source, loss), json.dumps(found) + "\n")
            print(f"{source} {loss}: words {ratio(*pair(found, 'words')).value:.4f}", flush=True)


def cell_file(args: argparse.Namespace, source: str, loss: str) -> Path:
    place: Path = args.out / f"{source}-{loss}.json"
    return place


def target_path(args: argparse.Namespace) -> str:
    return str(load_recipe("distill-tiny", args.set).recipe.target.path)


def data_config(args: argparse.Namespace) -> DataConfig:
    return load_recipe("distill-tiny", args.set).recipe.data


def shared_start(args: argparse.Namespace) -> Path:
    """The drafter that all cells go on from; untrained where they begin from scratch."""
    steps = 1 if args.from_scratch else args.start_steps
    values = {"optimizer__lr": 1e-12, "optimizer__warmup_steps": 0} if args.from_scratch else {}
    return run_of(args, "start", loop__steps=steps, **values)


def train_cell(source: str, loss: str, start: Path, answers: dict[str, Path], args: argparse.Namespace) -> Path:
    """Go on from `start` with one divergence on one kind of rows; the drafter's folder."""
    values: dict[str, Any] = {f"objective__{name}": value for name, value in LOSSES[loss].items()}
    if source in ANSWERS:
        values |= {"data__source": str(answers[ANSWERS[source]]), "data__packing": False}
    values |= {f"rollouts__{name}": value for name, value in SOURCES[source].items()}
    if SOURCES[source]:
        values |= {
            "rollouts__prompt_tokens": args.prompt_tokens,
            "rollouts__new_tokens": args.new_tokens,
            "rollouts__every_steps": args.every_steps,
        }
    return run_of(
        args,
        f"{source}-{loss}",
        model__start_from=str(start),
        loop__steps=args.steps,
        loop__batch_rows=args.batch_rows,
        loop__micro_rows=args.batch_rows,
        optimizer__lr=args.lr,
        **values,
    )


def run_of(args: argparse.Namespace, name: str, **values: Any) -> Path:
    """Train `distill-tiny` with these values, or go on with it; the drafter's folder."""
    out: Path = args.out / "runs" / name
    if not is_finished(out):
        quiet = {
            "loop__validate_every": 10**6,
            "loop__validate_rows": 4,
            "probe__every_steps": None,
            "probe__prompts": 1,
            "probe__max_new_tokens": 4,
            "checkpoint__every_steps": 10**6,
        }
        own = {name.replace(".", "__"): value for name, value in args.set}
        train("distill-tiny", out=out, **{**own, **quiet, **values})
    return out / "drafter"


def target_words(kind: str, start: Path, args: argparse.Namespace) -> Path:
    """The target's continuations of windows of the training texts alone, as rows to train on.

    At temperature 1; `greedy` at 0; `replay`: where it overruled the shared draft at temperature 1.
    """
    prompts, answers = args.out / "prompts.jsonl", args.out / kind
    if not prompts.is_file():
        rows = islice(windows(training_texts(data_config(args))), args.answers)
        lines = [json.dumps({"text": window}) + "\n" for window in rows]
        write_text(prompts, "".join(lines))
    length = data_config(args).sequence_length
    code = draftsmith(
        [
            "generate",
            "--source",
            str(prompts),
            "--out",
            str(answers),
            "--target",
            target_path(args),
            "--temperature",
            "0" if kind == "greedy" else "1",
            "--batch",
            "32",
            "--prompt-tokens",
            str(args.prompt_tokens),
            "--max-new-tokens",
            str(length - args.prompt_tokens - 2),
            *(["--drafter", str(start), "--corrections"] if kind == "replay" else []),
        ]
    )
    logging.getLogger("draftsmith").setLevel(logging.WARNING)  # the command line sets its own
    if code:
        raise SystemExit(code)
    return answers / ("corrections.jsonl" if kind == "replay" else "answers.jsonl")


def windows(texts: Iterator[str]) -> Iterator[str]:
    """Two thousand characters from the beginning and the middle of every text."""
    for text in texts:
        lines = text.splitlines(keepends=True)
        for first in sorted({0, len(lines) // 3, 2 * len(lines) // 3}):
            window = "".join(lines[first : first + 60])[:2000]
            if window.strip():
                yield window


def hold_out(target: Backbone, args: argparse.Namespace) -> HeldOut:
    """Rows spread over those held out, prompts from them, and the target's own continuations."""
    rows = prepare(data_config(args), target.tokenizer, out=None).validation
    chosen = [at * len(rows) // args.limit for at in range(min(args.limit, len(rows)))]
    whole = rows.batch(chosen)
    prompts = []
    for ids, documents in zip(whole["input_ids"], whole["documents"], strict=True):
        own = documents == documents[0]
        prompts.append(ids[own][: args.prompt_tokens].tolist())
    said = autoregressive(
        target, prompts, warper=Warper(1.0), max_new_tokens=args.max_new_tokens, seed=11, eos_ids=target.eos_ids
    ).tokens
    text = [rows.batch(chosen[at : at + 16]) for at in range(0, len(chosen), 16)]
    both = list(zip(prompts, said, strict=True))
    words = [continued(both[at : at + 16]) for at in range(0, len(both), 16)]
    distributions = {
        name: [distribution(target.model, batch) for batch in batches]
        for name, batches in (("text", text), ("words", words))
    }
    return HeldOut(prompts, args.max_new_tokens, args.draws, text, words, distributions)


def continued(pairs: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """A batch of one document a row, whose labels are what stands behind the prompt."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    rows = len(pairs)
    batch = {
        "input_ids": torch.zeros(rows, length, dtype=torch.long),
        "loss_mask": torch.zeros(rows, length, dtype=torch.bool),
        "positions": torch.arange(length).repeat(rows, 1),
        "documents": torch.full((rows, length), -1),
    }
    for at, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        batch["input_ids"][at, :end] = torch.tensor([*prompt, *answer])
        batch["loss_mask"][at, len(prompt) : end] = True
        batch["documents"][at, :end] = 0
    return batch


@torch.no_grad()
def distribution(model: Any, batch: Batch) -> torch.Tensor:
    """softmax of the logits at the labelled positions, fp32 [P, V]."""
    hidden_PH, _ = labelled(hidden_states(model, batch), batch)
    logits_PV: torch.Tensor = model.get_output_embeddings()(hidden_PH)
    return logits_PV.float().softmax(-1)


def measure(target: Backbone, drafter: Path, held_out: HeldOut) -> dict[str, Any]:
    """Per prompt or row, what is summed above and below the line of every measure."""
    proposer: Any = load_drafter(drafter, target, draft_length=DEPTH)
    found: dict[str, Any] = {}
    for name, batches in (("text", held_out.text), ("words", held_out.words)):
        parts = [
            overlaps(proposer.module, batch, p_PV)
            for batch, p_PV in zip(batches, held_out.distributions[name], strict=True)
        ]
        found[name] = [[value for part in parts for value in part[at]] for at in (0, 1)]
    for temperature in (0, 1):
        counts = decoded(target, proposer, held_out, float(temperature))
        found[f"alpha_hat_{temperature}"] = [
            [sum(float(one.alpha_hat_D.sum()) for one in each) for each in counts],
            [sum(float(one.tested_D.sum()) for one in each) for each in counts],
        ]
        found[f"tau_{temperature}"] = [
            [sum(one.emitted for one in each) for each in counts],
            [sum(one.steps for one in each) for each in counts],
        ]
    return found


def overlaps(model: Any, batch: Batch, p_PV: torch.Tensor) -> tuple[list[float], list[int]]:
    """sum_v min(p, q) summed over each row's labels, and how many there are."""
    alpha_P = torch.minimum(p_PV, distribution(model, batch)).sum(-1)
    counts = batch["loss_mask"][:, 1:].sum(1).tolist()
    return [float(part.sum()) for part in alpha_P.split(counts)], counts


def decoded(target: Backbone, proposer: Any, held_out: HeldOut, temperature: float) -> list[list[Counts]]:
    """Counts of every prompt's decodes: one at T = 0, several that draw differently above."""
    each = held_out.draws if temperature else 1
    rows = [prompt for prompt in held_out.prompts for _ in range(each)]
    found: list[Counts] = []
    for at in range(0, len(rows), 64):
        some = rows[at : at + 64]
        done = generate(
            target,
            proposer,
            some,
            warper=Warper(temperature),
            max_new_tokens=held_out.tokens,
            eos_ids=target.eos_ids,
            requests=range(at, at + len(some)),
        )
        found += counts_of(done.steps)
    return [found[at : at + each] for at in range(0, len(found), each)]


def verdict_of(target: Backbone, drafter: Path, held_out: HeldOut, args: argparse.Namespace) -> str:
    """Of the family: all cells draft by the same code with other weights."""
    proposer = load_drafter(drafter, target, draft_length=DEPTH)
    evidence = AuditConfig(tokens=args.audit_tokens, sequences=args.audit_sequences, prompts=24)
    return str(audit(target, proposer, held_out.prompts, evidence).verdict)


def pair(found: dict[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    top, bottom = found[name]
    return np.array(top, dtype=float), np.array(bottom, dtype=float)


def gain(mine: dict[str, Any], other: dict[str, Any], name: str) -> Interval:
    """Difference of two ratios of sums over the prompts that both had."""
    return difference(pair(mine, name), pair(other, name), resamples=4000)


def table(found: dict[str, Any], cells: Sequence[tuple[str, str]], args: argparse.Namespace) -> list[str]:
    """Markdown, one row per cell."""
    place = found["start"]
    begin = "an untrained draft" if args.from_scratch else f"{args.start_steps} steps of KL"
    less = ["words: less KL's", "tau T=0: less KL's", "alpha_hat T=1: less KL's"]
    heads = ["data", "divergence", *HEADS, *less]
    lines = [
        f"{place['processor']}, {place['threads']} threads, torch {torch.__version__}; from "
        f"{begin}, {args.steps} steps of {args.batch_rows} rows; {args.limit} held-out prompts of "
        f"{args.prompt_tokens} tokens, {args.max_new_tokens} new ({args.draws} draws at T = 1), "
        f"K = {DEPTH}; 95 % intervals over prompts; audit of the shared draft: {place['verdict']}.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        row_of("before", "", place, None),
    ]
    for source, loss in cells:
        base = found.get(f"{source}-kl") if loss != "kl" else None
        lines.append(row_of(source, loss, found[f"{source}-{loss}"], base))
    return lines


def row_of(source: str, loss: str, own: dict[str, Any], base: dict[str, Any] | None) -> str:
    values = [shown(ratio(*pair(own, name)).to_list()) for name in MEASURES]
    less = ["" if base is None else signed(gain(own, base, name)) for name in COMPARED]
    return "| " + " | ".join([source, loss, *values, *less]) + " |"


def signed(found: Interval) -> str:
    return f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def verdicts(found: dict[str, Any], cells: Sequence[tuple[str, str]]) -> list[str]:
    """Which acceptance-aimed losses beat forward KL on the same rows beyond chance."""
    lines = []
    for source, loss in cells:
        if loss not in AIMED or f"{source}-kl" not in found:
            continue
        own, base = found[f"{source}-{loss}"], found[f"{source}-kl"]
        for name in ("text", *COMPARED):
            value = gain(own, base, name)
            says = "above" if value.low > 0 else "below" if value.high < 0 else "not told apart from"
            lines.append(f"{source} {loss} is {says} KL in {name}: {signed(value)}")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = lambda word: word.split(",")  # noqa: E731
    parser.add_argument("--out", type=Path, default=Path("runs/alignment"))
    parser.add_argument("--losses", type=names, default=list(LOSSES))
    parser.add_argument("--sources", type=names, default=list(SOURCES))
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument("--start-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--every-steps", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=412)
    parser.add_argument("--limit", type=int, default=64, help="held-out prompts")
    parser.add_argument("--draws", type=int, default=2, help="decodes of a prompt at T = 1")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--audit-tokens", type=int, default=20_000)
    parser.add_argument("--audit-sequences", type=int, default=200_000)
    parser.add_argument(
        "--set",
        type=lambda word: tuple(word.split("=", 1)),
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="a value for every run's recipe",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
