"""Load a draft model whose tokenizer may be another than the target's.

`drafter.vocabulary` is the permission, and says by which way. Read next: `foreign_draft.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...decoding.no_model import check_no_form_for_engines
from ...errors import RequestError
from ..config import DrafterConfig, check_options
from ..families import FAMILIES
from ..folder import is_drafter, kind_of, read_entry
from ..identity import fingerprint
from ..model.adapters import take_up
from ..model.draft_model import DraftModel
from ..model.pard import Pard, masked, need_mask
from ..weights import check_finite
from .foreign_draft import ForeignDraft, IntersectionDraft, RetokenisedDraft
from .shared_tokens import Vocabulary, VocabularyPair

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone

_log = logging.getLogger(__name__)
ENOUGH = 0.5
"""Share of the draft's tokens that have to be the target's too for `auto` to draft those alone."""


def load_across(
    path: Path, target: Backbone, *, draft_length: int, config: DrafterConfig
) -> DraftModel | ForeignDraft:
    """A drafter folder of family `draft_model`, or any causal LM, as a draft for `target`.

    With `auto`, a draft of the target's own tokenizer is an ordinary one, or a PARD draft where its config names the
    mask that it was trained with.

    Raises:
        RequestError: a drafter of another family, tokens that cannot be compared, or a PARD draft of other tokens.
    """
    from ...decoding.backbone.loading import load_target

    entry = read_entry(path) if is_drafter(path) else None
    if entry is not None and kind_of(entry["family"]) != "model":
        raise RequestError(
            f"drafter.vocabulary is {config.vocabulary!r}, and {path} is a drafter of family "
            f"{entry['family']!r}, which drafts its target's own tokens; expected a draft model or "
            "any causal LM, or leave drafter.vocabulary out"
        )
    if entry is None:
        check_no_form_for_engines(path)
    if config.tree != DrafterConfig().tree:
        raise RequestError(f"drafter.tree is {config.tree!r}, and {path} drafts chains; leave it out")
    check_options(FAMILIES[DraftModel.family], config, str(path))
    backbone = load_target(str(path), device=str(target.device))
    take_up(backbone.model, path, {} if entry is None else entry["settings"], config.adapter)
    check_finite(backbone.model, path)
    how: dict[str, Any] = {
        "draft_length": draft_length,
        "policy": config.policy,
        "factors": config.temperature_factors,
    }
    same, is_pard = config.vocabulary == "auto" and _same_tokens(backbone, target), masked(backbone.model)
    if same and is_pard:
        mask = need_mask(backbone.model.config, path)
        _log.info("draft %s: it was trained to draft in one pass (pard_token %d), and does: PARD", path, mask)
        return Pard(backbone, target.vocabulary, mask=mask, **how)
    if is_pard:
        raise RequestError(
            f"{path} is a PARD draft (pard_token in its config.json), which drafts the tokens of its own tokenizer in "
            f"one pass, and drafter.vocabulary is {config.vocabulary!r} for a target that "
            f"{'may have' if config.vocabulary != 'auto' else 'has'} others: expected a target of its tokenizer, with "
            "drafter.vocabulary auto, or an ordinary draft model"
        )
    if same:
        return DraftModel(backbone, target.vocabulary, **how)
    pair = VocabularyPair(
        Vocabulary.of(backbone.tokenizer, backbone.vocabulary), Vocabulary.of(target.tokenizer, target.vocabulary)
    )
    kind = _kind(config.vocabulary, pair)
    _log.info(
        "draft %s: %s of its %s tokens (%.0f %%) are the target's too; it drafts by %s",
        path,
        f"{pair.common:,}",
        f"{pair.draft.size:,}",
        100 * pair.share,
        kind.family,
    )
    if config.temperature_factors and kind is RetokenisedDraft:
        raise RequestError(
            f"drafter.temperature_factors are {config.temperature_factors}, and {path} drafts by {kind.family}, which "
            "draws nothing; leave them out"
        )
    return kind(backbone, pair, target.vocabulary, **how)


def says_the_same(path: Path, config: DrafterConfig) -> bool:
    """Whether `auto` need not look: drafters other than draft models have their target's tokens."""
    other = is_drafter(path) and kind_of(read_entry(path)["family"]) != "model"
    return config.vocabulary == "auto" and other


def _kind(asked: str, pair: VocabularyPair) -> type[ForeignDraft]:
    if asked == IntersectionDraft.family or (asked == "auto" and pair.share >= ENOUGH):
        return IntersectionDraft
    return RetokenisedDraft


def _same_tokens(draft: Backbone, target: Backbone) -> bool:
    return fingerprint(draft.tokenizer) == fingerprint(target.tokenizer)
