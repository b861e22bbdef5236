"""The list of published drafters: every entry is whole, of a form that is read, and found by its target."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import draftsmith
import pytest
from draftsmith.drafters.published.forms import FORMS
from draftsmith.drafters.published.known import known_drafters
from draftsmith.launch.cli import main
from ruamel.yaml import YAML

ROOT = Path(draftsmith.__path__[0])


def test_every_entry_is_of_a_form_that_is_read() -> None:
    every = known_drafters()
    assert len(every) > 90
    assert {each.form for each in every} <= {form.title for form in FORMS}
    assert len({each.name for each in every}) == len(every)
    for each in every:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", each.name)
        assert each.target.strip()
        assert each.page.startswith("https://")
        assert known_drafters(each.target).count(each) == 1


def test_a_licence_is_of_a_drafter_that_is_listed() -> None:
    stated = YAML(typ="safe").load((ROOT / "drafters/published/known.yaml").read_text(encoding="utf-8"))["licences"]
    assert set(stated) <= {each.name for each in known_drafters()}
    assert {each.name: each.licence for each in known_drafters() if each.licence is not None} == stated


def test_the_wheel_holds_the_list() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert data["draftsmith.drafters.published"] == ["*.yaml"]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),  # `Qwen3-8B (non-thinking)`
        ("meta-llama/Meta-Llama-3-8B-Instruct", "yuhuili/EAGLE-LLaMA3-Instruct-8B"),  # `LLaMA3-Instruct 8B`
        ("meta-llama/Llama-2-7b-chat-hf", "yuhuili/EAGLE-llama2-chat-7B"),
        ("models/vicuna-7b-v1.3/", "FasterDecoding/medusa-vicuna-7b-v1.3"),
    ],
)
def test_a_target_is_found_by_its_name(target: str, name: str) -> None:
    assert name in {each.name for each in known_drafters(target)}


def test_another_size_is_another_target() -> None:
    assert not {each.name for each in known_drafters("Qwen/Qwen3-8B")} & {
        each.name for each in known_drafters("Qwen/Qwen3-4B")
    }
    assert known_drafters("Qwen/Qwen3-8B-Base") == []


def test_ls_names_what_drafter_takes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--drafters", "--target", "Qwen/Qwen3-8B"]) == 0
    printed = capfd.readouterr().out
    assert "hub:RedHatAI/Qwen3-8B-speculator.peagle  for Qwen/Qwen3-8B: P-EAGLE, licence apache-2.0" in printed
    assert "hub:AngelSlim/Qwen3-8B_eagle3  for Qwen/Qwen3-8B: EAGLE-3, licence not stated" in printed
    assert "Qwen3-4B" not in printed
    assert main(["ls", "--drafters", "--target", "nobody/knows"]) == 0
    assert "none for nobody/knows" in capfd.readouterr().out
    assert main(["ls", "--target", "Qwen/Qwen3-8B"]) == 2
    assert "give --drafters" in capfd.readouterr().err
