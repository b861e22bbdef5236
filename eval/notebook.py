"""Results as Python code gets them: an HTML table below the cell of a notebook, rows for pandas, named figures.

Read next: `measure/evaluate.py` and `audit/audit.py`, which make them; `../api.py`, which hands them out.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from ..decoding.engine import Generation
from ..errors import EnvironmentFailure, RequestError
from ..storage import write_text
from .measure.metrics import Interval, tau

if TYPE_CHECKING:
    from ..decoding.backbone.backbone import Backbone
    from .audit.audit import AuditReport

_TABLE = Environment(autoescape=True).from_string(
    "<table><thead><tr>{% for name in names %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>"
    "{% for row in rows %}<tr>{% for name in names %}<td>{{ row[name] }}</td>{% endfor %}</tr>{% endfor %}"
    "</tbody></table>{% if note %}<p>{{ note }}</p>{% endif %}"
)

_WIDEST = 60
"""Characters of a column of the table in text."""


class Shown(ABC):
    """What a notebook shows as a table, and `print` as lines of text."""

    @abstractmethod
    def table(self) -> list[dict[str, Any]]:
        """The rows, each with the same columns by name."""

    @property
    def note(self) -> str:
        """A line below the table; empty: none."""
        return ""

    def _repr_html_(self) -> str:
        """The table in HTML, every text escaped: what Jupyter shows."""
        rows = [{name: _text(value) for name, value in row.items()} for row in self.table()]
        return _TABLE.render(rows=rows, names=list(rows[0]) if rows else [], note=self.note)

    def __repr__(self) -> str:
        """The table in lines of text, and the note below it."""
        rows = [{name: _line(value) for name, value in row.items()} for row in self.table()]
        head = {name: name for name in rows[0]} if rows else {}
        wide = {name: max(len(row[name]) for row in [head, *rows]) for name in head}
        lines = ["  ".join(row[name].ljust(wide[name]) for name in head).rstrip() for row in [head, *rows] if head]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame.

        Raises:
            EnvironmentFailure: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise EnvironmentFailure(
                "to_pandas() needs pandas, which is not installed: pip install pandas; table() has the same rows"
            ) from error
        return pandas.DataFrame(self.table())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1_000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def _line(value: Any) -> str:
    """As `_text`, on one line of a table."""
    words = " ".join(_text(value).split())
    # a terminal obeys what is not printed
    text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in words)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


@dataclass(repr=False)
class Decoded(Shown, Generation):
    """What was decoded: `Generation`, with the texts and tau."""

    target: Backbone | None = field(default=None, repr=False)

    @cached_property
    def texts(self) -> list[str]:
        """The tokens of every row as text, by the target's tokenizer."""
        assert self.target is not None
        return [str(self.target.tokenizer.decode(ids, skip_special_tokens=True)) for ids in self.tokens]

    @property
    def tau(self) -> float:
        """Tokens per target call, over the steps that the length limit cannot cut; NaN where there is none."""
        return tau([self.steps])

    def table(self) -> list[dict[str, Any]]:
        """A row per prompt: its text, how many tokens it has, and how many of them were drafted."""
        drafted = [sum(each == "draft" for each in row) for row in self.origin]
        rows = zip(self.texts, self.tokens, drafted, strict=True)
        return [{"text": text, "tokens": len(ids), "drafted": count} for text, ids, count in rows]

    @property
    def note(self) -> str:
        return f"{self.target_calls} target calls, tau {_text(self.tau)}"


@dataclass(frozen=True, repr=False)
class Measurement(Shown):
    """What drafters are worth on some prompts: a row per drafter and temperature, each with its verdict.

    `tau`, `alpha`, `by_depth`, `speedup` and `verdict` are those of the first row; `row` finds another one.
    """

    results: Mapping[str, Any] = field(repr=False)
    """All of it, as `results.json` holds it (docs/evaluation.md)."""
    reports: Mapping[str, AuditReport] = field(repr=False)
    """The audits, by the drafter's name; those that were not audited are not here."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of `results.json`."""
        return self.results["rows"]

    def row(self, name: str, temperature: float = 0.0) -> Mapping[str, Any]:
        """The row of a drafter at a temperature.

        Raises:
            RequestError: there is none.
        """
        for row in self.rows:
            if row["method"] == name and row["temperature"] == temperature:
                return row
        known = ", ".join(f"{row['method']!r} at {row['temperature']:g}" for row in self.rows)
        raise RequestError(f"no drafter {name!r} was measured at temperature {temperature:g}; there are {known}")

    @property
    def tau(self) -> Interval:
        """Tokens per target call, with its 95 % interval."""
        return _interval(self.rows[0]["tau"])

    @property
    def alpha(self) -> Interval:
        """Share of the tested draft tokens that were accepted."""
        return _interval(self.rows[0]["alpha"])

    @property
    def by_depth(self) -> list[Interval]:
        """The same at each depth of the draft, the first token first."""
        return [_interval(each) for each in self.rows[0]["n_alpha"]]

    @property
    def speedup(self) -> Interval:
        """Time of plain decoding / time of decoding with the drafter, measured in turn."""
        return _interval(self.rows[0]["speedup"])

    @property
    def verdict(self) -> str:
        """The audit's."""
        return str(self.rows[0]["verdict"])

    def table(self) -> list[dict[str, Any]]:
        """A row per drafter and temperature: tau, alpha and speed-up with intervals, alpha by depth, the verdict."""
        return [
            {
                "drafter": row["method"],
                "T": row["temperature"],
                **_columns(row, ("tau", "alpha", "speedup")),
                **{f"alpha {depth}": _or_nan(each[0]) for depth, each in enumerate(row["n_alpha"], 1)},
                "verdict": row["verdict"],
            }
            for row in self._filled()
        ]

    @property
    def note(self) -> str:
        """Which drafters nothing can be said of."""
        names = dict.fromkeys(str(row["method"]) for row in self.rows if row["tau"][0] is None)
        if not names:
            return ""
        return f"no step counts of {', '.join(names)}: the answers end with their first token, or are too short"

    def _filled(self) -> list[dict[str, Any]]:
        """The rows with as many depths as the deepest has."""
        depth = max(len(row["n_alpha"]) for row in self.rows)
        missing: list[Any] = [[None, None, None]]
        return [{**row, "n_alpha": row["n_alpha"] + missing * (depth - len(row["n_alpha"]))} for row in self.rows]

    def save(self, folder: str | Path) -> Path:
        """Write `results.json` and `audit.json`, of which `draftsmith report FOLDER` makes a page."""
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "results.json", json.dumps(dict(self.results), indent=1) + "\n")
        for report in list(self.reports.values())[:1]:
            write_text(out / "audit.json", json.dumps(report.to_dict(), indent=1) + "\n")
        return out


def _columns(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Value and bounds of some measures."""
    return {
        f"{name}{part}": _or_nan(value)
        for name in names
        for part, value in zip(("", " low", " high"), row[name], strict=True)
    }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _interval(values: Sequence[float | None]) -> Interval:
    return Interval(*map(_or_nan, values))
