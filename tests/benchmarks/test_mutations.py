"""Planted bugs: each has its text and its tests in today's tree, and a bug is told from a broken file."""

from __future__ import annotations

import ast
import json
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import draftsmith
import pytest
from draftsmith.benchmarks.mutations.__main__ import MUTATIONS, assembled, chosen_of, earlier, outcomes_of
from draftsmith.benchmarks.mutations.kept import Kept
from draftsmith.benchmarks.mutations.listed import read
from draftsmith.benchmarks.mutations.mutation import Misplaced, Mutation
from draftsmith.benchmarks.mutations.planting import Bench, Outcome, check_clean, copied, outcome_of

ROOT = Path(draftsmith.__file__).parent
IDS = [each.id for each in MUTATIONS]
ROOMS = sorted({each.room for each in MUTATIONS})
LEAST = 0.95
"""The share of a room's bugs that has to be seen."""


@cache
def functions(path: str) -> set[str]:
    """The functions of a file of tests."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_all_bugs_of_the_first_study_are_there() -> None:
    """83 by the letters of the study, and seven behind which a test passed for the wrong reason."""
    assert len(set(IDS)) == len(IDS)
    counts = {letter: sum(name.startswith(letter) for name in IDS) for letter in "DRTAEI"}
    assert counts == {"D": 23, "R": 15, "T": 26, "A": 8, "E": 11, "I": 7}


@cache
def dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("room", ROOMS)
def test_bugs_apply_and_compile(room: str) -> None:
    for mutation in (each for each in MUTATIONS if each.room == room):
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        planted = mutation.planted_in(text)
        compile(planted, mutation.file, "exec")
        assert ast.dump(ast.parse(planted)) != dumped(text), f"{mutation.id}: no change to what is run"
        assert mutation.tests, mutation.id
        for test in mutation.tests:
            path, _, name = test.partition("::")
            assert functions(path), mutation.id
            assert not name or name.partition("[")[0] in functions(path), f"{mutation.id}: {test}"


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


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_the_tests_of_a_room_see_its_bugs(room: str) -> None:
    """What became of a bug is kept beside the tree, so a run that was stopped goes on."""
    outcomes = outcomes_of([each for each in MUTATIONS if each.room == room], limit=600)
    missed = [
        f"{each.mutation.id} {each.verdict}: {each.mutation.bug}" for each in outcomes if each.verdict != "killed"
    ]
    assert len(missed) <= (1 - LEAST) * len(outcomes), "\n".join(missed)


def test_a_list_of_bugs_is_read_as_it_is_written() -> None:
    text = """\
file a.py
tests tests/test_a.py::test_one tests/test_b.py

X1 adds one too many
-    return a + b
+    return a + b + 1

# a word about it
X2 two lines, one of them empty
-    first()
-
-    second()
+    second()

file b.py
tests tests/test_c.py

