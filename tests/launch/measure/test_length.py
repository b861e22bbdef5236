"""That a drafter drafts another number of tokens than was asked for is told, where it was asked for."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.drafters.tuned_file import Tuned
from draftsmith.launch.measure.loaded import say_length, say_no_sweep
from draftsmith.launch.recipe.load import load_recipe
from rich.console import Console


@pytest.mark.parametrize(
    ("asked", "typed", "tuned", "drafts", "said"),
    [
        (10, True, {}, 4, "eval.draft_length is 10, and the drafter drafts 4 a call, all that it can"),
        (10, False, {}, 4, "eval.draft_length is 10, and the drafter drafts 4 a call, all that it can"),
        (2, True, {}, 4, "eval.draft_length is 2, and the drafter drafts 4 a call, as deep as its tree is"),
        (4, True, {}, 3, "eval.draft_length is 4, and the drafter drafts 3 a call, all that it can"),
        (4, False, {}, 3, ""),
        (8, False, {"eval.draft_length": "8"}, 4, ""),
        (3, True, {}, 3, ""),
    ],
)
def test_the_length_is_told(asked: int, typed: bool, tuned: dict[str, str], drafts: int, said: str) -> None:
    flags = [("eval.draft_length", str(asked))]
    pair: Any = SimpleNamespace(
        recipe=load_recipe("dflash-tiny", flags).recipe, drafters={"trained": SimpleNamespace(draft_length=drafts)}
    )
    named: Any = SimpleNamespace(tuned=Tuned(tuned))
    told = io.StringIO()
    say_length(named, pair, flags if typed else [], Console(file=told, width=20))
    assert told.getvalue().strip() == said


@pytest.mark.parametrize(
    ("flag", "sweeps", "said"),
    [
        ("[2, 9]", False, "eval.sweep is [2, 9], and dflash is decoded with one length"),
        ("[2, 9]", True, ""),
        ("[]", False, ""),
        (None, False, ""),
    ],
)
def test_a_sweep_that_is_not_decoded_is_told(flag: str | None, sweeps: bool, said: str) -> None:
    flags = [] if flag is None else [("eval.sweep", flag)]
    arm: Any = SimpleNamespace(name="dflash", sweeps=sweeps)
    told = io.StringIO()
    say_no_sweep(arm, load_recipe("dflash-tiny", flags).recipe.eval, flags, Console(file=told, width=20))
    assert told.getvalue().startswith(said)
    assert bool(told.getvalue()) == bool(said)
