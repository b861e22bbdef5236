"""How hidden states are kept on disk: as they are, in bf16, or in fp8 with a scale per token.

e4m3 holds 3 bits behind the point: a value comes back within 1/16 of itself, or within
scale / 1024 where it is smaller than scale / 64 (subnormal); the scale of a token in a layer is
its largest value / 448, so that nothing overflows (Micikevicius et al. 2022, arXiv 2209.05433).
Read next: `features/store.py`, where the shards lie.

Shapes: N hidden states of a row, S tokens, H hidden size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FeatureDtype = Literal["fp32", "bf16", "fp8"]
Encoded = dict[str, Tensor]
"""`states` [N, S, H] and, for fp8 alone, `scales` fp32 [N, S]."""

_LARGEST = 448.0  # of e4m3
_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
_STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}


def token_bytes(layers: int, hidden: int, dtype: FeatureDtype) -> int:
    """Bytes of one token in `layers` hidden states."""
    return layers * (hidden * _BYTES[dtype] + (4 if dtype == "fp8" else 0))


def encode(states_NSH: Tensor, dtype: FeatureDtype) -> Encoded:
    """What is stored for one row, on the device that the states are on."""
    if dtype != "fp8":
        return {"states": states_NSH.to(_STORED[dtype])}
    wide_NSH = states_NSH.float()
    largest_NS = wide_NSH.abs().amax(-1)
    # a token of zeros has no scale; any will do
    scales_NS = torch.where(largest_NS > 0, largest_NS / _LARGEST, torch.ones_like(largest_NS))
    return {"states": (wide_NSH / scales_NS[..., None]).to(torch.float8_e4m3fn), "scales": scales_NS}


def decode(stored: Encoded, dtype: torch.dtype) -> Tensor:
    """The states [N, S, H] in `dtype`, the same bits whenever and wherever they are decoded."""
    if "scales" not in stored:
        return stored["states"].to(dtype)
    return (stored["states"].float() * stored["scales"][..., None]).to(dtype)
