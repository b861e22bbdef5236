"""What takes hours may be stopped: only what passed in this very tree is left out the next time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from draftsmith.benchmarks import all_tests
from draftsmith.benchmarks.common.passed_tests import Tree, contents, is_tests, lines_of, reads_pages
from draftsmith.benchmarks.common.records import read_record

TESTS = """
import pathlib, pytest
def test_right(): pass
@pytest.mark.skip(reason="not here")
def test_left_out(): pass
def test_wrong(): assert pathlib.Path(__file__).with_name("mended").exists()
"""


def test_a_second_sitting_runs_what_did_not_pass(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "some"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    first = sitting(tmp_path)
    assert (first.returncode, "0 tests of this tree have passed before" in first.stdout) == (1, True), first.stdout
    record = read_record(tmp_path / "found.json")
    assert record.rows[0] | {"seconds": 0} == row(1, 1, 1)
    assert record.notes == ["Failed: `tests/some/test_some.py::test_wrong`.", "Left out, 1: not here."]
    (folder / "mended").touch()
    second = sitting(tmp_path)
    assert (second.returncode, "2 tests of this tree have passed before" in second.stdout) == (0, True), second.stdout
    assert read_record(tmp_path / "found.json").rows[0] | {"seconds": 0} == row(2, 1, 0)
    assert sitting(tmp_path).returncode == 0  # nothing is left


def row(passed: int, skipped: int, failed: int) -> dict[str, object]:
    return {"folder": "`tests/some`", "passed": passed, "skipped": skipped, "failed": failed, "seconds": 0}


def sitting(folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["--workers", "1", "--kept", "kept.jsonl", "--json", "found.json", "tests"]
    return subprocess.run(
        [sys.executable, all_tests.__file__, *words], cwd=folder, capture_output=True, text=True, check=False
    )


def test_another_tree_knows_nothing_of_it(tmp_path: Path) -> None:
    net, one, other = (tmp_path / name for name in ("net.py", "tests/test_one.py", "tests/test_other.py"))
    one.parent.mkdir()
    for file in (net, one, other):
        file.write_text("x = 1\n")
    fast, slow = ("tests/test_one.py::test_fast", False), ("tests/test_one.py::test_slow", True)

    def known() -> list[bool]:
        contents.cache_clear()
        tree = Tree.of(tmp_path, [net, one, other])
        return [tree.knows(tmp_path, {"test": test, "tree": digest}) for (test, _), digest in before.items()]

    contents.cache_clear()
    tree = Tree.of(tmp_path, [net, one, other])
    before = {each: tree.digest(tmp_path, *each) for each in (fast, slow)}
    assert known() == [True, True]
    other.write_text("x = 2\n")
    assert known() == [False, True]
    other.write_text("x = 1\n")
    assert known() == [True, True]
    for file in (one, net):
        file.write_text("x = 2\n")
        assert known() == [False, False]
        file.write_text("x = 1\n")


def test_a_page_is_of_the_tree_of_what_reads_it(tmp_path: Path) -> None:
    page, one, reader = (tmp_path / name for name in ("docs/page.md", "tests/test_one.py", "tests/test_reader.py"))
    for file, text in ((page, "a"), (one, "x = 1"), (reader, "PAGE = 'docs/page.md'")):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    tests = ("tests/test_one.py::test_slow", "tests/test_reader.py::test_slow")

    def digests() -> list[str]:
        contents.cache_clear()
        reads_pages.cache_clear()
        tree = Tree.of(tmp_path, [page, one, reader])
        return [tree.digest(tmp_path, each, True) for each in tests]

    before = digests()
    page.write_text("b")
    after = digests()
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_a_helper_is_no_file_of_tests() -> None:
    files = ("tests/some/test_one.py", "tests/conftest.py", "tests/helpers/runs.py", "benchmarks/test_x.py")
    assert [is_tests(Path(file), Path()) for file in files] == [True, False, False, False]


def test_a_line_that_a_stop_has_cut_off_is_none(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text('{"tree": "a", "test": "one"}\n{"tree": "a", "test": "tw')
    assert [entry["test"] for entry in lines_of(kept)] == ["one"]
