"""The table that papers print, as Markdown and as LaTeX: rows target x temperature x method, columns prompt sets.

Each set has its speed-up and tau, the last columns their means over sets, all with intervals, beside the audit's
verdict. Read next: `results.py`, what is read; `tables.py`, the same for a terminal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.prompt_sets import SETS
from ...errors import RequestError
from ...storage import write_text
from .comparison import names_of
from .report import cell, results_in, visible
from .results import read_results
from .tables import DEGENERATE, MISSING, interval, verdict_of

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}"} | {
    each: f"\\{each}" for each in "&%$#_{}"
}


_NAMES = (
    "Names elsewhere: tau is also called mean acceptance length (MAL), accept length and block efficiency. An "
    "acceptance rate is one of four: per token (alpha), per depth, given those before it (n-alpha), per draft "
    "((tau - 1) / K on a chain of K), or of the first token (n-alpha at depth 1)."
)


@dataclass(frozen=True)
class PaperTable:
    """What both forms show."""

    columns: list[str]
    """The sets, and the mean where they are several."""
    rows: list[tuple[str, str, str, list[dict[str, Any]]]]
    """Target, temperature, method, and of each column the figures."""
    audit: str
    converted: str
    """Which rows are of answers that others wrote, and what is other about them; empty where none is."""


def write_tables(run: Path, beside: Sequence[Path], *, markdown: bool, latex: bool) -> list[Path]:
    """Write `table.md` and `table.tex`, those that are asked for, into a run folder or an --out of `eval`.

    Args:
        beside: other runs, whose rows follow in the same table.

    Raises:
        RequestError: one of them is named twice, has not been evaluated, or on other prompt sets.
    """
    table = paper_table([run, *beside])
    made = [("table.md", as_markdown(table))] * markdown + [("table.tex", as_latex(table))] * latex
    for name, text in made:
        write_text(run / name, text)
    return [run / name for name, _ in made]


def paper_table(runs: Sequence[Path]) -> PaperTable:
    """The rows of one or several runs, which have to be of the same prompt sets, by target and temperature.

    A method that several runs have in the same place is named with its run.
    """
    columns: list[str] = []
    read, others = [], []
    for name, run in zip(names_of(runs), runs, strict=True):
        path = results_in(run) / "results.json"
        results = read_results(path)
        for row in results["rows"]:
            parts = _parts(row)
            if columns and [each for each, _ in parts] != columns:
                raise RequestError(
                    f"{path} is of the prompts {', '.join(each for each, _ in parts)}, and those before it are of "
                    f"{', '.join(columns)}; expected the same ones in that order: evaluate it on them"
                )
            columns = [each for each, _ in parts]
            place = (results["target"]["name"], f"{row['temperature']:g}")
            read.append((place, row["method"], name, [figures for _, figures in parts], verdict_of(row)))
            others += [row["method"]] if "converted" in results else []
    count = Counter((place, method) for place, method, *_ in read)
    places = list(dict.fromkeys(place for place, *_ in read))
    rows, verdicts = [], []
    for place, method, name, figures, verdict in sorted(read, key=lambda row: places.index(row[0])):
        label = f"{name}: {method}" if count[place, method] > 1 else method
        rows.append((*place, label, figures))
        verdicts.append((f"{label} at T = {place[1]}", verdict))
    return PaperTable(columns, rows, _audit_line(verdicts), _converted(others))


def _parts(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The columns of a row of results, each with its figures."""
    if "sets" not in row:
        name, given, _ = row["prompts"].partition("=")
        return [(name if given and name in SETS else Path(row["prompts"]).name, row)]
    return [*((each["set"], each) for each in row["sets"]), ("Mean", row["over_sets"])]


def _audit_line(verdicts: Sequence[tuple[str, str]]) -> str:
    different = {verdict for _, verdict in verdicts}
    if len(different) == 1:
        return f"losslessness audit of every row: {different.pop()}"
    return f"losslessness audit: {'; '.join(f'{who}: {verdict}' for who, verdict in dict.fromkeys(verdicts))}"


def _converted(methods: Sequence[str]) -> str:
    if not methods:
        return ""
    named = ", ".join(dict.fromkeys(methods))
    return (
        f"; {named}: by others' answer files, with the time of prompts, every step counted, intervals over questions"
    )


def _note(table: PaperTable) -> str:
    """What the figures are, in one sentence, which ends with the audit's line."""
    flagged = any(each["flagged"] for *_, parts in table.rows for each in parts)
    mean = ", for the mean within each set" if table.columns[-1] == "Mean" else ""
    doubt = f"; !: the target's own text is degenerate, {DEGENERATE}" if flagged else ""
    return (
        "Speed-up over plain decoding in the same engine, and tau, tokens per target call with the bonus token; "
        f"in brackets 95 % bootstrap intervals, over requests, for speed over batches{mean}{doubt}{table.converted}; "
        f"{table.audit}."
    )


def as_markdown(table: PaperTable) -> str:
    """The table with two columns for each set."""
    names = [f"{cell(name)}: {of}" for name in table.columns for of in ("speed-up", "tau")]
    lines = [_line(["target", "T", "method", *names]), _line(["---", "---:", "---", *["---:"] * len(names)])]
    for target, temperature, method, parts in table.rows:
        figures = [text for each in parts for text in _figures(each)]
        lines.append(_line([cell(target), temperature, cell(method), *figures]))
    return "\n".join([*lines, "", cell(_note(table)), "", cell(_NAMES), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figures(figures: dict[str, Any]) -> tuple[str, str]:
    return interval(figures["speedup"]), f"{interval(figures['tau'])}{' !' if figures['flagged'] else ''}"


def as_latex(table: PaperTable) -> str:
    """The same for `booktabs` and `graphicx`: no wider than a line, intervals small, what rows share named once."""
    sets, pair = len(table.columns), r" & Speed-up & $\tau$"
    heads = "".join(rf" & \multicolumn{{2}}{{c}}{{{escaped(name)}}}" for name in table.columns)
    rules = " ".join(rf"\cmidrule(lr){{{4 + 2 * at}-{5 + 2 * at}}}" for at in range(sets))
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table}",
        r"\centering",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{lrl{'rr' * sets}}}",
        r"\toprule",
        rf" & &{heads} \\",
        rules,
        rf"Target & $T$ & Method{pair * sets} \\",
        r"\midrule",
    ]
    before = None
    for target, temperature, method, parts in table.rows:
        if before not in (None, (target, temperature)):
            lines.append(r"\addlinespace")
        shared = " & " if before == (target, temperature) else f"{escaped(target)} & {temperature}"
        before = (target, temperature)
        figures = "".join(f" & {_small(text)}" for each in parts for text in _figures(each))
        lines.append(rf"{shared} & {escaped(method)}{figures} \\")
    caption = escaped(_note(table)).replace("and tau,", r"and $\tau$,")
    lines += [r"\bottomrule", r"\end{tabular}}", rf"\caption{{{caption}}}", r"\end{table}", ""]
    return "\n".join(lines)


def _small(text: str) -> str:
    """`1.41 [1.16, 1.72]` with the interval in a small font."""
    value, bracket, rest = text.partition(" [")
    if not bracket:
        return "--" if value == MISSING else value
    return rf"{value} {{\scriptsize [{rest}}}"


def escaped(text: str) -> str:
    """Text that LaTeX sets as it stands."""
    return re.sub(r"[\\~^&%$#_{}\[]", lambda found: _LATEX[found.group()], str(visible(re.sub(r"\s", " ", text))))
