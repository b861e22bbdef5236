"""Writes every table of README, docs and the embedded target's card from the measurements in `docs/results/*.json`.

Between `<!-- table: NAME -->` and `<!-- end -->` a page holds what this script prints, and nothing
else: `table` is one of a record's tables, `run: RECORD` what was run and on what, `notes: RECORD`
what the figures say. A table that has the name of its record needs no more than that; another one
is called `RECORD/TABLE`. `list: families` and its like come from the tables of the package.

    python benchmarks/tables.py             # rewrite all pages
    python benchmarks/tables.py --check     # say which differ, exit 1
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import draftsmith
from draftsmith.benchmarks.common.markdown import lines_of, listed, run_of
from draftsmith.benchmarks.common.records import Record, read_records
from draftsmith.data.rows.presets import presets
from draftsmith.drafters.families import FAMILIES
from draftsmith.launch.recommend.recommend import made_for
from draftsmith.storage import write_text
from draftsmith.trainers.methods import METHODS

ROOT = Path(draftsmith.__file__).parent
BLOCK = re.compile(r"^(<!-- (table|run|notes|list): (\S+) -->\n)(.*?)^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
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
    """README, everything in docs, and the card of the embedded target."""
    return [
        ROOT / "README.md",
        *(page for folder in ("docs", "recipes") for page in sorted((ROOT / folder).rglob("*.md"))),
    ]


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
    return run_of(record_of(name, records, page))


def notes_block(name: str, records: Mapping[str, Record], page: str) -> str:
    """What the figures say, and what was not measured."""
    record = record_of(name, records, page)
    missing = [f"Not measured: {'; '.join(record.not_measured)}."] if record.not_measured else []
    return listed([*record.notes, *missing])


def list_block(name: str, _records: Mapping[str, Record], page: str) -> str:
    """A list of what the package has, from its own tables."""
    if name not in LISTS:
        raise SystemExit(f"{page}: no list {name!r}; there are {', '.join(LISTS)}")
    head, *rows = LISTS[name]()
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def families_list() -> list[list[str]]:
    """Every family: what it drafts by, and what trains or makes it."""
    rows = [["family", "what drafts", "made by", "exported for"]]
    for family in FAMILIES.values():
        trained = (each for each in METHODS.values() if family.name in (each.family, *each.variants))
        methods = [f"`{method.name}`" for method in trained] or ["`draftsmith derive`"] * (
            family.kind == "from target"
        )
        rows.append(
            [
                f"[{family.title}]({family.page})",
                family.summary,
                ", ".join(methods) or "-",
                ", ".join(family.exports) or "-",
            ]
        )
    return rows


def methods_list() -> list[list[str]]:
    """Every training method: what it trains, and the recipe sections that are its own."""
    rows = [["method", "trains", "its own sections of a recipe"]]
    rows += [
        [f"`{method.name}`", method.summary, ", ".join(f"`{name}`" for name in method.sections) or "-"]
        for method in METHODS.values()
    ]
    return rows


def recipes_list() -> list[list[str]]:
    """Which recipes are made for which target, by which `draftsmith recommend` goes."""
    return [["target", "recipes"], *([each.shown, each.recipes] for each in made_for())]


def sources_list() -> list[list[str]]:
    """The sets of rows that `data.source` takes by name."""
    rows = [["name", "good for", "columns", "licence", "where, and its commit"]]
    for name, each in presets().items():
        at = f"`{each.repository}{f':{each.config}' if each.config else ''}`, `{each.revision[:12]}`"
        rows.append([f"`{name}`", each.good_for, ", ".join(each.columns), each.licence, at])
    return rows


LISTS: dict[str, Callable[[], list[list[str]]]] = {
    "families": families_list,
    "methods": methods_list,
    "recipes": recipes_list,
    "sources": sources_list,
}
BLOCKS: dict[str, Callable[[str, Mapping[str, Record], str], str]] = {
    "table": table_block,
    "run": run_block,
    "notes": notes_block,
    "list": list_block,
}


def record_of(name: str, records: Mapping[str, Record], page: str) -> Record:
    """The record of that name."""
    if name not in records:
        raise SystemExit(f"{page}: no docs/results/{name}.json; there are {', '.join(records)}")
    return records[name]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page differs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
