"""`draftsmith export` from a run folder: what is written, what is said, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.target.hub import embedded_target
from draftsmith.decoding.target.loading import load_target
from draftsmith.drafters.eagle.layers import EagleShape
from draftsmith.drafters.eagle.net import EagleNet
from draftsmith.drafters.folder import save_draft_model
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.drafters.identity import TUNED, mark_tuned
from draftsmith.drafters.tuned_file import write_tuned
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import replace_folder
from draftsmith.trainers.teacher.frozen import saver
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target("tiny")


def run_folder(place: Path, recipe: str, net: Any, target: Any) -> Path:
    """A run as training leaves it, as far as an export looks."""
    run = place / recipe
    run.mkdir()
    resolved = load_recipe(recipe)
    (run / "run.yaml").write_text(resolved.yaml())
    family = resolved.recipe.method.removesuffix("2")  # Medusa-2's heads are Medusa's
    replace_folder(run / "drafter", lambda folder: saver(target, family)(net, folder))  # as the loop does
    return run


@pytest.fixture
def eagle(target: Any, tmp_path: Path) -> Path:
    return run_folder(tmp_path, "eagle-tiny", EagleNet(EagleShape.like(target.model.config)), target)


def test_a_run_becomes_a_folder_for_each_engine(eagle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(eagle)]) == 0
    message = capfd.readouterr().out
    assert f"vllm serve {embedded_target()}" in message
    assert '"method": "eagle"' in message
    assert main(["export", str(eagle), "--format", "sglang", "--dtype", "fp32"]) == 0
    assert "--speculative-algorithm EAGLE " in capfd.readouterr().out
    own = load_file(eagle / "drafter" / "model.safetensors")
    for form, dtype in (("vllm", torch.bfloat16), ("sglang", torch.float32)):
        assert {path.name for path in (eagle / form).iterdir()} == {"config.json", "model.safetensors"}
        config = json.loads((eagle / form / "config.json").read_text())
        assert (config["vocab_size"], config["max_position_embeddings"]) == (4096, 2048)
        tensors = load_file(eagle / form / "model.safetensors")
        assert tensors.keys() == {*own, "fc.bias"}
        for name, weight in own.items():
            assert torch.equal(tensors[name], weight.to(dtype))


def test_shared_heads_take_the_targets_projection_along(
    target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM gets no other; and it is told of no more heads than there are."""
    heads = MedusaHeads.for_target(target.model, heads=2, shared_head=True)
    run = run_folder(tmp_path, "medusa-tiny", heads, target)
    assert main(["export", str(run), "--dtype", "fp32"]) == 0
    assert '"num_speculative_tokens": 2' in capfd.readouterr().out
    tensors = load_file(run / "vllm" / "model.safetensors")
    head = target.model.get_output_embeddings().weight
    assert torch.equal(tensors["lm_head.weight"], head)


def other_target(place: Path, **changes: Any) -> Path:
    """The embedded target's config and tokenizer with other entries; no weights are read of it."""
    shutil.copytree(embedded_target(), place, ignore=lambda _, names: [n for n in names if "safetensors" in n])
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


def test_a_drafter_of_a_tuned_target_is_exported_beside_it_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Beside the target as it was published an engine would load it, and accept little."""
    tuned = load_target("tiny")
    mark_tuned(tuned.model, name="tiny-target", identity="abc")
    heads = MedusaHeads.for_target(tuned.model, heads=2)
    run = run_folder(tmp_path, "medusa2-tiny", heads, tuned)
    assert main(["export", str(run)]) == 2  # its folder `target` is gone
    message = capfd.readouterr().err
    assert "as tuned to abc; this target 'tiny-target' is one whose weights no run" in message
    assert not (run / "vllm").exists()
    other_target(run / "target", **{TUNED: {"from": "tiny-target", "sha256": "abc"}})
    assert main(["export", str(run)]) == 0
    assert f"vllm serve {run}/target" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--format", "speculators"], "expected vllm or sglang"),
        (["--out", "{run}/drafter"], "exists; name a new folder"),
        (["--target", "{narrow}"], "with hidden_size 208; this target 'narrow' has hidden_size 192"),
        (["--target", "{padded}"], "with vocabulary 4096; this target 'padded' has vocabulary 5000"),
        (["--target", "{tuned}"], "is one as tuned to abc. Use the folder"),
        (["--target", "{words}"], "this target 'words' has tokenizer"),
    ],
)
def test_what_cannot_be_is_one_message(
    words: list[str], reason: str, eagle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    others = {
        "narrow": other_target(tmp_path / "narrow", hidden_size=192),
        "padded": other_target(tmp_path / "padded", vocab_size=5000),
        "tuned": other_target(tmp_path / "tuned", **{TUNED: {"from": "tiny", "sha256": "abc"}}),
        "words": other_target(tmp_path / "words"),
    }
    train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300).save_pretrained(others["words"])
    given = [word.format(run=eagle, **others) for word in words]
    assert main(["export", str(eagle), *given]) == 2
    message = capfd.readouterr().err
    assert reason in message
    assert message.count("draftsmith: ") == 1
    assert not (eagle / "vllm").exists()


def test_no_run_and_no_drafter(eagle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert "is no run folder" in capfd.readouterr().err
    shutil.rmtree(eagle / "drafter")
    assert main(["export", str(eagle)]) == 2
    assert "holds no drafter" in capfd.readouterr().err


def test_the_command_says_how_drafts_are_drawn(
    eagle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From wherever the engine is started; vLLM would take the argmax unasked."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", eagle.name]) == 0
    message = capfd.readouterr().out
    assert f'"model": "{eagle / "vllm"}"' in message
    assert '"draft_sample_method": "probabilistic"' in message
    write_tuned(eagle / "drafter", {"drafter.policy": "argmax", "eval.draft_length": "2"}, {})
    assert main(["export", eagle.name, "--out", "again"]) == 0
    message = capfd.readouterr().out
    assert '"num_speculative_tokens": 2' in message
    assert "draft_sample_method" not in message


def test_a_draft_model_is_told_how_it_is_loaded(
    target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_draft_model(target.model, run / "drafter", target)
    (run / "run.yaml").write_text(load_recipe("distill-tiny").yaml())
    assert main(["export", str(run)]) == 2
    message = capfd.readouterr().err
    assert "load it as it is" in message
    assert f'{{"method": "draft_model", "model": "{run / "drafter"}", "num_speculative_tokens": 4' in message
    assert '"draft_sample_method": "probabilistic"' in message


def test_others_may_read_the_weights(eagle: Path) -> None:
    """An engine in a container runs as somebody else."""
    assert main(["export", str(eagle)]) == 0
    before = os.umask(0)
    os.umask(before)
    for path in (*(eagle / "vllm").iterdir(), *(eagle / "drafter").iterdir()):
        assert path.stat().st_mode & 0o777 == 0o666 & ~before, path
