"""What this machine's processor can do, as far as it decides which kernel is the fastest.

Nothing here reads a clock, so that equal runs on one machine choose alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def has_avx512() -> bool:
    """Whether there are registers of 512 bits; yes where torch does not say."""
    return bool(_capabilities().get("avx512_f", True))


def multiplies_bf16() -> bool:
    """Whether there are instructions for products of bf16; elsewhere torch makes them too, far slower than of fp32."""
    found = _capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


@cache
def _capabilities() -> dict[str, Any]:
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found
