"""Edges of what measures: which drafter is named with its run, what stands for what, how many are compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows import prepare as preparing
from draftsmith.drafters.sizes import MOST_PARTS
from draftsmith.errors import RequestError
from draftsmith.eval.config import AuditConfig, EvalConfig
from draftsmith.eval.measure import agreement as agreeing
from draftsmith.eval.measure import drift as drifting
from draftsmith.eval.measure.requests import Request
from draftsmith.launch.measure import compare, contenders, loaded, run, tune
from draftsmith.launch.measure.readings import verdict
from draftsmith.launch.measure.tree import _nodes
from draftsmith.launch.requests import TuneRequest
from rich.console import Console

NOTHING: Any = None


@pytest.mark.parametrize(
    ("folders", "several"), [(["a"], False), (["a", None], False), (["a", "b"], True), ([None, None], False)]
)
def test_drafters_are_named_with_their_runs_where_there_are_two(
    folders: list[str | None], *, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(contenders, "_contender", lambda *_given, several: asked.append(several))
    pairs: Any = [SimpleNamespace(drafter=each and Path(each), methods=["m"]) for each in folders]
    contenders.contenders_of(pairs, NOTHING)
    assert asked == [several] * len(folders)


@pytest.mark.parametrize(("tokens", "longest"), [(1000, 5), (1001, 9), (9999, 9)])
def test_the_longest_prompt_that_an_audit_decodes(tokens: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are replayed; answers of 501 tokens count 500 each, so that 1,001 tokens take three, two at a time."""
    found: list[int] = []
    monkeypatch.setattr(run, "check_context", lambda *given, answer: found.append(given[3]))
    requests = [Request(Prompt(str(n), "all", (), chat=False), [0] * n, n) for n in (2, 5, 3, 9, 1)]
    config = AuditConfig(prompts=2, batch=2, max_new_tokens=501, tokens=tokens)
    run.check_rooms(NOTHING, [], requests, EvalConfig(), config)
    assert found == [9, longest]


def test_an_enumeration_stands_for_drafters_of_its_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four, the third has the first one's code; what nobody has enumerated stands for nothing."""
    asked: list[Any] = []

    def audit(_target: Any, drafter: str, *_: Any, enumerated: Any, **_how: Any) -> Any:
        asked.append(enumerated)
        made = None if drafter == "none" else f"of {drafter}"
        return SimpleNamespace(
            enumeration=enumerated or made, text=lambda: "", to_dict=lambda: {"verdict": "lossless", "distance": None}
        )

    monkeypatch.setattr(compare, "audit", audit)
    monkeypatch.setattr(compare, "toy_of", lambda drafter: drafter)
    pair: Any = SimpleNamespace(recipe=SimpleNamespace(audit=None, eval=SimpleNamespace(rule=None)))
    counted: dict[str, Any] = {}
    for at, kind in enumerate(("heads", "none", "heads", "tree", "none")):
        arm: Any = compare.Arm(kind, kind)  # type: ignore[arg-type]
        made = compare._audited(at, arm, NOTHING, [], pair, tmp_path, Console(quiet=True), counted)
        assert made.verdict == "lossless"
    assert asked == [None, None, "of heads", None, None]


@pytest.mark.parametrize(
    ("temperatures", "warm"), [([0.0, 0.5, 1.0], 0.5), ([1.0, 0.5], 1.0), ([0.7], 0.7), ([0.25, 2.0], 0.25)]
)
def test_answers_are_sampled_at_the_first_temperature_above_0(
    temperatures: list[float], warm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(agreeing, "agreement", lambda *_, **how: asked.append(how) or {})
    monkeypatch.setattr(agreeing, "agreement_table", lambda _result: "")
    recipe = SimpleNamespace(eval=EvalConfig(temperatures=temperatures, seed=5))
    pair: Any = SimpleNamespace(recipe=recipe, target=SimpleNamespace(eos_ids=(0,)), drafter=None)
    run._agreement(pair, [[1]], 3, tmp_path, Console(quiet=True))
    assert [(each["warper"].temperature, each["samples"], each["seed"]) for each in asked] == [(warm, 3, 5)]


@pytest.mark.parametrize(("limit", "of_each"), [(9, 3), (10, 4), (11, 4), (12, 4), (1, 1)])
def test_sets_give_no_fewer_prompts_than_are_asked_for(limit: int, of_each: int, tmp_path: Path) -> None:
    names = ("gsm8k", "aime", "nq")
    for name in names:
        (tmp_path / f"{name}.jsonl").touch()
    words = ",".join(f"{name}={tmp_path / name}.jsonl" for name in names)
    recipe: Any = SimpleNamespace(eval=EvalConfig())
    assert tune._config(TuneRequest(prompts=words, limit=limit), recipe).limit == of_each


def test_a_tree_of_the_most_nodes_there_may_be() -> None:
    assert _nodes(str(MOST_PARTS)) == MOST_PARTS
    with pytest.raises(RequestError, match="expected at most 4,096"):
        _nodes(str(MOST_PARTS + 1))


@pytest.mark.parametrize(("rows", "compared"), [(3, 3), (8, 8), (64, 8)])
def test_rounding_is_compared_on_few_rows(rows: int, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(loaded, "load_target", lambda *_, **__: None)
    monkeypatch.setattr(preparing, "prepare", lambda data, *_, **__: SimpleNamespace(validation=data))
    monkeypatch.setattr(
        drifting, "measure_drift", lambda *_, **how: asked.append(how) or SimpleNamespace(to_dict=lambda: {"kl": 1})
    )
    target = SimpleNamespace(
        quantization="int8", unquantised=None, revision=None, dtype="fp32", trust_remote_code=False
    )
    loop = SimpleNamespace(validate_rows=rows, seed=7)
    recipe = SimpleNamespace(target=target, loop=loop, data=SimpleNamespace(limit_rows=5))
    pair: Any = SimpleNamespace(recipe=recipe, target=SimpleNamespace(name="t", tokenizer=None))
    assert loaded._rounded(pair) == {"kl": 1}
    assert asked == [{"count": compared, "seed": 7, "change": "rounded"}]


def test_the_best_reading_is_that_of_the_mean_over_prompts() -> None:
    """A half on every prompt, against one on one of three."""
    readings: Any = [SimpleNamespace(what=each, source="", changes={}) for each in ("even", "lucky")]
    rates = [np.array([0.5, 0.5, 0.5]), np.array([0.1, 1.0, 0.1])]
    assert verdict(readings, rates).startswith("acceptance does not tell even from lucky")
    assert verdict(readings, [rates[0], rates[0] / 4]) == "acceptance supports the drafter as it is read here"


@pytest.mark.parametrize(
    ("own", "target", "sizes"),
    [(None, 8_192, [4_096]), (None, 8_191, []), (8_192, 128_000, [4_096]), (None, 32_769, [4_096, 8_192, 16_384])],
)
def test_a_draft_vocabulary_is_at_most_half(
    own: int | None, target: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "read_entry", lambda _folder: {"settings": {"draft_vocabulary": own}})
    monkeypatch.setattr(contenders, "with_ids", lambda *_: None)
    monkeypatch.setattr(contenders, "_with", lambda *_: None)
    recipe: Any = SimpleNamespace(drafter=SimpleNamespace(draft_vocabulary=None))
    decodes: Any = SimpleNamespace(vocabulary=target, tokenizer=None)
    assert list(contenders.cuts(Path("drafter"), recipe, decodes)) == sizes
