"""The rows of the next step are made while this one is computed, for every kind of objective, and change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftsmith.errors import Stopped
from draftsmith.trainers.loop.feed import Feed
from draftsmith.trainers.method_config import MedusaConfig, RolloutsConfig
from faults import toy

STEPS = 4
SMALL: dict[str, Any] = {"steps": STEPS, "validate_every": 2, "validate_rows": 2, "micro_rows": 4}
HEADS = MedusaConfig(heads=2)
WRITTEN = RolloutsConfig(share=0.5, prompt_tokens=4, new_tokens=4)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "the text alone": ("target", {}),
    "states of a frozen target": ("medusa", {"medusa": HEADS}),
    "a target that is tuned": ("medusa2", {"medusa": HEADS}),
    "rows that are written anew": ("distill", {"rollouts": WRITTEN}),
}


def events_of(loop: Any) -> list[str]:
    """What happens in a run, in order: rows that are made, gradients, updates."""
    seen: list[str] = []
    batch, update, backward = loop.train_rows.batch, loop.steps.update, loop.steps.backward

    def noted(name: str, call: Any) -> Any:
        return lambda *given, **named: (seen.append(name), call(*given, **named))[1]

    loop.train_rows.batch = noted("rows", batch)
    loop.steps.backward, loop.steps.update = noted("gradient", backward), noted("update", update)
    toy.run(loop)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_made_in_front_of_the_update_before(kind: str, tmp_path: Path) -> None:
    """Two micro-batches a step; in front of the last gradient too where features may be fetched ahead."""
    method, given = KINDS[kind]
    seen = events_of(toy.loop_in(tmp_path, method, given=given, **SMALL))
    made = ["rows"] * 2
    last = [*made, "gradient"] if kind == "states of a frozen target" else ["gradient", *made]
    assert seen == [*made, *["gradient", *last, "update"] * (STEPS - 1), "gradient", "gradient", "update"]


@pytest.mark.parametrize("ahead", [True, False])
def test_features_are_asked_for_where_they_look_ahead(ahead: bool, tmp_path: Path) -> None:
    """A target that is cut over processes says that it does not; its rows are made ahead all the same."""
    loop = toy.loop_in(tmp_path, "medusa", given={"medusa": HEADS}, **SMALL)
    features, expected = loop.objective.features, []
    features.looks_ahead, features.start = ahead, expected.append
    seen = events_of(loop)
    assert len(expected) == (2 * STEPS - 1 if ahead else 0)
    assert seen[:6] == [
        "rows",
        "rows",
        "gradient",
        *(("rows", "rows", "gradient") if ahead else ("gradient", "rows", "rows")),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_without(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was stopped, with rows that were made and never used, and went on."""
    method, given = KINDS[kind]

    def state(name: str, stop_at: int | None = None) -> dict[str, bytes]:
        values = {**SMALL, "micro_rows": 8, "validate_every": STEPS}
        if stop_at is not None:
            with pytest.raises(Stopped):
                toy.run(toy.loop_in(tmp_path / name, method, given=given, **values), stop_at=stop_at)
        toy.run(toy.loop_in(tmp_path / name, method, given=given, **values))
        return toy.state_files(tmp_path / name, STEPS)

    ahead, cut = state("ahead"), state("cut", stop_at=2)
    monkeypatch.setattr(Feed, "make_next", lambda *_: None)
    assert ahead == cut == state("as asked for")
