"""`results.json` of a real evaluation fits the published schema, and the schema is strict."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

SCHEMA = json.loads((files("draftsmith.eval") / "results.schema.json").read_text())


def test_real_results_fit(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(measured[0], SCHEMA)


@pytest.mark.parametrize("field", ["verdict", "tau", "distinct_2", "predicted_speedup"])
def test_nothing_may_be_left_out(
    field: str, measured: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Above all, no acceptance without the audit's verdict."""
    results = copy.deepcopy(measured[0])
    del results["rows"][0][field]
    with pytest.raises(jsonschema.ValidationError, match=field):
        jsonschema.validate(results, SCHEMA)


def test_nothing_may_be_added(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    results = copy.deepcopy(measured[0])
    results["rows"][0]["taux"] = 1
    with pytest.raises(jsonschema.ValidationError, match="taux"):
        jsonschema.validate(results, SCHEMA)


def test_a_verdict_is_one_of_three(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    results = copy.deepcopy(measured[0])
    results["rows"][0]["verdict"] = "probably fine"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(results, SCHEMA)
