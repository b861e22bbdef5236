"""What `records.py` names: each drafter made from the recipe's section.

Read next: `../lookup/lookup.py`, what those that copy share; docs/methods.md says which to choose when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import RequestError
from ..config import DrafterConfig
from ..model.draft_model import DraftModel
from ..model.pard import Pard
from ..record import Corpora
from .adaptive import AdaptiveDraft
from .llma import Llma
from .lookahead import Lookahead
from .ngram import Ngram, NgramTable
from .rest import Rest

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone
    from ...decoding.proposal import Proposer


def ngram(config: DrafterConfig, target: Backbone, corpora: Corpora) -> Ngram:
    """Counts its corpus."""
    texts = corpora.texts(config.ngram.corpus, config.ngram.documents)
    table = NgramTable.count(texts, order=config.ngram.order, vocabulary=target.vocabulary)
    return Ngram(table, draft_length=config.ngram.tokens, device=target.device)


def llma(config: DrafterConfig, target: Backbone, corpora: Corpora) -> Llma:
    """Reads its reference documents.

    Raises:
        RequestError: none are named.
    """
    if config.llma.references is None:
        raise RequestError(
            "llma copies from reference documents, and none are named; expected "
            "--drafter.llma.references SOURCE, as in data.source"
        )
    return Llma(
        list(corpora.texts(config.llma.references, config.llma.documents)),
        draft_length=config.llma.tokens,
        longest=config.llma.longest,
        device=target.device,
    )


def rest(config: DrafterConfig, target: Backbone, corpora: Corpora) -> Rest:
    """Opens its datastore.

    Raises:
        RequestError: none is named, or it is of another tokenizer.
    """
    if config.rest.datastore is None:
        raise RequestError(
            "rest retrieves from a datastore, and none is named; expected --drafter.rest.datastore "
            "FOLDER; `draftsmith datastore build` makes one"
        )
    return Rest(
        corpora.datastore(config.rest.datastore),
        nodes=config.rest.nodes,
        longest=config.rest.longest,
        draft_length=config.rest.tokens,
        device=target.device,
    )


def lookahead(config: DrafterConfig, target: Backbone, _corpora: Corpora) -> Lookahead:
    """Lookahead needs nothing but the target's own text."""
    return Lookahead(
        window=config.lookahead.window,
        ngram=config.lookahead.ngram,
        guesses=config.lookahead.guesses,
        device=target.device,
    )


def adaptive(config: DrafterConfig, draft: Proposer, _corpora: Corpora) -> AdaptiveDraft:
    """A loaded draft model with a length that follows what is accepted.

    Raises:
        RequestError: the drafter is no draft model of the target's tokenizer.
    """
    if not isinstance(draft, DraftModel) or isinstance(draft, Pard):
        found = "a PARD draft, which drafts all in one pass" if isinstance(draft, Pard) else "none"
        raise RequestError(
            "adaptive-draft needs a draft model of the target's tokenizer that drafts token by token, and this is "
            f"{found}; use --method trained"
        )
    return AdaptiveDraft(
        draft.backbone,
        draft.vocabulary,
        longest=config.adaptive.longest,
        policy=config.policy,
        factors=config.temperature_factors,
    )
