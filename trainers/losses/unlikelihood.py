"""Cross-entropy on what a text says, unlikelihood on what a model should not have said.

Welleck et al. 2020, "Neural Text Generation with Unlikelihood Training" (arXiv 1908.04319), equation 6: tokens that
stand in a repetition of the model's own continuation are made less likely, by -log(1 - q(token)). Read next:
`trainers/teacher/loops.py`, which finds them.

Shapes: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mix import cross_entropy


def to_avoid(label_P: Tensor) -> Tensor:
    """Labels that `cross_entropy_or_unlikelihood` makes less likely: -1 - id, so that id 0 can be one."""
    return ~label_P


def cross_entropy_or_unlikelihood(logits_CV: Tensor, _target: Tensor | None, label_C: Tensor) -> dict[str, Tensor]:
    """-log q(label) in nats, and -log(1 - q(label)) where a label is one `to_avoid`.

    Both are reported as well, each zero where it is not meant.
    """
    avoid_C = label_C < 0
    id_C = torch.where(avoid_C, to_avoid(label_C), label_C)
    ce_C = cross_entropy(logits_CV, id_C).masked_fill(avoid_C, 0.0)
    # 1 - q as the sum of the others: finite, with a gradient, where q rounds to 1
    others_CV = logits_CV.scatter(-1, id_C[:, None], -torch.inf)
    log_rest_C = others_CV.logsumexp(-1) - logits_CV.logsumexp(-1)
    unlikelihood_C = (-log_rest_C).masked_fill(~avoid_C, 0.0)
    return {"loss": ce_C + unlikelihood_C, "ce": ce_C.detach(), "unlikelihood": unlikelihood_C.detach()}
