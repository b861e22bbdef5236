"""How often each of a drafter's candidates is the right one: by depth, and by rank at that depth.

The drafter looks along texts that the target wrote, and the token that stands there is found among
its candidates. Of candidates that are chosen without randomness that is their acceptance, at every
temperature that the texts were written at. `decoding/tree/search.py` makes the best tree of it.
Read next: `launch/measure/tree.py`, which writes that tree beside the drafter.

Shapes: S tokens of a text, X positions that have a token at a depth, D depths, R ranks, V vocabulary,
F numbers of the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.kv_cache import KVCache
from ...decoding.proposal import TeacherForced
from ...decoding.tree.search import acceptance_of


@dataclass(frozen=True)
class Text:
    """Tokens that the target wrote behind a prompt."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Ranks:
    """What was counted.

    Attributes:
        hits_DR: how often the candidate of rank r was the token of depth d.
        trials_D: how often depth d came to the test: all tokens above were among the candidates.
    """

    hits_DR: NDArray[np.int64]
    trials_D: NDArray[np.int64]

    @property
    def acceptance(self) -> NDArray[np.float64]:
        """Hits over trials, [D, R]."""
        return acceptance_of(self.hits_DR, self.trials_D)

    @property
    def falling(self) -> NDArray[np.float64]:
        """The same, no rank above the one before it: for siblings that are drawn in order.

        The least-squares fit that falls (isotonic regression): ranks out of order by chance share
        what they have, and a depth keeps its sum.
        """
        rows = [isotonic_regression(row_R, increasing=False).x for row_R in self.acceptance]
        return np.stack(rows)


@torch.inference_mode()
def measure_ranks(target: Backbone, drafter: TeacherForced, texts: Sequence[Text], *, depth: int, ranks: int) -> Ranks:
    """Count over all positions of the answers at which a draft may begin.

    A draft begins behind any token of an answer, its root; depth d is the d-th token behind that.
    Of two equally likely candidates the drafter may take either; here both count as the first.

    Args:
        depth: depths to look at; heads have no more than there are of them.
        ranks: candidates of a depth.
    """
    hits_DR = np.zeros((depth, ranks), dtype=np.int64)
    trials_D = np.zeros(depth, dtype=np.int64)
    drafted = 0
    for text in texts:
        tokens_S = torch.tensor([*text.prompt, *text.answer], device=target.device)
        features_SF = states_along(target, drafter.layers, tokens_S)
        # position t stands for the draft whose root is token t + 1
        alive_X = torch.arange(len(tokens_S), device=target.device) >= len(text.prompt) - 1
        for d, logits_XV in enumerate(drafter.teacher_forced(features_SF, tokens_S, depth)):
            rank_X = _rank(logits_XV, tokens_S[d + 2 :])
            alive_X = alive_X[: len(rank_X)]
            trials_D[d] += int(alive_X.sum())
            alive_X = alive_X & (rank_X < ranks)
            hits_DR[d] += torch.bincount(rank_X[alive_X], minlength=ranks).cpu().numpy()
            drafted = max(drafted, d + 1)
    return Ranks(hits_DR[:drafted], trials_D[:drafted])


def states_along(target: Backbone, layers: Sequence[int], tokens_S: Tensor) -> Tensor:
    """The target's hidden states of some layers along a text, [S, F]."""
    features: list[Tensor] = []
    kv_cache = KVCache(1, len(tokens_S))
    target.prefill([tokens_S.tolist()], kv_cache, layers=layers, features=features)
    return features[0]


def _rank(logits_XV: Tensor, token_X: Tensor) -> Tensor:
    """How many candidates are likelier than the right one, int64 [X]."""
    own_X1 = logits_XV.gather(1, token_X[:, None])
    return (logits_XV > own_X1).sum(1)
