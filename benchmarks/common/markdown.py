"""A record as markdown: its tables, what was run, what its figures say.

Read next: `tables.py` in the folder above, which puts these into the pages.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from draftsmith.benchmarks.common.records import (
    FOLDER,
    NOT_KEPT,
    PLACEHOLDER,
    Cell,
    Column,
    Figure,
    Record,
    Table,
    Weights,
)

MISSING = "-"
WIDTH = 119


def run_of(record: Record) -> str:
    """The command, the setup and everything that a figure hangs on."""
    runs = record.command.startswith("python ") and not record.needs and not is_retired(record)
    shell = "sh" if runs else "text"
    setup = "\n\n".join(filled(part) for part in record.setup.split("\n\n"))
    return "\n\n".join(filter(None, (f"```{shell}\n{record.command}\n```", setup, facts_of(record))))


def printed(record: Record) -> str:
    """What a script prints: all tables, and what they hang on."""
    tables = [f"{name}\n\n" + "\n".join(lines_of(table, record)) for name, table in record.tables.items()]
    notes = "\n".join(map(filled, record.notes))
    return "\n\n".join([filled(record.setup), facts_of(record), *tables, notes]).rstrip()


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
        "script": "no longer kept: it stands in the history at that commit" if is_retired(record) else "",
    }
    return listed([f"{name}: {fact}" for name, fact in facts.items() if fact])


def filled(text: str, bullet: str = "") -> str:
    """Text in lines of readable length."""
    indent = " " * len(bullet)
    return textwrap.fill(bullet + text, 119, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def listed(items: Sequence[str]) -> str:
    """A markdown list."""
    return "\n".join(filled(item, "- ") for item in items)


def weights_of(weights: Sequence[Weights]) -> str:
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


_OLD_TAU = "; its tau leaves out the steps that the length limit cut, and so is 1 to 3 % low"


def origin_of(record: Record) -> str:
    """Whether the figures came from a run's own JSON, and the commit that they are of."""
    if record.origin == "not yet measured":
        return "not yet measured"
    where = f"carried over from a {record.origin} ({record.source})" if record.source else record.origin
    return f"{where}, {record.date}, commit `{record.commit}`{_OLD_TAU if counts_old_steps(record) else ''}"


def is_retired(record: Record) -> bool:
    """Whether the script that measured it is not kept: it ran once, and the figures are here."""
    script = re.search(r"benchmarks/\w+\.py", record.command)
    return script is not None and not (FOLDER.parents[1] / script[0]).is_file()


def counts_old_steps(record: Record) -> bool:
    """Whether its tau was counted before steps were chosen by where they begin (docs/evaluation.md)."""
    columns = [column for table in record.tables.values() for column in table.columns]
    return record.origin == "table of 0.1.0" and any("tau" in f"{column.head} {column.cell}" for column in columns)


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
    return PLACEHOLDER.sub(lambda match: cell_text(row.get(match[1]), formats.get(match[1], "")), column.cell).strip()


def cell_text(cell: Cell, form: str) -> str:
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
