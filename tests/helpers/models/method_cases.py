"""Every method of training as a small case: its name, and the sections of its recipe.

Read next: `faults/toy.py`, which makes objectives and whole runs of them.
"""

from __future__ import annotations

from typing import Any

from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.method_config import (
    BlockConfig,
    BpdConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    MtpConfig,
    PardConfig,
    PeagleConfig,
)

PACED = ObjectiveConfig(chunk=16, positions="d-pace")
BLOCKS = BlockConfig(size=4, decoder_layers=1, anchors=5)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "target": ("target", {}),
    "distill": ("distill", {}),
    "medusa": ("medusa", {"medusa": MedusaConfig(heads=2), "objective": PACED}),
    "medusa2": ("medusa2", {"medusa": MedusaConfig(heads=2)}),
    "hydra": ("hydra", {"medusa": MedusaConfig(heads=2)}),
    "hydra++": ("hydra", {"medusa": MedusaConfig(heads=2, prefix=True), "objective": ObjectiveConfig(kl=1, ce=0)}),
    "bpd": ("bpd", {"bpd": BpdConfig(every_head=True)}),
    "eagle": ("eagle", {}),
    "hass": ("eagle", {"eagle": EagleConfig(passes=2, top_k=1.0, top_k_tokens=4)}),
    "eagle3": ("eagle3", {"eagle3": Eagle3Config(passes=2)}),
    "mtp": ("mtp", {"mtp": MtpConfig(passes=2)}),
    "dflash": ("dflash", {"block": BLOCKS, "objective": PACED}),
    "dflash2": ("dflash2", {"block": BLOCKS}),
    "dspark": ("dspark", {"block": BLOCKS}),
    "peagle": ("peagle", {"peagle": PeagleConfig(depths=3), "objective": PACED}),
    "pard": ("pard", {"pard": PardConfig(drafts=3)}),
}
