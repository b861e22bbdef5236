"""The report of a run: one self-contained HTML page, and the same as Markdown.

Opens anywhere, needs no network, runs no script. Everything from outside is escaped, and what
cannot be seen or would turn the reading direction is shown by its number.

Its first lines say what pays, by how much, where it stops paying, and the verdict.

Read next: `report.html.j2`, `plots.py`, `results.py`; `paper.py`, the tables that papers print; `comparison.py`, the
page of several runs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError, select_autoescape
from markupsafe import Markup

from ...errors import RequestError
from ...storage import write_text
from . import plots
from .pays import read_tuning, tuning_shown
from .results import VERDICTS, read_results
from .server import WAITS, notes, waiting_rows
from .tables import (
    MEAN,
    MISSING,
    accuracy,
    agreement_line,
    best_measured,
    best_predicted,
    cost_lines,
    degenerate,
    drifted,
    interval,
    left_out,
    number,
    off,
    share,
    stand_in,
)

# how Markdown tells the origin of a token, where HTML has colours
_MARKS = {"draft": ("", ""), "correction": ("[-", "-]"), "bonus": ("[+", "+]"), "prefill": ("", "")}
# controls but tab and line feed, directions, invisible spaces, halves of a character
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def write_report(run: Path) -> Path:
    """Write `report.html` and `report.md` into a run folder, or an --out of `eval`.

    Returns:
        The page's path.

    Raises:
        RequestError: the run has not been evaluated, or by another version, or its results are damaged.
    """
    folder = results_in(run)
    results = read_results(folder / "results.json")
    audit, curve = _audit(folder / "audit.json"), _curve(run / "metrics.jsonl")
    tuning = read_tuning(folder / "tune.json")
    try:
        shown = context(results, audit, curve) | {"tuning": tuning_shown(tuning) if tuning else None}
        pages = {name: page_of(name, shown) for name in ("report.html", "report.md")}
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, TemplateError) as error:
        raise RequestError(
            f"{folder / 'results.json'}, or audit.json, tune.json or metrics.jsonl beside it, is damaged: "
            f"{type(error).__name__} ({error!s:.200}); evaluate the run again"
        ) from error
    for name, page in pages.items():
        write_text(run / name, page)
    return run / "report.html"


def page_of(name: str, content: dict[str, Any]) -> str:
    """The text of a page, by the name of its template."""
    environment = Environment(
        loader=PackageLoader("draftsmith.eval.report", "."),
        undefined=StrictUndefined,
        autoescape=select_autoescape(("html.j2",)),
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    environment.filters |= {
        "interval": interval,
        "number": number,
        "share": share,
        "off": off,
        "cell": cell,
        "stand_in": stand_in,
    }
    return environment.get_template(f"{name}.j2").render(content) + "\n"


def results_in(run: Path) -> Path:
    """The folder of a run's results, or of those that `eval --out` wrote."""
    folders = (run / "eval", run)
    for folder in folders:
        if (folder / "results.json").is_file():
            return folder
    raise RequestError(
        f"{folders[0] / 'results.json'} is missing, and so is {folders[1] / 'results.json'}: "
        "`draftsmith eval RUN` writes the first, with `--out FOLDER` the second"
    )


def context(results: dict[str, Any], audit: dict[str, Any] | None, curve: list[dict[str, Any]]) -> dict[str, Any]:
    """What the templates show."""
    rows, sweep, second = results["rows"], results["sweep"], results.get("second", [])
    return {
        "results": results,
        "rows": rows,
        "sweep": sweep,
        "second": second,
        "agreement": agreement_line(second) if second else None,
        "best": (best_predicted(sweep), best_measured(sweep)) if sweep else None,
        "opening": opening(rows, sweep),
        "accuracy": accuracy([(row["predicted_speedup"], row["speedup"][0]) for row in rows]),
        "cost_lines": cost_lines(results["target"]),
        "lead": fastest(rows),
        "warnings": [
            *tuned(results["target"]),
            *covered(curve),
            *left_out(results),
            *notes(results),
            *results.get("converted", {}).get("notes", []),
            *warnings(rows, audit),
        ],
        "waiting": waiting_rows(rows) if "server" in results else [],
        "waits": list(WAITS.values()),
        "audit": audit,
        "verdict": verdict(rows),
        # once, whatever the temperatures
        "stand_ins": list({row["method"]: row for row in rows if stand_in(row)}.values()),
        "depths": max(len(row["n_alpha"]) for row in rows),
        "categories": [each["category"] for each in rows[0]["categories"]],
        "sets": rows[0].get("sets", []),
        "mean": MEAN,
        "samples": [{**each, "counts": _origins(each)} for each in rows[0]["sample"]],
        "plots": _plots(results, audit, curve),
        "marks": _MARKS,
        "fence": _fence(rows[0]["sample"]),
        "environment": results["environment"],
        "converted": results.get("converted"),
        "settings": {
            **(results["settings"] or {}),
            **{f"drafter.{name}": value for name, value in results["draft"]["settings"].items()},
        },
        "missing": MISSING,
    }


