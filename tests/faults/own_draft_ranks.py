"""A run that learns along its own drafts, in one process or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.trainers.method_config import BlockConfig, Eagle3Config, MedusaConfig, MtpConfig, PeagleConfig
from faults import toy

DRAFTING = {"rollouts": {"share": 0.5, "places": 3}, "data": {"sequence_length": 32}}
CASES: dict[str, dict[str, Any]] = {
    "eagle3": {"eagle3": Eagle3Config(passes=3)},
    "mtp": {"mtp": MtpConfig(passes=2)},
    "dspark": {"block": BlockConfig(size=3, decoder_layers=1, anchors=5)},
    "peagle": {"peagle": PeagleConfig(depths=3)},
    "hydra": {"medusa": MedusaConfig(heads=2)},
}


def run(out: Path, method: str, stop_at: int | None = None) -> Any:
    """Run or resume; returns the loop."""
    loop = toy.loop_in(out, method, given=CASES[method] | DRAFTING, micro_rows=2)
    toy.run(loop, stop_at=stop_at)
    return loop
