"""Folders of every family whose weights or settings were damaged: one message, exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import make_drafter, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import load_config, load_tokenizer
from draftsmith.decoding.backbone.loading import load_model
from draftsmith.drafters.export import ServedTarget, export_of
from draftsmith.drafters.folder import save_draft_model, save_heads
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.cli import main
from helpers.models.small_drafters import FAMILIES, make_on_target
from helpers.runs.damaged_files import KINDS, damage
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def target() -> Backbone:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    return target


def saved(family: str, target: Backbone, folder: Path) -> Path:
    if family == "draft_model":
        save_draft_model(make_drafter(target).module, folder, target)
        return folder
    module = make_on_target(family, target).module
    save_heads(module, folder, target, family=family, settings=asdict(module.config))
    assert load_drafter(folder, target).family == family
    return folder


def entry_of(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["draftsmith"])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", [*KINDS, "a folder"])
@pytest.mark.parametrize("family", [*FAMILIES, "draft_model"])
def test_damaged_weights_are_named(family: str, kind: str, target: Backbone, tmp_path: Path) -> None:
    path = saved(family, target, tmp_path / "d") / WEIGHTS
    if kind == "a folder":
        path.unlink()
        path.mkdir()
    else:
        damage(path, kind)
    with pytest.raises(RequestError, match=rf"{path} .* cannot be read: .*copy .* again"):
        load_drafter(path.parent, target)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "does not hold the sizes of"),
        ([], "does not describe a drafter"),
        (None, "does not describe a drafter"),
        ("a size is a word", "does not hold the sizes of"),
        ("a size is less than none", "does not hold the sizes of"),
        ("a size is unknown", "does not hold the sizes of .*hiden"),
    ],
)
def test_settings_that_nothing_can_be_built_from(
    family: str, settings: Any, says: str, target: Backbone, tmp_path: Path
) -> None:
    folder = saved(family, target, tmp_path / "d")

    def change(entry: dict[str, Any]) -> None:
        own = entry["settings"]
        changed = {
            "a size is a word": {"hidden": "x"},
            "a size is less than none": {"hidden": -8},
            "a size is unknown": {"hiden": 8},
        }
        entry["settings"] = own | changed[settings] if isinstance(settings, str) else settings

    entry_of(folder, change)
    with pytest.raises(RequestError, match=rf"config\.json {says}"):
        load_drafter(folder, target)


@pytest.mark.parametrize("family", ["medusa", "eagle", "eagle3"])
def test_an_export_says_the_same(family: str, target: Backbone, tmp_path: Path) -> None:
    folder = saved(family, target, tmp_path / "d")
    served = ServedTarget("t", ["Qwen3ForCausalLM"], 61, 2, 256, None, None)
    with pytest.raises(RequestError, match=r"config\.json does not hold the sizes of"):
        export_of(folder, family, {"hidden": 8}, served, "vllm")


def test_a_config_that_is_no_file_or_in_no_folder(target: Backbone, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(RequestError, match="does not describe a drafter"):
        load_drafter(tmp_path, target)
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="holds no drafter"):
        load_drafter(tmp_path / "file", target)


def test_weights_of_other_sizes_than_the_config_says(target: Backbone, tmp_path: Path) -> None:
    path = saved("draft_model", target, tmp_path / "d") / WEIGHTS
    name, tensor = next((k, t) for k, t in load_file(path).items() if "gate_proj" in k)
    save_file(load_file(path) | {name: tensor[:3].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(RequestError, match="weights are of other sizes than its config.json"):
        load_drafter(path.parent, target)


def test_weights_that_lack_a_tensor(target: Backbone, tmp_path: Path) -> None:
    """`transformers` would fill it with random numbers; a tied projection is not missed."""
    path = saved("draft_model", target, tmp_path / "d") / WEIGHTS
    tensors = load_file(path)
    load_model(str(path.parent))
    name = next(name for name in tensors if "q_proj" in name)
    save_file({key: t for key, t in tensors.items() if key != name}, path, {"format": "pt"})
    with pytest.raises(RequestError, match=rf"its weights lack {name}; expected a folder"):
        load_model(str(path.parent))


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": []}', "1", "{"])
def test_a_damaged_list_of_shards(content: str, target: Backbone, tmp_path: Path) -> None:
    folder = saved("draft_model", target, tmp_path / "d")
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(content)
    with pytest.raises(RequestError, match=f"cannot load the model '{folder}'"):
        load_model(str(folder))


@pytest.mark.parametrize("content", ["[]", "1", "{", ""])
@pytest.mark.parametrize(
    ("load", "name"),
    [(load_tokenizer, "tokenizer.json"), (load_tokenizer, "tokenizer_config.json"), (load_config, "config.json")],
)
def test_damaged_files_of_a_model(
    load: Callable[[str], Any], name: str, content: str, target: Backbone, tmp_path: Path
) -> None:
    folder = saved("draft_model", target, tmp_path / "d")
    (folder / name).write_text(content)
    with pytest.raises(RequestError, match=rf"cannot load the (config|tokenizer) of '{folder}'"):
        load(str(folder))


@pytest.mark.parametrize("verb", ["eval", "audit"])
def test_from_the_command_line(verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One message without a traceback, and the exit code of a request that cannot work."""
    from draftsmith.decoding.backbone.loading import load_target

    target = load_target("tiny")
    save_draft_model(target.model, tmp_path / "d", target)
    damage(tmp_path / "d" / WEIGHTS, "cut")
    words = [verb, "--target", "tiny", "--drafter", str(tmp_path / "d")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    message = capfd.readouterr().err
    assert f"{tmp_path / 'd' / WEIGHTS} (" in message
    assert "unexpected" not in message
    assert "Traceback" not in message