def _plots(results: dict[str, Any], audit: dict[str, Any] | None, curve: list[dict[str, Any]]) -> dict[str, Markup]:
    figures = {}
    if any(row["n_alpha"] for row in results["rows"]):
        figures["depth"] = plots.acceptance_by_depth(results["rows"])
    if results["sweep"]:
        figures["sweep_acceptance"] = plots.sweep_acceptance(results["sweep"])
        figures["sweep_speed"] = plots.sweep_speed(results["sweep"])
    if audit is not None and audit["rosenblatt"] is not None:
        figures["uniformity"] = plots.uniformity(audit["rosenblatt"]["histogram"])
    if curve:
        figures["training"] = plots.training(curve)
    return figures


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """The worst verdict of all rows."""
    verdicts = {row["verdict"] for row in rows}
    return next(each for each in VERDICTS if each in verdicts)


def tuned(target: dict[str, Any]) -> list[str]:
    """What it means that the target is no longer the original, if it is not."""
    drift = target.get("drift")
    if drift is None:
        return []
    if drift.get("change") == "rounded":
        return [
            f"The target is {drift['original']} with quantised weights. It is what decodes and "
            "what the audit compares with: lossless means the quantised target's own output. "
            f"{drifted(drift)}."
        ]
    return [
        f"The target is {drift['original']} as this run has tuned it. It is what decodes and what "
        "the audit compares with: lossless means the tuned target's own output. "
        f"{drifted(drift)}."
    ]


def covered(curve: Sequence[dict[str, Any]]) -> list[str]:
    """How much the draft vocabulary of the run's drafter has of held-out rows, if it has one of its own."""
    found = [each for each in curve if each["kind"] == "validation" and "validation_covered_mass" in each]
    if not found:
        return []
    last = found[-1]
    labels, mass = (last[f"validation_covered_{name}"] for name in ("labels", "mass"))
    return [
        f"The draft vocabulary has {labels:.0%} of the held-out labels and {mass:.0%} of the target's mass there "
        f"(step {last['step']}): what it lacks is never drafted."
    ]


def warnings(rows: Sequence[dict[str, Any]], audit: dict[str, Any] | None) -> list[str]:
    """What a reader has to know before believing a figure."""
    messages = [degenerate(row) for row in rows if row["flagged"]]
    worst = verdict(rows)
    if worst == "NOT lossless":
        messages.append(
            "The audit failed: the output is not the target's own, and a biased rule accepts "
            "more. No figure of acceptance or speed here can be used."
        )
    if worst == "not audited":
        messages.append(
            "These figures were made without an audit: a biased rule accepts more, so they prove nothing yet."
        )
    for row in rows:
        if row["verdict"] == "lossy" and row["distance"] is not None:
            messages.append(
                f"{row['method']}, T = {row['temperature']:g}: the rule {row['rule']} is lossy; "
                f"its output is a total variation of {row['distance']:.3f} away from the target's."
            )
    exact = [row for row in rows if row["verdict"] != "lossy"]
    differing = sum(row["differing_rows"] or 0 for row in exact)
    if differing:
        messages.append(
            f"At T = 0, {differing} outputs differ from plain decoding: near-ties, or a bug. The "
            "audit's replay tells which."
        )
    served = audit is not None and audit["decoder"].startswith("server ")
    if audit is not None and (audit["verdict"] != worst or audit["decoder"] != "draftsmith") and not served:
        messages.append(
            f"The audit below is of another time or decoder ({audit['decoder']}, verdict "
            f"{audit['verdict']}); the figures carry the verdict they were made with, {worst}."
        )
    return messages


