"""From a folder to a drafter, by the family that its config names.

Read next: `draft_model.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RequestError
from .checkpoint import read_entry
from .draft_model import DraftModel, Policy
from .identity import TargetIdentity

if TYPE_CHECKING:
    from ..decoding.backbone import Backbone

FAMILIES = ("draft_model",)


def load_drafter(
    path: str | Path, target: Backbone, *, draft_length: int = 4, policy: Policy = "sample"
) -> DraftModel:
    """Load a drafter checkpoint for `target`.

    Raises:
        RequestError: the folder is no drafter, its family is unknown, or it was made for another
            target; the message names the field that differs.
    """
    from ..decoding.loading import load_target

    folder = Path(path)
    entry = read_entry(folder)
    if entry["family"] not in FAMILIES:
        raise RequestError(
            f"{folder} is a drafter of family {entry['family']!r}; this version knows "
            f"{', '.join(FAMILIES)}"
        )
    entry["identity"].refuse_other(TargetIdentity.of(target), str(folder))
    backbone = load_target(str(folder), device=str(target.device))
    return DraftModel(backbone, target.vocabulary, draft_length=draft_length, policy=policy)
