"""Suffix decoding against prompt lookup and n-grams, on equal prompts, by how much the text repeats.

Three kinds of text, each from the same held-out files of the standard library:

- `files`: stretches of them, as they are;
- `repeated`: a stretch, and its first tokens again, as in an edit or a quotation;
- `agent`: turns of a transcript that grows: the stretch, the target's own answer, the stretch's first
  tokens as the next observation, and so on. All methods get the transcripts of plain greedy decoding.

Counted are tokens per target call and verified tokens per call, which do not depend on what else the machine
does. Seconds are those of one round, plain decoding and every method in turn on each prompt; a second round
would ask the memory of earlier answers, that of the same kind's prompts before, for what it has just seen.
With `--drafter` a trained drafter is measured too, alone and behind suffix decoding (the hybrid). Every method
is audited on each kind's prompts. Intervals are bootstraps over prompts. What is measured is kept in `--out`, so
that a call that was cut goes on where it was; other settings need another `--out`.

    python benchmarks/suffix.py
    python benchmarks/suffix.py --out runs/suffix-8 --limit 8 --max-new-tokens 32 --json suffix.json
    python benchmarks/suffix.py --out runs/suffix-hybrid --drafter runs/eagle-tiny/drafter
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.common.acceptance import audited
from draftsmith.benchmarks.common.in_turn import FORMATS, Make, Prompts, cells, in_turn
from draftsmith.benchmarks.common.kept import file_name, same_settings
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Figure, Record, table_of
from draftsmith.benchmarks.common.runs import add_audit, kept
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.extras.ngram import Ngram, NgramTable
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.suffix.hybrid import beside
from draftsmith.drafters.suffix.index import AnswerMemory
from draftsmith.drafters.suffix.proposer import SuffixDecoding
from draftsmith.eval.audit.enumeration import Enumeration
from draftsmith.launch.methods import TargetTexts

TEMPERATURES = (0.0, 1.0)
STRETCH, AGAIN = 160, 16  # tokens of a stretch, and of those that stand a second time
TURNS = 3
DRAFTED = 4  # tokens of a trained drafter's draft
TRAINED, HYBRID = "trained drafter", "suffix before the trained drafter"


def main() -> None:
    args = arguments()
    same_settings(args.out, vars(args), free=("json",))
    target = load_target(args.target)
    stretches = [
        render(prompt, target.tokenizer, limit=STRETCH) for prompt in load_prompts("stdlib", limit=args.limit)
    ]
    texts = kept(args.out / "texts.json", partial(texts_of, target, stretches, args.max_new_tokens))
    makers = makers_of(target, args)
    audits = {
        name: kept(args.out / f"{file_name(name)}-audits.json", partial(audits_of, target, make, texts, args))
        for name, make in makers.items()
    }
    rows = [row for kind, prompts in texts.items() for row in rows_of(target, makers, kind, prompts, audits, args)]
    record = assembled(rows, {kind: len(prompts) for kind, prompts in texts.items()}, args)
    print(printed(record))
    finish(record, args.json)


def texts_of(target: Backbone, stretches: Prompts, max_new_tokens: int) -> dict[str, Prompts]:
    """The prompts of every kind."""
    repeated = [[*stretch, *stretch[:AGAIN]] for stretch in stretches]
    return {
        "files": stretches,
        "repeated": repeated,
        "agent": [turn for stretch in stretches for turn in transcript(target, stretch, max_new_tokens)],
    }


def transcript(target: Backbone, stretch: list[int], max_new_tokens: int) -> list[list[int]]:
    """The prompts of all turns: each holds the turns before it, and their answers."""
    turns = [stretch]
    while len(turns) < TURNS:
        done = autoregressive(
            target, [turns[-1]], warper=Warper(0.0), max_new_tokens=max_new_tokens, eos_ids=target.eos_ids
        )
        turns.append([*turns[-1], *done.tokens[0], *stretch[:AGAIN]])
    return turns


def makers_of(target: Backbone, args: argparse.Namespace) -> dict[str, Make]:
    """The methods, a fresh drafter for every measurement."""
    table = NgramTable.count(
        TargetTexts(target.tokenizer).texts("stdlib", args.ngram_documents), order=3, vocabulary=target.vocabulary
    )

    def trained() -> Proposer:
        return load_drafter(args.drafter, target, draft_length=DRAFTED)

    behind = {} if args.drafter is None else {TRAINED: trained, HYBRID: lambda: beside(trained(), SuffixDecoding())}
    return {
        "prompt-lookup": PromptLookup,
        "ngram": lambda: Ngram(table),
        "suffix, chain": SuffixDecoding,
        "suffix, tree of 24": lambda: SuffixDecoding(nodes=24),
        "suffix, with earlier answers": lambda: SuffixDecoding(memory=AnswerMemory()),
        **behind,
    }


def audits_of(
    target: Backbone, make: Make, texts: Mapping[str, Prompts], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """A method's verdict on every kind of text; what is enumerated of it knows no text: once for all."""
    enumerated: Enumeration | None = None
    verdicts = {}
    for kind, prompts in texts.items():
        report = audited(target, make(), prompts, args, enumerated=enumerated)
        enumerated = report.enumeration
        verdicts[kind] = {"verdict": report.verdict, "sees": report.rosenblatt.detectable}
    return verdicts


