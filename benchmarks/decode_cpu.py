"""Our decoder against transformers' on a CPU: same weights, interleaved; batches; where a step's time goes.

1. For every prompt all decoders take turns, greedy, batch of one: plain, draft model, prompt lookup. Of the draft
   model two pairs: both draft equally many tokens, and both as one would take them, transformers' with the settings
   that it comes with, which end a draft where the draft model is unsure, ours with `--short` tokens. Ratios are of
   tokens per second, prefill included, with 95 % bootstrap intervals over prompts; how often a decoder wrote the
   plain one's tokens is counted. `--foreign FILE` does the same with prompts of another kind.
2. Eight prompts at once against one after another.
3. The ledger: milliseconds of a step by part, for every drafter at T = 0 and 1, against the time that memory needs
   for the weights that a step reads.

    python benchmarks/decode_cpu.py --drafter runs/distill-tiny/drafter
    python benchmarks/decode_cpu.py --drafter ... --ledger --also runs/eagle-tiny/drafter   # the ledger alone
    python benchmarks/decode_cpu.py --drafter ... --prompts 2 --max-new-tokens 16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from draftsmith.benchmarks.common.ledger import Ledger, bandwidth, decode
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.provenance import drafter_weights, finish, record_of, target_weights
from draftsmith.benchmarks.common.records import Cell, Record, figure, table_of
from draftsmith.data.prompts import load_prompts, render
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Proposer
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.family import load_draft_model
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.metrics import ratio
from draftsmith.eval.measure.speed import bytes_of
from transformers import AutoModelForCausalLM

GREEDY = Warper(0.0)
PLAIN = "autoregressive"
SHORT = "draft model, short"
PAIRS = {
    # ours: theirs, which the cell of the table calls so, and the least ratio
    PLAIN: ("`generate`", "of `generate`", 1.3),
    "draft model": ("`generate(assistant_model=...)`, as many tokens", "of assisted generation", 1.8),
    SHORT: ("`generate(assistant_model=...)`, its own settings", "of assisted generation", 1.8),
    "prompt lookup": ("`generate(prompt_lookup_num_tokens=10)`", "of theirs", 1.4),
}
LEAST_TOGETHER, MOST_OUTSIDE = 2.5, 8
Ids = list[int]
Decoder = Callable[[Ids], Ids]


class Timed(NamedTuple):
    """What the decoders did on one set of prompts."""

    seconds: dict[str, np.ndarray]
    """Of every decoder, by prompt."""
    same: dict[str, int]
    """On how many prompts it wrote the plain decoder's tokens."""


def main() -> None:
    args = arguments()
    target = load_target(args.target)
    draft = load_draft_model(args.drafter, target, draft_length=args.draft_length)
    sets = {"standard library": ids_of("stdlib", target, args)}
    if args.foreign is not None:
        sets[args.foreign.stem] = ids_of(str(args.foreign), target, args)
    rows, notes = [], []
    if not args.ledger:
        short = load_draft_model(args.drafter, target, draft_length=args.short)
        decoders = decoders_of(target, draft, short, args.max_new_tokens)
        rows = [row for name, ids in sets.items() for row in ratios(name, run(decoders, ids, args.rounds), args)]
        notes = [together(target, draft, sets["standard library"], args)]
    rows += ledger_rows(target, proposers(target, draft, args), sets["standard library"], args)
    record = assembled(rows, notes, args)
    print(printed(record))
    finish(record, args.json)


def ids_of(source: str, target: Backbone, args: argparse.Namespace) -> list[Ids]:
    """Prompts as token ids, the end of each."""
    prompts = load_prompts(source, limit=args.prompts)
    return [render(prompt, target.tokenizer, limit=args.prompt_tokens) for prompt in prompts]


# ---- against transformers -----------------------------------------------------------------------


def loaded(name: str) -> Any:
    """A model as anybody loads it: ours attends by another function."""
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True)


