"""Where a drafter drafts with its own tokens in a step, and the random numbers that it draws them with.

A share of a step's rows is not learnt from as it stands: behind some places of each the drafter drafts as it will
while decoding, and learns along its own tokens. Which rows and places, and every random number, follow from the
step's seed and a row's index in the step alone, so that a resumed run, other micro-batches and other processes draft
the same; the host works it out. Read next: `objective.py`, what is learnt there.

A place is a pair: the state of a token t and the token t + 1, the root, which is known; drafts speak of t + 2 and on.

Shapes: R rows, S tokens of a row, A places of a row, X places of all rows, J drafts behind one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ...decoding.on_host import all_on_host, on_host, sent
from ...drafters.families import FAMILIES
from ...errors import RequestError
from ..config import MASKED
from ..labels import has_label
from ..loop.objective import Batch
from ..loop.order import scores
from ..method_config import RolloutsConfig
from ..recipe import TrainingRecipe
from ..teacher.rollouts import check_share, replaced_of

AT, UNIFORM = "drafted_at", "draft_uniforms"
"""Of a batch: int64 [R, A], the tokens t of the places, -1 where a row has fewer; and fp32 [R, A, J] in [0, 1)."""


class Places(NamedTuple):
    """The places of some rows."""

    at_RA: Tensor
    """int64; a token of the row where there is no place."""
    row_X: Tensor
    """int64, of the places that there are."""
    number_X: Tensor
    """int64: of each, which of its row's it is."""

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Those of a batch that `DraftPlaces` has rewritten."""
        known_RA = on_host(batch[AT])
        row_X, number_X = (sent(each, batch[AT].device) for each in (known_RA >= 0).nonzero(as_tuple=True))
        return cls(batch[AT].clamp_min(0), row_X, number_X)

    @property
    def at_X(self) -> Tensor:
        """int64: the token t of each."""
        return self.at_RA[self.row_X, self.number_X]


class DraftPlaces:
    """Chooses rows and places of every step: a `RowWriter` that leaves the text as it is, and keeps nothing."""

    kept: Batch | None = None
    """Nothing: the next step's places follow from its seed."""

    def __init__(self, config: RolloutsConfig, drafts: int, batch_rows: int, ends: Sequence[int] = ()) -> None:
        """Nothing is chosen yet.

        Args:
            drafts: how many are drafted behind a place.
            batch_rows: of a step.
            ends: tokens that end a text, behind which nothing is drafted.
        """
        self._config, self._drafts, self._batch_rows = config, drafts, batch_rows
        self._ends = torch.tensor([*ends], dtype=torch.long)

    def rewrite(self, batches: Sequence[Batch], indices: Sequence[int], _step: int, seed: int) -> list[Batch]:
        """The micro-batches of a step with `AT` and `UNIFORM`."""
        drafted_for = self._rows(seed)
        sizes = [len(each["input_ids"]) for each in batches]
        starts = np.cumsum([0, *sizes])
        return [
            batch | self._chosen(batch, indices[start : start + size], seed, drafted_for)
            for batch, start, size in zip(batches, starts, sizes, strict=False)
        ]

    def _rows(self, seed: int) -> set[int]:
        """The rows of a step that are drafted for, drawn anew for each: evenly spaced ones may be of one process."""
        order = scores(f"{seed}/rows", self._batch_rows).argsort()
        return {int(row) for row in order[: replaced_of(self._batch_rows, self._config.share)]}

    def of_all(self, parts: Sequence[Batch]) -> Batch:  # noqa: ARG002
        """Nothing is kept."""
        return {}

    def recall(self, rows: Batch, rank: int, world: int) -> None:
        """Nothing was kept."""

    def _chosen(self, batch: Batch, indices: Sequence[int], seed: int, drafted_for: set[int]) -> Batch:
        (R, S), J = batch["input_ids"].shape, self._drafts
        known = all_on_host(batch)
        can_RX = has_label(known, 2) & ~torch.isin(known["input_ids"][:, 1:-1], self._ends)
        places: dict[int, Tensor] = {}
        for r, index in enumerate(indices):
            if index in drafted_for:
                can_X = can_RX[r].nonzero()[:, 0]
                order = torch.from_numpy(scores(f"{seed}/{index}/places", S))[can_X].argsort()
                places[r] = can_X[order[: self._config.places]].sort().values
        A = max((len(chosen) for chosen in places.values()), default=0)  # as many as there are, not as are asked for
        at_RA, uniform_RAJ = torch.full((R, A), -1), torch.zeros(R, A, J)
        for r, chosen in places.items():
            at_RA[r, : len(chosen)] = chosen
            drawn = scores(f"{seed}/{indices[r]}/drafts", A * J)
            uniform_RAJ[r] = torch.from_numpy(drawn).view(A, J).float().clamp_max(1 - 2**-24)
        device = batch["input_ids"].device
        return {AT: sent(at_RA, device), UNIFORM: sent(uniform_RAJ, device)}


