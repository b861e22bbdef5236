"""What this machine's processor can do: it decides which kernel is the fastest.

Nothing here reads a clock, so equal runs on one machine choose the same kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch

Kind = Literal["amx", "avx512", "narrower"]
"""Classes of CPUs by which small fp32 products differ: Intel's with AMX (whose tiles such products do not use), others
with AVX-512, and those with narrower registers."""


def kind() -> Kind:
    """The kind of this machine's processor; `avx512` where torch does not say."""
    found = _capabilities()
    if found.get("amx_tile"):
        return "amx"
    return "avx512" if found.get("avx512_f", True) else "narrower"


def multiplies_bf16() -> bool:
    """Whether there are instructions for bf16 products; without them torch computes these far slower than in fp32."""
    found = _capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


@cache
def _capabilities() -> dict[str, Any]:
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found
