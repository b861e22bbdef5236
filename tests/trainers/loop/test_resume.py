"""A resumed run ends with the same weights, bit for bit, wherever it was cut."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.errors import RequestError, Stopped, TrainingFailed
from draftsmith.launch.recipe.model import Recipe
from draftsmith.storage.staging import this_host
from draftsmith.trainers.config import (
    CheckpointConfig,
    LoopConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProbeConfig,
)
from draftsmith.trainers.loop import setup, state
from draftsmith.trainers.loop.loop import Loop, Plan
from draftsmith.trainers.student.architecture import fresh_model
from draftsmith.trainers.target import TargetObjective
from helpers.models.learnable_text import labelled_beginning, stop_behind
from helpers.models.method_objectives import NoTokenizer
from safetensors.torch import load_file
from torch import Tensor

V, S, ROWS, STEPS = 61, 24, 40, 12


class RandomRows:
    """Rows with structure to learn: each token is its predecessor plus one, now and then not."""

    def __init__(self, rows: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        steps = 1 + (torch.rand(rows, S, generator=g) < 0.1) * 7
        self.ids = steps.cumsum(1) % V

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        ids = self.ids[rows]
        return {
            "input_ids": ids,
            "loss_mask": torch.ones_like(ids, dtype=torch.bool),
            "positions": torch.arange(S).expand_as(ids),
            "documents": torch.zeros_like(ids),
        }


class UnevenRows(RandomRows):
    """Rows with unlike numbers of labels, and so have micro-batches."""

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        return super().batch(rows) | {"loss_mask": labelled_beginning(rows, S)}


def plan(**changes) -> Plan:
    loop = {
        "steps": STEPS,
        "batch_rows": 8,
        "micro_rows": 4,
        "precision": "fp32",
        "validate_every": 6,
        "validate_rows": 4,
        "log_every": 2,
    }
    optimizer = {"lr": 3e-3, "warmup_steps": 2}
    for key, value in changes.items():
        (optimizer if key in OptimizerConfig.model_fields else loop)[key] = value
    return Plan(LoopConfig(**loop), OptimizerConfig(**optimizer), CheckpointConfig(every_steps=5), ProbeConfig())


RECIPE = Recipe(method="target", objective=ObjectiveConfig(chunk=16))


def train(
    out: Path,
    plan: Plan,
    resume: str = "auto",
    stop_at: int | None = None,
    rows=None,
    make=TargetObjective,
    probe=None,
):
    out.mkdir(parents=True, exist_ok=True)
    setup.make_deterministic(plan.loop)
    accelerator = setup.make_accelerator(plan.loop, plan.optimizer, out)
    sizes = ModelConfig(layers=2, hidden=32, heads=2, head_size=16, max_positions=64)
    model = fresh_model(sizes, vocabulary=V, eos=0)
    objective = make(RECIPE, model, NoTokenizer())
    loop = Loop(
        objective,
        rows or RandomRows(ROWS, 0),
        RandomRows(8, 1),
        plan,
        accelerator,
        out=out,
        export_to=out / "target",
        probe=probe,
    )
    stop_behind(loop, stop_at)
    outcome = loop.run(setup.resume_from(out, resume))
    return objective, outcome


def weights(objective: TargetObjective) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in state.trainable(objective.module).items()}


SETTINGS = [{}, {"micro_rows": 8}, {"precision": "bf16"}, {"ema": 0.9}, {"name": "muon"}]
DAILY = ({"ema": 0.9}, {"name": "muon"})


@pytest.mark.parametrize(
    "setting",
    [each if each in DAILY else pytest.param(each, marks=pytest.mark.slow) for each in SETTINGS],
    ids=[str(each) for each in SETTINGS],
)
def test_every_cut_resumes_to_the_same_bits(tmp_path: Path, setting: dict) -> None:
    undisturbed, _ = train(tmp_path / "whole", plan(**setting))
    expected = weights(undisturbed)
    for cut in (1, 4, 5, 6, 11):
        out = tmp_path / f"cut-{cut}"
        with pytest.raises(Stopped, match=f"after step {cut} of {STEPS}"):
            train(out, plan(**setting), stop_at=cut)
        resumed, _ = train(out, plan(**setting))
        got = weights(resumed)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        assert _records(out) == _records(tmp_path / "whole")


def _records(out: Path) -> list[tuple]:
    """What was recorded, less what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(each["kind"], each["step"], each.get("validation_loss")) for each in lines]


