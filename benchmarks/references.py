"""What a draft costs by how much text is searched: references of LLMA, datastores of REST and suffix decoding.

The texts are sources of the standard library, as many as fit into each of `--megabytes`, or all; the prompts are
beginnings of held-out files, which are in none of them. Prompt lookup, which searches the prompt and the answer alone,
stands beside them. Plain decoding and all of them take turns on every prompt, at T = 0. A draft costs its time over
that of a one-token call of plain decoding. Every method is audited on the same prompts, with the last of the sizes.
Intervals are bootstraps over prompts.

    python benchmarks/references.py
    python benchmarks/references.py --megabytes 0.1,1 --limit 4 --max-new-tokens 16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from draftsmith.benchmarks.common.acceptance import audited
from draftsmith.benchmarks.common.in_turn import FORMATS, Make, cells, in_turn
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.benchmarks.common.runs import add_audit
from draftsmith.data.config import DataConfig
from draftsmith.data.datastore import Datastore
from draftsmith.data.datastore_build import build_datastore
from draftsmith.data.prompts import load_prompts, render
from draftsmith.data.rows.prepare import all_texts
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.identity import fingerprint
from draftsmith.drafters.lookup.llma import Llma
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.lookup.rest import Rest
from draftsmith.drafters.suffix.proposer import SuffixDecoding

OWN = "prompt-lookup"


class Searched(NamedTuple):
    """Texts of one size, as each method searches them."""

    megabytes: float
    tokens: int
    makers: dict[str, Make]


def main() -> None:
    args = arguments()
    target = load_target(args.target)
    prompts = [
        render(prompt, target.tokenizer, limit=args.prompt_tokens)
        for prompt in load_prompts("stdlib", limit=args.limit)
    ]
    with TemporaryDirectory() as folder:
        searched = [searched_of(target, size, Path(folder) / f"{size:g}") for size in args.megabytes]
        rows = rows_of(target, searched, prompts, args)
    record = assembled(rows, len(prompts), args)
    print(printed(record))
    finish(record, args.json)


def searched_of(target: Backbone, megabytes: float, folder: Path) -> Searched:
    """LLMA's index, and a datastore of the same texts."""
    texts = texts_of(megabytes)
    documents = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokenizer = fingerprint(target.tokenizer)
    build_datastore(documents, folder, vocabulary=target.vocabulary, tokenizer=tokenizer)
    store, llma = Datastore(folder, tokenizer=tokenizer), Llma(documents)
    makers: dict[str, Make] = {
        "llma": lambda: llma,
        "rest": partial(Rest, store),
        "suffix with a datastore": partial(SuffixDecoding, store=store),
    }
    return Searched(sum(len(text.encode()) for text in texts) / 1e6, sum(map(len, documents)), makers)


def texts_of(megabytes: float) -> list[str]:
    """The first files whose sizes add up to so many megabytes, the last one cut; all where there are not as many."""
    texts: list[str] = []
    left = round(1e6 * megabytes)
    for text in all_texts(DataConfig(source="stdlib")):
        texts.append(text.encode()[:left].decode(errors="ignore"))
        left -= len(text.encode())
        if left <= 0:
            break
    return texts


def rows_of(
    target: Backbone, searched: Sequence[Searched], prompts: Sequence[list[int]], args: argparse.Namespace
) -> list[dict[str, Cell]]:
    """A row for each method and size: its figures of one run in turn, and the method's audit."""
    makers: dict[tuple[str, float, int], Make] = {(OWN, 0.0, 0): PromptLookup}
    makers |= {(name, each.megabytes, each.tokens): make for each in searched for name, make in each.makers.items()}
    named = {f"{name} {megabytes}": make for (name, megabytes, _), make in makers.items()}
    runs = in_turn(target, named, prompts, 0.0, args.max_new_tokens)
    # a later size takes the place of an earlier one: a method is audited where it finds the most
    largest = {name: make for (name, _, _), make in makers.items()}
    reports = {name: audited(target, make(), prompts, args) for name, make in largest.items()}
    rows: list[dict[str, Cell]] = [
        {
            "method": name,
            "megabytes": megabytes or None,
            "tokens": tokens or None,
            **cells(runs[f"{name} {megabytes}"]),
            "verdict": reports[name].verdict,
            "sees": reports[name].rosenblatt.detectable,
        }
        for name, megabytes, tokens in makers
    ]
    return sorted(rows, key=lambda row: str(row["method"]))


def assembled(rows: list[dict[str, Cell]], prompts: int, args: argparse.Namespace) -> Record:
    """One row per method and size."""
    heads = {
        "method": "{method}",
        "MB searched": "{megabytes}",
        "tokens searched": "{tokens}",
        "target calls of a draft": "{draft_calls}",
        "tau": "{tau}",
        "tokens per call": "{verified}",
        "speed-up": "{speedup}",
        "audit": "{verdict} (sees {sees})",
    }
    return record_of(
        args,
        title="The cost of a draft by how much text is searched",
        target=target_weights(args.target),
        setup=f"{prompts} beginnings of held-out files, {args.prompt_tokens} tokens each; {args.max_new_tokens} new "
        "tokens, one prompt at a time, T = 0, fp32; searched are sources of the standard library; one interleaved "
        "round. Prompt lookup searches prompt and answer alone.",
        intervals="95 % bootstrap intervals over prompts",
        audit={
            "verdict": "of each method, with the most text",
            "sees": "the smallest total variation seen stands behind it",
        },
        formats={"megabytes": ".1f", "tokens": ",.0f", "sees": ".3f", **FORMATS},
        rows=rows,
        tables={"references": table_of(heads)},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument(
        "--megabytes",
        type=lambda text: [float(each) for each in text.split(",")],
        default=[0.1, 1.0, 11.0],
        help="sizes of what is searched, ascending",
    )
    parser.add_argument("--limit", type=int, default=24, help="prompts")
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    add_audit(parser, tokens=6_000, sequences=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
