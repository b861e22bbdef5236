"""Which precision decodes faster on this CPU: when it is asked, and what is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.eval.tune import precision
from draftsmith.eval.tune.precision import compared, in_words, other_precision
from helpers.models.shallow_target import SHALLOW


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine and a model that are worth a comparison."""
    monkeypatch.setattr(precision, "_LEAST_BYTES", 0)
    monkeypatch.setattr(precision, "multiplies_bf16", lambda: True)


@pytest.mark.usefixtures("asked")
def test_both_are_timed_and_the_faster_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(dtype: str) -> Backbone:
        loaded.append(dtype)
        return load_target(SHALLOW, dtype=dtype)

    monkeypatch.setattr(precision, "_TURNS", {"rounds": 2, "repeats": 1})
    line = compared(load_target(SHALLOW), load, 3, [5, 6, 7, 8], 3)
    assert loaded == ["bf16"]
    assert line is not None
    assert line.startswith("a target call of 1 / 3 tokens takes ")
    assert " ms in fp32 and " in line
    assert " ms in bf16: " in line


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0.9, "bf16 is faster here; tune anew with --target.dtype bf16"),
        (1.1, "fp32, which was tuned in, is faster here"),
        (1.02, "one is as fast as the other here"),
    ],
)
def test_the_verdict_is_of_the_call_that_decodes(ratio: float, said: str) -> None:
    line = in_words({"fp32": [0.0421, 0.07], "bf16": [0.0333, 0.035]}, ratio, 5)
    assert line == f"a target call of 1 / 5 tokens takes 42.1 / 70 ms in fp32 and 33.3 / 35 ms in bf16: {said}"


@pytest.mark.usefixtures("asked")
def test_where_nothing_is_to_be_gained_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    fp32, bf16 = (load_target(SHALLOW, dtype=dtype) for dtype in ("fp32", "bf16"))
    assert other_precision(fp32) == "bf16"
    assert other_precision(bf16) == "fp32"
    changes: list[tuple[Any, str, Any]] = [
        (precision, "multiplies_bf16", lambda: False),
        (precision, "_LEAST_BYTES", 1e12),
        (precision, "quantisation_of", lambda _config: "int8"),
        (psutil, "virtual_memory", lambda: SimpleNamespace(available=1000)),
    ]
    for where, name, value in changes:
        with monkeypatch.context() as changed:
            changed.setattr(where, name, value)
            assert other_precision(fp32) is None
            assert compared(fp32, lambda _dtype: pytest.fail("it was loaded"), 3, [5], 1) is None
