"""Recipes for a model of 100 M to 2 B parameters: what they would train for one of 135 M, and each for two steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.launch.check.memory import needs, trained
from draftsmith.launch.check.models import Models, check_model
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.load import load_recipe, shipped_recipes
from helpers.models.shallow_target import ON_SHALLOW
from helpers.runs.small_flags import TRAINING

SMALL = [path.stem for path in shipped_recipes() if path.stem.endswith("-small")]
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# what the shallow target has room for
FEWER = {
    "dflash-small": ["--block.vocabulary", "256"],
    "dspark-small": ["--block.vocabulary", "256"],
    "eagle-small": ["--eagle.vocabulary", "256"],
    "eagle3-small": ["--eagle3.vocabulary", "256"],
    "hydra-small": ["--medusa.vocabulary", "256"],
    "medusa-small": ["--medusa.vocabulary", "256"],
    "mtp-small": ["--mtp.vocabulary", "256"],
    "peagle-small": ["--peagle.vocabulary", "256"],
    "boost-small": [
        "--boost.samples",
        "8",
        "--boost.held_out",
        "4",
        "--boost.continuation",
        "8",
        "--boost.prompt_tokens",
        "8",
    ],
}


def test_there_is_one_for_each_family_that_makes_sense() -> None:
    families = "boost dflash distill dspark eagle eagle3 hydra medusa mtp pard peagle"
    assert [name.removesuffix("-small") for name in SMALL] == families.split()


@pytest.mark.parametrize("name", SMALL)
def test_a_laptop_has_room(name: str, tmp_path: Path) -> None:
    """A sixth of the target's parameters at most, and two gigabytes with the target in fp32."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    sizes = [("target.path", "somebody/model"), ("target.sizes", str(tmp_path / "config.json"))]
    recipe = load_recipe(name, sizes).recipe
    models = Models(recipe)
    assert "M parameters" in check_model(recipe, models)
    assert 1e6 < trained(models.student()) < 135e6 / 6
    assert sum(needs(recipe, models.student(), models.target()).values()) < 2e9
    assert recipe.data.sequence_length == 1024
    assert recipe.objective.chunk is None


@pytest.mark.one_in(11)
@pytest.mark.run
@pytest.mark.parametrize("name", SMALL)
def test_each_is_trained(name: str, tmp_path: Path) -> None:
    words = ["--data.source", "stdlib", "--loop.steps", "2", *FEWER.get(name, []), *TRAINING, *ON_SHALLOW]
    words[words.index("--probe.max_new_tokens") + 1] = "12"  # some draft six and seven tokens
    assert main(["train", name, "--out", str(tmp_path / "run"), *words]) == 0
    assert (tmp_path / "run" / "drafter" / "config.json").is_file()
