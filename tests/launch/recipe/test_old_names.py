"""Fields of `drafter` under the names that they had before they stood in sections: understood, and told of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import draftsmith
import pytest
from draftsmith.config import changed
from draftsmith.drafters.config import DrafterConfig, old_names
from draftsmith.drafters.tuned_file import NAME, read_tuned
from draftsmith.errors import RequestError
from draftsmith.launch.check.early import named
from draftsmith.launch.recipe.load import field_paths, load_recipe
from draftsmith.launch.recipe.values import say_renamed, split_overrides, value_path
from draftsmith.launch.requests import Pair
from draftsmith.storage.identity import flat
from ruamel.yaml import YAML

SAVED = Path(draftsmith.__file__).parent / "recipes/assets/tiny-target/run.yaml"
LAST = "this is the last version that knows the old names"


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """A process says each name once."""
    say_renamed.cache_clear()
    yield
    say_renamed.cache_clear()


def test_a_flag() -> None:
    words = ["show", "distill-tiny", "--drafter.suffix_depth", "9", "--drafter.suffix-depth=8"]
    done = subprocess.run([sys.executable, "-m", "draftsmith.launch.cli", *words], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == f"--drafter.suffix_depth is --drafter.suffix.depth now; {LAST}\n"
    (line,) = [line.split() for line in done.stdout.splitlines() if "suffix.depth" in line]
    assert line == ["drafter.suffix.depth", "8", "--drafter.suffix.depth"]


def test_a_flag_is_refused_where_no_method_reads_it() -> None:
    _, flags = split_overrides(["--drafter.rest_nodes", "3"])
    with pytest.raises(RequestError, match=r"--drafter\.rest\.nodes is 3, .*rest alone reads it"):
        named(Pair(None, "tiny", "folder", "trained"), flags)


def test_a_recipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("method: eagle\ndrafter:\n  eagle_tree: dynamic\n  eagle_nodes: 9\n  suffix: {depth: 5}\n")
    found = load_recipe(str(file))
    drafter = found.recipe.drafter
    assert (drafter.eagle.tree, drafter.eagle.nodes, drafter.suffix.depth) == ("dynamic", 9, 5)
    assert found.origin["drafter.eagle.nodes"] == "old.yaml:4"
    assert caplog.messages == [
        f"drafter.eagle_tree (old.yaml:3) is drafter.eagle.tree now (1 more renamed alike); {LAST}"
    ]
    assert load_recipe(str(file), [("drafter.eagle_nodes", "12")]).recipe.drafter.eagle.nodes == 12


def test_old_and_new_together_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    for pair in ("  rest_nodes: 9\n  rest: {nodes: 8}\n", "  rest: {nodes: 8}\n  rest_nodes: 9\n"):
        file.write_text(f"method: distill\ndrafter:\n{pair}")
        with pytest.raises(RequestError, match=r"drafter\.rest\.nodes is set at both\.yaml:\d too; leave one out"):
            load_recipe(str(file))


def test_a_base_has_old_names_and_a_recipe_new_ones(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text("method: distill\ndrafter:\n  llma_tokens: 7\n  llma_longest: 3\n")
    (tmp_path / "high.yaml").write_text("base: low.yaml\ndrafter:\n  llma: {tokens: 8}\n")
    llma = load_recipe(str(tmp_path / "high.yaml")).recipe.drafter.llma
    assert (llma.tokens, llma.longest) == (8, 3)


def test_the_recipe_of_an_old_run() -> None:
    """The embedded target's: every field by its old name."""
    own = YAML(typ="safe", pure=True).load(SAVED.read_text())["drafter"]
    assert len(own.keys() & old_names().keys()) == 32
    drafter = flat(load_recipe(str(SAVED)).recipe.drafter.model_dump())
    assert {old_names().get(name, name): value for name, value in own.items()}.items() <= drafter.items()


def test_an_old_tuned_file(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"format": 1, "settings": {"drafter.eagle_nodes": "16"}, "plain": False}))
    tuned = read_tuned(tmp_path)
    assert tuned.values == {"drafter.eagle.nodes": "16"}
    assert not tuned.is_chain


@pytest.mark.parametrize("name", ["suffix_depth", "drafter_suffix_depth", "drafter__suffix_depth"])
def test_the_name_of_a_value_in_python(name: str) -> None:
    assert value_path(name, field_paths()) == "drafter.suffix.depth"


def test_a_field_in_python() -> None:
    """`load_drafter` and its like take a field of a section by both names."""
    found = changed(DrafterConfig(policy="argmax"), {"eagle_tree": "dynamic"})
    assert (found.policy, found.eagle.tree, found.eagle.nodes) == ("argmax", "dynamic", 61)
    with pytest.raises(RequestError, match="eagle_trees is no field of DrafterConfig; did you mean 'eagle_tree'"):
        changed(found, {"eagle_trees": "chain"})


def test_an_old_field_in_python() -> None:
    with pytest.warns(DeprecationWarning, match=r"lookup_tokens of DrafterConfig is lookup\.tokens now"):
        found = DrafterConfig.model_validate({"lookup_tokens": 9, "lookup": {"longest": 2}})
    assert (found.lookup.tokens, found.lookup.longest) == (9, 2)