def test_accumulation_does_not_change_the_mathematics(tmp_path: Path) -> None:
    losses = []
    for micro in (1, 2, 8):
        _, outcome = train(tmp_path / str(micro), plan(micro_rows=micro), rows=UnevenRows(ROWS, 0))
        losses.append(outcome.validation_loss)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_it_learns(tmp_path: Path) -> None:
    _, outcome = train(tmp_path, plan(steps=60))
    assert outcome.validation_loss < 2.0  # ln 61 = 4.1 for a uniform guess


class Poisoned(RandomRows):
    """Some steps meet a token outside the embedding's finite rows: the loss becomes NaN."""

    bad_steps: set[int] = set()

    def __init__(self) -> None:
        super().__init__(ROWS, 0)
        self.calls = 0

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        batch = super().batch(rows)
        if self.calls // 2 in self.bad_steps:
            # more positions than RoPE can represent make the hidden states NaN
            batch["positions"] = torch.full_like(batch["positions"], 1).float() * float("nan")
        self.calls += 1
        return batch


def test_non_finite_steps_are_skipped_and_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    rows = Poisoned()
    rows.bad_steps = {3, 4}
    objective, outcome = train(tmp_path, plan(), rows=rows)
    assert all(torch.isfinite(t).all() for t in weights(objective).values())
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["skipped_steps"] == 2


