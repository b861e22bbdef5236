"""Early exit: the first layers of the target, its own last norm and projection draft a chain.

Self-speculative decoding (Elhoushi et al. 2024, LayerSkip, arXiv 2404.16710; Zhang et al. 2023,
arXiv 2309.08168, skips layers in between). Nothing is trained and no weight is copied: the folder
holds the number of layers. Read next: `draft_model.py`, `quantised.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...decoding.backbone.backbone import Backbone
from ...decoding.backbone.layers import with_layers
from ...errors import RequestError
from ..folder import read_settings, write_card, write_entry
from .draft_model import DraftModel

FAMILY = "early_exit"


class EarlyExit(DraftModel):
    """Drafts with the target's first layers, in a KV cache of its own."""

    family = FAMILY


def first_layers(target: Backbone, layers: int) -> Backbone:
    """A view of the target's first layers.

    Raises:
        RequestError: it has no layer after those, or its layers cannot be taken apart.
    """
    own = int(target.model.config.num_hidden_layers)
    if not isinstance(layers, int) or not 1 <= layers < own:
        raise RequestError(
            f"an early exit after {layers} layers; the target {target.name!r} has {own}: expected 1 to {own - 1}"
        )
    return Backbone(with_layers(target.model, range(layers)), name=target.name)


def save_early_exit(folder: Path, target: Backbone, *, layers: int) -> None:
    """Write a drafter folder: which target, how many layers. Errors as for `first_layers`."""
    first_layers(target, layers)
    folder.mkdir(parents=True, exist_ok=True)
    write_entry(folder, target, family=FAMILY, settings={"layers": layers})
    write_card(folder, target, f"The first {layers} layers of the target, no weights of its own.")


def load_early_exit(folder: Path, target: Backbone, **how: Any) -> EarlyExit:
    """The target's first layers as a drafter, `how` as of a `DraftModel`; errors as for `load_drafter`."""
    _, settings = read_settings(folder, target, FAMILY)
    draft = first_layers(target, settings.get("layers", 0))
    return EarlyExit(draft, target.vocabulary, **how)
