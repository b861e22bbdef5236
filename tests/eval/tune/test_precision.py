"""Which precision decodes faster on this CPU: when it is asked, and what is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
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


MILLISECONDS = {
    "bf16 wins": {"fp32 1": [4, 4, 4], "fp32 3": [9, 8, 40], "bf16 1": [5, 5, 5], "bf16 3": [6, 6, 30]},
    "fp32 wins": {"fp32 1": [5, 5, 5], "fp32 3": [6, 6, 30], "bf16 1": [4, 4, 4], "bf16 3": [9, 8, 40]},
}


@pytest.mark.parametrize(
    ("dtype", "times", "said"),
    [
        (torch.float32, "bf16 wins", "4 / 9 ms in fp32 and 5 / 6 ms in bf16: bf16 is faster here; tune anew"),
        (torch.float32, "fp32 wins", "5 / 6 ms in fp32 and 4 / 9 ms in bf16: fp32, which was tuned in, is faster"),
        (torch.bfloat16, "bf16 wins", "5 / 6 ms in bf16 and 4 / 9 ms in fp32: bf16, which was tuned in, is faster"),
        (torch.bfloat16, "fp32 wins", "4 / 9 ms in bf16 and 5 / 6 ms in fp32: fp32 is faster here; tune anew"),
    ],
)
def test_the_faster_one_is_that_whose_verify_call_takes_less(
    dtype: torch.dtype, times: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, calls of one token the other way round: who decodes waits for the longer ones."""
    timed: dict[str, Any] = {}

    def turns(arms: dict[str, Any], **_how: Any) -> dict[str, list[float]]:
        timed.update(arms)
        return {name: [each / 1e3 for each in MILLISECONDS[times][name]] for name in arms}

    other = "fp32" if dtype == torch.bfloat16 else "bf16"
    monkeypatch.setattr(precision, "other_precision", lambda _target: other)
    monkeypatch.setattr(precision, "one_call", lambda *given: given)
    monkeypatch.setattr(precision, "turns", turns)
    target: Any = SimpleNamespace(model=SimpleNamespace(dtype=dtype), device="cpu")
    line = compared(target, lambda name: name, 3, [5, 6, 7], 2)
    assert line is not None
    assert line.startswith(f"a target call of 1 / 3 tokens takes {said}")
    mine = "bf16" if dtype == torch.bfloat16 else "fp32"
    # behind the root, the drafted nodes
    calls = {
        f"{name} {size}": (each, size - 1, 2, 1, [5, 6, 7])
        for name, each in ((mine, target), (other, other))
        for size in (1, 3)
    }
    assert timed == calls


@pytest.mark.parametrize(("available", "other"), [(401, "bf16"), (400, None)])
def test_a_copy_of_twice_the_size_needs_four_times_the_room(
    available: int, other: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(precision, "_LEAST_BYTES", 99)
    monkeypatch.setattr(precision, "bytes_of", lambda _model: 100)
    monkeypatch.setattr(precision, "quantisation_of", lambda _config: None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    model = SimpleNamespace(dtype=torch.float32, config=None)
    target: Any = SimpleNamespace(model=model, device=torch.device("cpu"))
    assert other_precision(target) == other
    monkeypatch.setattr(precision, "_LEAST_BYTES", 100)
    assert other_precision(target) is None
