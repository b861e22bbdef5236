"""One measurement as a JSON file in `docs/results/`: what was run, on what, and every figure.

Tables and pages are written from these files alone, so that a figure of the documentation can be
looked up with the command, the versions and the seeds behind it. A file holds rows of named cells,
and tables that show some of them. Read next: `tables.py`, which prints them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import draftsmith
from draftsmith.storage import write_text
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FOLDER = Path(draftsmith.__file__).parent / "docs" / "results"
PLACEHOLDER = re.compile(r"{(\w+)}")
# cells that nobody may show without saying what the audit said of them
ACCEPTANCE = re.compile(r"(tau|alpha|alpha_hat|n_alpha|mbsu|foreseen)(_.*)?$")
NOT_KEPT = "not kept"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Figure(_Strict):
    """A number with its interval, over prompts, steps or samples as the record says."""

    value: float
    low: float | None = None
    high: float | None = None
    seeds: list[float] | None = None
    """The same figure of each training seed; `value` is their mean."""
    format: str | None = None
    """How this one is written, where that differs from its column."""

    @model_validator(mode="after")
    def _interval_holds(self) -> Figure:
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has two ends")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ValueError(f"[{self.low}, {self.high}] is no interval")
        return self


# absent: the cell stays empty; None: "-"; a text: as it stands
Cell = Figure | list[float] | float | str | None


class Column(_Strict):
    """A column of a table: its heading, and which cells of a row stand in it."""

    head: str
    cell: str
    """Names of cells in braces, with the words around them: `{speedup} ({predicted})`."""

    @property
    def names(self) -> list[str]:
        """The cells that it shows."""
        return PLACEHOLDER.findall(self.cell)


class Table(_Strict):
    """Columns of the rows that have all the values of `where`."""

    columns: list[Column] = Field(min_length=1)
    where: dict[str, float | str] = {}


class Weights(_Strict):
    """A target or a drafter, by name and by the hash of its files."""

    name: str
    sha256: str


class Audit(_Strict):
    """What the losslessness audit said of the rows that carry no verdict of their own."""

    verdict: str
    sees: str = ""
    """The smallest bias that it would have seen, or how much it looked at."""


class Record(_Strict):
    """A measurement. Rows that show acceptance have a verdict, of their own or the record's."""

    title: str
    origin: Literal["measured", "table of 0.1.0", "not yet measured"]
    source: str = ""
    """Of a table of 0.1.0: the page and section where it stood."""
    command: str
    needs: list[str] = []
    """What has to exist before the command can run."""
    commit: str
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    versions: dict[str, str]
    hardware: str
    target: Weights | None
    drafters: list[Weights] = []
    setup: str = ""
    """Data, steps and sizes, in a sentence or two of markdown."""
    intervals: str = ""
    """What the intervals are over."""
    seeds: int = Field(ge=0)
    """Training seeds behind a row; 0 where nothing was trained for it."""
    seed_values: list[int] = []
    tells_apart: str = ""
    """Where there is one training seed: the difference below which nothing can be concluded."""
    audit: Audit | None = None
    formats: dict[str, str] = {}
    """How a cell's numbers are written, as Python's format specifications."""
    rows: list[dict[str, Cell]] = []
    tables: dict[str, Table] = {}
    notes: list[str] = []
    """What the figures say, and figures that stand in no table; markdown."""
    not_measured: list[str] = []

    @model_validator(mode="after")
    def _complete(self) -> Record:
        problems = [*self._provenance(), *self._verdicts(), *self._columns()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _provenance(self) -> list[str]:
        problems = []
        if self.origin == "table of 0.1.0" and not self.source:
            problems.append("a table of 0.1.0 names the page and section where it stood")
        if self.origin == "measured" and self.target is not None:
            unknown = [each.name for each in (self.target, *self.drafters) if each.sha256 == NOT_KEPT]
            problems += [f"{name}: a measurement has the hash of its weights" for name in unknown]
        if self.seeds == 1 and not self.tells_apart:
            problems.append("with one training seed, `tells_apart` says which differences mean nothing")
        if self.seed_values and len(self.seed_values) != self.seeds:
            problems.append(f"{self.seeds} seeds, {len(self.seed_values)} values of them")
        return problems

    def _verdicts(self) -> list[str]:
        if self.audit is not None:
            return []
        return [
            f"row {number}: acceptance ({', '.join(shown)}) without a verdict"
            for number, row in enumerate(self.rows)
            if "verdict" not in row and (shown := [name for name in row if ACCEPTANCE.match(name)])
        ]

    def _columns(self) -> list[str]:
        known = {name for row in self.rows for name in row}
        problems = [
            f"table {name!r}: no row has a cell {cell!r}"
            for name, table in self.tables.items()
            for column in table.columns
            for cell in column.names
            if cell not in known
        ]
        empty = [name for name, table in self.tables.items() if not self.rows_of(table)]
        return problems + [f"table {name!r} has no rows" for name in empty]

    def rows_of(self, table: Table) -> list[dict[str, Cell]]:
        """The rows that a table shows, in their order."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in table.where.items())]


def table_of(heads: dict[str, str], where: dict[str, float | str] | None = None) -> Table:
    """A table of columns, given as their headings and cells."""
    return Table(columns=[Column(head=head, cell=cell) for head, cell in heads.items()], where=where or {})


def read_record(path: Path) -> Record:
    """A record from its file.

    Raises:
        SystemExit: it is no JSON, or not what a record has to be; the message names file and field.
    """
    try:
        return Record.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, ValidationError) as error:
        raise SystemExit(
            f"{path.name} is no record of a measurement (benchmarks/common/records.py): {error}"
        ) from error


def read_records(folder: Path = FOLDER) -> dict[str, Record]:
    """All records of a folder by their files' names."""
    return {path.stem: read_record(path) for path in sorted(folder.glob("*.json"))}


def write_record(path: Path, record: Record) -> None:
    """Write a record, a row a line, without what is unset."""
    values = record.model_dump(mode="json", exclude_unset=True)
    rows = values.pop("rows", [])
    text = json.dumps(values, indent=1, ensure_ascii=False)
    if rows:
        lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
        text = text.removesuffix("\n}") + f',\n "rows": [\n{lines}\n ]\n}}'
    write_text(path, text + "\n")


def mean_figure(figures: Sequence[Figure]) -> Figure:
    """The same figure of several training seeds as their mean.

    Its ends are the means of the seeds' own ends. The prompts are the same, so the interval of the mean is no wider
    than that, and equal to it where all seeds find the same prompts easy.
    """
    values, lows, highs = ([getattr(each, name) for each in figures] for name in ("value", "low", "high"))
    ends = {} if None in lows else {"low": fmean(lows), "high": fmean(highs)}
    seeds = {"seeds": values} if len(values) > 1 else {}
    return Figure(value=fmean(values), **ends, **seeds)


def figure(values: Any) -> Figure | None:
    """A figure of `[value, low, high]`, the form of `results.json`; None where there is no value."""
    value, low, high = values
    if value is None:
        return None
    return Figure(value=value) if low is None or high is None else Figure(value=value, low=low, high=high)
