"""An MTP module drafts as EAGLE does: a chain or a tree, by the target's projection, with the law it draws from.

Read next: `../eagle/proposer.py`, which this is; `net.py`, the network.

Shapes: B rows, N nodes, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...decoding.backbone.backbone import Backbone
from ..eagle.proposer import Eagle
from .net import MtpNet


class Mtp(Eagle):
    """Drafts with an MTP module."""

    family = "mtp"
    net: MtpNet

    def __init__(self, net: MtpNet, target: Backbone, **settings: Any) -> None:
        """`settings`: those of `Eagle`."""
        super().__init__(net, target, **settings)
        self.layers = (net.reads,)

    def _logits(self, hidden_BNH: Tensor) -> Tensor:
        """Logits [B, N, V], fp32, of what the module puts out."""
        return super()._logits(self.net.head_input(hidden_BNH))
