"""A GGUF file as the target of every verb, and `draftsmith convert`, which makes an ordinary folder of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.hub import ends_of, load_config, load_tokenizer
from draftsmith.decoding.backbone.loading import load_model, load_target
from draftsmith.decoding.gguf.file import find_gguf
from draftsmith.drafters.folder import read_entry
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.drafters.identity import TargetIdentity
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.cli import main
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.gguf_files import TEMPLATE, pytestmark_gguf, write_gemma, write_llama
from helpers.runs.small_flags import MEASURING, TRAINING

pytestmark = pytestmark_gguf
SMALL = shlex.split("--loop.steps 2 --eagle3.vocabulary 256 --data.source stdlib") + TRAINING
FEW = [*MEASURING, "--eval.temperatures", "[0]"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model.gguf", kind="Q8_0")
    return tmp_path / "model.gguf"


@pytest.mark.slow
@pytest.mark.run
def test_a_run_is_trained_measured_tuned_and_exported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "model.gguf", tmp_path / "run"
    write_llama(file, kind="Q8_0", num_hidden_layers=6)
    words = ["--target.path", str(file), "--out", str(run), *SMALL]
    assert main(["check", "eagle3-tiny", *words]) == 0
    assert main(["train", "eagle3-tiny", *words]) == 0
    identity = read_entry(run / "drafter")["identity"]
    assert identity == TargetIdentity.of(load_target(str(file)))
    assert main(["eval", str(run), *FEW]) == 0
    results = json.loads((run / "eval" / "results.json").read_text())
    assert {row["verdict"] for row in results["rows"]} == {"lossless"}
    few = ["--limit", "8", "--best", "1", "--no-surfaces", "--eval.max_new_tokens", "12"]
    assert main(["tune", str(run), "--method", "prompt-lookup", *few]) == 0
    assert main(["chat", str(run), "--prompt", "1?", "--max-new-tokens", "4", "--no-plain"]) == 0
    capfd.readouterr()
    assert main(["export", str(run), "--format", "vllm"]) == 0
    assert str(file) in capfd.readouterr().out
    assert main(["export", str(run), "--format", "llama.cpp"]) == 2  # its converter takes the tokenizer from a folder
    assert "draftsmith convert" in capfd.readouterr().err


def test_the_pre_flight(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "eagle3-tiny", "--target.path", str(file), "--out", str(tmp_path / "run"), *SMALL]) == 0
    assert "llama, 0.3 M parameters" in capfd.readouterr().out


def test_it_answers_drafts_and_is_inspected(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows, target = tmp_path / "rows.jsonl", ["--target", str(file)]
    rows.write_text(json.dumps({"text": "def add(a, b):\n    return a + b\n"}) + "\n")
    few = ["--prompt-tokens", "4", "--max-new-tokens", "4"]
    assert main(["generate", *target, "--source", str(rows), "--out", str(tmp_path / "g"), *few]) == 0
    assert "sha256" in json.loads((tmp_path / "g" / "manifest.json").read_text())["target"]
    assert main(["derive", "early-exit", "--layers", "1", *target, "--out", str(tmp_path / "first")]) == 0
    how = ["--target.path", str(file), "--data.limit_rows", "4", "--data.sequence_length", "64"]
    capfd.readouterr()
    assert main(["inspect", "eagle3-tiny", *how, "--rows", "1"]) == 0
    assert "input -> label" in capfd.readouterr().out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_converted_folder_computes_the_same_bits(dtype: str, file: Path, tmp_path: Path) -> None:
    assert main(["convert", str(file), "--out", str(tmp_path / "folder")]) == 0
    ids = torch.tensor([list(range(4, 44))])
    with torch.no_grad():
        read, converted = (load_model(str(path), dtype=dtype)(ids).logits for path in (file, tmp_path / "folder"))
    assert torch.equal(read, converted)


def test_a_converted_folder_is_the_same_target(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Tokenizer, template, ends and identity; what is made for one drafts for the other."""
    folder, drafter = str(tmp_path / "folder"), tmp_path / "drafter"
    assert main(["convert", str(file), "--out", folder, "--dtype", "bf16"]) == 0
    said = capfd.readouterr().out
    assert "llama, 0.3 M parameters in bf16, made of Q8_0; with tokenizer and chat template" in said
    assert "quantization_config" not in json.loads((tmp_path / "folder" / "config.json").read_text())
    ours, theirs = load_tokenizer(str(file)), load_tokenizer(folder)
    assert theirs.chat_template == ours.chat_template == TEMPLATE
    assert theirs("a   12 <|im_end|>").input_ids == ours("a   12 <|im_end|>").input_ids
    assert json.loads((tmp_path / "folder" / "generation_config.json").read_text())["eos_token_id"] == 3
    assert ends_of(folder, load_config(folder)) == ends_of(str(file), load_config(str(file))) == (3,)
    read, converted = (TargetIdentity.of(load_target(path)).to_dict() for path in (str(file), folder))
    assert converted == read | {"name": "folder"}
    target = load_target(str(file))
    saver(target, "medusa")(MedusaHeads.for_target(target.model, heads=1, shared_head=True), drafter)
    assert read_entry(drafter)["identity"] == TargetIdentity.of(target)
    assert load_drafter(drafter, load_target(folder)) is not None


def test_a_base_model_has_no_template(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_gemma(tmp_path / "model.gguf", kind="Q8_0")
    assert main(["convert", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "folder")]) == 0
    assert "it has no chat template, so texts can be trained on and not chats" in capfd.readouterr().out
    config = load_config(str(tmp_path / "folder"))
    assert (config.model_type, config.sliding_window) == ("gemma3_text", 8)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a template": (
        {"fields": {"tokenizer.chat_template": "{% for message in %}"}},
        "model.gguf is damaged: the chat template is not valid Jinja: .*; take another file of the model",
    ),
    "a tokenizer": ({"without": ["tokenizer.ggml.merges"]}, "the tokenizer of .* is missing or not whole"),
    "a part": ({"fields": {"split.count": 2}}, "is part 1 of 2 of a model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_converted(what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    how, said = REFUSED[what]
    write_llama(tmp_path / "model.gguf", **how)
    assert main(["convert", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "folder")]) == 2
    assert not (tmp_path / "folder").exists()
    message = capfd.readouterr().err
    with pytest.raises(RequestError, match=said):
        raise RequestError(message)


def test_a_folder_that_is_there_and_a_file_that_is_not(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    assert main(["convert", str(file), "--out", str(tmp_path / "there")]) == 2
    assert "there exists; name a new folder" in capfd.readouterr().err
    assert main(["convert", str(tmp_path / "no.gguf"), "--out", str(tmp_path / "new")]) == 2
    assert "no.gguf is not there; name a file that ends in .gguf" in capfd.readouterr().err
    assert find_gguf(str(tmp_path / "there")) is None
