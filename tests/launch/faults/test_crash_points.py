"""A process may die at any file operation: what is left is whole, and the next run goes on and cleans up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from draftsmith.data.config import DataConfig
from draftsmith.data.features.store import FeatureStore
from draftsmith.data.generate.journal import Journal
from draftsmith.data.rows import cache
from draftsmith.data.rows.prepare import prepare
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.folder import read_entry
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.launch.check.resume import held_folder
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.train.run import Status
from draftsmith.storage import folder as folder_module
from draftsmith.storage import replace_folder, restore_folder
from draftsmith.trainers.config import LoopConfig, OptimizerConfig
from draftsmith.trainers.loop import checkpoint, setup
from draftsmith.trainers.loop.progress import Record, records
from draftsmith.trainers.loop.snapshot import Counters, Snapshots
from draftsmith.trainers.loop.state import Average
from draftsmith.trainers.teacher.frozen import saver
from helpers.reliability_tally import tally
from helpers.runs.crashed_process import crash, points, run
from safetensors.torch import load_file
from torch import nn


class Subject(NamedTuple):
    """Something that is written; each function is given the folder that it is written in."""

    begin: Callable[[Path], None]
    act: Callable[[Path], Any]
    read: Callable[[Path], None]
    """Asserts that a reader finds the old or the new."""
    go_on: Callable[[Path], None]
    """What the next run does, and what it must find then."""
    least: int
    """Points that there are at least."""


def checkpoints(_place: Path) -> Subject:
    """Saving step 3 where steps 1 and 2 are and two are kept."""
    torch.manual_seed(0)
    module = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    accelerator = setup.make_accelerator(LoopConfig(precision="fp32"), OptimizerConfig(), Path())

    def of(folder: Path) -> Snapshots:
        return Snapshots(
            folder,
            accelerator,
            wrapped=module,
            module=module,
            optimizers=[optimizer],
            average=Average(module, 0.9),
            rollouts=None,
            identity={"loop.seed": 0},
        )

    def save(folder: Path, step: int) -> None:
        nn.init.constant_(module.weight, step)
        of(folder).save(Counters(step, None, 0, 0), keep=2)

    def read(folder: Path) -> None:
        newest = checkpoint.newest(folder)
        assert newest is not None
        step = of(folder).load(newest).step
        assert step in (2, 3)
        assert torch.equal(module.weight, torch.full_like(module.weight, step))

    def go_on(folder: Path) -> None:
        last = checkpoint.newest(folder)
        checkpoint.delete_halves(folder, alone=True)
        save(folder, 4)
        assert last is not None
        assert sorted(each.name for each in folder.iterdir()) == [last.name, "step-00000004"]

    def begin(folder: Path) -> None:
        save(folder, 1)
        save(folder, 2)

    return Subject(begin, lambda folder: save(folder, 3), read, go_on, 25)


def drafter(_place: Path) -> Subject:
    """Exporting heads of ones over heads of zeros."""
    target = load_target("tiny")
    heads = MedusaHeads.for_target(target.model, heads=1, shared_head=True)
    save = saver(target, "medusa")

    def export(folder: Path, value: float) -> None:
        with torch.no_grad():
            for weight in heads.parameters():
                weight.fill_(value)
        replace_folder(folder / "drafter", lambda staging: save(heads, staging))

    def values(folder: Path) -> set[float]:
        read_entry(folder / "drafter")
        assert (folder / "drafter" / "README.md").read_text()
        tensors = load_file(folder / "drafter" / "model.safetensors")
        return {float(each) for tensor in tensors.values() for each in tensor.unique()}

    def read(folder: Path) -> None:
        if not can_swap():
            restore_folder(folder / "drafter")
        assert values(folder) in ({0.0}, {1.0})

    def go_on(folder: Path) -> None:
        export(folder, 2.0)
        assert values(folder) == {2.0}

    return Subject(lambda folder: export(folder, 0.0), lambda folder: export(folder, 1.0), read, go_on, 12)


def can_swap() -> bool:
    return folder_module.swap.__name__ == "swap"


def engine_folder(place: Path) -> Subject:
    """`draftsmith export`, into a folder that is new."""
    target = load_target("tiny")
    heads = MedusaHeads.for_target(target.model, heads=1, shared_head=True)
    made = place / "made"

    def begin(folder: Path) -> None:
        folder.mkdir()
        (folder / "run.yaml").write_text(load_recipe("medusa-tiny").yaml())
        saver(target, "medusa")(heads, folder / "drafter")
        if not made.exists():
            shutil.copytree(folder, made)
            assert run(partial(act, made)) == 0

    def act(folder: Path) -> int:
        return main(["export", str(folder)])

    def read(folder: Path) -> None:
        if (folder / "vllm").exists():
            for path in (made / "vllm").iterdir():
                assert (folder / "vllm" / path.name).read_bytes() == path.read_bytes()

    def go_on(folder: Path) -> None:
        if not (folder / "vllm").exists():
            assert run(partial(act, folder)) == 0
        read(folder)

    return Subject(begin, act, read, go_on, 8)


def rows(place: Path) -> Subject:
    """An entry of the cache of tokenised data."""
    (place / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"def f_{n}(): return {n}"}) + "\n" for n in range(40))
    )
    config = DataConfig(source=str(place / "texts.jsonl"), sequence_length=32, cache=str(place / "other"))
    prepared = prepare(config, load_target("tiny").tokenizer, out=None)

    def read(folder: Path) -> None:
        found = cache.load(folder, "key")
        assert found is None or same(found)

    def same(found: cache.Prepared) -> bool:
        pairs = ((found.train, prepared.train), (found.validation, prepared.validation))
        return all(np.array_equal(mine.ids_RS, theirs.ids_RS) for mine, theirs in pairs)

    def go_on(folder: Path) -> None:
        if cache.load(folder, "key") is None:
            cache.store(folder, "key", prepared)
        found = cache.load(folder, "key")
        assert found is not None
        assert same(found)

    return Subject(lambda folder: folder.mkdir(), lambda folder: cache.store(folder, "key", prepared), read, go_on, 20)


def journal(place: Path) -> Subject:
    """A generation of nine rows, three at a time."""

    def entry(number: int) -> dict[str, Any]:
        if number % 4 == 3:
            return {"row": number, "rejected": {"file": "rows", "line": number, "reason": "why", "kind": "cut"}}
        sums = dict.fromkeys(("turns", "cut", "retokenised", "steps", "emitted", "tested", "accepted", "tokens"), 1)
        return {"row": number, "shape": "messages", "answer": {"messages": [f"row {number}"]}, **sums}

    def act(folder: Path) -> None:
        with Journal(folder / "out", {"seed": 0}, {"versions": 1}) as journal:
            if not journal.complete:
                for first in (0, 3, 6):
                    journal.add(entry(each) for each in range(first, first + 3) if each not in journal)
                journal.publish()

    def read(folder: Path) -> None:
        path = folder / "out" / "manifest.json"
        if path.exists() and json.loads(path.read_text())["state"] == "complete":
            assert contents(folder) == contents(whole)

    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "out").glob("[!.]*")}

    def go_on(folder: Path) -> None:
        act(folder)
        assert contents(folder) == contents(whole)

    whole = place / "whole"
    act(whole)
    return Subject(lambda folder: folder.mkdir(), act, read, go_on, 30)


def features(_place: Path) -> Subject:
    """Rows of a feature cache in shards of two."""
    wide = 256

    def row(number: int) -> dict[str, torch.Tensor]:
        return {"states": torch.full((wide,), float(number))}

    def store(folder: Path) -> FeatureStore:
        return FeatureStore(folder, {"target": "tiny"}, max_bytes=64 * 4 * wide, row_bytes=2 * 4 * wide)

    def fill(folder: Path, numbers: range) -> None:
        opened = store(folder)
        for number in numbers:
            opened.add(str(number), row(number))
        opened.close()

    def read(folder: Path) -> None:
        opened = store(folder)
        for number in range(16):
            found = opened.read(str(number))
            assert found is not None or number >= 6
            assert found is None or torch.equal(found["states"], row(number)["states"])
        opened.close()

    def go_on(folder: Path) -> None:
        fill(folder, range(16))
        opened = store(folder)
        assert all(opened.read(str(number)) is not None for number in range(16))
        opened.close()

    return Subject(lambda folder: fill(folder, range(6)), lambda folder: fill(folder, range(6, 16)), read, go_on, 12)


def start(place: Path) -> Subject:
    """A run goes on in its folder: the lock, the recipe, the status, the records of its steps."""
    resolved = load_recipe("distill-tiny")

    def act(folder: Path) -> None:
        with held_folder(folder, resolved, "auto"):
            Status(folder).write("running", None)
            record = Record(folder / "metrics.jsonl", after=2, active=True)
            for step in (3, 4):
                record.write("train", step, {"loss": 1.0})
            record.close()
            Status(folder).write("finished", 0)

    def begin(folder: Path) -> None:
        folder.mkdir()
        (folder / "run.yaml").write_text(resolved.yaml())
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"kind": "train", "step": n}) + "\n" for n in range(4))
        )
        left = folder / "checkpoints" / ".staging-elsewhere-1-step-00000009"
        left.mkdir(parents=True)
        (left / "half").write_text("half")
        checkpoint.write(
            folder / "checkpoints",
            "step-00000002",
            lambda staging: (staging / "trainer.json").write_text("{}") and None,
            manifest={"recipe": resolved.recipe.identity},
        )

    def read(folder: Path) -> None:
        assert load_recipe(str(folder / "run.yaml")).recipe == resolved.recipe
        steps = {known["step"] for _, known in records(folder / "metrics.jsonl")}
        assert steps >= {0, 1, 2}
        assert checkpoint.newest(folder / "checkpoints") is not None

    def go_on(folder: Path) -> None:
        act(folder)
        assert [known["step"] for _, known in records(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]
        assert json.loads((folder / "status.json").read_text())["state"] == "finished"

    return Subject(begin, act, read, go_on, 15)


SUBJECTS = [checkpoints, drafter, engine_folder, rows, journal, features, start]


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*") if path.name != ".lock")


def cut_everywhere(make: Callable[[Path], Subject], every: int, place: Path) -> None:
    (place / "own").mkdir()
    subject = make(place / "own")
    subject.begin(place / "base")
    shutil.copytree(place / "base", place / "whole")
    found = points(place / "whole", partial(subject.act, place / "whole"))
    assert len(found) >= subject.least, found
    chosen = found[:: min(every, len(found) // 2)]
    for at, point in enumerate(chosen):
        folder = place / f"cut-{at}"
        shutil.copytree(place / "base", folder)
        assert crash(folder, partial(subject.act, folder), point), point
        try:
            subject.read(folder)
            subject.go_on(folder)
            assert hidden(folder) == []
        except BaseException as error:
            tally("crash points", tried=at + 1, failed=1)
            raise AssertionError(f"after a crash before: {point.what}") from error
        shutil.rmtree(folder)
    tally("crash points", tried=len(chosen))


@pytest.mark.one_in(2)
@pytest.mark.fault
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", SUBJECTS, ids=lambda make: make.__name__)
def test_every_crash_leaves_the_old_or_the_new(make: Callable[[Path], Subject], every: int, tmp_path: Path) -> None:
    cut_everywhere(make, every, tmp_path)


@pytest.mark.fault
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_the_same_where_folders_cannot_change_places(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On file systems without that: two renames, and the next run undoes the first one."""
    monkeypatch.setattr(folder_module, "swap", lambda one, other: False)
    cut_everywhere(drafter, every, tmp_path)
