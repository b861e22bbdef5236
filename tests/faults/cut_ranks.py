"""Two processes with a target that is cut over them, each of which writes what it met."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from draftsmith.data.features.model_hash import weights_hash
from draftsmith.data.features.store import FeatureStore
from draftsmith.decoding.backbone import cut as cutting
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.cut import Cut, held_numbers
from draftsmith.decoding.backbone.hidden_states import LAST, decoder_of
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.projection import check_logits
from draftsmith.errors import RequestError
from draftsmith.eval.measure.speed import bytes_of
from draftsmith.trainers.config import LoopConfig, OptimizerConfig
from draftsmith.trainers.loop.interruptions import name_the_silent
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.loop.setup import make_accelerator
from draftsmith.trainers.packed import passes
from draftsmith.trainers.teacher.features import CachedFeatures, OnlineFeatures, states_of
from helpers.weight_reads import counted_reads

LAYERS = (0, 1, LAST)
ROWS, TOKENS = 4, 12
BOUND = 5  # seconds that one process may wait for another


def rows(rank: int, count: int = ROWS) -> Batch:
    """Rows of this process: two documents and padding."""
    g = torch.Generator().manual_seed(rank)
    documents = torch.tensor([0] * 5 + [1] * 5 + [-1] * 2).expand(count, -1)
    return {
        "input_ids": torch.randint(0, 60, (count, TOKENS), generator=g),
        "documents": documents,
        "positions": torch.tensor([0, 1, 2, 3, 4] * 2 + [0, 1]).expand(count, -1),
        "loss_mask": documents >= 0,
    }


def families(out: Path, folders: list[str], dtype: str, cut: Cut) -> None:
    """Each target in turn, cut: its states on rows of this process, its hash, and how much of it is here."""
    accelerator = Accelerator(cpu=True)
    rank, said = accelerator.process_index, {}
    for folder in folders:
        name = Path(folder).name
        target = load_target(folder, dtype=dtype, cut=cut)
        check_logits(target.model)
        states = OnlineFeatures(target.model, LAYERS)(rows(rank))
        torch.save([each.clone() for each in states], out / f"{name}-{rank}.pt")
        held, size = held_numbers(target.model), bytes_of(target.model)
        said[name] = {"hash": weights_hash(target.model), "held": held, "bytes": size}
        try:
            said[name]["written"] = written(target)
        except RequestError as error:
            said[name]["refused"] = str(error)
    (out / f"said-{rank}.json").write_text(json.dumps(said))
    accelerator.wait_for_everyone()  # the first process has what the others meet by, and teams are not alike fast


def loaded(out: Path, folder: str) -> None:
    """The target whole, and cut in each way: bytes read of its files, numbers held, and those that there were before."""
    rank = Accelerator(cpu=True).process_index
    said, made = {}, []
    apply = Cut.apply

    def noted(self: Cut, model: Any, mesh: Any) -> None:
        made.append(sum(each.numel() for each in model.parameters() if not each.is_meta))
        apply(self, model, mesh)

    Cut.apply = noted
    for name, cut in {"whole": None, "layers": Cut(), "offloaded": Cut(offload=True), "products": Cut(team=2)}.items():
        with counted_reads() as reads:
            held = held_numbers(load_target(folder, cut=cut).model)
        said[name] = {"read": reads.bytes, "held": held}
    (out / f"loaded-{rank}.json").write_text(json.dumps(said | {"made": made}))


def apart(rank: int) -> Batch:
    """A row of this process, of more documents than that of the process before."""
    lengths = [[12], [1, 2, 4, 5]][rank]
    positions = torch.cat([torch.arange(each) for each in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    ids = torch.randint(0, 60, (1, TOKENS), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "documents": documents, "positions": positions, "loss_mask": documents >= 0}


def long_rows(out: Path, folders: list[str], check: bool = True) -> None:
    """Rows behind the length up to which a mask is made: passes for the documents of each; what is held of a target."""
    rank = Accelerator(cpu=True).process_index
    passes.MASKED = TOKENS - 1
    if not check:
        cutting.check_layers = lambda _: None
    for folder in folders:
        model = load_target(folder, cut=Cut()).model
        made = states_of(decoder_of(model), apart(rank), LAYERS)
        torch.save([each.clone() for each in made], out / f"long-{Path(folder).name}-{rank}.pt")
        (out / f"held-{Path(folder).name}-{rank}").write_text(str(held_numbers(model)))


def written(target: Backbone) -> list[list[list[int]]]:
    """Two prompts' tokens, greedy and drawn."""
    return [
        autoregressive(target, [[1, 2, 3], [4]], warper=Warper(at), max_new_tokens=12, seed=3).tokens
        for at in (0.0, 1.0)
    ]


def parted(out: Path, folder: str) -> None:
    """The second process decodes something else than the first."""
    rank = Accelerator(cpu=True).process_index
    target = load_target(folder, cut=Cut(team=2))
    target.check_alike([[1, 2]])
    target.check_alike([[1, 2 + rank]])


def unequal_misses(out: Path, folder: str) -> None:
    """The first process has stored nothing, the second one all of its rows but one."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    store = FeatureStore(
        out / "store", {"a": 1}, max_bytes=10_000_000, row_bytes=100_000, rank=rank, world=accelerator.num_processes
    )
    online = OnlineFeatures(load_target(folder, cut=Cut()).model, LAYERS)
    source = CachedFeatures(online, store, "fp32", together=accelerator)
    batch = rows(rank)
    known = {name: each[: (ROWS - 1) * rank] for name, each in batch.items()}
    for at in range(ROWS - 1):  # one row at a time: a process without it makes up the pass
        source({name: each[at : at + 1] for name, each in (known if rank else rows(7)).items()})
    states = source(batch)
    store.close()
    torch.save([each.clone() for each in states], out / f"cached-{rank}.pt")


def one_ends(out: Path, folder: str, cut: Cut, how: str) -> None:
    """The second process raises or is stopped in front of its forward pass; the first one waits in its own, and those
    of other teams behind theirs."""
    loop = LoopConfig(stall_seconds=BOUND, precision="fp32", micro_rows=1)
    accelerator = make_accelerator(loop, OptimizerConfig(), out)
    rank = accelerator.process_index
    target = load_target(folder, cut=replace(cut, bound=timedelta(seconds=BOUND)))
    states_of(decoder_of(target.model), rows(rank), LAYERS)  # all groups are joined
    (out / f"last-{rank}").write_text(str(time.monotonic()))
    try:
        with name_the_silent(out, accelerator, bound=BOUND):
            if rank == 1 and how == "raises":
                raise ValueError("planted")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            states_of(decoder_of(target.model), rows(rank), LAYERS)
            accelerator.wait_for_everyone()
    finally:
        (out / f"end-{rank}").write_text(str(time.monotonic()))
