"""The texts that a tree is measured on, and what is written down of it, without a target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draftsmith.decoding.sampling import Warper
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.measure.tree_choice import Chosen, Ranks, Speed, WrittenText
from draftsmith.launch.measure import tree
from draftsmith.launch.requests import TreeRequest


def test_every_text_is_drawn_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch after batch, under the temperature that is asked for, up to an end of text: no two share their numbers."""
    asked: list[dict[str, Any]] = []

    def autoregressive(_target: Any, prompts: list[list[int]], **how: Any) -> Any:
        asked.append(how | {"rows": len(prompts)})
        return SimpleNamespace(tokens=[[prompt[0] + 1] for prompt in prompts])

    monkeypatch.setattr(tree, "autoregressive", autoregressive)
    config = EvalConfig(max_new_tokens=33, seed=7, top_k=5)
    target: Any = SimpleNamespace(eos_ids=(2,))
    loaded: Any = SimpleNamespace(recipe=SimpleNamespace(eval=config))
    count = 2 * tree._BATCH + 3
    texts = list(tree._answered(target, [[n] for n in range(count)], loaded, 0.7))
    assert texts == [WrittenText([n], [n + 1]) for n in range(count)]
    assert [each["rows"] for each in asked] == [tree._BATCH, tree._BATCH, 3]
    assert [number for each in asked for number in each["requests"]] == list(range(count))
    for each in asked:
        assert (each["warper"], each["max_new_tokens"]) == (Warper(0.7, top_k=5), 33)
        assert (each["eos_ids"], each["seed"]) == ((2,), 7)


def test_what_is_written_down_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "where", lambda _recipe: "held-out rows")
    monkeypatch.setattr(tree, "processor", lambda: "here")
    ranks = Ranks(np.array([[3, 1], [1, 0]]), np.array([5, 3]))
    chosen = Chosen(((0,), (0, 0)), 1.8, 1.7, 1.3)
    texts = [WrittenText([1], [2, 3]), WrittenText([1], [2, 3, 4])]
    loaded: Any = SimpleNamespace(recipe=None)
    request = TreeRequest(temperature=0.5)
    made = tree._facts(request, loaded, texts, ranks, chosen, Speed({1: 1.0, 3: 1.25}, 0.4))
    assert (made["expected_tau"], made["default_expected_tau"]) == (1.8, 1.7)
    measured = made["measured"]
    assert (measured["texts"], measured["tokens"], measured["temperature"]) == (2, 5, 0.5)
    assert (measured["hits"], measured["trials"]) == ([[3, 1], [1, 0]], [5, 3])
    assert made["speed"] == {"verify": {"1": 1.0, "3": 1.25}, "draft": 0.4, "predicted": 1.3, "processor": "here"}
    assert tree._facts(request, loaded, texts, ranks, chosen, None)["speed"] is None
