"""A draft's own context: behind it nothing is drafted, while the target goes on.

A draft that was made for shorter texts than its target has no positions behind them (learnt ones), or positions that
it never saw (rotary ones). So a row drafts up to its draft's context and not behind it, whatever runs in its batch.
Rows that are there are computed at the last positions that the draft has, and what comes of it is absent from the
proposal. Read next: `draft_model.py`, `ensemble.py`; `../vocabulary/translated_rows.py`, of drafts that count other
tokens than the target.

Shapes: B rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...errors import RequestError

_log = logging.getLogger(__name__)
_SAID: set[tuple[str, int]] = set()


class Limit:
    """How far a draft may read texts that begin with `prompts` and have room for `room` tokens more."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], room: int, *, least: int) -> None:
        """`room`: as of `Proposer.reset`; `least`: positions that a single draft takes.

        Raises:
            RequestError: the draft has not even those.
        """
        self.context, most = backbone.context, max(map(len, prompts)) + room - 1
        self.reached = most > self.context
        """Whether a text may come near enough that a draft of it would end behind the context."""
        # recurrent layers know no positions, and their states follow the text alone
        self._positions = self.reached and not backbone.is_recurrent
        if self.reached and self.context < least:
            raise RequestError(
                f"the draft {backbone.name} reads texts of {self.context} tokens{backbone.context_reason}, and a "
                f"single draft takes {least} positions; take a draft with a longer context, or draft fewer tokens"
            )
        if self.reached:
            say_limit(backbone.name, self.context, f"a prompt with its answer and drafts may take {most}")

    def read(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The prompts as far as the draft reads them."""
        return [prompt[: self.context] for prompt in prompts] if self._positions else prompts

    def inside(self, start_B: Tensor, count: int) -> Tensor:
        """Where `count` tokens of every row begin; of rows behind the context, so that they end with it."""
        return start_B.clamp(max=self.context - count).clamp_min(0) if self._positions else start_B

    def fewer(self, wanted_B: Tensor | None, lengths_B: Tensor) -> Tensor | None:
        """How many tokens every row may draft behind its last one, of those wanted; None: all.

        Args:
            lengths_B: tokens in front of the last one.
        """
        if not self.reached:
            return wanted_B
        room_B = (self.context - lengths_B).clamp_min(0)
        return room_B if wanted_B is None else wanted_B.minimum(room_B)


def say_limit(name: str, context: int, longer: str) -> None:
    """Say that texts are longer than the draft reads, once for a draft."""
    if (name, context) in _SAID:
        return
    _SAID.add((name, context))
    _log.warning(
        "the draft %s reads texts of up to %d tokens, and %s: behind its %d nothing is drafted, and such steps count "
        "as steps without drafts",
        name,
        context,
        longer,
        context,
    )
