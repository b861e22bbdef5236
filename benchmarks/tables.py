"""Writes every table of README and docs from the measurements in `docs/results/*.json`.

Between `<!-- table: NAME -->` and `<!-- end -->` a page holds what this script prints, and nothing
else: `table` is one of a record's tables, `run: RECORD` what was run and on what, `notes: RECORD`
what the figures say. A table that has the name of its record needs no more than that; another one
is called `RECORD/TABLE`.

    python benchmarks/tables.py             # rewrite all pages
    python benchmarks/tables.py --check     # say which differ, exit 1
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import draftsmith
from draftsmith.benchmarks.records import (
    NOT_KEPT,
    PLACEHOLDER,
    Cell,
    Column,
    Figure,
    Record,
    Table,
    Weights,
    read_records,
)
from draftsmith.storage import write_text

ROOT = Path(draftsmith.__file__).parent
MISSING = "-"
BLOCK = re.compile(r"^(<!-- (table|run|notes): (\S+) -->\n)(.*?)^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
# a cell that begins with a decimal, or an interval anywhere: no definition, a figure
MEASURED = re.compile(r"\|\s*\**[-+]?[\d,]*\d\.\d|\[[-+]?[\d,.]+%?, [-+]?[\d,.]+%?\]")
CODE = re.compile(r"`[^`]*`")


def main() -> None:
    args = arguments()
    records = read_records()
    differing = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        made = written(text, records, page.relative_to(ROOT).as_posix())
        if made != text:
            differing.append(page)
            if not args.check:
                write_text(page, made)
    for page in differing:
        print(f"{page.relative_to(ROOT)}: {'differs from docs/results' if args.check else 'written'}")
    if args.check and differing:
        raise SystemExit("python benchmarks/tables.py writes them anew")


def pages() -> list[Path]:
    """README and everything in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(text: str, records: Mapping[str, Record], page: str) -> str:
    """The page with every block as its record has it."""

    def block(match: re.Match[str]) -> str:
        opening, kind, name, _, closing = match.groups()
        return f"{opening}{BLOCKS[kind](name, records, page)}\n{closing}"

    return BLOCK.sub(block, text)


def outside(text: str) -> list[str]:
    """Lines of tables with measured figures that stand in no block."""
    return [row for row in ROW.findall(BLOCK.sub("", text)) if MEASURED.search(CODE.sub("", row))]


# ---- blocks -----------------------------------------------------------------------------------


def table_block(name: str, records: Mapping[str, Record], page: str) -> str:
    """A table as markdown."""
    record_name, _, table_name = name.partition("/")
    record = record_of(record_name, records, page)
    chosen = record.tables.get(table_name or record_name)
    if chosen is None:
        raise SystemExit(f"{page}: no table {name!r}; {record_name}.json has {', '.join(record.tables) or 'none'}")
    return "\n".join(lines_of(chosen, record))


def run_block(name: str, records: Mapping[str, Record], page: str) -> str:
    """What was run, on what, and how much of it was drawn by chance."""
    record = record_of(name, records, page)
    shell = "text" if record.needs or not record.command.startswith("python ") else "sh"
    setup = "\n\n".join(filled(part) for part in record.setup.split("\n\n"))
    return "\n\n".join(filter(None, (f"```{shell}\n{record.command}\n```", setup, facts_of(record))))


def notes_block(name: str, records: Mapping[str, Record], page: str) -> str:
    """What the figures say, and what was not measured."""
    record = record_of(name, records, page)
    missing = [f"Not measured: {'; '.join(record.not_measured)}."] if record.not_measured else []
    return listed([*record.notes, *missing])


BLOCKS: dict[str, Callable[[str, Mapping[str, Record], str], str]] = {
    "table": table_block,
    "run": run_block,
    "notes": notes_block,
}


def record_of(name: str, records: Mapping[str, Record], page: str) -> Record:
    """The record of that name."""
    if name not in records:
        raise SystemExit(f"{page}: no docs/results/{name}.json; there are {', '.join(records)}")
    return records[name]


def facts_of(record: Record) -> str:
    """A list of everything that a figure hangs on."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    facts = {
        "hardware": record.hardware,
        "versions": versions,
        "needs": "; ".join(record.needs),
        "target": weights_of([record.target] if record.target else []),
        "drafters": weights_of(record.drafters),
        "intervals": record.intervals,
        "audit": "" if record.audit is None else ", ".join(filter(None, (record.audit.verdict, record.audit.sees))),
        "training seeds": seeds_of(record),
        "from": origin_of(record),
    }
    return listed([f"{name}: {fact}" for name, fact in facts.items() if fact])


def filled(text: str, bullet: str = "") -> str:
    """Text in lines of readable length."""
    indent = " " * len(bullet)
    return textwrap.fill(bullet + text, 119, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def listed(items: list[str]) -> str:
    """A markdown list."""
    return "\n".join(filled(item, "- ") for item in items)


def weights_of(weights: list[Weights]) -> str:
    """Names with the first digits of their hashes."""
    return ", ".join(
        f"{each.name} (hash {NOT_KEPT})" if each.sha256 == NOT_KEPT else f"{each.name} (`{each.sha256[:12]}`)"
        for each in weights
    )


def seeds_of(record: Record) -> str:
    """How many, and what can be concluded from them."""
    if record.seeds == 0:
        return ""
    if record.seeds == 1:
        return (
            "**one training seed: no conclusion about training can be drawn from differences "
            f"smaller than {record.tells_apart}**"
        )
    values = ", ".join(map(str, record.seed_values))
    return f"{record.seeds} ({values}); a figure is their mean, behind it the lowest and the highest seed"


def origin_of(record: Record) -> str:
    """Whether the figures came from a run's own JSON, and the commit that they are of."""
    if record.origin == "not yet measured":
        return "not yet measured"
    where = f"carried over from a {record.origin} ({record.source})" if record.source else record.origin
    return f"{where}, {record.date}, commit `{record.commit}`"


# ---- cells ------------------------------------------------------------------------------------


def lines_of(table: Table, record: Record) -> list[str]:
    """Heading, rule and rows."""
    lines = [[column.head for column in table.columns]]
    lines += [[cell_of(column, row, record.formats) for column in table.columns] for row in record.rows_of(table)]
    shown = ["| " + " | ".join(cells) + " |" for cells in lines]
    return [shown[0], "|" + "---|" * len(table.columns), *shown[1:]]


def cell_of(column: Column, row: Mapping[str, Cell], formats: Mapping[str, str]) -> str:
    """A column's text of a row: empty without cells, a dash where they are null."""
    present = [name for name in column.names if name in row]
    if column.names and not present:
        return ""
    if present and all(row[name] is None for name in present):
        return MISSING
    if len(column.names) == 1 and isinstance(word := row[present[0]], str):
        return word
    return PLACEHOLDER.sub(lambda match: shown(row.get(match[1]), formats.get(match[1], "")), column.cell).strip()


def shown(cell: Cell, form: str) -> str:
    """A cell's value: `2.64 [2.43, 2.92] (2.58 to 2.71)` is a mean, its interval, its seeds."""
    if cell is None:
        return MISSING
    if isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        return " ".join(format(each, form) for each in cell)
    if isinstance(cell, Figure):
        form = cell.format or form
        text = format(cell.value, form)
        if cell.low is not None and cell.high is not None:
            text += f" [{format(cell.low, form)}, {format(cell.high, form)}]"
        if cell.seeds:
            text += f" ({format(min(cell.seeds), form)} to {format(max(cell.seeds), form)})"
        return text
    return format(cell, form or "g")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page differs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
