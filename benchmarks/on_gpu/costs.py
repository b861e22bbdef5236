"""The plan's sections that have scripts of their own: a training step, samplers, memory of the losses.

Read next: `../step_gpu.py`, `../samplers.py`, `../loss_memory.py`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from draftsmith.benchmarks import loss_memory, step_gpu
from draftsmith.benchmarks import samplers as sampler_script
from draftsmith.benchmarks.common.records import Record
from draftsmith.benchmarks.on_gpu.arms import why
from draftsmith.benchmarks.on_gpu.setting import Setting, release


def training(setting: Setting, name: str) -> Iterator[Record]:
    """An EAGLE-3 step with small and large chunks, with and without computing again."""
    sizes = step_gpu.sizes_of(setting)
    rows = []
    notes = []
    for chunk in setting.chunks:
        for recompute in (False, True):
            try:
                rows.append(step_gpu.measured(sizes, recompute=recompute, chunk=chunk))
            except Exception as error:  # noqa: BLE001
                # memory may not suffice for one of them
                notes.append(f"chunk {chunk}, recompute {recompute}: {why(error)}")
            release(setting.device)
            if rows:
                yield step_gpu.assembled(rows, sizes, asked(setting), notes)


def samplers(setting: Setting) -> Iterator[Record]:
    """A row for each batch at the vocabulary of Qwen3."""
    sizes = sampler_script.Sizes(
        str(setting.device),
        setting.dtype,
        rounds=setting.rounds,
        repeats=setting.repeats,
        batches=tuple(setting.batches),
        vocabularies=(setting.shapes["Qwen3-8B"].vocabulary,),
    )
    rows = []
    for row in sampler_script.measure(sizes):
        rows.append(row)
        yield sampler_script.assembled(rows, sizes, asked(setting))


def losses(setting: Setting) -> Iterator[Record]:
    """Memory and time of every family's loss; the first of four rounds warms up."""
    words = ["--device", str(setting.device), "--rounds", "4"]
    if setting.tiny:
        words += ["--vocabulary", "500", "--positions", "64", "--hidden", "16"]
    args = loss_memory.arguments(words)
    summaries = {}
    for family in args.families:
        summaries[family] = loss_memory.measured(family, args)
        release(setting.device)
        yield loss_memory.assembled(summaries, args)


def asked(setting: Setting) -> Namespace:
    """What the scripts' records read of their arguments."""
    return Namespace(tiny=setting.tiny, device=str(setting.device))