def initial(out: Path) -> dict[str, Tensor]:
    """The weights that every run of `train` begins with: none of its steps is finite."""
    rows = Poisoned()
    rows.bad_steps = {0}
    return weights(train(out, plan(steps=1), rows=rows)[0])


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The largest change of any weight."""
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def test_a_skipped_step_leaves_every_weight_as_it_was(tmp_path: Path) -> None:
    made: list[dict[str, Tensor]] = []

    def make(*args: Any, **more: Any) -> TargetObjective:
        objective = TargetObjective(*args, **more)
        made.append(weights(objective))
        return objective

    rows = Poisoned()
    rows.bad_steps = {0, 1}
    objective, _ = train(tmp_path, plan(steps=2, ema=0.9), rows=rows, make=make)
    assert moved(made[0], weights(objective)) == 0
    average = load_file(tmp_path / "checkpoints" / "step-00000002" / "average.safetensors")
    assert moved(made[0], average) == 0


def test_gradients_are_clipped_before_the_step_as_the_recipe_says(tmp_path: Path) -> None:
    """What AdamW is given is far below its epsilon, so that hardly anything moves."""
    start = initial(tmp_path / "start")
    for clip, bounds in ((1e-12, (0.0, 1e-5)), (1.0, (1e-3, 1.0))):
        one = plan(steps=2, clip=clip, weight_decay=0.0)
        distance = moved(start, weights(train(tmp_path / str(clip), one)[0]))
        assert bounds[0] <= distance <= bounds[1]


class CountedRows(RandomRows):
    """Remembers which rows it was asked for."""

    def __init__(self) -> None:
        super().__init__(ROWS, 0)
        self.asked: list[list[int]] = []

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        self.asked.append(rows)
        return super().batch(rows)


def test_validation_asks_for_no_training_row(tmp_path: Path) -> None:
    rows = CountedRows()
    train(tmp_path, plan(), rows=rows)
    assert len(rows.asked) == STEPS * 2  # two micro-batches a step
    assert all(len(asked) == 4 for asked in rows.asked)


def test_with_a_moving_average_the_validation_loss_is_that_of_the_average(tmp_path: Path) -> None:
    objective, outcome = train(tmp_path, plan(ema=0.9, validate_rows=8))
    held_out = RandomRows(8, 1).batch(list(range(8)))

    def loss() -> float:
        with torch.no_grad():
            return float(objective.module(held_out)[0]) / int(held_out["loss_mask"][:, 1:].sum())

    trained = loss()
    state.load_trainable(
        objective.module, load_file(tmp_path / "checkpoints" / f"step-{STEPS:08d}" / "average.safetensors")
    )
    labels = held_out["loss_mask"]
    share = int(labels[:, 1:].sum()) / int(labels.sum())  # the loop counts a row's first token too
    assert outcome.validation_loss == pytest.approx(loss() * share, rel=1e-5)
    assert abs(trained - loss()) > 0.05


class Rewritten:
    """Stands for rows that the models write: remembers what it was asked, and changes nothing."""

    kept = None

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, list[int]]] = []

    def rewrite(self, batches: list, places: range, step: int, seed: int) -> list:
        self.asked.append((step, seed, list(places)))
        return batches


def test_rollouts_draw_anew_at_every_step_and_the_same_in_every_run(tmp_path: Path) -> None:
    asked = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        written = Rewritten()

        def make(*args: Any, written: Rewritten = written, **more: Any) -> TargetObjective:
            objective = TargetObjective(*args, **more)
            objective.rollouts = written
            return objective

        train(tmp_path / name, plan(steps=4, seed=seed), make=make)
        asked.append(written.asked)
    assert [(step, places) for step, _, places in asked[0]] == [(step, list(range(8))) for step in range(4)]
    assert asked[0] == asked[1]
    seeds = [seed for each in (asked[0], asked[2]) for _, seed, _ in each]
    assert len(set(seeds)) == 8


def test_too_many_non_finite_steps_stop_the_run(tmp_path: Path) -> None:
    rows = Poisoned()
    rows.bad_steps = set(range(2, 12))
    with pytest.raises(TrainingFailed, match="4 non-finite steps in a row"):
        train(tmp_path, plan(), rows=rows)


def test_resume_words(tmp_path: Path) -> None:
    train(tmp_path, plan(steps=2))
    with pytest.raises(RequestError, match="--resume is never"):
        train(tmp_path, plan(steps=2), resume="never")
    with pytest.raises(RequestError, match="there is no such folder"):
        train(tmp_path, plan(steps=2), resume=str(tmp_path / "nowhere"))
    with pytest.raises(RequestError, match="no manifest"):
        train(tmp_path, plan(steps=2), resume=str(tmp_path / "checkpoints"))


class Drafting(TargetObjective):
    """What is trained drafts, so that a probe chooses what is exported."""

    def draft(self):
        return self.module


def going_on(folder: Path, taus: list[float], saved: Path | None = None) -> tuple[Path, Any]:
    """A run of four steps, a checkpoint behind each and a probe behind every second, or the rest."""
    one = plan(steps=4, ema=0.5)
    one = replace(one, checkpoint=CheckpointConfig(every_steps=1, keep=4), probe=ProbeConfig(every_steps=2))
    left = iter(taus)
    outcome = train(
        folder, one, resume="auto" if saved is None else str(saved), make=Drafting, probe=lambda _: {"tau": next(left)}
    )[1]
    assert list(left) == []
    return folder / "target" / "model.safetensors", outcome.best


def test_a_checkpoint_of_another_run_brings_its_best_along(tmp_path: Path) -> None:
    first, best = going_on(tmp_path / "first", [2.0, 1.0])
    assert best == {"tau": 2.0, "step": 2.0}
    last = tmp_path / "first" / "checkpoints" / "step-00000004"
    middle = last.with_name("step-00000003")
    for name, saved, taus in (("end", last, []), ("middle", middle, [1.0])):
        exported, again = going_on(tmp_path / name, taus, saved)
        assert exported.read_bytes() == first.read_bytes()
        assert again == best
    went_on = tmp_path / "middle" / "checkpoints" / last.name / "model.safetensors"
    assert went_on.read_bytes() == (last / "model.safetensors").read_bytes()
    latest, tied = going_on(tmp_path / "tied", [2.0, 2.0])
    assert tied == {"tau": 2.0, "step": 4.0}, "of equal ones the later, which has learnt longer"
    resumed, again = going_on(tmp_path / "tied-middle", [2.0], middle)
    assert again == tied
    assert resumed.read_bytes() == latest.read_bytes() != first.read_bytes()
    exported, again = going_on(tmp_path / "better", [3.0], middle)
    assert again == {"tau": 3.0, "step": 4.0}
    assert exported.read_bytes() != first.read_bytes()


def test_where_the_best_is_gone_the_next_probe_or_the_end_is_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = going_on(tmp_path / "first", [2.0, 1.0])
    _, best = going_on(tmp_path / "last", [1.0, 2.0])
    assert best == {"tau": 2.0, "step": 4.0}
    last = tmp_path / "first" / "checkpoints" / "step-00000004"
    shutil.rmtree(last.with_name("step-00000002"))
    exported, best = going_on(tmp_path / "end", [], last)
    assert "what was trained up to step 4 is exported" in caplog.text
    assert best is None
    expected = tmp_path / "last" / "target" / "model.safetensors"
    assert exported.read_bytes() == expected.read_bytes() != first.read_bytes()


def test_an_export_that_was_deleted_comes_back(tmp_path: Path) -> None:
    exported, _ = going_on(tmp_path, [2.0, 1.0])
    before = exported.read_bytes()
    shutil.rmtree(exported.parent)
    going_on(tmp_path, [])
    assert exported.read_bytes() == before
    exported.parent.rename(exported.parent.with_name(f".old-{this_host()}-99999999-target"))  # between two renames
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    going_on(tmp_path, [])
    assert exported.read_bytes() == before


def test_a_batch_that_does_not_divide_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--loop.batch_rows 9"):
        train(tmp_path, plan(batch_rows=8, micro_rows=3))
