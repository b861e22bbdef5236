"""What is measured on a GPU, in order: sections, each of which writes its record as it goes.

A section that fails is printed and the next goes on; one that is late ends the process, and so does a device that an
error has left unusable: `gpu.py` then begins another process behind it. Read next: `calls.py`, `speculation.py`;
`../gpu_measure.py`, the script.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from draftsmith.benchmarks.common.gpu_front import UNUSABLE
from draftsmith.benchmarks.common.records import Record, write_record
from draftsmith.benchmarks.on_gpu import calls, card, costs, replay, single, speculation
from draftsmith.benchmarks.on_gpu.setting import Setting, release
from draftsmith.decoding import kernels
from draftsmith.storage import write_text


@dataclass(frozen=True)
class Section:
    """A name, the record that it writes, the most seconds that it may take, and what it does."""

    name: str
    record: str
    seconds: int
    measure: Callable[[Setting], Iterator[Record]]


def _calls(section: str, shape: str, seconds: int) -> Section:
    return Section(section, f"gpu-{section}.json", seconds, partial(calls.measure, name=shape))


def _on(section: str, record: str, seconds: int, measure: Callable[..., Iterator[Record]]) -> Section:
    return Section(section, record, seconds, partial(measure, name="Qwen3-8B"))


SECTIONS = (
    Section("card", "gpu-card.json", 30, card.measure),
    _calls("8b", "Qwen3-8B", 90),
    _on("speculation", "gpu-speculation.json", 90, speculation.measure),
    _calls("4b", "Qwen3-4B", 40),
    _calls("1.7b", "Qwen3-1.7B", 40),
    _calls("1b", "Llama-3.2-1B", 40),
    _on("layer", "gpu-layer.json", 60, single.measure),
    _on("training", "step-gpu.json", 50, costs.training),
    Section("samplers", "samplers.json", 40, costs.samplers),
    Section("losses", "loss-memory-gpu.json", 40, costs.losses),
    _on("profile", "gpu-profile.json", 40, replay.measure),
)


def run(sections: list[Section], setting: Setting) -> int:
    """All of them; 0 where none failed. How far it has come stands in `progress.json`."""
    failed = 0
    for section in sections:
        began = time.monotonic()
        _note(setting.out, section, "begun", began)
        faulthandler.dump_traceback_later(section.seconds * setting.patience, exit=True, file=1)
        try:
            with nullcontext() if setting.own_kernels else patch.object(kernels, "available", bool):
                for record in section.measure(setting):
                    write_record(setting.out / section.record, noted(record, section, setting))
            outcome = "passed"
        except (Exception, SystemExit) as error:  # noqa: BLE001
            # one section takes no other along
            traceback.print_exc(file=sys.stdout)
            outcome, failed = f"failed: {type(error).__name__}", failed + 1
        faulthandler.cancel_dump_traceback_later()
        _note(setting.out, section, outcome, began)
        print(f"section {section.name}: {outcome}, {time.monotonic() - began:.1f} s", flush=True)
        if not _usable(setting):
            return UNUSABLE
    return int(failed > 0)


def noted(record: Record, section: Section, setting: Setting) -> Record:
    """The record as of that section, with a word where our kernels were left out."""
    notes = [] if setting.own_kernels else ["Without kernels of our own: they ended a process."]
    command = f"python3 benchmarks/gpu.py --sections {section.name}"
    return record.model_copy(update={"command": command, "notes": [*record.notes, *notes]})


def _note(out: Path, section: Section, outcome: str, began: float) -> None:
    path = out / "progress.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known[section.name] = {"outcome": outcome, "seconds": time.monotonic() - began, "record": section.record}
    write_text(path, json.dumps(known, indent=1) + "\n")


def _usable(setting: Setting) -> bool:
    """Whether the device still answers: behind an illegal access nothing does, in this process."""
    try:
        release(setting.device)
        torch.zeros(1, device=setting.device).item()
    except Exception:  # noqa: BLE001
        traceback.print_exc(file=sys.stdout)
        return False
    return True
