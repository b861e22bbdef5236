"""Drawing the children of a node: independently, or one after another without replacement.

What is drawn here is judged by `acceptance.accept_tree` under the distribution declared with it.
Read next: `proposal.py`.

Shapes: B rows, C children, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling import draw


def draw_siblings(probs_BV: Tensor, uniform_BC: Tensor, *, replace: bool) -> tuple[Tensor, Tensor]:
    """Children of one node per row, in the order in which they were drawn.

    Without replacement a row may have fewer than C tokens of positive probability. The missing ones are marked as
    absent; no token is drawn with probability zero.

    Args:
        probs_BV: q, fp32, warped; the distribution to be declared for the node.
        uniform_BC: fresh numbers in [0, 1), one per child.
        replace: whether siblings may be the same token twice.

    Returns:
        tokens int64 [B, C], and whether each is there, bool [B, C].
    """
    tokens, present = [], []
    for child in range(uniform_BC.shape[1]):
        present.append(probs_BV.sum(-1) > 0)
        tokens.append(draw(probs_BV, uniform_BC[:, child]))
        if not replace:
            probs_BV = probs_BV.scatter(1, tokens[-1][:, None], 0.0)
    return torch.stack(tokens, 1), torch.stack(present, 1)
