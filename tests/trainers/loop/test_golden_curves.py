"""Curves of short runs stay those that are kept in `tests/helpers/runs/golden_curves.json`, compiled or not.

The tolerance has room for the sums of other processors and versions, which a few steps carry on; what a planted change
does to a curve is far beyond it. Read next: `tests/helpers/runs/golden_curves.py`, which writes the file anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.trainers.losses.chunked import ChunkedLoss
from draftsmith.trainers.methods import METHODS
from helpers.runs.golden_curves import METHODS as KEPT
from helpers.runs.golden_curves import curve, kept

TOLERANCE = 2e-2
"""Of a loss, relatively; from the kept curve."""
ROUNDING = 1e-4
"""Of a compiled run from the same one without, on the same machine."""


def far(found: list[float], wanted: list[float]) -> float:
    assert len(found) == len(wanted) > 10
    return max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("method", KEPT)
def test_a_run_has_the_kept_curve(method: str, tmp_path: Path) -> None:
    # NaN stands in all memory that nobody has written yet: what reads it is seen
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert far(curve(tmp_path, method), kept(method)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", [each for each in KEPT if METHODS[each].compiles])
def test_a_compiled_run_has_it_too(method: str, tmp_path: Path) -> None:
    """By torch's own compiler; as near to the run without as rounding lets it be."""
    torch._dynamo.reset()
    mine = curve(tmp_path / "mine", method, compile=True)
    assert far(mine, kept(method)) < TOLERANCE
    assert far(mine, curve(tmp_path / "plain", method)) < ROUNDING


PLANTED = [pytest.param(each, marks=[] if each == "distill" else pytest.mark.slow, id=each) for each in KEPT]


@pytest.mark.parametrize("method", PLANTED)
def test_another_learning_rate_would_be_seen(method: str, tmp_path: Path) -> None:
    assert far(curve(tmp_path, method, faster=1.5), kept(method)) > 2 * TOLERANCE


@pytest.mark.parametrize("method", PLANTED)
def test_states_beside_their_labels_would_be_seen(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compared with what its neighbour stands for."""
    whole = ChunkedLoss.forward

    def shifted(self: Any, hidden_PH: torch.Tensor, *given: Any, **more: Any) -> Any:
        return whole(self, hidden_PH.roll(1, 0), *given, **more)

    monkeypatch.setattr(ChunkedLoss, "forward", shifted)
    assert far(curve(tmp_path, method), kept(method)) > 2 * TOLERANCE