def decoders_of(target: Backbone, draft: DraftModel, short: DraftModel, limit: int) -> dict[str, Decoder]:
    """The decoders, each from prompt ids to new ids."""
    model, assistant, as_it_comes = map(loaded, (target.name, draft.backbone.name, draft.backbone.name))
    # as many drafted tokens as ours, no early stop: both decoders do the same work
    assistant.generation_config.num_assistant_tokens = draft.draft_length
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    lookup = PromptLookup(draft_length=10, longest=2)

    def theirs(**how: object) -> Decoder:
        def call(ids: Ids) -> Ids:
            tensor = torch.tensor([ids])
            done = model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **how,
            )
            return done[0, len(ids) :].tolist()

        return call

    def ours(drafter: Proposer) -> Decoder:
        return lambda ids: generate(target, drafter, [ids], warper=GREEDY, max_new_tokens=limit).tokens[0]

    return {
        PLAIN: lambda ids: autoregressive(target, [ids], warper=GREEDY, max_new_tokens=limit).tokens[0],
        PAIRS[PLAIN][0]: theirs(),
        "draft model": ours(draft),
        PAIRS["draft model"][0]: theirs(assistant_model=assistant),
        SHORT: ours(short),
        PAIRS[SHORT][0]: theirs(assistant_model=as_it_comes),
        "prompt lookup": ours(lookup),
        PAIRS["prompt lookup"][0]: theirs(prompt_lookup_num_tokens=10, max_matching_ngram_size=2),
    }


def run(decoders: Mapping[str, Decoder], prompts: list[Ids], rounds: int) -> Timed:
    """All decoders in turn, prompt by prompt; each warmed up once before."""
    seconds = {name: np.zeros(len(prompts)) for name in decoders}
    same = dict.fromkeys(decoders, 0)
    for call in decoders.values():
        call(prompts[0])
    for number, ids in enumerate(prompts):
        written = {}
        for _ in range(rounds):
            for name, call in decoders.items():
                start = time.perf_counter()
                written[name] = call(ids)
                seconds[name][number] += time.perf_counter() - start
        for name, tokens in written.items():
            same[name] += tokens == written[PLAIN]
    return Timed(seconds, same)


def ratios(prompts: str, timed: Timed, args: argparse.Namespace) -> Iterator[dict[str, Cell]]:
    """A row per decoder; those of ours with their ratio to theirs."""
    count = len(timed.seconds[PLAIN])
    tokens = args.max_new_tokens * args.rounds * count
    for name, seconds in timed.seconds.items():
        row: dict[str, Cell] = {
            "kind": "ratio",
            "prompts": prompts,
            "decoder": f"{name}, ours" if name in PAIRS else name,
            "tokens_per_second": tokens / float(seconds.sum()),
            "same": f"{timed.same[name]} of {count}",
        }
        if name in PAIRS:
            theirs, of, least = PAIRS[name]
            faster = figure(ratio(timed.seconds[theirs], seconds).to_list())
            row |= {"ratio": faster, "ratio_of": of, "goal": f"{least}"}
        yield row


def together(target: Backbone, draft: DraftModel, prompts: list[Ids], args: argparse.Namespace) -> str:
    """Eight prompts at once against the same eight one by one, in turn; prefill left out. A sentence."""
    eights = [prompts[at : at + 8] for at in range(0, len(prompts), 8)]
    how: dict[str, Any] = {"warper": GREEDY, "max_new_tokens": args.max_new_tokens}
    at_once, alone = np.zeros(len(eights)), np.zeros(len(eights))
    for _ in range(args.rounds):
        for number, some in enumerate(eights):
            at_once[number] += generate(target, draft, some, **how).decode_seconds
            alone[number] += sum(generate(target, draft, [ids], **how).decode_seconds for ids in some)
    faster = ratio(alone, at_once)
    interval = f" [{faster.low:.2f}, {faster.high:.2f}]" if len(eights) > 1 else ""
    return (
        "Eight prompts at once against one after another, draft model, prefill left out: "
        f"{faster.value:.2f}{interval} (goal {LEAST_TOGETHER})."
    )


# ---- the ledger ---------------------------------------------------------------------------------


def proposers(target: Backbone, draft: DraftModel, args: argparse.Namespace) -> dict[str, Proposer]:
    """The drafters of the ledger, by name."""
    others = {folder.parent.name: load_drafter(folder, target, draft_length=args.draft_length) for folder in args.also}
    return {"draft model": draft, **others, "prompt lookup": PromptLookup(draft_length=10, longest=2)}


