"""What is said of values that are wrong: what was found, each fault once, and every remedy whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.load import find_recipe, load_recipe
from draftsmith.trainers.student.warm_start import check_start_folder


def said(recipe: str, *flags: tuple[str, str]) -> list[str]:
    with pytest.raises(RequestError) as raised:
        load_recipe(recipe, flags)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("value", ["[1,2]", "[1]", "[]"])
def test_too_few_numbers(value: str) -> None:
    head, line = said("peagle-tiny", ("peagle.layers", value))
    assert line == f"  - peagle.layers (--peagle.layers): found {json.loads(value)}; expected 3 numbers"
    assert head == "1 error in the flags"


def test_a_wrong_item_is_no_missing_one() -> None:
    head, line = said("dflash-tiny", ("block.layers", '["a"]'))
    assert line.startswith("  - block.layers.0 (--block.layers): found 'a'; ")
    assert head == "1 error in the flags"
    assert "at least 1 item" in said("dflash-tiny", ("block.layers", "[]"))[1]


def test_a_remedy_is_said_to_its_end() -> None:
    flags = ("drafter.temperature_factors", "[0.5, 0.7]"), ("drafter.policy", "argmax")
    assert said("dflash-tiny", *flags)[1].endswith("'[]' does away with a recipe's own")
    assert said("dflash-tiny", ("drafter.temperature_factors", "[0.0000001]"))[1].endswith("run out of range")


def test_a_causal_lm_as_it_is_drafts_and_starts_nothing() -> None:
    """Of the way in which it drafts a message speaks where it is to draft."""
    folder = Path(embedded_target())
    with pytest.raises(RequestError, match=r"does not describe a drafter.*--drafter.vocabulary auto$"):
        load_drafter(folder, load_target("tiny"))
    recipe = load_recipe("dflash-tiny", [("model.start_from", str(folder))]).recipe
    with pytest.raises(RequestError, match="model.start_from: .* as training writes it$"):
        check_start_folder(recipe)


def test_a_flag_that_does_not_fit_a_recipe_is_no_fault_of_the_flags_alone(tmp_path: Path) -> None:
    """The value that it contradicts stands in the file, with its line."""
    file = tmp_path / "own.yaml"
    file.write_text(Path(find_recipe("dflash-tiny")).read_text().replace("factors: []", "factors: [1, 0.3]"))
    line_of = next(n for n, line in enumerate(file.read_text().splitlines(), 1) if "factors: [1, 0.3]" in line)
    head, line = said(str(file), ("drafter.block.tree", "tree"))
    assert head == f"{file}: 1 error in the recipe with these flags"
    assert line.startswith(f"  - drafter.temperature_factors (own.yaml:{line_of}): found [1, 0.3]")


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"^{tmp_path} is a folder; expected a recipe file: name a file in it$"):
        load_recipe(str(tmp_path))
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(RequestError, match=f"is a folder.*: the recipe of a run is {tmp_path}/run.yaml$"):
        load_recipe(f"{tmp_path}/")
