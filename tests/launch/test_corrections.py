"""`draftsmith generate --corrections`: where drafts were wrong, and learning from it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.registry import load_drafter
from draftsmith.eval.measure.metrics import tau
from draftsmith.launch.cli import main
from helpers.runs import killed_process

NAMES = ["width", "height", "path", "index", "parser", "value"]
LENGTH, TOKENS, PROMPT = 3, 24, 12


@pytest.fixture(scope="module")
def target() -> Backbone:
    return load_target("tiny")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target: Backbone) -> Path:
    """A drafter that is right now and then, texts, and what decoding them says of it."""
    from draftsmith.drafters.folder import save_draft_model
    from draftsmith.trainers.config import ModelConfig
    from draftsmith.trainers.student.architecture import fresh_model

    folder = tmp_path_factory.mktemp("corrections")
    torch.manual_seed(0)
    sizes = ModelConfig(layers=1, hidden=64, heads=1, kv_heads=1, head_size=64)
    save_draft_model(fresh_model(sizes, vocabulary=target.vocabulary, eos=None), folder / "untrained", target)
    shaken = load_target("tiny").model
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in shaken.parameters():
            parameter.add_(0.004 * torch.randn(parameter.shape, generator=g))
    save_draft_model(shaken, folder / "shaken", target)
    rows = [{"text": f"import {name}\n\nclass {name.title()}:\n    def get_{name}(self):\n" * 3} for name in NAMES]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command(folder, "shaken", folder / "greedy") == 0
    return folder


def words(place: Path, drafter: str, out: Path, *more: str) -> list[str]:
    return [
        "generate",
        "--source",
        str(place / "texts.jsonl"),
        "--out",
        str(out),
        "--target",
        "tiny",
        "--drafter",
        str(place / drafter),
        "--corrections",
        "--max-new-tokens",
        str(TOKENS),
        "--prompt-tokens",
        str(PROMPT),
        "--batch",
        "4",
        "--eval.draft_length",
        str(LENGTH),
        *more,
    ]


def command(place: Path, drafter: str, out: Path, *more: str) -> int:
    return main(words(place, drafter, out, *more))


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def best(model: Any, ids: list[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([ids])).logits[0, -1].argmax())


def corrected_places(target: Any, draft: Any, ids: list[int], start: int) -> list[int]:
    """Greedy decoding walked through with whole forward passes: where the draft was overruled."""
    found, at = [], start + 1  # the first token comes from the prompt, not from a step
    while at < len(ids):
        drafted: list[int] = []
        while len(drafted) < LENGTH:
            drafted.append(best(draft, ids[:at] + drafted))
        for token in drafted:
            if at == len(ids):
                return found
            assert best(target, ids[:at]) == ids[at]
            if token != ids[at]:
                found.append(at)
                at += 1
                break
            at += 1
        else:
            at += 1  # all were right: one more of the target's own
    return found


@pytest.mark.slow
def test_labels_are_where_the_target_overruled_the_draft(place: Path, target: Backbone) -> None:
    draft = load_target(str(place / "shaken")).model
    answers, found = (rows(place / "greedy" / "answers.jsonl"), rows(place / "greedy" / "corrections.jsonl"))
    assert len(answers) == len(NAMES)
    wanted = []
    for row in answers:
        ids, start = row["input_ids"], row["loss_mask"].index(1)
        places = corrected_places(target.model, draft, ids, start)
        if places:
            mask = [int(at in places) for at in range(len(ids))]
            wanted.append({"input_ids": ids, "loss_mask": mask})
    assert found == wanted
    labels = sum(sum(row["loss_mask"]) for row in found)
    assert 0 < labels < sum(sum(row["loss_mask"]) for row in answers)
    manifest = json.loads((place / "greedy" / "manifest.json").read_text())
    assert manifest["corrections"] == {"rows": len(found)}
    assert "corrections.jsonl" in manifest["files"]


@pytest.mark.slow
def test_killed_at_a_random_moment_it_ends_with_the_same_bits(place: Path, tmp_path: Path) -> None:
    rng = random.Random(4)  # noqa: S311
    out = tmp_path / "killed"
    landed = 0
    while landed < 1:
        process = killed_process.start(words(place, "shaken", out, "--batch", "1"))
        process.join(1 + 3 * rng.random())
        if not process.is_alive():
            break
        process.kill()
        process.join()
        landed += 1
    assert command(place, "shaken", out, "--batch", "1") == 0
    assert command(place, "shaken", tmp_path / "whole", "--batch", "1") == 0
    for name in ("corrections.jsonl", "answers.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_goes_on_as_it_was_begun(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = [word for word in words(place, "shaken", place / "greedy") if word != "--corrections"]
    assert main(plain) == 2
    assert "drafter.corrections is True there and None here" in capfd.readouterr().err


def test_without_a_drafter_there_is_nothing_to_correct(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--source", "stdlib", "--out", "nowhere", "--corrections"]) == 2
    assert "it needs --drafter" in capfd.readouterr().err


@pytest.mark.slow
def test_training_on_corrections_raises_acceptance_on_these_prompts(
    place: Path, target: Backbone, tmp_path: Path
) -> None:
    """The draft of which next to nothing is accepted learns from being corrected."""
    assert command(place, "untrained", tmp_path / "log") == 0
    corrections = tmp_path / "log" / "corrections.jsonl"
    assert len(rows(corrections)) == len(NAMES)
    run = tmp_path / "run"
    code = main(
        [
            "train",
            "distill-tiny",
            "--out",
            str(run),
            "--data.source",
            str(corrections),
            "--data.validation",
            str(corrections),
            "--data.sequence_length",
            "64",
            "--model.start_from",
            str(place / "untrained"),
            "--loop.steps",
            "60",
            "--loop.batch_rows",
            "4",
            "--loop.micro_rows",
            "4",
            "--loop.precision",
            "fp32",
            "--optimizer.warmup_steps",
            "5",
            "--optimizer.name",
            "adamw",
            "--probe.prompts",
            "1",
            "--probe.max_new_tokens",
            "6",
            "--loop.validate_every",
            "60",
        ]
    )
    assert code == 0
    prompts = [row["input_ids"][: row["loss_mask"].index(1)] for row in rows(tmp_path / "log" / "answers.jsonl")]
    before, after = (tau_of(target, folder, prompts) for folder in (place / "untrained", run / "drafter"))
    assert before < 1.1
    assert after > before + 0.5


def tau_of(target: Backbone, drafter: Path, prompts: list[list[int]]) -> float:
    proposer = load_drafter(drafter, target, draft_length=LENGTH)
    done = generate(target, proposer, prompts, warper=Warper(0.0), max_new_tokens=TOKENS)
    return tau([done.steps])
