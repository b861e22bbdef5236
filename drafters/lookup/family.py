"""What `families.py` names of drafters without training: each made from the recipe's section.

Read next: `lookup.py`, what those that copy share; docs/methods.md says which to choose when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import RequestError
from ..config import DrafterConfig
from ..families import Corpora
from .llma import Llma
from .lookahead import Lookahead
from .ngram import Ngram, NgramTable
from .prompt_lookup import PromptLookup
from .rest import Rest

if TYPE_CHECKING:
    from ...decoding.backbone.backbone import Backbone


def prompt_lookup(config: DrafterConfig, target: Backbone, _corpora: Corpora) -> PromptLookup:
    """Prompt lookup needs nothing but the prompt."""
    return PromptLookup(
        draft_length=config.lookup.tokens,
        longest=config.lookup.longest,
        latest=config.lookup.latest,
        device=target.device,
    )


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
