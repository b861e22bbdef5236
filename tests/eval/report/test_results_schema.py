"""`results.json` of a real evaluation fits the published schema, and the schema is strict."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import make_drafter, make_target
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.drafters.model.ensemble import join
from draftsmith.errors import RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.arms import Arm
from draftsmith.eval.measure.evaluate import _sweep as sweep
from draftsmith.eval.measure.evaluate import evaluate
from draftsmith.eval.measure.requests import Request
from draftsmith.eval.measure.speed import measure_costs
from draftsmith.eval.report.results import SCHEMA_VERSION, VERDICTS, read_results, schema

Measured = tuple[dict[str, Any], dict[str, Any]]
SCHEMA = schema()
CHECK = jsonschema.Draft202012Validator(SCHEMA)
# what shows how much is accepted, directly or multiplied into a speed
ACCEPTANCE = {"tau", "tau_macro", "alpha", "alpha_hat", "n_alpha", "mbsu", "predicted_speedup"}


@pytest.fixture
def results(measured: Measured) -> dict[str, Any]:
    return copy.deepcopy(measured[0])


def test_real_results_fit(results: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    CHECK.validate(results)
    assert results["schema_version"] == SCHEMA_VERSION
    assert results["sweep"]
    assert len(results["rows"][0]["categories"]) == 2
    # any reader of JSON can read it: no NaN, no infinity
    json.dumps(results, allow_nan=False)


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Every object that the schema describes."""
    if isinstance(node, dict):
        if "properties" in node and isinstance(node["properties"], dict):
            yield node
        for child in node.values():
            yield from objects(child)
    if isinstance(node, list):
        for child in node:
            yield from objects(child)


def test_whatever_shows_acceptance_demands_a_verdict() -> None:
    showing = [each for each in objects(SCHEMA) if ACCEPTANCE & set(each["properties"])]
    # a row, a category and a set of it, the mean over sets, a draft length of the sweep, a row of the second set
    assert len(showing) == 6
    for each in showing:
        assert "verdict" in each["required"]
        assert each["properties"]["verdict"] == {"$ref": "#/$defs/verdict"}
    assert set(SCHEMA["$defs"]["verdict"]["enum"]) == set(VERDICTS)


def test_every_field_is_described_and_nothing_else_allowed() -> None:
    for each in objects(SCHEMA):
        assert each["additionalProperties"] is False
        for name, field in each["properties"].items():
            target = SCHEMA["$defs"][field["$ref"].rsplit("/", 1)[-1]] if "$ref" in field else field
            assert field.get("description") or target.get("description"), name


