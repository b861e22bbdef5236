"""From a folder to a drafter, by the family that its config names.

Read next: `families.py`, the records; `heads/family.py`, `eagle/family.py`, `model/family.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..decoding.request import whole
from ..errors import RequestError
from .config import BY_AUTO, DrafterConfig, check_options
from .families import family_of
from .folder import read_entry
from .hub import drafter_folder
from .record import function
from .vocabulary.across import load_across, says_the_same

if TYPE_CHECKING:
    from ..decoding.backbone.backbone import Backbone
    from ..decoding.proposal import Proposer

_AS_IT_IS = f". A causal LM as it is may draft by {BY_AUTO}"


def load_drafter(
    path: str | Path, target: Backbone, *, draft_length: int = 4, config: DrafterConfig | None = None
) -> Proposer:
    """Load a drafter for `target`.

    Args:
        path: its folder, or `hub:NAME[@REVISION]`.
        draft_length: tokens of a chain, depth of a tree by confidence.
        config: how it proposes; the defaults by default.

    Raises:
        RequestError: the folder is no drafter, its family is unknown, or it was made for another
            target; the message names the field that differs. Of a hub's also as for `drafter_folder`.
            Or `draft_length` is no whole number from 1.
    """
    draft_length = whole(draft_length, "draft_length (eval.draft_length of a recipe)", least=1)
    config = config or DrafterConfig()
    folder = drafter_folder(path)
    if config.vocabulary != "same" and not says_the_same(folder, config):
        return load_across(folder, target, draft_length=draft_length, config=config)
    family = family_of(read_entry(folder, _AS_IT_IS)["family"], str(folder))
    if family.load is None:
        raise RequestError(f"{folder} names family {family.name!r}, of which there are no folders")
    check_options(family, config, str(folder))
    config = resolved(config, target.vocabulary)
    return cast("Proposer", function(family.load)(folder, target, draft_length=draft_length, config=config))


def resolved(config: DrafterConfig, vocabulary: int) -> DrafterConfig:
    """The same with the ids themselves where a file names them, of a target's vocabulary; errors as for `ids_in`."""
    asked = config.draft_vocabulary
    if asked is None or isinstance(asked, int):
        return config
    from .layers.named_ids import checked, ids_in

    if isinstance(asked, str):
        return config.model_copy(update={"draft_vocabulary": ids_in(Path(asked), vocabulary)})
    return config.model_copy(update={"draft_vocabulary": checked(asked, vocabulary, "drafter.draft_vocabulary")})
