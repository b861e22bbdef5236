"""Edges of recipes: how long and how deep they may be, how errors are counted, what a run hangs on."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.identity import changes_weights
from draftsmith.launch.recipe.load import _all_errors, load_recipe
from draftsmith.launch.recipe.text import check_plain_values, cut, read_yaml
from draftsmith.launch.recipe.values import value_path

FILE = Path("some.yaml")


def test_a_recipe_of_100_000_bytes_and_one_more(tmp_path: Path) -> None:
    text = "a: 1\n# "
    text += "x" * (100_000 - len(text))
    assert read_yaml(FILE, text) == {"a": 1}
    with pytest.raises(RequestError, match="holds 100,001 bytes"):
        read_yaml(FILE, text + "x")
    (tmp_path / "r.yaml").write_text(text)
    assert read_yaml(tmp_path / "r.yaml") == {"a": 1}


def test_values_sixteen_deep_and_one_deeper() -> None:
    """The file's own mapping is the first."""
    check_plain_values(f"a: {'[' * 15}1{']' * 15}", FILE)
    with pytest.raises(RequestError, match=r"some.yaml:2: values are nested more than 16 deep"):
        check_plain_values(f"b: 1\na: {'[' * 16}1{']' * 16}", FILE)


def test_a_text_is_cut_to_what_it_may_be() -> None:
    assert cut("x" * 80) == "x" * 80
    assert cut("x" * 81) == "x" * 77 + "..."
    assert cut("abcdefgh", 7) == "abcd..."


@pytest.mark.parametrize(("count", "more"), [(1, None), (10, None), (11, "and 1 more"), (1_011, "and 1,001 more")])
def test_errors_that_do_not_fit_are_counted(count: int, more: str | None) -> None:
    head, *lines = _all_errors(FILE, [f"error {n}" for n in range(count)], with_flags=False).split("\n")
    assert head == f"some.yaml: {count:,} error{'s' if count > 1 else ''} in the recipe"
    shown = [f"  - error {n}" for n in range(min(count, 10))]
    assert lines == [*shown, *([] if more is None else [f"  - {more}"])]


def test_what_a_run_hangs_on() -> None:
    """Its batch, and what its probes decode; not how many rows fit into memory at a time."""
    recipe = load_recipe("distill-tiny", [("loop.micro_rows", "1"), ("eval.prompt_tokens", "33")]).recipe
    identity = recipe.identity
    assert "loop.micro_rows" not in identity
    assert identity["loop.steps"] == recipe.loop.steps
    assert identity["eval.prompt_tokens"] == 33
    assert "eval.limit" not in identity
    for path, changes in {"probe.prompts": False, "loop.validate_rows": False, "loop.steps": True}.items():
        assert changes_weights(path) is changes, path


def test_a_name_of_several_sections_is_refused() -> None:
    assert value_path("steps", ["loop.steps", "loop.rows"]) == "loop.steps"
    with pytest.raises(RequestError, match="expected loop_seed or eval_seed"):
        value_path("seed", ["loop.seed", "eval.seed"])
    assert value_path("eval_seed", ["loop.seed", "eval.seed"]) == "eval.seed"
