"""Memory of a training step against the length of its row: flat for each token, where no mask is made.

For rows of 2,048 to 32,768 tokens, of one document or of several: the most that torch held at once, beyond
weights and inputs, in the frozen target's forward pass (three hidden states kept) and in forward and backward of
what is trained, gradients included; divided by the tokens. The models are narrow and random: what is shown is how
bytes grow with the row, not how many there are. `with a mask` is the same target by one pass with a mask of
rows by rows, as shorter rows are read; it is left out where that mask alone would be larger than `--most-gb`.
Targets whose layers have windows, caps or sinks stand in a table of their own.

Block drafters are shown twice: with as many blocks in every row, and `dense`, with a block for every 8 tokens, which
covers each token once. P-EAGLE and PARD have masks behind a share of its tokens.

    python benchmarks/row_memory.py
    python benchmarks/row_memory.py --tokens 512,1024
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from draftsmith.benchmarks.common.markdown import printed
from draftsmith.benchmarks.common.peak import peak_bytes
from draftsmith.benchmarks.common.provenance import finish, record_of
from draftsmith.benchmarks.common.random_models import WINDOWED, narrow_target, random_model
from draftsmith.benchmarks.common.records import Cell, Record, table_of
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.hidden_states import LAST, decoder_of
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import distill, eagle3, medusa
from draftsmith.trainers.block import dflash, dflash2, dspark, mtp, pard, peagle
from draftsmith.trainers.packed import passes
from draftsmith.trainers.teacher.features import states_of
from torch import Tensor

DOCUMENTS = (1, 8)
VOCABULARY, DRAFTED = 512, 256
BLOCK_DRAFTERS = ("dflash", "dspark", "dflash2")
DENSE = "_dense"
BY_BLOCK = (*BLOCK_DRAFTERS, *(f"{name}{DENSE}" for name in BLOCK_DRAFTERS))
PARTS = ("target", "masked", "distill", "medusa", "eagle3", "mtp", *BY_BLOCK, "peagle", "pard")
BLOCKS, SLOTS, DRAFTS = 32, 8, 4
WINDOW, WINDOW_ENTRIES = 512, {"sliding_window", "attention_chunk_size"}
TARGETS = {
    "gemma3_text": "windows (Gemma 3)",
    "gemma2": "windows, capped scores (Gemma 2)",
    "gpt_oss": "windows, sinks (gpt-oss)",
    "llama4_text": "chunks (Llama 4)",
}
KEPT, KEPT_LEAST = 0.7, 0.2


def main() -> None:
    args = arguments()
    rows = [measured(tokens, documents, args) for documents in DOCUMENTS for tokens in args.tokens]
    record = assembled(rows, args)
    print(printed(record))
    finish(record, args.json)


def measured(tokens: int, documents: int, args: argparse.Namespace) -> dict[str, Cell]:
    """Bytes for each token of a row, by part."""
    row: dict[str, Cell] = {"tokens": tokens, "documents": documents}
    batch = one_row(tokens, documents, args.device)
    for part, goal in goals(tokens, args).items():
        if part == "eagle3":
            row["target"] = bytes_of(partial(goal.prepare, batch), tokens, args.device)
            row["masked"] = None
            if tokens**2 <= args.most_gb * 1e9:
                with limit_of_masks(tokens):
                    row["masked"] = bytes_of(partial(goal.prepare, batch), tokens, args.device)
        row[part] = bytes_of(partial(step, goal, batch, goal.prepare(batch)), tokens, args.device)
        gc.collect()
    for family in TARGETS:
        decoder = decoder_of(windowed(family, tokens, args))
        row[family] = bytes_of(partial(states_of, decoder, batch, (0, 1, LAST)), tokens, args.device)
        gc.collect()
    return row


def bytes_of(work: Any, tokens: int, device: str) -> float:
    return peak_bytes(work, device) / tokens


def step(goal: Any, batch: dict[str, Tensor], teacher_output: Any) -> None:
    """Forward and backward of what is trained."""
    goal.module.zero_grad(set_to_none=True)
    goal.module(batch, teacher_output)[0].backward()


@contextmanager
def limit_of_masks(tokens: int) -> Iterator[None]:
    """Rows of so many tokens are read by one pass with a mask."""
    before = passes.MASKED
    passes.MASKED = tokens
    try:
        yield
    finally:
        passes.MASKED = before


def goals(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """An objective of each kind, on one random target."""
    torch.manual_seed(0)
    target = narrow_target(args.hidden, tokens, VOCABULARY, args.device)
    draft = {"layers": 2, "hidden": args.hidden, "heads": 2, "kv_heads": 1, "head_size": args.hidden // 2}
    data = {"sequence_length": tokens}
    distilled = Recipe.model_validate({"method": "distill", "data": data, "model": draft})
    heads = Recipe.model_validate({"method": "medusa", "data": data, "medusa": {"heads": 3}})
    feature = Recipe.model_validate({"method": "eagle3", "data": data, "eagle3": {"passes": 4, "layers": [1, 2, 3]}})
    small = distill.student(distilled, target)
    chosen = range(0, VOCABULARY, VOCABULARY // DRAFTED)
    made: dict[str, Any] = {
        "distill": distill.DistillObjective(distilled, small, target, nowhere),
        "medusa": medusa.MedusaObjective(heads, medusa.student(heads, target), target, nowhere),
        "eagle3": eagle3.Eagle3Objective(feature, eagle3.student(feature, target, chosen), target, nowhere),
    }
    made |= at_once(target, {"data": data, "model": draft}, chosen)
    for each in made.values():
        each.module.to(args.device)
    return made


def at_once(target: Any, given: dict[str, Any], chosen: range) -> dict[str, Any]:
    """Those of families that draft several tokens in a pass, and of MTP modules."""
    shares = {"kept": KEPT, "kept_least": KEPT_LEAST}
    pairs = {"depths": DRAFTS, "decoder_layers": 2, "layers": [1, 2, 3], **shares}
    sections: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "mtp": (mtp, mtp.MtpObjective, {"mtp": {"passes": DRAFTS}}),
        **blocks_of(BLOCKS, ""),
        **blocks_of(given["data"]["sequence_length"] // SLOTS, DENSE),
        "peagle": (peagle, peagle.PeagleObjective, {"peagle": pairs}),
        "pard": (pard, pard.PardObjective, {"model": given["model"], "pard": {"drafts": DRAFTS, **shares}}),
    }
    made = {}
    for name, (module, objective_of, words) in sections.items():
        recipe = Recipe.model_validate({"method": name.removesuffix(DENSE), "data": given["data"]} | words)
        student = module.student(recipe, target, *([chosen] if name == "peagle" else []))
        made[name] = objective_of(recipe, student, target, nowhere)
    return made


def blocks_of(anchors: int, which: str) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """The block drafters with so many blocks in a row; `which`: behind their names."""
    block: dict[str, Any] = {"block": {"size": SLOTS, "anchors": anchors, "decoder_layers": 2, "layers": [1, 2, 3]}}
    return {
        f"dflash{which}": (dflash, dflash.DFlashObjective, block),
        f"dspark{which}": (dspark, dspark.DSparkObjective, block | {"dspark": {"rank": 16}}),
        f"dflash2{which}": (dflash2, dflash2.DFlash2Objective, block | {"dflash2": {"rank": 16}}),
    }


def windowed(family: str, tokens: int, args: argparse.Namespace) -> Any:
    """A narrow random target of two layers, which see no more than so many tokens, all of them or every other one."""
    sizes = {"hidden_size": args.hidden, "intermediate_size": args.hidden, "intermediate_size_mlp": args.hidden}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": args.hidden // 2}
    more = WINDOWED[family] | dict.fromkeys(WINDOW_ENTRIES & WINDOWED[family].keys(), WINDOW)
    made = random_model(family, **more | sizes | heads, max_position_embeddings=tokens)
    use_grouped_attention(made)
    return made.to(args.device)


def nowhere(_module: object, _folder: object) -> None:
    """Nothing is saved."""


def one_row(tokens: int, documents: int, device: str) -> dict[str, Tensor]:
    """Documents of equal lengths, all of them labels but their first tokens."""
    documents_S = torch.arange(tokens) * documents // tokens
    positions_S = torch.cat([torch.arange(int(count)) for count in documents_S.bincount()])
    row = {
        "input_ids": torch.randint(0, VOCABULARY, (1, tokens)),
        "positions": positions_S[None],
        "documents": documents_S[None],
        "loss_mask": positions_S[None] > 0,
    }
    return {name: each.to(device) for name, each in row.items()}


def assembled(rows: list[dict[str, Cell]], args: argparse.Namespace) -> Record:
    """Bytes for a token by the row's length, a column for each part."""
    heads = {
        "tokens of the row": "{tokens}",
        "documents": "{documents}",
        "target": "{target}",
        "target, with a mask": "{masked}",
        "distilled draft": "{distill}",
        "Medusa": "{medusa}",
        "EAGLE-3": "{eagle3}",
        "MTP": "{mtp}",
        "DFlash": "{dflash}",
        "DSpark": "{dspark}",
        "DFlash 2": "{dflash2}",
        "DFlash, dense": "{dflash_dense}",
        "DSpark, dense": "{dspark_dense}",
        "DFlash 2, dense": "{dflash2_dense}",
        "P-EAGLE": "{peagle}",
        "PARD": "{pard}",
    }
    targets = {"tokens of the row": "{tokens}", "documents": "{documents}", "as above": "{target}"}
    targets |= {head: f"{{{family}}}" for family, head in TARGETS.items()}
    return record_of(
        args,
        title="Memory of a training step for each token of its row",
        target=None,
        setup=f"Bytes for each token, fp32, a random target of 4 layers of {args.hidden} numbers, vocabulary "
        f"{VOCABULARY}; the drafts have 2 layers, Medusa 3 heads, EAGLE-3 and MTP {DRAFTS} passes, block "
        f"drafters {BLOCKS} blocks of {SLOTS} slots in a row, `dense` one for every {SLOTS} tokens, P-EAGLE and PARD "
        f"{DRAFTS} drafts. Targets with windows of {WINDOW} tokens have 2 layers. Rows of up to "
        f"{passes.MASKED:,} tokens are read with a mask in any case. On {args.device}.",
        formats={"tokens": ",.0f", "documents": ".0f", **dict.fromkeys((*PARTS, *TARGETS), ",.0f")},
        rows=rows,
        tables={"row-memory": table_of(heads), "row-memory-targets": table_of(targets)},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[2048, 4096, 8192, 16384, 32768],
        help="lengths of rows",
    )
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--most-gb", type=float, default=0.3, help="the largest mask that is made")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of docs/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
