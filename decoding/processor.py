"""What this machine's processor can do, as far as it decides which kernel is the fastest.

Nothing here reads a clock, so that equal runs on one machine choose alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch

Kind = Literal["amx", "avx512", "narrower"]
"""As products of fp32 with few rows differ: Intel's processors that have tiles, which such products do not use; others
with registers of 512 bits; those with narrower ones."""


def kind() -> Kind:
    """The kind of this machine's processor; `avx512` where torch does not say."""
    found = _capabilities()
    if found.get("amx_tile"):
        return "amx"
    return "avx512" if found.get("avx512_f", True) else "narrower"


def multiplies_bf16() -> bool:
    """Whether there are instructions for products of bf16; elsewhere torch makes them too, far slower than of fp32."""
    found = _capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


@cache
def _capabilities() -> dict[str, Any]:
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found
