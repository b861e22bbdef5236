"""What `families.py` names of suffix decoding: alone, and beside a trained drafter.

Read next: `proposer.py`, `hybrid.py`; docs/suffix.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import DrafterConfig
from ..record import Corpora
from .hybrid import SuffixHybrid, beside, can_skip
from .proposer import SuffixDecoding

if TYPE_CHECKING:
    import torch

    from ...decoding.backbone.backbone import Backbone
    from ...decoding.proposal import Proposer


def suffix(config: DrafterConfig, target: Backbone, corpora: Corpora) -> SuffixDecoding:
    """Suffix decoding over the request's own text, and over a datastore where one is named.

    Raises:
        RequestError: the draft does not fit into the depth, or the datastore is of another tokenizer.
    """
    return _by_config(config, corpora, target.device)


def hybrid(config: DrafterConfig, draft: Proposer, corpora: Corpora) -> SuffixHybrid:
    """The same beside a loaded drafter.

    Raises:
        RequestError: as for `suffix`; or that drafter cannot leave out steps, or a tree is asked for.
    """
    device = next(can_skip(draft).module.parameters()).device
    return beside(draft, _by_config(config, corpora, device))


def _by_config(config: DrafterConfig, corpora: Corpora, device: torch.device) -> SuffixDecoding:
    folder = config.suffix.datastore
    return SuffixDecoding(
        draft_length=config.suffix.tokens,
        nodes=config.suffix.nodes,
        depth=config.suffix.depth,
        factor=config.suffix.factor,
        least=config.suffix.least,
        store=None if folder is None else corpora.datastore(folder),
        device=device,
    )