def test_the_prediction_is_the_formula_that_is_stated(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        assert row["draft_steps"] == row["draft_length"] == 2
    steps = [row["draft_steps"] for row in results["rows"]]
    steps += [row["draft_length"] for row in results["sweep"]]
    for row, each in zip([*results["rows"], *results["sweep"]], steps, strict=True):
        predicted = row["tau"][0] / (row["c_v"] + each * row["c"])
        assert row["predicted_speedup"] == pytest.approx(predicted, rel=1e-4)
    for of in ("row", "sweep_row"):
        stated = SCHEMA["$defs"][of]["properties"]["predicted_speedup"]["description"]
        assert stated.startswith("tau / (c_v + draft steps x c)")


def test_the_sweep_of_an_ensemble_has_its_costs(measured: Measured) -> None:
    """None of its members alone tells what a step costs: the time of proposing does."""
    target = make_target("qwen3")
    arm = Arm("ensemble", join([make_drafter(target), make_drafter(target, seed=2)]))
    request = Request(Prompt("0", "any", ("",), chat=False), [5, 7, 11], 0)
    config = EvalConfig(max_new_tokens=8, sweep=[2], repeats=1)
    costs = measure_costs(target, None, [2], context=8, rounds=1)
    [row] = sweep(target, arm, [request], config, costs)
    CHECK.validate(measured[0] | {"sweep": [row]})
    predicted = row["tau"][0] / (row["c_v"] + 2 * row["c"])
    assert row["c"] > 0
    assert row["predicted_speedup"] == pytest.approx(predicted, rel=1e-4)


def test_answers_that_end_at_once_fit(measured: Measured) -> None:
    """No verify call, no step: nothing is known of them, and nothing is NaN."""
    target = make_target("qwen3")
    target.model.generation_config.eos_token_id = list(range(target.vocabulary))
    request = Request(Prompt("0", "any", ("",), chat=False), [5, 7, 11], 0)
    target.tokenizer = train_tokenizer(["abc def ghi jkl\n"] * 5, 300)
    config = EvalConfig(max_new_tokens=12, sweep=[], repeats=1, limit=None)
    results = evaluate(target, [Arm("draft model", make_drafter(target))], [request], config)
    CHECK.validate(measured[0] | {"rows": results["rows"]})
    assert {row["mean_nodes"] for row in results["rows"]} == {None}


def test_settings_are_those_of_the_recipe() -> None:
    assert set(SCHEMA["properties"]["settings"]["properties"]) == set(EvalConfig.model_fields)


ROW, CATEGORY, SWEEP = ["rows", 0], ["rows", 0, "categories", 0], ["sweep", 0]


def at(results: dict[str, Any], path: list[Any]) -> Any:
    node: Any = results
    for part in path:
        node = node[part]
    return node


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (ROW, "verdict"),
        (ROW, "audited"),
        (CATEGORY, "verdict"),
        (SWEEP, "verdict"),
        (ROW, "tau"),
        (SWEEP, "tau"),
        (ROW, "distinct_2"),
        (ROW, "predicted_speedup"),
        ([], "schema_version"),
    ],
)
def test_nothing_may_be_left_out(path: list[Any], field: str, results: dict[str, Any]) -> None:
    """Above all, no acceptance without the audit's verdict."""
    del at(results, path)[field]
    with pytest.raises(jsonschema.ValidationError, match=f"'{field}' is a required property"):
        CHECK.validate(results)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (ROW, "verdict", "probably fine"),
        (SWEEP, "verdict", None),
        (ROW, "taux", 1),
        (ROW, "tau", [1.7, 1.6]),
        (ROW, "tau", [0.4, 0.3, 0.5]),
        (ROW, "alpha", [1.2, 1.1, 1.3]),
        (ROW, "sample", [{"id": "a", "prompt": "b", "tokens": [["c", "guess"]]}]),
        ([], "schema_version", 1),
        (["costs"], "c_v", {"four": 1.2}),
    ],
)
def test_wrong_values_are_refused(path: list[Any], field: str, value: Any, results: dict[str, Any]) -> None:
    at(results, path)[field] = value
    with pytest.raises(jsonschema.ValidationError):
        CHECK.validate(results)


def test_reading_again(results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run" / "eval" / "results.json"
    with pytest.raises(RequestError, match=r"is missing: .*draftsmith eval .*run`"):
        read_results(path)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        read_results(path)
    path.write_text(json.dumps(results))
    assert read_results(path) == results
    path.write_text(json.dumps({**results, "schema_version": 0}))
    with pytest.raises(RequestError, match="schema_version 0, this version reads 4: evaluate the run"):
        read_results(path)
    path.write_text(json.dumps({**results, "schema_version": 3}))
    with pytest.raises(
        RequestError, match=r"this version reads 4 \(it leaves steps out of tau .* audited\): evaluate"
    ):
        read_results(path)


@pytest.mark.parametrize("path", [ROW, CATEGORY, SWEEP])
def test_reading_acceptance_without_a_verdict(path: list[Any], results: dict[str, Any], tmp_path: Path) -> None:
    del at(results, path)["verdict"]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    with pytest.raises(RequestError, match="acceptance with the verdict None"):
        read_results(file)
