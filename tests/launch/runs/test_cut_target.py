"""Runs of two processes whose target is cut over them: the same numbers as with whole targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from head_runs import CLOCKS, COMMON, LAUNCHING, RECIPES, records
from launching import launched
from small_run import drafter

FROZEN = [method for method in RECIPES if method != "medusa2"]


def write_recipes(folder: Path, methods: list[str], sharding: str, extra: str = "") -> list[str]:
    paths = [folder / f"{method}.yaml" for method in methods]
    for path in paths:
        own = f"method: {path.stem}\nname: {path.stem}\n{RECIPES.get(path.stem, '')}{COMMON}{extra}"
        path.write_text(
            f"target: {{sharding: {sharding}}}\n{own}".replace(
                "validate_rows: 3", "validate_rows: 3, validate_every: 2"
            )
        )
    return list(map(str, paths))


def assert_same_numbers(cut: Path, whole: Path) -> None:
    """Every value of every record that is no clock, and every bit of the drafter."""
    found, wanted = records(cut), {key: each for key, each in records(whole).items() if key[0] != "probe"}
    assert found.keys() == wanted.keys()
    assert len(found) >= 9
    for key, values in wanted.items():
        for name in values.keys() - CLOCKS:
            assert found[key][name] == values[name], (key, name)
    mine, theirs = drafter(cut), drafter(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.run
def test_eagle3_learns_the_same_from_a_cut_target(tmp_path: Path) -> None:
    said = {}
    for sharding in ("none", "fully_shard"):
        (tmp_path / sharding).mkdir()
        recipes = write_recipes(tmp_path / sharding, ["eagle3"], sharding)
        said[sharding] = launched("multi_cpu", LAUNCHING, str(tmp_path / sharding), *recipes)
    print(said["fully_shard"])
    assert "held-out loss chooses the best drafter" in said["fully_shard"]
    assert_same_numbers(tmp_path / "fully_shard" / "eagle3", tmp_path / "none" / "eagle3")
