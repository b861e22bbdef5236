"""What every speculative step tested, accepted and emitted: the raw material of all measures.

Read next: `eval/measure/metrics.py`, which turns it into the measures of the design.

Shapes: T steps, B rows, D depths.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .rules.acceptance import Outcome

PREFILL, DRAFT, CORRECTION, BONUS = "prefill", "draft", "correction", "bonus"
"""Where an emitted token comes from."""


class StepLog:
    """Per step and row, kept on the device until it is asked for."""

    def __init__(self, rows: int, depth: int, limit: int) -> None:
        """`depth`: drafted tokens that a step can accept at most; `limit`: tokens of an answer."""
        self.replayed = False
        """Whether a replayed step writes its next outcome to the same place."""
        self.rows, self.depth, self.limit = rows, depth, limit
        self._accepted: list[Tensor] = []
        self._tested: list[Tensor] = []
        self._alpha: list[Tensor] = []
        self._kept: list[Tensor] = []

    def add(self, outcome: Outcome, kept_B: Tensor) -> None:
        """Record a step; `kept_B` counts its tokens up to EOS and the limit, 0 for a row that had ended."""
        recorded = (
            (self._accepted, outcome.accepted_B),
            (self._tested, outcome.tested_BD),
            (self._alpha, outcome.alpha_hat_BD),
            (self._kept, kept_B),
        )
        for steps, of_this_one in recorded:
            steps.append(of_this_one.clone() if self.replayed else of_this_one)

    def cut(self, steps: int) -> StepLog:
        """Keep only the first `steps`: a host that sees one step late that all rows have ended runs one more."""
        for parts in (self._accepted, self._tested, self._alpha, self._kept):
            del parts[steps:]
        return self

    def origins(self) -> list[list[str]]:
        """Where each emitted token comes from, row by row; a correction follows a rejection, a bonus a whole path."""
        if not len(self):
            return [[PREFILL] for _ in range(self.rows)]
        accepted_TB, kept_TB = self.accepted_TB, self.kept_TB
        tested_TB = self._deep(self._tested, np.bool_).sum(-1)
        last_TB = np.where(tested_TB > accepted_TB, CORRECTION, BONUS)
        return [[PREFILL, *self._origins_of(*row)] for row in zip(accepted_TB.T, kept_TB.T, last_TB.T, strict=True)]

    @staticmethod
    def _origins_of(accepted_T: NDArray, kept_T: NDArray, last_T: NDArray) -> Iterator[str]:
        for accepted, kept, last in zip(accepted_T.tolist(), kept_T.tolist(), last_T.tolist(), strict=True):
            yield from [DRAFT] * min(accepted, kept)
            if kept > accepted:
                yield last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def running_TB(self) -> NDArray[np.bool_]:
        """Whether the row took part in the step; everything else counts only where it did."""
        return self.kept_TB > 0  # a row that runs emits at least one token

    @property
    def accepted_TB(self) -> NDArray[np.int64]:
        """Drafted tokens accepted, before EOS and the limit cut anything."""
        return self._stacked(self._accepted, (self.rows,), np.int64)

    @property
    def kept_TB(self) -> NDArray[np.int64]:
        """Tokens emitted by the step, after EOS and the limit."""
        return self._stacked(self._kept, (self.rows,), np.int64)

    @property
    def truncated_TB(self) -> NDArray[np.bool_]:
        """Steps that EOS or the limit cut short."""
        return self.running_TB & (self.kept_TB < self.accepted_TB + 1)

    @property
    def counted_TB(self) -> NDArray[np.bool_]:
        """Steps that the measures count: those that the limit cannot cut, whatever they accept.

        A step counts by where it begins: at least `depth` + 1 tokens before the limit. Chosen by
        what they accepted, short steps would be preferred (Wald's identity needs a choice that
        does not look at the step). docs/evaluation.md says why a step that meets EOS counts.
        """
        kept_TB = self.kept_TB
        # the first token of an answer comes from the prefill
        begun_TB = 1 + kept_TB.cumsum(0) - kept_TB
        return self.running_TB & (begun_TB + self.depth + 1 <= self.limit)

    @property
    def tested_TBD(self) -> NDArray[np.bool_]:
        """Depths whose candidate was put to the test and belongs to the answer, EOS included."""
        return self._deep(self._tested, np.bool_) & self._before_the_end_TBD

    @property
    def passed_TBD(self) -> NDArray[np.bool_]:
        """Depths whose candidate was accepted and belongs to the answer."""
        return (np.arange(self.depth) < self.accepted_TB[..., None]) & self._before_the_end_TBD

    @property
    def _before_the_end_TBD(self) -> NDArray[np.bool_]:
        """Depths whose token is not after EOS or the limit."""
        return np.arange(self.depth) < self.kept_TB[..., None]

    @property
    def alpha_hat_TBD(self) -> NDArray[np.float32]:
        """Chance of acceptance at each tested depth, given the two distributions there."""
        return self._deep(self._alpha, np.float32)

    def _deep(self, parts: list[Tensor], dtype: type) -> NDArray:
        """Fill up steps that drafted less than others to the common depth."""
        missing = [self.depth - x_BD.shape[1] for x_BD in parts]
        full = [torch.nn.functional.pad(x_BD, (0, more)) if more else x_BD for x_BD, more in zip(parts, missing)]
        return self._stacked(full, (self.rows, self.depth), dtype)

    def _stacked(self, parts: list[Tensor], shape: tuple[int, ...], dtype: type) -> NDArray:
        if not parts:
            return np.zeros((0, *shape), dtype=dtype)
        return torch.stack(parts).cpu().numpy().astype(dtype)
