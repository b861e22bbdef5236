"""Any module with a loss of the caller's, as the loop trains it: what `draftsmith.fit` and small families use.

Read next: `loop/objective.py`, what the loop asks of it; `features.py`, the target's states.

Shapes: R rows, S tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...decoding.backbone.hidden_states import LAST
from ...errors import RequestError
from ..loop.feed import upload
from ..loop.objective import Batch, Objective
from ..loop.sharding import standalone
from .features import OnlineFeatures
from .frozen import Save, freeze

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..loop.loop import TrainingRows

Loss = Callable[[Any, Batch, tuple[Tensor, ...]], "Tensor | Mapping[str, Tensor]"]
"""(net, batch, states) -> the loss, summed over the labels of the batch; or sums by name, of which `loss` is
minimised.

`batch` holds `input_ids`, `positions`, `documents` (a number for each document of a row, -1 for padding) and
`loss_mask` (which tokens count as labels), all [R, S]; `states` the target's hidden states [R, S, H], one for each
layer asked for. Every sum is divided by how many labels there are (`loss_mask`), or by the sum that is called
"labels of NAME" where there is one.
"""

_COMPARED_ROWS = 4
"""Rows on which it is looked at whether the loss is a sum."""
_ROUNDING = 1e-3
"""What sums in low precision may differ by, of themselves."""


class _Student(nn.Module):
    """A net and its loss, as one module whose forward pass is the loss."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self._loss = net, loss

    def forward(self, batch: Batch, states: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        found = self._loss(self.net, batch, states)
        sums = dict(found) if isinstance(found, Mapping) else {"loss": found}
        _check_sums(sums, found, learns=torch.is_grad_enabled())
        return sums["loss"], {name: each.detach() for name, each in sums.items()}


def _check_sums(sums: Mapping[str, Any], found: object, *, learns: bool) -> None:
    """Raise RequestError for what a loss may not return."""
    expected = "expected the loss summed over labels, a tensor of one number, or a dict of such tensors with 'loss'"
    if "loss" not in sums:
        raise RequestError(
            f"the loss function returned a dict of {', '.join(map(repr, sums)) or 'nothing'}; {expected}"
        )
    for name, each in sums.items():
        if not isinstance(each, Tensor) or each.ndim:
            shown = f"a tensor of shape {list(each.shape)}" if isinstance(each, Tensor) else f"{each!r:.60}"
            raise RequestError(f"the loss function returned {shown} as {name!r}; {expected}")
    if learns and not sums["loss"].requires_grad:
        raise RequestError(
            f"the loss ({type(found).__name__}) does not depend on any weight of the net that is trained: nothing "
            "would be learnt; compute it from what net(...) returns, without detach() or no_grad()"
        )


def check_adds_up(objective: OwnObjective, rows: TrainingRows) -> None:
    """Raise RequestError for a loss that is a mean, which the loop would divide by the labels once more.

    A sum over rows is what the sums over two halves of them make together; a mean lies between those of the halves.
    Both are asked of the net as it decodes, without what it draws in training.
    """
    few = list(range(min(_COMPARED_ROWS, len(rows))))
    if len(few) < 2:
        return
    module, device = objective.module, next(objective.module.parameters()).device
    was = module.training
    module.eval()
    try:
        parts = [upload(rows.batch(part), device) for part in (few, few[::2], few[1::2])]
        whole, *halves = [module(batch, objective.prepare(batch))[1] for batch in parts]
    finally:
        module.train(was)
    for name in sorted(whole.keys() & halves[0].keys() & halves[1].keys(), key=lambda each: each != "loss"):
        _check_is_sum(name, float(whole[name]), [float(half[name]) for half in halves])


def _check_is_sum(name: str, whole: float, halves: Sequence[float]) -> None:
    """Raise RequestError where a value over all rows is not its halves' sum, and lies between them."""
    together, slack = sum(halves), _ROUNDING * (abs(whole) + sum(map(abs, halves)))
    is_between = min(halves) - slack <= whole <= max(halves) + slack
    if is_between and abs(whole - together) > slack:
        raise RequestError(
            f"the loss function returned {whole:.4g} as {name!r} of {_COMPARED_ROWS} rows, {halves[0]:.4g} of the one "
            f"half of them and {halves[1]:.4g} of the other: that is a mean; expected a sum over the labels, as of "
            'cross_entropy(..., reduction="sum"), which makes the halves add up to the whole. The loop divides it by '
            f'their number ("labels of {name}" in the returned dict, where it is not that of all labels)'
        )


class OwnObjective(Objective):
    """Trains `net` by a loss of the caller's, on the states of a frozen target."""

    def __init__(
        self, net: nn.Module, loss: Loss, target: PreTrainedModel, save: Save, *, layers: Sequence[int] = (LAST,)
    ) -> None:
        """`save`: writes the net into a folder; `layers`: which hidden states of the target the loss is given."""
        super().__init__(_Student(net, loss), features=OnlineFeatures(freeze(target), layers))
        self._net, self._save = net, save

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Tensor, ...]:
        """The target's hidden states; none where no layer is asked for."""
        return self.features(batch) if self.features.layers else ()

    def export(self, folder: Path) -> None:
        """Write the net."""
        self._save(standalone(self._net), folder)

    def draft(self) -> nn.Module:
        """What probes decode with."""
        return self._net
