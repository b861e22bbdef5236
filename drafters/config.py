"""Recipe sections that the drafters read. No torch here."""

from __future__ import annotations

from typing import Literal

from ..config import Section


class DrafterConfig(Section):
    """How a draft model proposes."""

    policy: Literal["sample", "argmax"] = "sample"
    """At temperature > 0: draw from the draft's warped law, or take its argmax (a point mass)."""