def check_own_drafts(recipe: TrainingRecipe) -> None:
    """Raise RequestError for a recipe that asks for the drafter's own drafts where they cannot be made or learnt."""
    config, rows = recipe.rollouts, recipe.data.sequence_length
    if not config.share:
        return
    check_share(config, recipe.loop.batch_rows)
    asked = f"rollouts.share is {config.share:g}"
    if recipe.record.drafts_trained(recipe) < 2:
        counted = recipe.record.unrolled or "what is drafted"
        raise RequestError(
            f"{asked}, and one draft behind a place is trained ({counted}): none has another in front of it; train "
            "more of them, or set rollouts.share to 0"
        )
    if recipe.loop.compile:
        raise RequestError(
            f"{asked} and loop.compile is on: how many places are drafted behind differs from batch to batch; leave "
            "one of them out"
        )
    if recipe.loop.context_parallel > 1:
        raise RequestError(
            f"{asked} and loop.context_parallel is {recipe.loop.context_parallel}: the target reads drafts behind "
            "whole rows; leave one of them out"
        )
    if rows > MASKED:
        raise RequestError(
            f"{asked}, and rows have {rows:,} tokens: the target reads drafts by a mask, which is made for rows of at "
            f"most {MASKED:,}; lower data.sequence_length, or set rollouts.share to 0"
        )
    if recipe.features.source != "online":
        raise RequestError(
            f"{asked} and features.source is {recipe.features.source}: the target has to read what is drafted, in "
            "this process; set features.source to online"
        )
    if recipe.target.sharding != "none" or recipe.target.tensor_parallel > 1:
        raise RequestError(
            f"{asked}, and the target is cut over processes, whose drafts are not equally many; set target.sharding "
            "to none and target.tensor_parallel to 1"
        )
    own = {
        "objective.siblings": recipe.objective.siblings > 1,
        "block.weigh": recipe.block.weigh == "blocks" and recipe.record.reads_value("block.weigh", recipe),
    }
    for name in (name for name, is_set in own.items() if is_set):
        raise RequestError(
            f"{asked}, and {name} weighs the drafts of a text otherwise than own drafts, which count as often as "
            "decoding gets to them, one chain behind a place; leave one of them out"
        )
    if learns_length(recipe) and (why := _no_length(recipe)):
        raise RequestError(
            f"{asked}, and objective.tv with objective.positions {recipe.objective.positions} learns how likely each "
            f"drawn token is kept; {why}"
        )


def learns_length(recipe: TrainingRecipe) -> bool:
    """Whether the loss has the gradient of the accepted length through every factor."""
    return recipe.objective.positions in ("accepted", "on-policy") and recipe.objective.tv > 0


def _no_length(recipe: TrainingRecipe) -> str:
    """Why it cannot be learnt along own drafts, and what to do; empty where it can."""
    family = recipe.record.family
    if family is not None and not FAMILIES[family].samples:
        return f"method {recipe.method} draws none, it drafts the likeliest: set objective.positions to geometric"
    if recipe.rollouts.temperature != 1:
        return f"set rollouts.temperature, which is {recipe.rollouts.temperature:g}, to 1"
    if recipe.objective.ce:
        return "objective.ce would have the drafted token for its label: set it to 0"
    return ""
