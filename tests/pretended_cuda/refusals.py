"""What CUDA refuses: tensors of two devices in one operation, and random numbers of another device's generator.

A tensor of no dimensions may lie on the CPU where an operation is pointwise, and beside indices of another tensor's
places; indices may lie on the CPU, and are copied, which is a wait (`waits.py`).
"""

from __future__ import annotations

import torch
from pretended_cuda.call import COPIES, Call
from pretended_cuda.tensor import OnCuda

_FILLS = ("fill", "masked_fill", "index_fill")
MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


def refuse(call: Call) -> None:
    """Raise where CUDA would."""
    generator = call.kwargs.get("generator")
    if call.to_cuda and generator is not None and generator.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({call.func})")
    if not call.on_cuda or not call.on_cpu or call.name in COPIES:
        return
    if call.indexes:
        _refuse_indices(call)
    elif not _takes_numbers_of_the_cpu(call):
        where = [f"{'cuda' if isinstance(each, OnCuda) else 'cpu'} {[*each.shape]}" for each in call.tensors]
        raise RuntimeError(f"{MIXED} ({call.func}: {', '.join(where)})")


def _refuse_indices(call: Call) -> None:
    if not isinstance(call.args[0], OnCuda):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({call.func})"
        )
    for values in call.args[2:]:
        if isinstance(values, torch.Tensor) and not isinstance(values, OnCuda) and values.dim():
            raise RuntimeError(f"{MIXED} ({call.func}: values {[*values.shape]} on cpu)")


def _takes_numbers_of_the_cpu(call: Call) -> bool:
    """Whether each tensor of the CPU is a single number for an operation that reads it by the way."""
    written = [call.kwargs["out"]] if "out" in call.kwargs else call.args[:1] if call.name.endswith("_") else []
    plain = call.name.removesuffix("_")
    pointwise = torch.Tag.pointwise in call.func.tags or plain in _FILLS or plain.startswith("_foreach_")
    return (
        pointwise
        and all(each.dim() == 0 for each in call.on_cpu)
        and all(isinstance(each, OnCuda) for each in written if isinstance(each, torch.Tensor))
    )
