"""`results.json`: the version of its layout, its published schema, and reading it again.

The schema, `results.schema.json`, defines every field and its unit; it demands an
audit verdict in every row that shows acceptance. Read next: `measure/evaluate.py`, which makes the
results, and `report.py`, which shows them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...errors import RequestError

SCHEMA_VERSION = 4
# why results of an earlier layout cannot be shown as they are
_CHANGES = {
    3: "it leaves steps out of tau by what they accepted (1 to 3 % too low) and does not say which drafter was audited"
}
# worst first
VERDICTS = ("NOT lossless", "not audited", "lossy", "lossless")


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of `results.json`."""
    return json.loads((files(__package__) / "results.schema.json").read_text(encoding="utf-8"))


def results_of_others(rows: Sequence[dict[str, Any]], target: str) -> dict[str, Any]:
    """The content of `results.json` of rows that our decoder did not make: nothing of settings, costs and drafts."""
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": rows,
        "left_out": 0,
        "sweep": [],
        "costs": None,
        "settings": None,
        "target": {"name": target, "bytes": None},
        "draft": {"bytes": None, "loaded": [], "settings": {}},
        "repeat": [],
        "environment": None,
    }


def read_results(path: Path) -> dict[str, Any]:
    """Read `results.json` of this version.

    Raises:
        RequestError: there is none, it is not JSON, another version wrote it, or a row shows
            acceptance without a verdict.
    """
    # what `eval --out` wrote does not say by itself which run it was
    run = path.parent.parent if path.parent.name == "eval" else f"RUN --out {path.parent}"
    again = f"evaluate the run: `draftsmith eval {run}`"
    if not path.is_file():
        raise RequestError(f"{path} is missing: {again}")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON ({error}): {again}") from error
    version = results.get("schema_version") if isinstance(results, dict) else None
    if version != SCHEMA_VERSION:
        reason = f" ({_CHANGES[version]})" if isinstance(version, int) and version in _CHANGES else ""
        raise RequestError(
            f"{path} has schema_version {version!r}, this version reads {SCHEMA_VERSION}{reason}: {again}"
        )
    try:
        shown = _with_acceptance(results)
    except (LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is damaged: {type(error).__name__} ({error!s:.80}): {again}") from error
    for row in shown:
        if row.get("verdict") not in VERDICTS:
            raise RequestError(
                f"{path} shows acceptance with the verdict {row.get('verdict')!r}, expected one of "
                f"{', '.join(VERDICTS)}: {again}"
            )
    return results


def _with_acceptance(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = results["rows"]
    parts = [each for row in rows for each in (*row["categories"], *row.get("sets", []))]
    means = [row["over_sets"] for row in rows if "sets" in row]
    found = [*rows, *parts, *means, *results["sweep"], *results.get("second", [])]
    if not rows or not all(isinstance(each, dict) for each in found):
        raise TypeError("expected rows that are tables")
    return found
