"""What block drafters, P-EAGLE, MTP modules and PARD cannot learn from the rows that a recipe has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import VOCABULARY
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import layer_count
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.errors import RequestError
from draftsmith.launch.check.models import check_recipe
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.trainers.block.common import check_target
from draftsmith.trainers.teacher.unused import check_unused

ROW = 32
MOST: dict[str, tuple[str, int, dict[str, str]]] = {
    "dflash": ("block.size", ROW - 1, {"block.layout": "fill-in"}),
    "dspark": ("block.size", ROW - 2, {"block.layout": "anchor-first"}),
    "dflash2": ("block.size", ROW - 1, {"block.layout": "fill-in"}),
    "peagle": ("peagle.depths", ROW - 2, {}),
    "mtp": ("mtp.passes", ROW - 2, {}),
    "pard": ("pard.drafts", ROW - 1, {}),
}


@pytest.mark.parametrize("method", MOST)
def test_drafts_that_no_row_has_a_label_for(method: str) -> None:
    field, most, own = MOST[method]

    def recipe_of(count: int) -> Any:
        values = {"data.sequence_length": str(ROW), field: str(count), **own}
        return load_recipe(f"{method}-tiny", list(values.items())).recipe

    check_recipe(recipe_of(most))
    with pytest.raises(RequestError, match=rf"{field} asks for \d+ drafts .* a row of {ROW} tokens has labels for"):
        check_recipe(recipe_of(most + 1))


def test_states_and_masks_that_the_target_does_not_have(target: Backbone) -> None:
    """From the embedding's state to the one behind the last layer, low to high and each once."""
    recipe, count = load_recipe("dflash-tiny").recipe, layer_count(target.model)

    def check(**values: Any) -> None:
        block = recipe.block.model_copy(update={"layers": [count], "mask_token": None, **values})
        check_target(recipe.model_copy(update={"block": block}), target.model)

    for layers in ([0], [count], [0, 1, count]):
        check(layers=layers)
    for layers in ([-1], [count + 1], [1, 1], [1, 0]):
        with pytest.raises(RequestError, match=rf"block.layers is .*to {count} \(the last layer"):
            check(layers=layers)
    check(mask_token=VOCABULARY - 1)
    with pytest.raises(RequestError, match=rf"mask_token is {VOCABULARY}; .* of ids 0 to {VOCABULARY - 1}:"):
        check(mask_token=VOCABULARY)


def test_rows_that_have_the_mask_are_counted_however_often_they_have_it() -> None:
    recipe = load_recipe("pard-tiny", [("pard.mask_token", "7")]).recipe
    texts = [np.array(ids, np.int32) for ids in ([1, 7, 7], [2], [7], [3, 4])]
    with pytest.raises(RequestError, match="mask_token is 7, and 2 of the first 4 rows have that token"):
        check_unused(recipe, iter(texts))
    check_unused(recipe, iter(texts[1::2]))


@pytest.mark.parametrize(("method", "field"), [("dflash", "block.mask_token"), ("pard", "pard.mask_token")])
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_mask_that_texts_have(
    method: str, field: str, verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.jsonl"
    texts = [f"def add_{n}(a, b):\n    return a + b\n" * 30 for n in range(40)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    used = load_tokenizer("tiny")(texts[0], add_special_tokens=False)["input_ids"][3]
    words = [verb, f"{method}-tiny", "--data.source", str(source), "--data.sequence_length", "64"]
    words += ["--loop.steps", "1", "--out", str(tmp_path / "out")]
    assert main([*words, f"--{field}", str(used)]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert f"{field} is {used}, and" in said
    assert "rows have that token" in said
