"""A target on this CPU in fp32 and in bf16: what a call of N tokens costs, and plain decoding beside `generate`.

1. Calls of N tokens behind a text, all in turn: by the model's own forward, and by the decoder's with its weights laid
   out. A plain read of the weights is the floor of a call.
2. Plain decoding of `--prompts`, ours and transformers' `generate` in the same type, in turn; ratios of tokens per
   second with 95 % bootstrap intervals over prompts, and on how many prompts both wrote the same tokens.

    python benchmarks/target_dtypes.py --target path/to/target --prompts prompts.jsonl
    python benchmarks/target_dtypes.py --rounds 1 --count 1 --max-new-tokens 4      # checks the script
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from draftsmith.benchmarks.common.ledger import bandwidth
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, figure, table_of
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import chain
from draftsmith.eval.measure.metrics import ratio
from draftsmith.eval.measure.speed import bytes_of

DTYPES = ("fp32", "bf16")
GREEDY = Warper(0.0)


class Caller:
    """A target behind a text, by its own forward or by the decoder's."""

    def __init__(self, target: Backbone, ids: list[int], most: int, *, lean: bool) -> None:
        self._target, self._ids, self._context, self._lean = target, ids, len(ids) - most, lean
        self._cache = KVCache(1, len(ids))
        target.lean = lean
        with torch.inference_mode():
            target.prefill([ids[: self._context]], self._cache)

    def seconds(self, tokens: int) -> float:
        """Of one call, after another that brings its weights into the caches as far as they fit."""
        self._target.lean = self._lean
        with torch.inference_mode():
            self._call(tokens)
            start = time.perf_counter()
            self._call(tokens)
            return time.perf_counter() - start

    def _call(self, tokens: int) -> None:
        given = torch.tensor([self._ids[self._context : self._context + tokens]])
        self._target.forward(given, torch.tensor([self._context]), chain(tokens - 1), self._cache)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    targets = {dtype: load_target(args.target, dtype=dtype) for dtype in DTYPES}
    prompts = prompts_of(targets["fp32"], args)
    rows = [*call_rows(targets, prompts, args), *decoding_rows(targets, prompts, args)]
    record = assembled(rows, targets, args)
    print(printed(record))
    finish(record, args.json)


def prompts_of(target: Backbone, args: argparse.Namespace) -> list[list[int]]:
    """As token ids."""
    found = load_prompts(args.prompts, limit=args.count)
    return [render(each, target.tokenizer, limit=args.prompt_tokens) for each in found]


def call_rows(
    targets: dict[str, Backbone], prompts: list[list[int]], args: argparse.Namespace
) -> list[dict[str, Cell]]:
    """A row per number of tokens: the medians of all ways, in milliseconds."""
    most = max(args.tokens)
    text = [token for ids in prompts for token in ids]
    text = (text * (1 + (args.context + most) // len(text)))[: args.context + most]
    ways = {
        f"{dtype}_{name}": Caller(target, text, most, lean=name == "laid")
        for dtype, target in targets.items()
        for name in ("own", "laid")
    }
    seconds: dict[tuple[str, int], list[float]] = {(way, n): [] for way in ways for n in args.tokens}
    for _ in range(args.rounds):
        for way, caller in ways.items():
            for n in args.tokens:
                seconds[way, n].append(caller.seconds(n))
    return [
        {"kind": "call", "N": n, **{f"{way}_ms": 1e3 * median(seconds[way, n]) for way in ways}} for n in args.tokens
    ]


def decoding_rows(
    targets: dict[str, Backbone], prompts: list[list[int]], args: argparse.Namespace
) -> list[dict[str, Cell]]:
    """A row per type: tokens per second of both, and their ratio."""
    limit = args.max_new_tokens
    seconds = {(dtype, whose): np.zeros(len(prompts)) for dtype in DTYPES for whose in ("ours", "theirs")}
    same = dict.fromkeys(DTYPES, 0)
    for number, ids in enumerate([prompts[0], *prompts]):  # the first warms up
        for dtype, target in targets.items():
            target.lean, written = True, {}
            for whose, decode in (("ours", plain), ("theirs", generated)):
                start = time.perf_counter()
                written[whose] = decode(target, ids, limit)
                if number:
                    seconds[dtype, whose][number - 1] = time.perf_counter() - start
            same[dtype] += bool(number) and written["ours"] == written["theirs"]
    tokens = limit * len(prompts)
    return [
        {
            "kind": "decoding",
            "dtype": dtype,
            **{whose: tokens / float(seconds[dtype, whose].sum()) for whose in ("ours", "theirs")},
            "ratio": figure(ratio(seconds[dtype, "theirs"], seconds[dtype, "ours"]).to_list()),
            "same": f"{same[dtype]} of {len(prompts)}",
        }
        for dtype in DTYPES
    ]


def plain(target: Backbone, ids: list[int], limit: int) -> list[int]:
    """Our decoder without a drafter."""
    return autoregressive(target, [ids], warper=GREEDY, max_new_tokens=limit, eos_ids=[]).tokens[0]


def generated(target: Backbone, ids: list[int], limit: int, **how: Any) -> list[int]:
    """transformers' decoder, with the same weights and SDPA as it comes; `how` of its `generate`."""
    given = torch.tensor([ids])
    model: Any = target.model
    held = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    done = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=limit,
        eos_token_id=None,
        do_sample=False,
        pad_token_id=0,
        **how,
    )
    model.set_attn_implementation(held)
    written: list[int] = done[0, len(ids) :].tolist()
    return written


def assembled(rows: list[dict[str, Cell]], targets: dict[str, Backbone], args: argparse.Namespace) -> Record:
    """The record with its two tables."""
    floor = {dtype: 1e3 * bytes_of(target.model) / bandwidth() for dtype, target in targets.items()}
    heads = {"tokens": "{N}"}
    for dtype in DTYPES:
        heads[f"{dtype}, own forward, ms"] = f"{{{dtype}_own_ms}}"
        heads[f"{dtype}, the decoder's, ms"] = f"{{{dtype}_laid_ms}}"
    decoding = {
        "dtype": "{dtype}",
        "ours, tokens/s": "{ours}",
        "`generate`, tokens/s": "{theirs}",
        "ratio": "{ratio}",
        "same tokens": "{same}",
    }
    return record_of(
        args,
        title="A target on a CPU in fp32 and bf16",
        target=target_weights(args.target),
        setup=f"A text of {args.context} tokens before the calls, {args.rounds} interleaved rounds, medians; "
        f"{len(prompts_of(targets['fp32'], args))} prompts, {args.max_new_tokens} tokens each, T = 0, in turn. "
        f"A plain read of the weights takes {floor['fp32']:.1f} ms in fp32 and {floor['bf16']:.1f} ms in bf16.",
        formats={**{f"{dtype}_{way}_ms": ".1f" for dtype in DTYPES for way in ("own", "laid")}}
        | {"ours": ".1f", "theirs": ".1f", "ratio": ".2f"},
        rows=rows,
        tables={
            "target-dtype-calls": table_of(heads, where={"kind": "call"}),
            "target-dtype-decoding": table_of(decoding, where={"kind": "decoding"}),
        },
    )


def add_prompts(parser: argparse.ArgumentParser, *, prompt_tokens: int) -> None:
    """What is decoded, how far and by how many threads, and where the record goes."""
    parser.add_argument("--prompts", default="stdlib", help="as --prompts of `eval`")
    parser.add_argument("--count", type=int, default=16, help="prompts")
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the record here")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    add_prompts(parser, prompt_tokens=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8], help="of a call")
    parser.add_argument("--context", type=int, default=200, help="tokens before a call")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
