"""What strangers bring is refused where each command looks first: the pre-flight, the loader, the export."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import EMBEDDED, load_config
from draftsmith.decoding.backbone.loading import load_model, load_target
from draftsmith.decoding.backbone.weights import check_weight_files
from draftsmith.drafters.export import ServedTarget, export_of
from draftsmith.drafters.folder import save_draft_model, save_heads
from draftsmith.errors import DraftsmithError, EnvironmentFailure, RequestError, TrainingFailed
from draftsmith.launch.check.models import Models
from draftsmith.launch.cli import main
from draftsmith.launch.engines import COMMANDS, Start, command
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from helpers.models.small_drafters import make_on_target
from helpers.runs.hostile_folders import CASES, copied, trusting_run
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    make_target("qwen3").model.save_pretrained(place / "target")
    tokenizer.save_pretrained(place / "target")
    return place


@pytest.fixture(scope="module")
def target() -> Backbone:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    return target


# of what `eval` alone meets: `check` reads no rows for these, and knows no run
LATER = ("tokenizer", "ends", "its run")


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.base == "target" and case.refused and not any(word in case.name for word in LATER)
    ],
    ids=lambda case: case.name,
)
def test_the_pre_flight_refuses_what_the_loader_refuses(
    case: object, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "executed"
    folder = copied(case, made, tmp_path, mark)
    recipe = load_recipe("distill-tiny", [("target.path", str(folder))]).recipe
    if case.name != "target: no weights":  # a target may be looked at before its weights are here
        with pytest.raises(DraftsmithError) as first:
            Models(recipe).target()
        assert first.value.exit_code == 2
    with pytest.raises(DraftsmithError) as second:
        load_target(str(folder))
    assert second.value.exit_code == 2
    assert not mark.exists()


def test_the_command_that_converts_a_pickle(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the message prints it: the same weights, and a folder that is read."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "a folder"
    model = AutoModelForCausalLM.from_pretrained(made / "target")
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(RequestError, match="never read here") as raised:
        load_model(str(folder))
    words = shlex.split(str(raised.value).splitlines()[-1])
    assert words[:2] == ["python", "-c"]
    monkeypatch.setattr(sys, "argv", ["-c", *words[3:]])
    exec(words[2], {})
    check_weight_files(str(folder))
    loaded = load_model(str(folder)).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


def test_attention_is_ours_whatever_a_config_says(made: Path, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "target: a choice of attention")
    folder = copied(case, made, tmp_path, tmp_path / "mark")
    plain = load_target(str(made / "target")).model.config._attn_implementation
    assert load_target(str(folder)).model.config._attn_implementation == plain
    assert load_config(str(folder))._attn_implementation is None


def test_a_target_that_is_trusted_by_name_is_not_looked_at(made: Path, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "target: fusions")
    folder = str(copied(case, made, tmp_path, tmp_path / "mark"))
    with pytest.raises(RequestError, match=r"target\.trust_remote_code"):
        load_config(folder)
    assert load_config(folder, trust_remote_code=True).fusion_config == {"evil": True}
    assert not load_recipe("distill-tiny").recipe.target.trust_remote_code


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_drafter_with_such_numbers_is_exported(value: float, target: Backbone, tmp_path: Path) -> None:
    heads = make_on_target("medusa", target).module
    with torch.no_grad():
        next(heads.parameters()).view(-1)[3] = value
    with pytest.raises(TrainingFailed, match=r"blocks\.0.* holds NaN or infinity"):
        save_heads(heads, tmp_path / "h", target, family="medusa", settings=asdict(heads.config))
    draft = make_target("qwen3", seed=2).model
    with torch.no_grad():
        next(draft.parameters())[0, 0] = value
    with pytest.raises(TrainingFailed, match="is not exported"):
        save_draft_model(draft, tmp_path / "d", target)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_half_precision_cannot_hold(target: Backbone, tmp_path: Path) -> None:
    heads = make_on_target("medusa", target).module
    with torch.no_grad():
        next(heads.parameters()).view(-1)[0] = 1e6
    save_heads(heads, tmp_path / "h", target, family="medusa", settings=asdict(heads.config))
    served = ServedTarget("t", ["Qwen3ForCausalLM"], 61, 2, 256, None, None)
    settings = asdict(heads.config)
    with pytest.raises(RequestError, match="beyond the range of fp16"):
        export_of(tmp_path / "h", "medusa", settings, served, "vllm", dtype="fp16")
    made = export_of(tmp_path / "h", "medusa", settings, served, "vllm", dtype="bf16")
    assert all(torch.isfinite(each).all() for each in made.tensors.values())
    assert load_file(tmp_path / "h" / "model.safetensors")["blocks.0.layers.0.weight"].max() == 1e6


def test_trust_of_a_run_folder_is_no_trust(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every command that reads a run folder wants it said by the user."""
    trusting_run(tmp_path, tmp_path / "executed")
    for words in (["eval"], ["audit"], ["tree"], ["chat"], ["export"]):
        assert main([*words, str(tmp_path)]) == 2
        flag = "--trust-remote-code" if words == ["export"] else "--target.trust_remote_code true"
        assert flag in capfd.readouterr().err
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("form", sorted(COMMANDS))
def test_a_printed_command_is_quoted_for_a_shell(form: str, tmp_path: Path) -> None:
    """It is there to be copied, and names come from a run folder."""
    target = tmp_path / "x'; touch y"
    target.mkdir()
    start = Start(str(target), "a b;c", "eagle3", 4, sampled=False)
    lines = command(form, start).splitlines()
    words = [word for line in lines for word in shlex.split(line)]
    assert (str(target) in words) == (form != "speculators")
    assert not any(word in ("y", "b;c", "touch") for word in words)
    assert any("a b;c" in word for word in words)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model.layers", "1000000"], "model.layers (--model.layers): found 1000000"),
        (["--model.hidden", "100000000"], "model.hidden"),
        (["--model.heads", "1000000000"], "model.heads"),
        (["--medusa.heads", "1000000000"], "medusa.heads"),
        (["--drafter.medusa.nodes", "1000000000"], "drafter.medusa.nodes"),
        (["--drafter.lookahead.window", "1000000000"], "drafter.lookahead.window"),
        (["--eval.draft_length", "1000000000"], "eval.draft_length"),
        (["--boost.members", "1000000000"], "boost.members"),
    ],
)
def test_absurd_sizes_of_a_recipe(flags: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "distill-tiny", *flags]) == 2
    message = capfd.readouterr().err
    assert says in message
    assert "less than or equal to" in message


def test_a_model_beyond_the_machine_is_refused_before_it_is_built() -> None:
    sizes = ModelConfig(layers=1_000, hidden=100_000, heads=800, kv_heads=800, head_size=128, intermediate=400_000)
    with pytest.raises(EnvironmentFailure, match=re.escape("section model")):
        fresh_model(sizes, vocabulary=1_000, eos=None)
    with torch.device("meta"):
        small = fresh_model(sizes.model_copy(update={"layers": 1}), vocabulary=1_000, eos=None)
    assert next(small.parameters()).device.type == "meta"


def test_the_embedded_target_passes() -> None:
    check_weight_files(EMBEDDED)
    load_model(EMBEDDED)
