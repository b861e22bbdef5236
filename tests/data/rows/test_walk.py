"""Which files a source names: each real file once, whatever links there are."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest
from draftsmith.data.rows.sources import find_files, glob_files
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.jsonl", "x/b.jsonl", "x/y/c.jsonl", "x/y/d.csv", ".hidden/e.jsonl", "x/.f.jsonl", "z[1]/g.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return tmp_path


def names(root: Path, pattern: str) -> list[str]:
    return [str(path.relative_to(root)) for path in find_files(str(root / pattern))]


@pytest.mark.parametrize(
    "pattern",
    [
        "**/*.jsonl",
        "*.jsonl",
        "x/**",
        "*/*.jsonl",
        "x/*/?.csv",
        "**/y/*",
        "z[[]1]/*",
        "**/**/*.csv",
        "x/**/c.jsonl",
        "[!a]/*",
    ],
)
def test_without_links_it_is_what_glob_matches(tree: Path, pattern: str) -> None:
    expected = [Path(each) for each in glob.glob(str(tree / pattern), recursive=True)]  # noqa: PTH207 - what it is compared with
    files = sorted({each for each in expected if each.is_file() and not each.name.startswith(".")})
    assert files
    assert names(tree, pattern) == [str(each.relative_to(tree)) for each in files]


def test_links_in_a_circle_end(tree: Path) -> None:
    """Two links to the folder they stand in are 2^40 paths to one file."""
    for name in ("one", "two"):
        (tree / name).symlink_to(tree)
        (tree / "x" / name).symlink_to("..")
    (tree / "x" / "self").symlink_to("self")
    assert names(tree, "**/*.jsonl") == ["a.jsonl", "x/b.jsonl", "x/y/c.jsonl", "z[1]/g.jsonl"]
    assert names(tree, "**/**/**/*.csv") == ["x/y/d.csv"]
    assert [Path(each).name for each in names(tree, "*/*/*/*.csv")] == ["d.csv"]
    assert len(names(tree, ".")) == 5


def test_a_link_elsewhere_is_followed_and_a_second_name_is_not_read(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "far.jsonl").write_text("{}")
    (tree / "x" / "link").symlink_to(other)
    (tree / "a-copy.jsonl").symlink_to(tree / "a.jsonl")
    assert names(tree, "**/*.jsonl") == ["a.jsonl", "x/b.jsonl", "x/link/far.jsonl", "x/y/c.jsonl", "z[1]/g.jsonl"]
    assert names(tree, "*.jsonl") == ["a.jsonl"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["**", "*", "x", "y", "one", "t*"]), min_size=1, max_size=6))
def test_any_pattern_over_circles_ends_with_each_file_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    root = tmp_path_factory.mktemp("circle")
    (root / "x" / "y").mkdir(parents=True)
    (root / "x" / "y" / "c.jsonl").write_text("{}")
    for place in (root, root / "x", root / "x" / "y"):
        (place / "one").symlink_to(root)
        (place / "two").symlink_to(place)
    found = [path for path in glob_files(root / Path(*parts, "*")) if path.suffix == ".jsonl"]
    expected = glob.glob(str(root / Path(*parts, "*.jsonl")), recursive=True) if "**" not in parts else found  # noqa: PTH207
    assert len(found) == min(1, len(expected))