def rows_of(
    target: Backbone,
    makers: Mapping[str, Make],
    kind: str,
    prompts: Prompts,
    audits: Mapping[str, dict[str, Any]],
    args: argparse.Namespace,
) -> list[dict[str, Cell]]:
    """Of one kind of text, a row per method: its audit, and its figures at every temperature."""
    rows: dict[str, dict[str, Cell]] = {name: {"text": kind, "method": name, **audits[name][kind]} for name in makers}
    for temperature in TEMPERATURES:
        place = args.out / f"{kind}-{temperature:g}.json"
        figures = kept(place, partial(figures_of, target, makers, prompts, temperature, args.max_new_tokens))
        for name, of_method in figures.items():
            rows[name] |= of_method
    return list(rows.values())


def figures_of(
    target: Backbone, makers: Mapping[str, Make], prompts: Prompts, temperature: float, max_new_tokens: int
) -> dict[str, dict[str, Any]]:
    """Every method's cells at a temperature, as they are written in files."""
    return {
        name: {
            f"{cell}_{temperature:g}": value.model_dump() if isinstance(value, Figure) else value
            for cell, value in cells(run).items()
        }
        for name, run in in_turn(target, makers, prompts, temperature, max_new_tokens).items()
    }


def assembled(rows: list[dict[str, Cell]], prompts: dict[str, int], args: argparse.Namespace) -> Record:
    """One row per method and kind of text."""
    heads = {"text": "{text}", "method": "{method}"}
    for temperature in TEMPERATURES:
        at = f"{temperature:g}"
        heads |= {
            f"tau, T = {at}": f"{{tau_{at}}}",
            f"tokens per call, T = {at}": f"{{verified_{at}}}",
            f"speed-up, T = {at} (ms of a draft)": f"{{speedup_{at}}} ({{draft_ms_{at}}})",
        }
    many = ", ".join(f"{count} of {kind}" for kind, count in prompts.items())
    return record_of(
        args,
        title="Suffix decoding, prompt lookup and n-grams",
        needs=[] if args.drafter is None else ["the drafter, trained by its recipe"],
        target=target_weights(args.target),
        drafters=[] if args.drafter is None else drafter_weights({TRAINED: args.drafter}),
        setup=f"Prompts: {many}; stretches of {STRETCH} tokens, {AGAIN} of them again, {TURNS} turns; "
        f"{args.max_new_tokens} new tokens, one prompt at a time, fp32; n-grams of 3 from {args.ngram_documents} of "
        "the files that the target was trained on.",
        intervals="95 % bootstrap intervals over prompts",
        audit={"verdict": "of each row", "sees": "the smallest total variation seen stands behind it"},
        formats={"sees": ".3f"}
        | {f"{name}_{each:g}": form for name, form in FORMATS.items() for each in TEMPERATURES},
        rows=rows,
        tables={"suffix": table_of({**heads, "audit": "{verdict} (sees {sees})"})},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/suffix"), help="where measurements are kept")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--limit", type=int, default=24, help="held-out files")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--drafter", type=Path, metavar="FOLDER", help="of a trained drafter, for the hybrid")
    parser.add_argument("--ngram-documents", type=int, default=200)
    add_audit(parser, tokens=6_000, sequences=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
