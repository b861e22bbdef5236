"""How far a quantised target is from the model that it was made from: stated where the recipe says which that is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.errors import RequestError
from draftsmith.launch.measure.loaded import Loaded, drift_of
from draftsmith.launch.recipe.load import load_recipe
from helpers.models.random_models import save_with_tokenizer
from rich.console import Console


def drift(place: Path, path: Path, **target: Any) -> dict[str, Any] | None:
    """What `eval` states of a target."""
    rows = place / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": f"quick foxes jump over {n} lazy dogs " * 4}) + "\n" for n in range(40))
    )
    values = {"target.path": path, "data.source": rows, "data.sequence_length": 32, "loop.validate_rows": 2}
    values |= {f"target.{name}": value for name, value in target.items()}
    recipe = load_recipe("eagle-tiny", [(name, str(value)) for name, value in values.items()]).recipe
    read = load_target(str(path), quantization=recipe.target.quantization)
    return drift_of(Loaded(recipe, read, {}, place, {}), Console(file=io.StringIO()))


def test_a_quantised_checkpoint_is_compared_with_its_original(
    int8_folder: Path, served_folder: Path, tmp_path: Path
) -> None:
    assert drift(tmp_path, int8_folder) is None  # nobody says what it was made from
    stated = drift(tmp_path, int8_folder, unquantised=served_folder)
    rounded = drift(tmp_path, served_folder, quantization="int8")
    assert stated is not None
    assert rounded is not None
    assert (stated["change"], stated["original"]) == ("rounded", served_folder.name)
    assert 0 < stated["kl"][0] < 0.1
    assert stated["kl"] == pytest.approx(rounded["kl"], rel=1e-3)


def test_what_is_no_copy_of_it_is_refused(int8_folder: Path, served_folder: Path, tmp_path: Path) -> None:
    other = save_with_tokenizer(tmp_path / "other")
    with pytest.raises(RequestError, match="says of no quantisation; leave target.unquantised out"):
        drift(tmp_path, served_folder, unquantised=served_folder)
    with pytest.raises(RequestError, match=r"whose quantisation is torchao.*expected None"):
        drift(tmp_path, int8_folder, unquantised=int8_folder)
    with pytest.raises(RequestError, match=r"target.unquantised is 'other', whose tokenizer is"):
        drift(tmp_path, int8_folder, unquantised=other)
    with pytest.raises(RequestError, match="quantization is int8, so path names the unquantised model itself"):
        drift(tmp_path, served_folder, unquantised=served_folder, quantization="int8")
