"""Planted bugs: each has its text and its tests in today's tree, and a bug is told from a broken file."""

from __future__ import annotations

import ast
import json
import subprocess
from argparse import Namespace
from dataclasses import replace
from functools import cache
from pathlib import Path

import draftsmith
import pytest
from draftsmith.benchmarks.mutations.__main__ import MUTATIONS, assembled, chosen_of, earlier
from draftsmith.benchmarks.mutations.mutation import Misplaced, Mutation
from draftsmith.benchmarks.mutations.planting import Outcome, check_clean, copied, outcome_of

ROOT = Path(draftsmith.__file__).parent
IDS = [each.id for each in MUTATIONS]


@cache
def functions(path: str) -> set[str]:
    """The functions of a file of tests."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_all_bugs_of_the_first_study_are_there() -> None:
    """83 by the letters of the study, and five behind which a test passed for the wrong reason."""
    assert len(set(IDS)) == len(IDS)
    counts = {letter: sum(name.startswith(letter) for name in IDS) for letter in "DRTAEI"}
    assert counts == {"D": 23, "R": 15, "T": 26, "A": 8, "E": 11, "I": 7}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=IDS)
def test_a_bug_applies_and_compiles(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    planted = mutation.planted_in(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text)), "no change to what is run"
    compile(planted, mutation.file, "exec")
    assert mutation.tests
    for test in mutation.tests:
        path, name = test.split("::")
        assert name.partition("[")[0] in functions(path)


def test_text_that_is_not_there_once_is_named() -> None:
    mutation = Mutation("X1", "a.py", "", "x = 1", "x = 2", ())
    with pytest.raises(Misplaced, match="X1: the text to replace stands 0 times in a.py, expected once"):
        mutation.planted_in("y = 1")
    with pytest.raises(Misplaced, match="stands 2 times"):
        mutation.planted_in("x = 1\nx = 1\n")


RIGHT = Mutation(
    "X1",
    "sums.py",
    "adds one too many",
    "return a + b",
    "return a + b + 1",
    ("tests/test_sums.py::test_signs", "tests/test_sums.py::test_sum[1]"),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a small repository with one function and two tests, of which one is blind."""
    root = tmp_path_factory.mktemp("small")
    (root / "tests").mkdir()
    (root / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (root / "tests" / "test_sums.py").write_text(
        "import sys\nfrom pathlib import Path\n\nimport pytest\n\nsys.path.insert(0, str(Path(__file__).parents[1]))\n"
        "from sums import add\n\n\n@pytest.mark.parametrize('a', [1, 2])\ndef test_sum(a):\n    assert add(a, 2) == a + 2"
        "\n\n\ndef test_signs():\n    assert add(1, 1) > 0\n"
    )
    (root / "left.txt").write_text("git does not know it")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "sums.py", "tests"], cwd=root, check=True)
    tree = copied(root, tmp_path_factory.mktemp("copy"))
    # the plugin is the package's own: the copy of another repository lacks it
    plugin = Path("benchmarks", "mutations", "unshrunk.py")
    (tree / plugin).parent.mkdir(parents=True)
    (tree / plugin).write_text((ROOT / plugin).read_text())
    return tree


def test_a_copy_holds_what_git_tracks(tree: Path) -> None:
    assert (tree / "sums.py").is_file()
    assert not (tree / "left.txt").exists()


def test_a_bug_is_seen_and_taken_out_again(tree: Path) -> None:
    check_clean(tree, [RIGHT], limit=60)
    before = (tree / "sums.py").read_text()
    found = outcome_of(tree, RIGHT, limit=60)
    assert (found.verdict, found.by) == ("killed", "tests/test_sums.py::test_sum[1]")
    assert (tree / "sums.py").read_text() == before


@pytest.mark.slow
def test_what_no_test_sees_survives_and_what_does_not_import_is_broken(tree: Path) -> None:
    blind = replace(RIGHT, tests=RIGHT.tests[:1])
    assert outcome_of(tree, blind, limit=60).verdict == "survived"
    assert outcome_of(tree, replace(RIGHT, new="return missing_(", tests=blind.tests), limit=60).verdict == "broken"
    endless = replace(RIGHT, new="while True: pass")
    assert outcome_of(tree, endless, limit=1).verdict == "timed out"


def test_tests_that_fail_without_a_bug_are_named(tree: Path) -> None:
    path = tree / "tests" / "test_wrong.py"
    path.write_text("def test_it():\n    assert False\n")
    wrong = replace(RIGHT, tests=("tests/test_wrong.py::test_it",))
    with pytest.raises(SystemExit, match=r"without any bug these tests fail: tests/test_wrong.py::test_it"):
        check_clean(tree, [wrong], limit=60)


def test_the_record_counts_by_room_and_names_what_survives() -> None:
    some = chosen_of(["D14", "T04", "I4"])
    outcomes = [Outcome(some[0], "killed", "a::b", 1.4), Outcome(some[1], "survived", "", 2.6)]
    record = assembled([*outcomes, Outcome(some[2], "killed", "c::d", 1.0)], Namespace())
    (table,) = record.tables.values()
    rows = [(row["room"], row["planted"], row["killed"], row["survived"]) for row in record.rows_of(table)]
    assert rows == [("decoding", 1, 1, 0), ("trainers", 1, 0, 1), ("eval", 1, 1, 0), ("all", 3, 2, 1)]
    assert "Of the 2 bugs of the study of 0.1.0, whose tests saw 62 of 83, 1 are killed." in record.notes
    assert [note for note in record.notes if note.startswith("T04 (survived): accumulation")]
    assert json.loads(record.model_dump_json())["rows"][-1]["by"] == "c::d"
    again = earlier(record, ["T04"])
    assert [(each.mutation.id, each.verdict, each.by) for each in again] == [
        ("D14", "killed", "a::b"),
        ("I4", "killed", "c::d"),
    ]
    with pytest.raises(SystemExit, match="no bug has the id X9; known: D01a"):
        chosen_of(["X9"])
