"""Suffix decoding against prompt lookup and n-grams, on equal prompts, by how much the text repeats.

Three kinds of text, each from the same held-out files of the standard library:

- `files`: stretches of them, as they are;
- `repeated`: a stretch, and its first tokens again, as in an edit or a quotation;
- `agent`: turns of a transcript that grows: the stretch, the target's own answer, the stretch's first
  tokens as the next observation, and so on. All methods get the transcripts of plain greedy decoding.

Counted are tokens per target call and verified tokens per call, no seconds: the figures do not depend on
what else the machine does. The memory of earlier answers is that of the same kind's prompts before.
Intervals are bootstraps over prompts.

    python benchmarks/suffix.py
    python benchmarks/suffix.py --limit 8 --max-new-tokens 32 --json suffix.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from draftsmith.benchmarks.common.acceptance import Sums, audited, mean, sums_of
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.common.runs import add_audit
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.lookup.ngram import Ngram, NgramTable
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.suffix.index import AnswerMemory
from draftsmith.drafters.suffix.proposer import SuffixDecoding
from draftsmith.eval.measure.metrics import counts_of
from draftsmith.launch.measure.methods import TargetTexts

TEMPERATURES = (0.0, 1.0)
STRETCH, AGAIN = 160, 16  # tokens of a stretch, and of those that stand a second time
TURNS = 3
Prompts = list[list[int]]


def main() -> None:
    args = arguments()
    target = load_target(args.target)
    stretches = [
        render(prompt, target.tokenizer, limit=STRETCH) for prompt in load_prompts("stdlib", limit=args.limit)
    ]
    texts = texts_of(target, stretches, args.max_new_tokens)
    makers = makers_of(target, args.ngram_documents)
    rows: list[dict[str, Cell]] = []
    for name, make in makers.items():
        verdict = audited(target, make(), stretches, args).verdict
        for kind, prompts in texts.items():
            row: dict[str, Cell] = {"text": kind, "method": name, "verdict": verdict}
            for temperature in TEMPERATURES:
                sums = measured(target, make(), prompts, temperature, args.max_new_tokens)
                row |= {
                    f"tau_{temperature:g}": mean([sums], "tau"),
                    f"alpha_{temperature:g}": mean([sums], "alpha"),
                    f"verified_{temperature:g}": mean([sums], "verified"),
                }
            rows.append(row)
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


def transcript(target: Backbone, stretch: list[int], max_new_tokens: int) -> Prompts:
    """The prompts of all turns: each holds the turns before it, and their answers."""
    turns = [stretch]
    while len(turns) < TURNS:
        done = autoregressive(
            target, [turns[-1]], warper=Warper(0.0), max_new_tokens=max_new_tokens, eos_ids=target.eos_ids
        )
        turns.append([*turns[-1], *done.tokens[0], *stretch[:AGAIN]])
    return turns


def makers_of(target: Backbone, documents: int) -> dict[str, Callable[[], Proposer]]:
    """The methods, a fresh drafter for every measurement."""
    table = NgramTable.count(
        TargetTexts(target.tokenizer).texts("stdlib", documents), order=3, vocabulary=target.vocabulary
    )
    return {
        "prompt-lookup": PromptLookup,
        "ngram": lambda: Ngram(table),
        "suffix, chain": SuffixDecoding,
        "suffix, tree of 24": lambda: SuffixDecoding(nodes=24),
        "suffix, with earlier answers": lambda: SuffixDecoding(memory=AnswerMemory()),
    }


def measured(
    target: Backbone, drafter: Proposer, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int
) -> Sums:
    """Sums of every prompt, one after another."""
    done = [
        generate(
            target,
            drafter,
            [prompt],
            warper=Warper(temperature),
            max_new_tokens=max_new_tokens,
            eos_ids=target.eos_ids,
            requests=[number],
        )
        for number, prompt in enumerate(prompts)
    ]
    return {
        **sums_of([counts_of(each.steps) for each in done]),
        "nodes": [each.nodes for each in done],
        "calls": [each.target_calls for each in done],
    }


def assembled(rows: list[dict[str, Cell]], prompts: dict[str, int], args: argparse.Namespace) -> Record:
    """One row per method and kind of text."""
    heads = {"text": "{text}", "method": "{method}"}
    for temperature in TEMPERATURES:
        heads |= {
            f"tau, T = {temperature:g}": f"{{tau_{temperature:g}}}",
            f"tokens per call, T = {temperature:g}": f"{{verified_{temperature:g}}}",
        }
    many = ", ".join(f"{count} of {kind}" for kind, count in prompts.items())
    return record_of(
        args,
        title="Suffix decoding, prompt lookup and n-grams",
        target=target_weights(args.target),
        setup=f"Prompts: {many}; stretches of {STRETCH} tokens, {AGAIN} of them again, {TURNS} turns; "
        f"{args.max_new_tokens} new tokens, one prompt at a time, fp32; n-grams of 3 from {args.ngram_documents} of "
        "the files that the target was trained on.",
        intervals="95 % bootstrap intervals over prompts",
        formats={
            f"{name}_{each:g}": form
            for name, form in (("tau", ".2f"), ("alpha", ".2f"), ("verified", ".1f"))
            for each in TEMPERATURES
        },
        rows=rows,
        tables={"suffix": table_of({**heads, "audit": "{verdict}"})},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--limit", type=int, default=24, help="held-out files")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--ngram-documents", type=int, default=200)
    add_audit(parser, tokens=6_000, sequences=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
