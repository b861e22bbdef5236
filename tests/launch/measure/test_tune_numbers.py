"""What `tune` predicts on, measures on, keeps and says, from measurements made by hand on both sides of 1."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftsmith.drafters.tuned_file import read_tuned
from draftsmith.errors import RequestError
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.metrics import Interval
from draftsmith.eval.report.tables import accuracy, off
from draftsmith.eval.tune.race import Raced
from draftsmith.eval.tune.settings import Contender, DraftSetting, Prediction
from draftsmith.launch.measure import tune
from draftsmith.launch.measure.tree import _nodes
from draftsmith.launch.measure.tune import _beginnings, content_of, held_out_prompts, sentence
from draftsmith.launch.requests import TuneRequest
from helpers.runs.planned_runs import requests_of


def raced(name: str, interval: tuple[float, float, float], *, promised: float = 1.5, size: str = "3") -> Raced:
    contender = Contender(name, Path(name).name, (), True, lambda _values: None)  # type: ignore[arg-type, return-value]
    prediction = Prediction(DraftSetting(contender, {"eval.draft_length": size}), 2.0, 4.0, 0.5, promised, 1.25)
    return Raced(prediction, Interval(*interval), Interval(2.5, 2.4, 2.6), 24)


@pytest.mark.parametrize(("count", "batch"), [(8, 1), (9, 1), (11, 1), (32, 1), (16, 2), (70, 8)])
def test_prompts_that_predict_are_not_measured_on(count: int, batch: int) -> None:
    """A quarter of them, spread; none is left out and none has two uses."""
    requests = requests_of([3] * count)
    profiled, measured = tune._split(requests, batch)
    numbers = [[each.number for each in part] for part in (profiled, measured)]
    assert numbers[0] == list(range(0, count, 4))
    assert sorted(numbers[0] + numbers[1]) == list(range(count))
    assert not set(numbers[0]) & set(numbers[1])
    assert numbers[1] == sorted(numbers[1])


@pytest.mark.parametrize(("count", "batch", "least"), [(7, 1, 8), (15, 2, 16), (63, 8, 64)])
def test_too_few_prompts_are_refused_with_the_number_that_would_do(count: int, batch: int, least: int) -> None:
    with pytest.raises(RequestError, match=f"are {count}; expected {least} or more at batch {batch}"):
        tune._split(requests_of([3] * count), batch)
    assert len(tune._split(requests_of([3] * least), batch)[1]) == 6 * batch


def test_as_many_prompts_as_the_batch_needs(tmp_path: Path) -> None:
    own, others = (str(tmp_path / name) for name in ("own.jsonl", "others.jsonl"))
    for path in (own, others):
        Path(path).touch()
    recipe: Any = SimpleNamespace(eval=EvalConfig(batch=5, repeats=3, prompts=own))
    for batch, limit, expected in ((1, None, 32), (4, None, 32), (8, None, 64), (8, 100, 100)):
        made = tune._config(TuneRequest(batch=batch, limit=limit), recipe)
        assert (made.batch, made.limit, made.repeats, made.prompts) == (batch, expected, 1, own)
    assert tune._config(TuneRequest(prompts=others), recipe).prompts == others


def kept(folder: Path, done: list[Raced]) -> dict[str, Any]:
    """`tuned.json` of a drafter that was measured so."""
    pair: Any = SimpleNamespace(drafter=folder)
    content = {
        "target": "t",
        "target_sha256": "0f",
        "target_call_seconds": 0.02,
        "temperature": 0.5,
        "batch": 4,
        "prompts": "held-out",
        "max_new_tokens": 48,
        "verdict": "not audited",
        "environment": {"processor": "here"},
        "pays_from": [{"method": str(folder), "factor": 0.8}, {"method": "other", "factor": 7.0}],
    }
    paths = tune._keep([pair], content, done)
    assert paths == [folder / "tuned.json"]
    found: dict[str, Any] = json.loads(paths[0].read_text())
    return found


@pytest.mark.parametrize(
    ("interval", "pays", "plain"),
    [
        ((1.5, 1.2, 1.8), True, False),
        ((1.1, 1.001, 1.2), True, False),
        ((1.1, 0.9, 1.3), False, False),
        ((0.95, 0.9, 1.001), False, False),
        ((0.9, 0.8, 0.999), False, True),
    ],
)
def test_what_is_slower_beyond_its_interval_is_not_kept(
    interval: tuple[float, float, float], tmp_path: Path, *, pays: bool, plain: bool
) -> None:
    mine = [raced(str(tmp_path), interval, size="4"), raced(str(tmp_path), (0.5, 0.4, 0.6), size="9")]
    found = kept(tmp_path, [raced("other", (2.0, 1.9, 2.1)), *mine])
    assert (found["pays"], found["plain"]) == (pays, plain)
    assert found["settings"] == ({} if plain else {"eval.draft_length": "4"})
    assert found["speedup"] == list(interval)
    assert (found["predicted"], found["pays_from"], found["target_call_seconds"]) == (1.5, 0.8, 0.02)
    assert (found["temperature"], found["batch"], found["processor"]) == (0.5, 4, "here")
    assert read_tuned(tmp_path).plain is plain


def test_what_could_not_be_timed_is_not_kept(tmp_path: Path) -> None:
    done = [raced(str(tmp_path), (2.0, math.nan, math.nan))]
    pair: Any = SimpleNamespace(drafter=tmp_path)
    nothing: dict[str, Any] = {"pays_from": []}
    assert tune._keep([pair], nothing, done) == tune._keep([pair], nothing, []) == []
    assert not (tmp_path / "tuned.json").exists()


@pytest.mark.parametrize(("low", "said"), [(1.1, True), (0.9, False)])
def test_a_method_without_a_drafter_is_told_as_flags_where_it_pays(low: float, *, said: bool) -> None:
    fast, slow = raced("prompt-lookup", (1.5, low, 1.8), size="6"), raced("prompt-lookup", (0.7, 0.6, 0.8))
    lines = list(tune._without_a_drafter([raced("mine", (1.9, 1.8, 2.0)), fast, slow]))
    assert lines == (
        ["prompt-lookup is used as it was tuned by: --method prompt-lookup --eval.draft_length 6"] if said else []
    )


def test_surfaces_are_of_the_fastest_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(tune, "measured_surfaces", lambda _target, best, *rest: asked.append((best, rest)) or [])
    done = [
        raced("a", (1.5, 1.4, 1.6)),
        raced("b", (1.2, 1.1, 1.3)),
        raced("a", (1.1, 1.0, 1.2)),
        raced("b", (0.7,) * 3),
    ]
    tune._surfaces(None, done, ["requests"], "config", 0.5)  # type: ignore[arg-type, list-item]
    ((best, rest),) = asked
    assert sorted(best, key=lambda each: each.setting.contender.name) == [done[0].prediction, done[1].prediction]
    assert rest == (["requests"], "config", 0.5)


def test_what_is_written_down_of_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shown_name", "target_hash", "environment", "where"):
        monkeypatch.setattr(tune, name, lambda *_, name=name: name)
    done = [raced("a", (1.2, 1.1, 1.3), promised=1.5), raced("b", (math.nan,) * 3)]
    first: Any = SimpleNamespace(recipe=None)
    request = TuneRequest(temperature=0.5, batch=4)
    made = content_of(request, first, None, EvalConfig(max_new_tokens=48), [done[0].prediction], done)  # type: ignore[arg-type]
    assert (made["temperature"], made["batch"], made["max_new_tokens"]) == (0.5, 4, 48)
    one, unknown = made["measured"]
    assert one["measured"] == [1.2, 1.1, 1.3]
    assert one["predicted_over_measured"] == pytest.approx(1.25)
    assert one["predicted_at_tau"] == pytest.approx(1.5 * 2.5 / 2.0)
    assert (one["tau"], one["measured_tau"], one["requests"]) == (2.0, [2.5, 2.4, 2.6], 24)
    assert (one["nodes"], one["proposing"], one["speedup"], one["pays_from"]) == (4.0, 0.5, 1.5, 1.25)
    assert unknown["predicted_over_measured"] is None
    assert unknown["measured"] == [None] * 3
    assert made["predicted"][0]["settings"] == {"eval.draft_length": "3"}


def test_a_setting_that_measured_faster_and_is_not_kept_is_named() -> None:
    best = raced("a", (1.4, 1.3, 1.5), promised=1.6)
    faster, slower, other = (
        raced(name, (value, value - 0.1, value + 0.1), size=size)
        for name, value, size in (("a", 1.45, "5"), ("a", 1.2, "6"), ("b", 1.6, "7"))
    )
    said = sentence([best, faster, slower, other], 0.0, 1)
    assert said.endswith("(measured level with a, chain of 5; predicted and measured together decide)")
    assert "measured level" not in sentence([best, slower, other], 0.0, 1)


@pytest.mark.parametrize(
    ("interval", "said"),
    [((0.95, 0.9, 1.0), "not told apart"), ((0.95, 0.9, 0.999), "nothing beats"), ((1.1, 1.0, 1.2), "not told apart")],
)
def test_what_is_not_told_apart_by_its_interval(interval: tuple[float, float, float], said: str) -> None:
    assert said in sentence([raced("a", interval)], 0.0, 1)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(1.1, 1.0), (0.9, 1.0)], "2 of 2 rows; off by +10, -10 %, +0 % on average"),
        ([(1.12, 1.0), (0.5, 1.0)], "0 of 2 rows; off by +12, -50 %, -19 % on average"),
        ([(2.1, 2.0), (None, 1.0)], "1 of 1 rows; off by +5, - %, +5 % on average"),
    ],
)
def test_how_far_predictions_are_off(pairs: list[Any], said: str) -> None:
    assert accuracy(pairs).endswith(said)
    assert off(1.5, 1.2) == "+25"
    assert off(1.5, None) == off(None, 1.0) == off(1.0, math.nan) == "-"
    assert "nothing was timed" in accuracy([(None, 1.0)])


def rows_of(*documents: tuple[int, int]) -> Any:
    """One packed row of documents, each of so many tokens of which the first ones are no labels."""
    ids = np.arange(sum(length for length, _ in documents))
    labels = np.concatenate([np.arange(length) >= first for length, first in documents])
    numbers = np.concatenate([np.full(length, n) for n, (length, _) in enumerate(documents)])
    return SimpleNamespace(ids_RS=[ids], in_loss_RS=[labels], document_RS=[numbers])


def test_prompts_are_what_stands_before_an_answer_or_half_a_text() -> None:
    """A chat's whole beginning, none that is cut; of a text the end of its first half; none below 8 tokens."""
    rows = rows_of((20, 9), (20, 7), (30, 1), (30, 0), (14, 1), (40, 25))
    found = list(_beginnings(rows, 12))
    assert found == [
        list(range(9)),  # a prompt of 9
        list(range(40 + 3, 40 + 15)),  # 12 tokens up to half of a text
        list(range(70 + 3, 70 + 15)),
    ]
    assert list(_beginnings(rows, 25))[-1] == list(range(114, 139))


def test_held_out_prompts_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(*[(20, 9)] * 10)
    monkeypatch.setattr(tune, "prepare", lambda *_, **__: SimpleNamespace(validation=rows))
    recipe: Any = SimpleNamespace(eval=EvalConfig(prompts="stdlib"), data=SimpleNamespace(validation=None))
    starts = [each[0] // 20 for each in held_out_prompts(recipe, None, 4)]  # type: ignore[arg-type]
    assert starts == [0, 2, 5, 7]
    assert len(held_out_prompts(recipe, None, 50)) == 10  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "nodes"), [(None, None), ("auto", 0), ("2", 2), ("64", 64)])
def test_nodes_of_a_tree(given: str | None, nodes: int | None) -> None:
    assert _nodes(given) == nodes


@pytest.mark.parametrize("given", ["1", "0", "-3", "x", "1000000000000"])
def test_nodes_that_make_no_tree(given: str) -> None:
    with pytest.raises(RequestError, match="--nodes is"):
        _nodes(given)
