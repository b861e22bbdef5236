"""An adapter is trained, saved, resumed and exported alone; the base stays what it was, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.cli import main
from helpers.models.shallow_target import SHALLOW
from safetensors.torch import load_file

RECIPE = """\
method: distill
target: {path: SHALLOW}
data: {limit_rows: 30, sequence_length: 64}
model: {layers: 1, hidden: 64, intermediate: 64, heads: 1, kv_heads: 1}
optimizer: {lr: 1e-2, warmup_steps: 0}
loop: {steps: 3, batch_rows: 4, micro_rows: 2, precision: fp32, validate_rows: 4, log_every: 1,
       validate_every: 2, ema: 0.5}
checkpoint: {every_steps: 1, keep: 3}
probe: {prompts: 1, max_new_tokens: 6}
""".replace("SHALLOW", SHALLOW)


def train(folder: Path, out: str, *flags: str) -> int:
    return main(["train", str(folder / "small.yaml"), "--out", str(folder / out), *flags])


def adapter(name: str, base: Path, rank: int = 2) -> list[str]:
    flags = ["--lora.rank", str(rank), "--lora.dropout", "0.1", "--lora.name", name]
    return [*flags, "--model.start_from", str(base / "drafter")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base draft, and two adapters trained one after the other."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "small.yaml").write_text(RECIPE)
    assert train(folder, "base") == 0
    assert train(folder, "one", *adapter("one", folder / "base")) == 0
    flags = [*adapter("two", folder / "one"), "--lora.layers", '["q_proj"]']
    assert train(folder, "two", *flags) == 0
    return folder


def tensors(*parts: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(*parts))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_the_base_and_other_adapters_stay_to_the_bit(runs: Path) -> None:
    base = tensors(runs, "base", "drafter", "model.safetensors")
    for run in ("one", "two"):
        assert same(base, tensors(runs, run, "drafter", "model.safetensors"))
    file = ("adapters", "one", "adapter_model.safetensors")
    assert same(tensors(runs, "one", "drafter", *file), tensors(runs, "two", "drafter", *file))
    settings = json.loads((runs / "two/drafter/config.json").read_text())["draftsmith"]["settings"]
    assert settings == {"adapters": ["one", "two"], "adapter": "two"}


def test_only_the_adapter_is_trained_saved_and_averaged(runs: Path) -> None:
    last = runs / "two" / "checkpoints" / "step-00000003"
    for name in ("model.safetensors", "average.safetensors"):
        kept = tensors(last, name)
        assert len(kept) == 2  # q_proj of one layer
        assert all(".q_proj.lora_" in key and ".two." in key for key in kept)
    before = tensors(runs, "two", "checkpoints", "step-00000001", "model.safetensors")
    assert not same(before, tensors(last, "model.safetensors"))
    moments = tensors(last, "optimizer-0.safetensors")
    assert {key.split(".")[0] for key in moments} == {"0", "1"}


def test_what_is_exported_drafts_as_what_was_probed(runs: Path) -> None:
    """The folder's distribution is that of base and averaged adapter together, by peft's own sum."""
    target = load_target(SHALLOW)
    drafter = load_drafter(runs / "one" / "drafter", target)
    assert isinstance(drafter, DraftModel)
    assert (drafter.adapters, drafter.adapter) == (("one",), "one")
    ids = torch.tensor([[5, 9, 2, 33, 7]])
    own = drafter.backbone.model(ids).logits
    drafter.use(None)
    assert not torch.equal(own, drafter.backbone.model(ids).logits)
    state = tensors(runs, "one", "checkpoints", "step-00000003", "average.safetensors")
    base = load_target(str(runs / "base" / "drafter")).model
    with torch.no_grad():
        for name, module in base.named_modules():
            a = state.get(f"draft.{name}.lora_A.one.weight")
            if a is not None:
                b = state[f"draft.{name}.lora_B.one.weight"]
                module.weight.add_(16.0 / 2 * b @ a)
    torch.testing.assert_close(base(ids).logits, own, atol=1e-5, rtol=1e-4)


def test_a_run_that_was_cut_ends_with_the_same_bits(runs: Path) -> None:
    shutil.copytree(runs / "one", runs / "cut")
    for step in (3, 2):  # as if the run had been killed behind step 1
        (runs / "cut" / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    shutil.rmtree(runs / "cut" / "drafter")
    assert train(runs, "cut", *adapter("one", runs / "base")) == 0
    last = "checkpoints/step-00000003"
    names = ["model.safetensors", "adapters/one/adapter_model.safetensors"]
    files = [f"drafter/{name}" for name in names]
    files += [f"{last}/model.safetensors", f"{last}/average.safetensors"]
    files += [f"{last}/optimizer-0.safetensors"]
    for name in files:
        assert same(tensors(runs, "one", name), tensors(runs, "cut", name)), name


REFUSED = {
    "another method": (["--method", "medusa"], "method 'medusa' trains no adapter of a draft"),
    "no draft": (["--model.start_from", ""], "an adapter changes an existing draft"),
    "the base's name": (["--lora.name", "base"], "which stands for no adapter"),
    "no such layer": (["--lora.layers", '["w_proj"]'], "lora.layers names w_proj, and the model"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("verb", ["train", pytest.param("check", marks=pytest.mark.slow)])
def test_what_cannot_be_trained_is_refused_before_the_run(
    case: str, verb: str, runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags, message = REFUSED[case]
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE.replace("distill", "medusa") if "--method" in flags else RECIPE)
    flags = [] if "--method" in flags else flags
    given = [*adapter("new", runs / "base"), *flags]
    assert main([verb, str(recipe), "--out", str(tmp_path / "out"), *given]) == 2
    assert message in " ".join(capfd.readouterr().err.split())


def test_zero_3_is_refused_before_the_run(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    machine = ["--machine.processes", "2", "--machine.device_gb", "80", "--machine.sharding"]
    flags = [*adapter("new", runs / "base"), "--loop.ema", "", *machine]
    assert main(["check", str(runs / "small.yaml"), *flags, "zero3"]) == 2
    assert "a draft with an adapter decodes in probes as it is" in capfd.readouterr().err
    assert main(["check", str(runs / "small.yaml"), *flags, "zero2"]) == 0


@pytest.mark.parametrize("verb", ["train", pytest.param("check", marks=pytest.mark.slow)])
def test_adapters_that_are_there_are_neither_lost_nor_written_over(
    verb: str, runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, out = str(runs / "small.yaml"), str(tmp_path / "out")
    assert main([verb, recipe, "--out", out, *adapter("one", runs / "two")]) == 2
    assert "has an adapter 'one' already" in capfd.readouterr().err
    whole = ["--model.start_from", str(runs / "two" / "drafter")]
    assert main([verb, recipe, "--out", out, *whole]) == 2
    assert "has adapters (one, two), made for its base" in capfd.readouterr().err


def test_the_pre_flight_counts_what_moves(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = adapter("new", runs / "base", rank=8)
    assert main(["check", str(runs / "small.yaml"), *flags]) == 0
    report = capfd.readouterr().out
    assert "0.01 M parameters" in report  # of 0.29 M
    assert "adapter's" in report  # base, which takes memory and no moments


@pytest.mark.slow  # test_adapters.py has the choice itself
def test_an_adapter_is_chosen_on_the_command_line(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    few = [
        "--eval.limit",
        "1",
        "--eval.max_new_tokens",
        "6",
        "--eval.repeats",
        "1",
        "--eval.sweep",
        "[1]",
        "--eval.temperatures",
        "[0]",
    ]
    for name in ("base", "one"):
        flags = ["--drafter.adapter", name, "--no-audit", *few]
        assert main(["eval", str(runs / "two"), *flags]) == 0
    assert main(["eval", str(runs / "two"), "--drafter.adapter", "law", *few]) == 2
    assert "no adapter 'law'; it has one, two, and 'base' means none" in capfd.readouterr().err