def ledger_rows(
    target: Backbone, drafters: Mapping[str, Proposer], prompts: list[Ids], args: argparse.Namespace
) -> list[dict[str, Cell]]:
    """A row per drafter and temperature: milliseconds of a step by part."""
    speed = bandwidth()
    rows: list[dict[str, Cell]] = []
    for name, drafter in drafters.items():
        read = bytes_of(target.model) + Arm(name, drafter).proposal_bytes
        for temperature in (0.0, 1.0):
            outside = outside_of(target, drafter, prompts, temperature, args)
            rows.append(
                {"kind": "ledger", "decoder": name, "T": temperature, "floor_ms": 1e3 * read / speed, **outside}
            )
    return rows


def outside_of(
    target: Backbone, drafter: Proposer, prompts: list[Ids], temperature: float, args: argparse.Namespace
) -> dict[str, Cell]:
    """Milliseconds of a step by part, and the share outside the forwards with its interval over prompts."""
    how: dict[str, Any] = {"warper": Warper(temperature), "max_new_tokens": args.max_new_tokens}
    decode(Ledger(), target, drafter, prompts[0], **how)  # warms up
    ledgers = [Ledger() for _ in prompts]
    for _ in range(args.rounds):
        for ledger, ids in zip(ledgers, prompts, strict=True):
            decode(ledger, target, drafter, ids, **how)
    whole = np.array([sum(each.seconds.values()) for each in ledgers])
    share = ratio(whole * [each.outside for each in ledgers], whole)
    calls = sum(each.calls for each in ledgers)
    parts = {_cell(part): 1e3 * sum(each.seconds[part] for each in ledgers) / calls for part in ledgers[0].seconds}
    percent = figure([None if each is None else 100 * each for each in share.to_list()])
    return {"step_ms": 1e3 * float(whole.sum()) / calls, **parts, "outside": percent}


def _cell(part: str) -> str:
    return f"{part.replace(' ', '_')}_ms"


# ---- the record ---------------------------------------------------------------------------------


def assembled(rows: list[dict[str, Cell]], notes: list[str], args: argparse.Namespace) -> Record:
    """All figures as a record."""
    against = {
        "prompts": "{prompts}",
        "decoder": "{decoder}",
        "tokens/s": "{tokens_per_second}",
        "ratio": "{ratio} {ratio_of}",
        "goal": "{goal}",
        "same tokens": "{same}",
    }
    parts = {
        "drafter": "{decoder}",
        "T": "{T}",
        "ms a step": "{step_ms}",
        "target forward": "{target_forward_ms}",
        "draft forward": "{draft_forward_ms}",
        "proposal": "{proposal_ms}",
        "acceptance": "{acceptance_ms}",
        "commit": "{commit_ms}",
        "bookkeeping": "{bookkeeping_ms}",
        f"outside the forwards (goal {MOST_OUTSIDE} %)": "{outside} %",
        "floor of memory": "{floor_ms}",
    }
    tables = {} if args.ledger else {"decode-cpu": table_of(against, where={"kind": "ratio"})}
    return record_of(
        args,
        title="Decoding against transformers on a CPU",
        needs=["the drafters, trained by their recipes"],
        target=target_weights(args.target),
        drafters=drafter_weights({each.parent.name: each for each in (args.drafter, *args.also)}),
        setup=setup_of(args),
        intervals="95 % bootstrap intervals over prompts",
        formats={"tokens_per_second": ".1f", "ratio": ".2f", "T": ".0f", "outside": ".1f"}
        | {name: ".2f" for row in rows for name in row if name.endswith("_ms")},
        rows=rows,
        tables=tables | {"decode-ledger": table_of(parts, where={"kind": "ledger"})},
        notes=notes,
    )


def setup_of(args: argparse.Namespace) -> str:
    """What was decoded and how; of the ratios only where they are measured."""
    ratios = f", the short one {args.short}. Ratios at T = 0, prefill included; rounds are interleaved"
    return (
        f"fp32, batch 1, {args.prompts} prompts of at most {args.prompt_tokens} tokens, {args.max_new_tokens} new "
        f"tokens, {args.rounds} rounds, draft length {args.draft_length}{'' if args.ledger else ratios}. The ledger "
        "leaves the prefill out; its floor is the time in which memory hands over the weights that a step reads, "
        "which a cache may beat."
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the distilled draft")
    parser.add_argument("--also", type=Path, action="append", default=[], help="another drafter's folder; the ledger")
    parser.add_argument("--foreign", type=Path, help="prompts of another kind, a JSONL file")
    parser.add_argument("--ledger", action="store_true", help="the ledger alone")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--short", type=int, default=2, help="draft length against transformers' own settings")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
