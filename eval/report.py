"""The report of a run: one self-contained HTML page, and the same as Markdown.

Opens anywhere, needs no network, runs no script. Everything from outside is escaped.
Read next: `report.html.j2`, `plots.py`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from ..errors import RequestError
from . import plots
from .tables import best_lengths, interval


def write_report(run: Path) -> Path:
    """Write `report.html` and `report.md` into a run folder; return the page's path.

    Raises:
        RequestError: the run has not been evaluated.
    """
    results = _read(run / "eval" / "results.json")
    audit_path = run / "eval" / "audit.json"
    audit = _read(audit_path) if audit_path.is_file() else None
    curve = _records(run / "metrics.jsonl")
    content = context(results, audit, curve)
    environment = Environment(
        loader=PackageLoader("draftsmith.eval", "."), undefined=StrictUndefined,
        autoescape=select_autoescape(("html.j2",)), trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"interval": interval, "cell": _cell}
    for name in ("report.html", "report.md"):
        text = environment.get_template(f"{name}.j2").render(content)
        (run / name).write_text(text.replace("\0", "�"), encoding="utf-8")
    return run / "report.html"


def context(
    results: dict[str, Any], audit: dict[str, Any] | None, curve: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the templates show."""
    first = results["rows"][0]
    return {
        "results": results,
        "rows": results["rows"],
        "sweep": results["sweep"],
        "best": best_lengths(results["sweep"]) if results["sweep"] else "",
        "sentence": sentence(first),
        "audit": audit,
        "verdict": first["verdict"],
        "depth_plot": plots.acceptance_by_depth(results["rows"]),
        "sweep_plot": plots.sweep(results["sweep"]) if results["sweep"] else "",
        "curve_plot": plots.training(curve) if curve else "",
        "samples": first["sample"],
        "categories": [each["category"] for each in first["categories"]],
        "depths": max(len(row["n_alpha"]) for row in results["rows"]),
        "marks": _MARKS,
        "fence": _fence(first["sample"]),
        "environment": results["environment"],
        "settings": results["settings"],
    }


def sentence(row: dict[str, Any]) -> str:
    """The result in one sentence, never without its verdict."""
    speed = interval(row["speedup"])
    text = (
        f"{row['method']}: {interval(row['tau'])} tokens per target call at temperature "
        f"{row['temperature']:g}, {speed} times the speed of the autoregressive baseline "
        f"({row['predicted_speedup']:.2f} predicted); audit: {row['verdict']}."
    )
    if row["flagged"]:
        text += " The target's own text is degenerate: do not believe tau."
    return text


# how Markdown tells the origin of a token, where HTML has colours
_MARKS = {"draft": ("", ""), "correction": ("[-", "-]"), "bonus": ("[+", "+]"), "prefill": ("", "")}


def _cell(text: str) -> str:
    """Text as one cell of a Markdown table, or as a line: no markup, no line end, no bar."""
    text = "".join(" " if unicodedata.category(c).startswith("C") else c for c in text)
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


def _fence(samples: list[dict[str, Any]]) -> str:
    """A code fence longer than any run of backticks inside, so that no text can close it."""
    texts = "".join(s["prompt"] + "".join(piece for piece, _ in s["tokens"]) for s in samples)
    longest = max((len(run) for run in re.findall("`+", texts)), default=0)
    return "`" * max(3, longest + 1)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(
            f"{path} is missing: evaluate the run first: `draftsmith eval {path.parent.parent}`"
        ) from None
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}); evaluate the run again") from error


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