X3 is left out
-    third()
"""
    found = list(read(text))
    assert [(each.id, each.file, each.tests) for each in found] == [
        ("X1", "a.py", ("tests/test_a.py::test_one", "tests/test_b.py")),
        ("X2", "a.py", ("tests/test_a.py::test_one", "tests/test_b.py")),
        ("X3", "b.py", ("tests/test_c.py",)),
    ]
    assert (found[0].bug, found[0].old, found[0].new) == (
        "adds one too many",
        "    return a + b",
        "    return a + b + 1",
    )
    assert (found[1].old, found[1].new) == ("    first()\n\n    second()", "    second()")
    assert found[2].new == ""
    with pytest.raises(ValueError, match="'X1 nothing' replaces nothing"):
        list(read("file a.py\ntests t.py\n\nX1 nothing\n"))
    with pytest.raises(ValueError, match="in front of its file and tests"):
        list(read("file a.py\n\nX1 something\n-x\n"))


def test_what_became_of_a_bug_holds_for_the_same_tree_alone(tmp_path: Path) -> None:
    """A line that a stop cut off, and what stands there of other trees and other bugs, are passed over."""
    tree, path = tmp_path / "tree", tmp_path / "kept.jsonl"
    tree.mkdir()
    (tree / "a.py").write_text("x = 1\n")
    kept = Kept.of(tree, path)
    first, second = chosen_of(["D14", "T04"])
    made = [
        kept.add(Outcome(first, "killed", "a::b", 1.5, "0f")),
        kept.add(Outcome(second, "survived", "", 2.0, "0f")),
    ]
    with path.open("a") as file:
        file.write('{"tree": "' + kept.digest + '", "id": "T04", "verd')
    assert list(Kept.of(tree, path).outcomes([first, second])) == made
    assert list(Kept.of(tree, path).outcomes([second])) == made[1:]
    (tree / "a.py").write_text("x = 2\n")
    assert list(Kept.of(tree, path).outcomes([first, second])) == []
    (tree / "a.py").write_text("x = 1\n")
    (tree / "b.py").write_text("")
    assert list(Kept.of(tree, path).outcomes([first, second])) == []
    assert list(Kept.of(tree, tmp_path / "none.jsonl").outcomes([first])) == []


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
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
    with Bench(tree) as bench:
        yield bench


def test_a_copy_holds_what_git_tracks(bench: Bench) -> None:
    assert (bench.tree / "sums.py").is_file()
    assert not (bench.tree / "left.txt").exists()


def test_a_bug_is_seen_and_taken_out_again(bench: Bench) -> None:
    check_clean(bench, [RIGHT], limit=60)
    before = (bench.tree / "sums.py").read_text()
    found = outcome_of(bench, RIGHT, limit=60)
    assert (found.verdict, found.by) == ("killed", "tests/test_sums.py::test_sum[1]")
    assert (bench.tree / "sums.py").read_text() == before
    whole = replace(RIGHT, tests=("tests/test_sums.py",))
    assert outcome_of(bench, whole, limit=60).by == "tests/test_sums.py::test_sum[1]"


def test_what_no_test_sees_survives_and_what_does_not_import_is_broken(bench: Bench) -> None:
    blind = replace(RIGHT, tests=RIGHT.tests[:1])
    assert outcome_of(bench, blind, limit=60).verdict == "survived"
    assert outcome_of(bench, replace(RIGHT, new="return missing_(", tests=blind.tests), limit=60).verdict == "broken"
    endless = replace(RIGHT, new="while True: pass")
    assert outcome_of(bench, endless, limit=1).verdict == "timed out"


def test_tests_that_fail_without_a_bug_are_named(bench: Bench) -> None:
    path = bench.tree / "tests" / "test_wrong.py"
    path.write_text("def test_it():\n    assert False\n")
    wrong = replace(RIGHT, tests=("tests/test_wrong.py::test_it",))
    with pytest.raises(SystemExit, match=r"without any bug these tests fail: tests/test_wrong.py::test_it"):
        check_clean(bench, [wrong], limit=60)


def test_the_record_counts_by_room_and_names_what_survives() -> None:
    some = chosen_of(["D14", "T04", "I4"])
    outcomes = [Outcome(some[0], "killed", "a::b", 1.4), Outcome(some[1], "survived", "", 2.6)]
    record = assembled([*outcomes, Outcome(some[2], "killed", "c::d", 1.0)], Namespace())
    (table,) = record.tables.values()
    rows = [(row["room"], row["planted"], row["killed"], row["survived"]) for row in record.rows_of(table)]
    assert rows == [
        ("decoding/rules", 1, 1, 0),
        ("trainers/loop", 1, 0, 1),
        ("eval/measure", 1, 1, 0),
        ("all", 3, 2, 1),
    ]
    assert "Of the 2 bugs of the study of 0.1.0, whose tests saw 62 of 83, 1 are killed." in record.notes
    assert [note for note in record.notes if note.startswith("T04 (survived): accumulation")]
    assert not any("a second study" in note for note in record.notes)
    more = assembled([*outcomes, Outcome(chosen_of(["PE20"])[0], "killed", "a::b", 1.0)], Namespace())
    assert "Of the 1 that survived a second study, whose tests saw 69 of 121, 1 are killed." in more.notes
    assert json.loads(record.model_dump_json())["rows"][-1]["by"] == "c::d"
    again = earlier(record, ["T04"])
    assert [(each.mutation.id, each.verdict, each.by) for each in again] == [
        ("D14", "killed", "a::b"),
        ("I4", "killed", "c::d"),
    ]
    with pytest.raises(SystemExit, match="no bug has the id X9; known: D01a"):
        chosen_of(["X9"])
