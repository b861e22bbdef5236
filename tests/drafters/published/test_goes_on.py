"""A published drafter behind every door that takes one: decoded, exported, converted, trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.method_config import Eagle3Config, PeagleConfig
from draftsmith.trainers.methods import METHODS
from draftsmith.trainers.student.warm_start import warm_started
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.published_doors import EXPORTED, TRAINED
from helpers.models.published_forms import FORMS, WORDS


@pytest.mark.parametrize("form", FORMS)
def test_convert_writes_the_same_drafter(
    form: str, deep: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = FORMS[form](deep.model)
    folder, out = made.write(tmp_path / "theirs"), tmp_path / "ours"
    assert main(["convert-drafter", str(folder), "--target", deep.name, "--out", str(out)]) == 0
    assert f"--drafter {out}" in capsys.readouterr().out
    entry = json.loads((out / "config.json").read_text())["draftsmith"]
    assert entry["family"] == made.family
    assert entry["target"]["tokenizer"] is not None
    mine, theirs = (load_drafter(each, deep) for each in (out, folder))
    weights, others = mine.module.state_dict(), theirs.module.state_dict()
    assert mine.module.config == theirs.module.config
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert "a drafter in the form of " in (out / "README.md").read_text()


def test_our_own_folder_is_not_converted(deep: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = FORMS["EAGLE-1, with a bias"](deep.model).write(tmp_path / "theirs")
    words = ["convert-drafter", str(folder), "--target", deep.name, "--out"]
    assert main([*words, str(tmp_path / "ours")]) == 0
    words[1] = str(tmp_path / "ours")
    assert main([*words, str(tmp_path / "again")]) == 2
    assert "is a drafter folder of ours already" in capsys.readouterr().err
    words[1] = deep.name
    assert main([*words, str(tmp_path / "again")]) == 2
    assert "does not describe a drafter" in capsys.readouterr().err


@pytest.mark.parametrize("form", TRAINED)
def test_training_goes_on_from_it(form: str, deep: Backbone, tmp_path: Path) -> None:
    """With the sizes of its layers, which are not the target's, and its own vocabulary; the same weights at first."""
    folder = FORMS[form](deep.model).write(tmp_path / "d")
    method, sections = TRAINED[form]
    recipe = Recipe(method=method, model=ModelConfig(start_from=str(folder)), **sections)
    code = METHODS[method].code()
    loaded = load_drafter(folder, deep).module
    drafted = range(len(loaded.d2t)) if hasattr(loaded, "d2t") else None  # the most frequent of other rows
    begun = warm_started(code.student(recipe, deep.model, drafted), recipe, deep)
    assert begun.config == loaded.config
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in begun.state_dict().items())
    assert any(parameter.requires_grad for parameter in begun.parameters())
    saver(deep, begun.family)(begun, tmp_path / "again")
    assert load_drafter(tmp_path / "again", deep).module.config == loaded.config


def test_training_from_other_choices_is_refused(deep: Backbone, tmp_path: Path) -> None:
    """What a recipe chooses has to be the drafter's: which states, how many tokens."""
    folder = FORMS["EAGLE-3, SpecForge"](deep.model).write(tmp_path / "d")
    chosen = Eagle3Config(layers=(2, 4, 5), vocabulary=len(WORDS))
    recipe = Recipe(method="eagle3", model=ModelConfig(start_from=str(folder)), eagle3=chosen)
    with pytest.raises(RequestError, match=r"has layers \[1, 3, 6\]; .* eagle3.layers to \[1, 3, 6\]"):
        warm_started(METHODS["eagle3"].code().student(recipe, deep.model, range(len(WORDS))), recipe, deep)


@pytest.mark.parametrize("form", EXPORTED)
def test_it_is_exported_as_ours_are(form: str, deep: Backbone, tmp_path: Path) -> None:
    """Read, written, read again: the same tensors."""
    folder = FORMS[form](deep.model).write(tmp_path / "theirs")
    words = ["--drafter", str(folder), "--target", deep.name, "--format", EXPORTED[form], "--dtype", "fp32"]
    assert main(["export", *words, "--out", str(tmp_path / "again")]) == 0
    before, behind = (load_drafter(each, deep).module for each in (folder, tmp_path / "again"))
    weights = behind.state_dict()
    assert before.config == behind.config
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.state_dict().items())


def test_eval_takes_it(deep: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"abc def {n}"}) + "\n" for n in range(2)))
    folder = str(FORMS["EAGLE-3, SpecForge"](deep.model).write(tmp_path / "eagle3"))
    asked = {"prompts": "prompts.jsonl", "max-new-tokens": "8", "repeats": "1", "temperatures": "[0.0]"}
    flags = [word for name, value in asked.items() for word in (f"--eval.{name}", value)]
    assert main(["eval", "--target", deep.name, "--drafter", folder, *flags, "--no-audit", "--out", "measured"]) == 0
    row, *_ = json.loads(Path("measured/results.json").read_text())["rows"]
    assert row["method"] == "eagle3"


def test_a_name_on_the_hub_goes_the_same_way(deep: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it lies in the hub's cache, fetched before."""
    commit = "0" * 40
    place = tmp_path / "hub/models--org--drafter/snapshots" / commit
    place.parent.mkdir(parents=True)
    FORMS["DFlash, z-lab"](deep.model).write(place)
    (place.parent.parent / "refs").mkdir()
    (place.parent.parent / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert load_drafter("hub:org/drafter", deep).family == "dflash"


def test_an_embedding_of_its_own_is_not_trained_on(deep: Backbone, tmp_path: Path) -> None:
    folder = FORMS["P-EAGLE, an embedding of its own"](deep.model).write(tmp_path / "d")
    sizes = PeagleConfig(layers=(2, 4, 5), vocabulary=len(WORDS), decoder_layers=2)
    recipe = Recipe(method="peagle", model=ModelConfig(start_from=str(folder)), peagle=sizes)
    fresh = METHODS["peagle"].code().student(recipe, deep.model, range(len(WORDS)))
    with pytest.raises(RequestError, match="with an embedding of its own, and training embeds by the target's"):
        warm_started(fresh, recipe, deep)
