"""Hooks of an objective: a default that does nothing, a refusal by name, and no misspelt one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.drafters.layers.row_split import RowSplit
from draftsmith.errors import RequestError
from draftsmith.trainers.loop.objective import Batch, Objective
from helpers.models.method_objectives import OBJECTIVES
from torch import nn


class Plain(Objective):
    """Nothing but what it has to have."""

    def prepare(self, _batch: Batch) -> None:
        """No target."""

    def export(self, folder: Path) -> None:
        """Nothing to write."""

    def draft(self) -> None:
        """No drafter."""


@pytest.mark.parametrize("kind", ["method", "property", "class method"])
def test_a_misspelt_hook_is_refused_where_the_class_is_made(kind: str) -> None:
    def begin_stepp(_self: Any, _step: int = 0, _seed: int = 0) -> None:
        """Never called."""

    made = {"method": begin_stepp, "property": property(begin_stepp), "class method": classmethod(begin_stepp)}[kind]
    with pytest.raises(TypeError, match=r"Mine\.begin_stepp is no hook .* are begin_step, .*split_rows"):
        type("Mine", (Plain,), {"begin_stepp": made})
    with pytest.raises(TypeError, match=r"Mine\.begin_stepp"):  # of a method that builds on another one's too
        type("Mine", (OBJECTIVES["eagle3"],), {"begin_stepp": made})
    type("Mine", (Plain,), {"_begin_stepp": made, "begin_step": begin_stepp})


def test_a_hook_that_is_not_written_does_nothing_or_refuses_by_name() -> None:
    goal = Plain(nn.Linear(1, 1))
    goal.set_steps(3)
    goal.begin_step(0, 1)
    assert (goal.features, goal.rollouts) == (None, None)
    with pytest.raises(
        RequestError, match=r"context_parallel is 2, .*whole rows alone; methods eagle, eagle3, mtp can"
    ):
        goal.split_rows(RowSplit(0, 2))


def test_what_every_method_has_to_have_is_asked_for() -> None:
    with pytest.raises(TypeError, match="abstract method.* draft"):
        type("Mine", (Objective,), {"prepare": Plain.prepare, "export": Plain.export})(torch.nn.Identity())
