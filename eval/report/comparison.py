"""Several runs on one page: what is gained by each, with intervals, acceptance by depth, and an answer as it comes.

The page is whole without its script, `comparison.js`, which sorts the table and plays the answers; nothing else may
run there. Read next: `comparison.html.j2`, `plots.py`; `report.py`, the page of one run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from markupsafe import Markup

from ...errors import RequestError
from ...storage import write_text
from . import plots
from .answers import ANSWERS, read_answers
from .report import page_of, results_in
from .results import read_results
from .tables import degenerate, stand_in

_MACHINE = ("processor", "threads", "devices")
"""Of the environment: what speed hangs on."""


def write_comparison(runs: Sequence[Path]) -> Path:
    """Write `comparison.html` of evaluated runs into the first one's folder.

    Raises:
        RequestError: a run is named twice, has not been evaluated, or its results are damaged.
    """
    read = {name: _read(run) for name, run in zip(names_of(runs), runs, strict=True)}
    try:
        page = page_of("comparison.html", compared(read))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, TemplateError) as error:
        raise RequestError(
            f"the results of {', '.join(map(str, runs))} cannot be shown together, one is damaged: "
            f"{type(error).__name__} ({error!s:.200}); `draftsmith report RUN` of each says which: evaluate it again"
        ) from error
    write_text(runs[0] / "comparison.html", page)
    return runs[0] / "comparison.html"


def _read(run: Path) -> dict[str, Any]:
    """The results of a run, and the lines of its answers where they were kept."""
    folder = results_in(run)
    answers = read_answers(folder) if (folder / ANSWERS).is_file() else []
    return read_results(folder / "results.json") | {"answers": answers}


def names_of(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell all of them apart.

    Raises:
        RequestError: a run is named twice.
    """
    for run in runs:
        if sum(run.resolve() == each.resolve() for each in runs) > 1:
            raise RequestError(f"{run} is named twice; expected each run once")
    parts = [run.resolve().parts for run in runs]
    longest = max(map(len, parts))
    ends = ([str(Path(*each[-count:])) for each in parts] for count in range(1, longest + 1))
    return next(each for each in ends if len(set(each)) == len(each))


def compared(read: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the page shows, of results by the name of their run."""
    rows = [
        {**row, "run": name, "target": results["target"]["name"]}
        for name, results in read.items()
        for row in results["rows"]
    ]
    for row in rows:
        several = len({each["method"] for each in read[row["run"]]["rows"]}) > 1
        row["label"] = f"{row['run']}: {row['method']}" if several else row["run"]
    ranked = sorted(rows, key=lambda row: -(row["speedup"][0] or 0))
    script = (files(__package__) / "comparison.js").read_text(encoding="utf-8")
    return {
        "runs": read,
        "rows": ranked,
        "warnings": [*_unlike(read), *_doubts(rows)],
        "speed": plots.speedups(ranked),
        "depth": _by_depth(rows),
        "replays": [played for name, results in read.items() for played in _replay(name, results)],
        "script": Markup(script),  # noqa: S704 - shipped beside this file
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def _by_depth(rows: Sequence[dict[str, Any]]) -> Markup | None:
    known = [{**row, "method": row["label"]} for row in rows if row["n_alpha"]]
    return plots.acceptance_by_depth(known) if known else None


def _unlike(read: dict[str, dict[str, Any]]) -> Iterator[str]:
    """In what the runs differ beside their drafters, so that figures do not compare."""
    targets = {name: results["target"]["name"] for name, results in read.items()}
    prompts = {name: results["rows"][0]["prompts"] for name, results in read.items()}
    machines = {
        name: ", ".join(f"{key} {(results['environment'] or {}).get(key)}" for key in _MACHINE)
        for name, results in read.items()
    }
    asked = (("targets", "tau and speed-up", targets), ("prompts", "tau and speed-up", prompts))
    for what, of, values in (*asked, ("machines", "speed", machines)):
        if len(set(values.values())) > 1:
            listed = "; ".join(f"{name}: {value}" for name, value in values.items())
            yield f"The runs are of different {what}, so {of} cannot be compared: {listed}."


def _doubts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["verdict"] != "lossless" and not stand_in(row):
            yield f"{row['label']} at T = {row['temperature']:g}: {row['verdict']}, so its figures prove nothing yet."
        if row["flagged"]:
            yield f"{degenerate({**row, 'method': row['label']})}."


def _replay(name: str, results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The first text of a run's fastest method, each token with the time at which it is there, plain and drafted."""
    timed = [row for row in results["rows"] if row["sample"] and row["tokens_per_second"] and row["tau"][0]]
    if not timed:
        return
    row = max(timed, key=lambda row: row["speedup"][0] or 0)
    sample = row["sample"][0]
    calls = _calls([origin for _, origin in sample["tokens"]])
    plain, drafted, measured = _times(row, sample, results["answers"])
    yield {
        "run": name,
        "method": row["method"],
        "temperature": row["temperature"],
        "verdict": row["verdict"],
        "id": sample["id"],
        "prompt": sample["prompt"],
        "measured": measured,
        "plain": [(piece, "plain", at, at * plain) for at, (piece, _) in enumerate(sample["tokens"])],
        "drafted": [
            (piece, origin, call, call * drafted)
            for (piece, origin), call in zip(sample["tokens"], calls, strict=True)
        ],
        "plain_ms": (len(calls) - 1) * plain,
        "drafted_ms": calls[-1] * drafted,
    }


def _calls(origins: Sequence[str]) -> list[int]:
    """Of each token the target call that it came by; the prefill's is 0, and a correction or a bonus ends a call."""
    made, call = [], 0 if origins[0] == "prefill" else 1
    for origin in origins:
        made.append(call)
        call += origin != "draft"
    return made


def _times(
    row: dict[str, Any], sample: dict[str, Any], answers: Sequence[dict[str, Any]]
) -> tuple[float, float, bool]:
    """Milliseconds of a token without the drafter and of a call with it; whether they are of this very answer.

    Else they are the row's means. An answer's own hold its prompt, spread over its tokens or calls.
    """
    at = (sample["id"], row["temperature"])
    lines = {each["method"]: each for each in answers if (each["id"], each["temperature"]) == at and not each["turn"]}
    plain, drafted = lines.get(None), lines.get(row["method"])
    if plain and drafted and plain["seconds"] and drafted["seconds"] and plain["steps"] and drafted["steps"]:
        return (1e3 * plain["seconds"] / len(plain["steps"]), 1e3 * drafted["seconds"] / len(drafted["steps"]), True)
    return 1e3 / row["baseline_tokens_per_second"], 1e3 * row["tau"][0] / row["tokens_per_second"], False
