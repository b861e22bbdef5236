"""The tables that papers print: what stands in which cell, the audit's line, and text that LaTeX would read."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.errors import RequestError
from draftsmith.eval.report.paper import _parts, as_latex, as_markdown, escaped, paper_table, write_tables
from draftsmith.launch.cli import main

Measured = tuple[dict[str, Any], dict[str, Any]]


def with_sets(results: dict[str, Any]) -> dict[str, Any]:
    """Two sets and their mean in every row, with figures of our own."""
    made = copy.deepcopy(results)
    made["target"]["name"] = "Q_3"
    for row in made["rows"]:
        figures = {"tau": [2.0, 1.5, 2.5], "speedup": [1.25, 1.0, 1.5], "alpha": [0.5, 0.4, 0.6]}
        kept = {name: row[name] for name in ("verdict", "requests", "loop_share", "distinct_2")}
        row["sets"] = [
            {"set": "gsm8k", "source": "g.jsonl", **kept, **figures, "flagged": False},
            {"set": "a_b", "source": "a.jsonl", **kept, **figures, "speedup": [None] * 3, "flagged": True},
        ]
        row["over_sets"] = {"verdict": row["verdict"], **figures, "tau": [2.5, None, None], "flagged": True}
    return made


@pytest.fixture
def run(measured: Measured, tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(with_sets(measured[0])))
    return folder


def test_the_table_as_markdown(run: Path) -> None:
    table = paper_table([run])
    lines = as_markdown(table).splitlines()
    assert lines[0] == (
        "| target | T | method | gsm8k: speed-up | gsm8k: tau | a\\_b: speed-up | a\\_b: tau "
        "| Mean: speed-up | Mean: tau |"
    )
    assert lines[2] == (
        "| Q\\_3 | 0 | draft model | 1.25 [1.00, 1.50] | 2.00 [1.50, 2.50] | - | 2.00 [1.50, 2.50] ! "
        "| 1.25 [1.00, 1.50] | 2.50 ! |"
    )
    assert [line.split(" | ")[1] for line in lines[2:4]] == ["0", "1"]
    assert "losslessness audit of every row: lossless." in lines[-3]
    assert "for the mean within each set; !: the target's own text is degenerate" in lines[-3]
    assert lines[-1].startswith("Names elsewhere: tau is also called mean acceptance length (MAL)")
    assert "(n-alpha), per draft ((tau - 1) / K" in lines[-1]
    assert "Names" not in as_latex(table)


def test_the_names_of_others_are_what_they_are_said_to_be(measured: Measured) -> None:
    """On a chain of K: tau and the rates per position and per draft, of the rates per depth alone."""
    for row in measured[0]["rows"]:
        positions = np.cumprod([share for share, *_ in row["n_alpha"]])
        assert row["tau"][0] == pytest.approx(1 + positions.sum())
        assert (row["tau"][0] - 1) / row["draft_length"] == pytest.approx(positions.mean())
        assert row["n_alpha_counts"][0] == row["steps"]
    assert sum(0.8**d for d in range(1, 9)) / 8 == pytest.approx(0.42, abs=0.005)


def test_the_table_as_latex(run: Path) -> None:
    text = as_latex(paper_table([run]))
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows[1:]} == {8}
    assert len(re.findall(r"(?<!\\)&", rows[0])) + 3 == 8  # three heads of two columns
    assert r"\begin{tabular}{lrlrrrrrr}" in text
    assert r"\cmidrule(lr){4-5} \cmidrule(lr){6-7} \cmidrule(lr){8-9}" in text
    assert r"\multicolumn{2}{c}{a\_b}" in text
    assert rows[2].startswith(r"Q\_3 & 0 & draft model & 1.25 {\scriptsize [1.00, 1.50]} & 2.00 {\scriptsize [1.50,")
    assert " & -- & " in rows[2]
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert r"95 \% bootstrap intervals" in text
    assert text.index(r"\resizebox{\ifdim\width>\linewidth\linewidth") < text.index(r"\begin{tabular}")
    assert "\\end{tabular}}\n" in text


def test_what_rows_share_is_named_once(run: Path) -> None:
    """In LaTeX, where rows stand in groups; a row of Markdown says all of itself."""
    results = json.loads((run / "results.json").read_text())
    results["rows"].insert(1, results["rows"][0] | {"method": "medusa"})
    (run / "results.json").write_text(json.dumps(results))
    table = paper_table([run])
    lines = [line for line in as_latex(table).splitlines() if line.startswith((r"Q\_3", " & ", r"\addlinespace"))][1:]
    assert [line.split(" & 1.25")[0] for line in lines] == [
        r"Q\_3 & 0 & draft model",
        " &  & medusa",
        r"\addlinespace",
        r"Q\_3 & 1 & draft model",
    ]
    assert as_markdown(table).count("| Q\\_3 | 0 |") == 2


def test_text_from_outside_is_no_latex() -> None:
    assert escaped("[x]") == "{[}x]"  # behind the end of a row a bracket would be its height
    assert escaped("a\\b_50%&{$#~^}\n") == (r"a\textbackslash{}b\_50\%\&\{\$\#\textasciitilde{}\textasciicircum{}\} ")


def test_several_runs_and_their_audits(run: Path, measured: Measured, tmp_path: Path) -> None:
    other = tmp_path / "two" / "eval"
    other.mkdir(parents=True)
    results = with_sets(measured[0])
    for row in results["rows"]:
        row |= {"method": "medusa", "verdict": "not audited"}
    (other / "results.json").write_text(json.dumps(results))
    made = write_tables(run, [other.parent], markdown=True, latex=True)
    assert [path.name for path in made] == ["table.md", "table.tex"]
    text = made[0].read_text()
    assert [text.count(f"| {name} |") for name in ("draft model", "medusa")] == [2, 2]
    assert "draft model at T = 0: lossless; " in text
    assert "medusa at T = 1: not audited." in text
    results["rows"][0]["sets"][0]["set"] = "nq"
    (other / "results.json").write_text(json.dumps(results))
    with pytest.raises(RequestError, match=r"of the prompts nq, a_b, Mean, .* are of gsm8k, a_b, Mean; expected the"):
        paper_table([run, other.parent])


def test_one_method_of_several_runs(run: Path, tmp_path: Path) -> None:
    """Each row says whose it is, rows of one temperature stand together, and no run is there twice."""
    other = tmp_path / "two"
    other.mkdir()
    (other / "results.json").write_text((run / "results.json").read_text())
    table = paper_table([run, other])
    assert [(temperature, method) for _, temperature, method, _ in table.rows] == [
        ("0", "one: draft model"),
        ("0", "two: draft model"),
        ("1", "one: draft model"),
        ("1", "two: draft model"),
    ]
    with pytest.raises(RequestError, match="two is named twice; expected each run once"):
        paper_table([run, other, other])


def test_a_single_set_has_no_mean(measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command; without a table there is nothing that other runs stand in."""
    (tmp_path / "results.json").write_text(json.dumps(measured[0]))
    named = copy.deepcopy(measured[0])
    named["rows"][0]["prompts"] = "gsm8k=/somewhere/test.jsonl"
    assert _parts(named["rows"][0])[0][0] == "gsm8k"
    assert main(["report", str(tmp_path), "--markdown", "--latex"]) == 0
    assert f"table: {tmp_path / 'table.tex'}" in capsys.readouterr().out
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("| target | T | method | stdlib: speed-up | stdlib: tau |\n")
    assert "Mean" not in text
    assert "within each set" not in text
    assert main(["report", str(tmp_path), "--beside", str(tmp_path)]) == 2
    assert "add --markdown or --latex" in capsys.readouterr().err


def test_temperatures_are_not_rounded(measured: Measured, tmp_path: Path) -> None:
    results = with_sets(measured[0])
    results["rows"] = [{**results["rows"][0], "temperature": each} for each in (0.6, 0.0)]
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert [temperature for _, temperature, _, _ in paper_table([tmp_path]).rows] == ["0.6", "0"]
