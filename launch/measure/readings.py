"""`draftsmith inspect-drafter`: which reading of a published drafter acceptance supports.

Every reading is written as a drafter folder of ours and decoded at temperature 0, prompt by prompt; the same prompts
for all, so that differences are of pairs. Read next: `drafters/published/readings.py`, the readings.

Shapes: P prompts.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.prompts import load_prompts, render
from ...decoding.backbone.loading import load_target
from ...decoding.engine import generate
from ...decoding.sampling import Warper
from ...drafters.published.readings import Reading
from ...drafters.registry import load_drafter
from ..convert import need_published, readings_for, save_as_read

if TYPE_CHECKING:
    from rich.console import Console

    from ...decoding.backbone.backbone import Backbone
    from ..requests import InspectDrafterRequest

_LEAST = 0.05
"""Accepted drafts a call below which a drafter drafts nothing."""
_ERRORS = 2.0
"""Standard errors by which the best reading has to be ahead of each other one."""


def run_inspect_drafter(request: InspectDrafterRequest, folder: Path, console: Console) -> str:
    """Decode under every reading; prints the table, returns what it says.

    Raises:
        RequestError: the folder is in no form that is read, or was made for another target.
    """
    found = need_published(folder, request.target)
    target = load_target(request.target, revision=request.revision, trust_remote_code=request.trust_remote_code)
    readings = readings_for(found, target)
    prompts = load_prompts(request.prompts, limit=request.limit)
    tokens = [render(each, target.tokenizer, limit=request.prompt_tokens) for each in prompts]
    drafter: Any = load_drafter(folder, target)
    rates = []
    for each in readings:
        with tempfile.TemporaryDirectory() as place:
            save_as_read(found, each, drafter.module, Path(place), target)
            rates.append(_rates(Path(place), target, tokens, request.max_new_tokens))
    rows = [("reading", "accepted/call", "whose")]
    rows += [(each.what, _shown(rate), each.source) for each, rate in zip(readings, rates, strict=True)]
    for row in rows:
        console.print("{:34} {:>14}  {}".format(*row), markup=False, soft_wrap=True)
    return verdict(readings, rates)


def _rates(folder: Path, target: Backbone, prompts: Sequence[list[int]], longest: int) -> np.ndarray[Any, Any]:
    """Accepted drafts per target call, of every prompt, [P]."""
    drafter, made = load_drafter(folder, target), []
    for tokens in prompts:
        out = generate(
            target, drafter, [tokens], warper=Warper(0.0), max_new_tokens=longest, eos_ids=sorted(target.eos_ids)
        )
        made.append(out.origin[0].count("draft") / max(out.target_calls, 1))
    return np.array(made)


def verdict(readings: Sequence[Reading], rates: Sequence[np.ndarray[Any, Any]]) -> str:
    """Which reading is ahead of all others by more than chance makes it, in a sentence."""
    best = max(range(len(rates)), key=lambda at: float(rates[at].mean()))
    if rates[best].mean() < _LEAST:
        return (
            "acceptance supports no reading: none drafts what the target writes; the drafter is of another target, or "
            "its form means something else than any of these"
        )
    unsure = [other.what for at, other in enumerate(readings) if at != best and not _is_ahead(rates[best] - rates[at])]
    if unsure:
        return f"acceptance does not tell {readings[best].what} from {', '.join(unsure)}: measure on more --limit"
    if best == 0:
        return "acceptance supports the drafter as it is read here"
    found = readings[best]
    changes = ", ".join(f"{name} {value}" for name, value in found.changes.items())
    return (
        f"acceptance supports another reading: {found.what} ({found.source}){changes and ', with '}{changes}. Write "
        f"it as our folder so: convert-drafter --reading {shlex.quote(found.what)}"
    )


def _is_ahead(difference_P: np.ndarray[Any, Any]) -> bool:
    if len(difference_P) < 2:
        return False
    error = difference_P.std(ddof=1) / len(difference_P) ** 0.5
    return bool(difference_P.mean() > _ERRORS * error)


def _shown(rate_P: np.ndarray[Any, Any]) -> str:
    error = rate_P.std(ddof=1) / len(rate_P) ** 0.5 if len(rate_P) > 1 else float("nan")
    return f"{rate_P.mean():.2f} +- {error:.2f}"
