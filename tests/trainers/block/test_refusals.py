"""What block drafters, P-EAGLE, MTP modules and PARD cannot learn from the rows that a recipe has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decoding.backbone.hub import load_tokenizer
from draftsmith.errors import RequestError
from draftsmith.launch.check.models import check_recipe
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe

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
