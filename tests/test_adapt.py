"""A drafter that is kept fresh from within a trainer: what is saved, what is recorded, what is started."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import adapt
from draftsmith.adapt import Callback
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.errors import RequestError
from helpers.models.shallow_target import SHALLOW
from helpers.runs.heads_run import write_heads_run
from helpers.runs.small_flags import AUDIT, TRAINING
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState, TrainingArguments

FEW = ["--steps", "2", "--rows", "4", "--prompts", "2", "--eval.max_new_tokens=8", *TRAINING, *AUDIT]
NO_ARGUMENTS: Any = None  # none of them is read
FEW += ["--data.validation_share=0.45", "--data.limit_rows=null"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"medusa__heads": "2", "medusa__shared_head": "true"}
    return write_heads_run(tmp_path_factory.mktemp("runs") / "heads", **values)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands that would have been run, each with its environment; they fail."""
    seen: list[tuple[list[str], dict[str, str]]] = []

    def note(command: Sequence[str], *, env: dict[str, str], **_how: Any) -> subprocess.CompletedProcess[str]:
        seen.append((list(command), env))
        return subprocess.CompletedProcess(command, 2, "", "a warning\ndraftsmith: 3 rollouts are too few\n")

    monkeypatch.setattr(adapt.subprocess, "run", note)
    return seen


def at_step(step: int, callback: Callback, *, main: bool = True, model: Any = None) -> None:
    state = TrainerState(global_step=step, is_world_process_zero=main)
    model = AutoModelForCausalLM.from_pretrained(SHALLOW) if model is None else model
    tokenizer = AutoTokenizer.from_pretrained(SHALLOW)
    callback.on_step_end(NO_ARGUMENTS, state, TrainerControl(), model, tokenizer)


def test_a_round_behind_every_so_many_steps(
    tmp_path: Path,
    started: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    launched = (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_VERSION", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    )
    for name in (*launched, "OTHER"):
        monkeypatch.setenv(name, "2")
    fresh = Callback("runs/mine", out=tmp_path, every=3, flags=["--steps", "5"], values={"optimizer.lr": 1e-4})
    model = AutoModelForCausalLM.from_pretrained(SHALLOW)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    for step, main in ((2, True), (3, False), (4, True)):
        at_step(step, fresh, main=main, model=model)
    assert not started
    at_step(6, fresh, model=model)
    ((command, environment),) = started
    assert command[1:5] == ["-m", "draftsmith.launch.cli", "adapt", "runs/mine"]
    words = ["--out", str(tmp_path), "--target", str(fresh.target), "--rollouts", str(tmp_path / "recorded")]
    assert command[5:] == [*words, "--steps", "5", "--optimizer.lr=0.0001"]
    assert not {*launched} & {*environment}
    assert environment["OTHER"] == "2"
    # the model as it is now, and its tokenizer
    saved = AutoModelForCausalLM.from_pretrained(fresh.target)
    assert torch.equal(next(saved.parameters()), next(model.parameters()))
    assert load_target(str(fresh.target)).vocabulary == load_target(SHALLOW).vocabulary
    assert "step 6: draftsmith adapt ended with code 2: draftsmith: 3 rollouts are too few" in caplog.text


def test_what_is_generated_is_written_down(tmp_path: Path) -> None:
    fresh = Callback("runs/mine", out=tmp_path)
    assert fresh.record(["1 + 1", "2 + 2"], [" = 2", " = 4"], completion_ids=[[1], [2]]) == [None, None]
    turn = {"role": "user", "content": "3 + 3?"}
    assert fresh.record([[turn]], [[{"role": "assistant", "content": "\u20286"}]]) == [None]
    rows = [json.loads(line) for line in (tmp_path / "recorded" / "rollouts.jsonl").read_text().split("\n")[:-1]]
    assert rows[0] == {"prompt": "1 + 1", "completion": " = 2"}
    assert rows[2] == {"messages": [turn, {"role": "assistant", "content": "\u20286"}]}


def test_requests_that_make_no_sense(tmp_path: Path, started: list[Any]) -> None:
    with pytest.raises(RequestError, match="every is 0; expected 1 or more"):
        Callback("runs/mine", out=tmp_path, every=0)
    cut = AutoModelForCausalLM.from_pretrained(SHALLOW)
    next(cut.parameters()).data = torch.empty(0)
    with pytest.raises(RequestError, match="lies in pieces over processes"):
        at_step(1, Callback("runs/mine", out=tmp_path, every=1), model=cut)
    with pytest.raises(RequestError, match="no processing_class"):
        Callback("runs/mine", out=tmp_path, every=1).on_step_end(
            NO_ARGUMENTS,
            TrainerState(global_step=1, is_world_process_zero=True),
            TrainerControl(),
            AutoModelForCausalLM.from_pretrained(SHALLOW),
        )
    assert not started


def rows() -> list[dict[str, str]]:
    return [
        {"prompt": f"def add_{n}(first, second):\n    ", "completion": f"return first + {n} * second\n"}
        for n in range(12)
    ]


@pytest.mark.slow
def test_within_a_trainer_of_transformers(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its random numbers and its steps are as without."""
    from transformers import Trainer

    caplog.set_level(logging.INFO)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "all.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows()))
    tokenizer = AutoTokenizer.from_pretrained(SHALLOW)
    texts = [each["prompt"] + each["completion"] for each in rows()]
    data = [{"input_ids": ids, "labels": ids} for ids in (tokenizer(text)["input_ids"][:16] for text in texts)]

    def trained(name: str, callbacks: list[Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(SHALLOW)
        args = TrainingArguments(
            str(tmp_path / name), max_steps=4, per_device_train_batch_size=1, use_cpu=True, report_to=[], save_steps=99
        )
        Trainer(model, args, train_dataset=data, callbacks=callbacks, processing_class=tokenizer).train()
        return [parameter.detach().clone() for parameter in model.parameters()]

    fresh = Callback(run, out=tmp_path / "fresh", every=2, rollouts=tmp_path / "rows", flags=FEW)
    for with_it, without in zip(trained("with", [fresh]), trained("without", []), strict=True):
        assert torch.equal(with_it, without)
    (made,) = json.loads((tmp_path / "fresh" / "adapted.json").read_text())["rounds"]
    assert made["verdict"] == "lossless"
    assert "step 2: draftsmith adapt ended with code 0: " in caplog.text
    assert "step 4: draftsmith adapt ended with code 2: " in caplog.text  # there are no more rows
    assert load_target(str(fresh.target)).vocabulary


@pytest.mark.slow
def test_within_grpo_of_trl(run: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    fresh = Callback(run, out=tmp_path / "fresh", every=2, flags=FEW)
    prompts = Dataset.from_list([{"prompt": each["prompt"]} for each in rows()])
    args = trl.GRPOConfig(
        str(tmp_path / "grpo"),
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_steps=99,
    )

    def reward(completions: list[str], **_more: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    trainer = trl.GRPOTrainer(
        SHALLOW,
        reward_funcs=[reward, fresh.record],
        args=args,
        train_dataset=prompts,
        callbacks=[fresh],
        processing_class=AutoTokenizer.from_pretrained(SHALLOW),
    )
    trainer.train()
    (made,) = json.loads((tmp_path / "fresh" / "adapted.json").read_text())["rounds"]
    recorded = (tmp_path / "fresh" / "recorded" / "rollouts.jsonl").read_text().split("\n")[:-1]
    assert (tmp_path / "fresh" / "rounds" / "0001" / "rollouts.jsonl").read_text().split("\n")[:-1] == recorded
    assert len(recorded) == 8
    assert made["verdict"] == "lossless"