def visible(value: object) -> object:
    """Text in which nothing hides: unseen characters and turned directions by their number."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _UNSEEN.sub(lambda match: f"[U+{ord(match.group()):04X}]", value)


def cell(text: str) -> str:
    """Text as one cell of a Markdown table, or as a line: no markup, no line end, no bar."""
    text = re.sub(r"\s", " ", str(visible(text)))
    return re.sub(r"([\\`*_\[\]<>|#&~$])", r"\\\1", text)


def _fence(samples: Sequence[dict[str, Any]]) -> str:
    """A code fence longer than any run of backticks inside, so that no text can close it."""
    texts = "".join(s["prompt"] + "".join(piece for piece, _ in s["tokens"]) for s in samples)
    longest = max((len(run) for run in re.findall("`+", texts)), default=0)
    return "`" * max(3, longest + 1)


def _origins(sample: dict[str, Any]) -> dict[str, int]:
    counts = Counter(origin for _, origin in sample["tokens"])
    return {origin: counts[origin] for origin in _MARKS}


def _audit(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON ({error}): audit again, by `draftsmith audit` as before") from error


def _curve(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    # a kill may have cut the last line short; only a whole line ends with a line end
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is damaged ({error}); move it away for a report") from error


def opening(rows: Sequence[dict[str, Any]], sweep: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each temperature, and one for the draft lengths that were tried; none without its verdict."""
    measured = [row for row in rows if not stand_in(row)]  # not the controls
    temperatures = sorted({row["temperature"] for row in measured})
    lines = [
        _at(temperature, [row for row in measured if row["temperature"] == temperature])
        for temperature in temperatures
    ]
    return [*lines, _lengths(measured[0]["method"], sweep)] if sweep and measured else lines


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the highest speed-up; the first one where nothing was timed."""
    return max(rows, key=lambda row: row["speedup"][0] if _timed(row) else -1.0)


def _at(temperature: float, rows: Sequence[dict[str, Any]]) -> str:
    """What pays at a temperature, the fastest first."""
    ranked = sorted((row for row in rows if _timed(row)), key=lambda row: -row["speedup"][0])
    if not ranked:
        return f"T = {temperature:g}: {_named(rows[0])}; too little was timed to tell what pays."
    paying = [row for row in ranked if row["speedup"][1] > 1]
    slower = [row for row in ranked if row["speedup"][2] < 1]
    unclear = [row for row in ranked if row not in paying and row not in slower]
    parts = [
        f"{word} {', '.join(map(_named, group))}"
        for word, group in (("pays:", paying), ("not told apart from plain decoding:", unclear), ("slower:", slower))
        if group
    ]
    nothing = "" if paying else "nothing pays beyond its interval. "
    return f"T = {temperature:g}: {nothing}{'; '.join(parts)}."


def _named(row: dict[str, Any]) -> str:
    speed = f"{interval(row['speedup'])} times plain decoding" if _timed(row) else "no speed"
    return f"{row['method']} {speed} with {interval(row['tau'])} tokens per target call ({row['verdict']})"


def _timed(row: dict[str, Any]) -> bool:
    return not any(each is None or isnan(each) for each in row["speedup"])


def _lengths(method: str, sweep: Sequence[dict[str, Any]]) -> str:
    """At which draft lengths of those tried the first method pays."""
    paying = [row for row in sweep if _timed(row) and row["speedup"][0] > 1]
    tried = ", ".join(str(row["draft_length"]) for row in sweep)
    verdict = sweep[0]["verdict"]
    if not paying:
        return f"{method} at T = 0 is slower than plain decoding with every draft length tried, {tried} ({verdict})."
    best = max(paying, key=lambda row: row["speedup"][0])
    last = max(row["draft_length"] for row in paying)
    beyond = [row["draft_length"] for row in sweep if row["draft_length"] > last]
    end = f"pays up to {last}, and no longer at {beyond[0]}" if beyond else f"still pays at {last}, the longest tried"
    return (
        f"{method} at T = 0, draft lengths {tried}: fastest with {best['draft_length']} "
        f"({interval(best['speedup'])} times), {end} ({verdict})."
    )
