"""What a target call of N tokens costs, with products laid out as for each kind of processor.

All in turn, call by call, on the embedded target; the one that this processor would choose is named.

    python benchmarks/verify_call.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Record, table_of
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.backbone import stacked
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.devices import Kind, kind
from draftsmith.decoding.tree.tree import chain

TARGET = "tiny"
KINDS: dict[Kind, str] = {"amx": "AMX", "avx512": "AVX-512 alone", "narrower": "neither"}


def main() -> None:
    args = arguments()
    layouts = {name: caller(name, max(args.tokens), args.context) for name in KINDS}
    seconds: dict[tuple[str, int], list[float]] = {(name, n): [] for name in layouts for n in args.tokens}
    for _ in range(args.rounds):
        for n in args.tokens:
            for name, call in layouts.items():
                call(n)  # the other layout has just pushed this one's weights out of the caches
                start = time.perf_counter()
                call(n)
                seconds[name, n].append(time.perf_counter() - start)
    record = assembled({key: 1e3 * median(each) for key, each in seconds.items()}, args)
    print(printed(record))
    finish(record, args.json)


def caller(processor: Kind, most: int, context: int) -> Callable[[int], None]:
    """A target whose products are laid out that way, behind a prompt; it takes how many tokens a call is of."""
    target = load_target(TARGET)
    ids = [each for prompt in load_prompts("stdlib") for each in render(prompt, target.tokenizer, limit=context)]
    cache = KVCache(1, context + most)
    trees = {n: chain(n - 1) for n in range(1, most + 1)}
    length_1 = torch.tensor([context])
    with mock.patch.object(stacked, "kind", return_value=processor), torch.inference_mode():
        target.prefill([ids[:context]], cache)  # the products are laid out here

    def call(n: int) -> None:
        with torch.inference_mode():
            target.forward(torch.tensor([ids[:n]]), length_1, trees[n], cache)

    return call


def assembled(ms: dict[tuple[str, int], float], args: argparse.Namespace) -> Record:
    """One row per number of tokens: milliseconds, and as calls of one token."""
    first = args.tokens[0]
    rows = [
        {"N": n}
        | {f"{name}_ms": ms[name, n] for name in KINDS}
        | {f"{name}_calls": ms[name, n] / ms[name, first] for name in KINDS}
        for n in args.tokens
    ]
    heads = {"tokens": "{N}"}
    for name, words in KINDS.items():
        heads[f"laid out for {words}, ms (calls of one)"] = f"{{{name}_ms}} ({{{name}_calls}})"
    return record_of(
        args,
        title="A target call, by how its products are laid out",
        target=target_weights(TARGET),
        setup=f"A text of {args.context} tokens, {args.rounds} interleaved rounds, medians. This processor has "
        f"{KINDS[kind()]}.",
        formats={key: ".2f" for key in rows[0] if key != "N"},
        rows=rows,
        tables={"verify-call": table_of(heads)},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--context", type=int, default=150, help="tokens before the call")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
