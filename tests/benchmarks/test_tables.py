"""Every table of the pages is its record's, and a record is complete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.benchmarks import tables
from draftsmith.benchmarks.common.markdown import lines_of, run_of
from draftsmith.benchmarks.common.records import FOLDER, Record, read_record, read_records, write_record
from pydantic import ValidationError

RECORDS = read_records()
PAGES = tables.pages()


def test_there_are_records_and_pages() -> None:
    assert len(RECORDS) >= 22
    assert len(PAGES) >= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_what_their_records_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.written(text, RECORDS, page.name) == text, "python benchmarks/tables.py writes it anew"
    markers = re.findall(r"^<!-- (\w+)", text, re.MULTILINE)
    assert len(markers) == 2 * len(tables.BLOCK.findall(text)), "a marker without its end, or the other way"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_measured_table_stands_outside_markers(page: Path) -> None:
    assert tables.outside(page.read_text(encoding="utf-8")) == []


def test_every_table_stands_on_a_page() -> None:
    """A record that no page shows is a figure that nobody can look up from the text."""
    blocks = [match for page in PAGES for match in tables.BLOCK.findall(page.read_text(encoding="utf-8"))]
    shown = {name for _, kind, name, *_ in blocks if kind == "table"}
    wanted = {
        record if table == record else f"{record}/{table}" for record, each in RECORDS.items() for table in each.tables
    }
    assert wanted - shown == set()
    assert {name for _, kind, name, *_ in blocks if kind == "run"} == set(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_written_as_it_is_read(name: str, tmp_path: Path) -> None:
    write_record(tmp_path / "again.json", RECORDS[name])
    assert read_record(tmp_path / "again.json") == RECORDS[name]
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads((FOLDER / f"{name}.json").read_text())


SCRIPTS = ("families.py --steps 1", "gone.py")
WHOLE: dict[str, Any] = {
    "title": "A title",
    "origin": "measured",
    "command": "python benchmarks/families.py",
    "commit": "abcdef0",
    "date": "2026-11-22",
    "versions": {"torch": "2.13.0"},
    "hardware": "a machine",
    "target": {"name": "tiny", "sha256": "a" * 64},
    "drafters": [{"name": "EAGLE-1", "sha256": "b" * 64}],
    "seeds": 3,
    "seed_values": [0, 1, 2],
    "formats": {"tau": ".2f"},
    "rows": [
        {
            "method": "a",
            "T": 0,
            "tau": {"value": 2, "low": 1.9, "high": 2.1, "seeds": [1.9, 2.1, 2.0]},
            "verdict": "lossless",
        },
        {"method": "b", "T": 0, "tau": None, "verdict": "not audited"},
        {"method": "c", "T": 1, "verdict": "not audited"},
    ],
    "tables": {
        "all": {"columns": [{"head": "method", "cell": "{method}"}, {"head": "tau", "cell": "{tau} of 5"}]},
        "T1": {"where": {"T": 1}, "columns": [{"head": "method", "cell": "{method}"}]},
    },
}


def test_cells_with_intervals_seeds_and_nothing() -> None:
    record = Record.model_validate(WHOLE)
    assert lines_of(record.tables["all"], record) == [
        "| method | tau |",
        "|---|---|",
        "| a | 2.00 [1.90, 2.10] (1.90 to 2.10) of 5 |",
        "| b | - |",
        "| c |  |",
    ]
    assert lines_of(record.tables["T1"], record)[2:] == ["| c |"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "Extra inputs are not permitted"),
        ({"origin": "table of 0.1.0"}, "page and section"),
        ({"drafters": [{"name": "EAGLE-1", "sha256": "not kept"}]}, "EAGLE-1: a measurement has the hash"),
        ({"seeds": 1, "seed_values": [0]}, "tells_apart"),
        ({"seed_values": [0]}, "3 seeds, 1 values"),
        ({"rows": [{"method": "a", "T": 1, "tau": 2.0}]}, r"row 0: acceptance \(tau\) without a verdict"),
        ({"rows": [{"method": "a", "T": 0, "verdict": "lossless"}]}, "no row has a cell 'tau'"),
        ({"rows": [{"tau": {"value": 1, "low": 2, "high": 1.5}}]}, "is no interval"),
        ({"rows": [{"tau": {"value": float("nan")}}]}, "finite number"),
    ],
)
def test_what_is_incomplete_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Record.model_validate(WHOLE | change)


def test_a_command_whose_script_is_retired_is_no_command_to_run() -> None:
    """The page shows it, and says where the script is."""
    kept, gone = (Record.model_validate(WHOLE | {"command": f"python benchmarks/{name}"}) for name in SCRIPTS)
    assert run_of(kept).startswith("```sh\n")
    assert "script:" not in run_of(kept)
    assert run_of(gone).startswith("```text\n")
    assert "- script: no longer kept: it stands in the history at that commit" in run_of(gone)


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"bad.json is no record of a measurement"):
        read_records(tmp_path)


def test_blocks_name_what_is_missing() -> None:
    records = {"one": Record.model_validate(WHOLE)}
    with pytest.raises(SystemExit, match=r"page.md: no docs/results/two.json; there are one"):
        tables.written("<!-- run: two -->\n<!-- end -->", records, "page.md")
    with pytest.raises(SystemExit, match=r"page.md: no table 'one/x'; one.json has all, T1"):
        tables.written("<!-- table: one/x -->\n<!-- end -->", records, "page.md")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("| EAGLE-1 | 2.64 [2.43, 2.92] |", True),
        ("| a | 37.5% |", True),
        ("| a | **1.5** |", True),
        ("| a | 508 [474, 542] |", True),
        ("| `lr: 0.5` | Leviathan et al. 2023, theorem 3.8 |", False),
        ("| 1 | 32,000 |", False),
    ],
)
def test_measured_figures_are_told_from_definitions(line: str, found: bool) -> None:
    assert bool(tables.outside(line)) == found


def test_the_script_checks_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A page\n\n<!-- table: methods -->\n| a stale row |\n<!-- end -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit, match="writes them anew"):
        tables.main()
    assert "README.md: differs" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    assert "| adaptive draft | 1.47 [1.38, 1.56] |" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    tables.main()


def test_it_runs_as_a_script() -> None:
    done = subprocess.run([sys.executable, tables.__file__, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
