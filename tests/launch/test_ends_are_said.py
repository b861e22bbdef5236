"""A template that ends answers by a token at which the target does not stop: every command says so before its work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from draftsmith.launch.cli import main

Captured = pytest.CaptureFixture[str]
SMALL = ["--data.source", "rows.jsonl", "--prompts", "rows.jsonl", "--eval.max-new-tokens", "16"]
COMMANDS = {
    "check": ["check", "medusa-tiny", "--data.source", "rows.jsonl", "--target.path", "target"],
    "generate": [
        "generate",
        "--target",
        "target",
        "--source",
        "rows.jsonl",
        "--out",
        "out",
        "--max-new-tokens",
        "6",
        "--limit",
        "2",
    ],
    "eval": ["eval", "--target", "target", "--method", "prompt-lookup", "--no-audit", "--out", "out", *SMALL],
    "tune": ["tune", "--target", "target", "--method", "prompt-lookup", "--out", "out", *SMALL],
}
QUICK = ("check", "generate")


@pytest.fixture
def place(served_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows beside a target with no ends of its own, where commands are called."""
    shutil.copytree(served_folder, tmp_path / "target")
    chat = [{"role": "user", "content": "the quick brown fox"}, {"role": "assistant", "content": "a lazy dog answers"}]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# a target that stops is looked at by all of them in one function; two of the four say so every day
@pytest.mark.parametrize(
    ("command", "stops"),
    [
        *((command, False) for command in COMMANDS),
        *(pytest.param(command, True, marks=() if command in QUICK else pytest.mark.slow) for command in COMMANDS),
    ],
)
def test_every_command_says_it_once(
    command: str, stops: bool, place: Path, capfd: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoTokenizer

    if stops:
        end = AutoTokenizer.from_pretrained(place / "target").get_vocab()["<|endoftext|>"]
        (place / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    main(COMMANDS[command])
    told = capfd.readouterr()
    words = " ".join((told.out + told.err + caplog.text).split())
    assert words.count("the chat template ends answers by '<|endoftext|>'") == (0 if stops else 1), words
