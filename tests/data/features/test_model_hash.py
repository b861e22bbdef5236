"""A model's hash holds what its weights are read as."""

from __future__ import annotations

import torch
from draftsmith.data.features.model_hash import weights_hash
from torch import nn


def test_the_same_bits_of_another_type_are_other_weights() -> None:
    bf16, fp16 = nn.Linear(4, 3, dtype=torch.bfloat16), nn.Linear(4, 3, dtype=torch.float16)
    for one, other in zip(bf16.parameters(), fp16.parameters(), strict=True):
        other.data.copy_(one.data.view(torch.float16))
    assert weights_hash(bf16) != weights_hash(fp16)
    assert weights_hash(bf16) == weights_hash(bf16)
