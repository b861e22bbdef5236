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
        draft_length=config.lookup_tokens,
        longest=config.lookup_longest,
        latest=config.lookup_latest,
        device=target.device,
    )


def ngram(config: DrafterConfig, target: Backbone, corpora: Corpora) -> Ngram:
    """Counts its corpus."""
    texts = corpora.texts(config.ngram_corpus, config.ngram_documents)
    table = NgramTable.count(texts, order=config.ngram_order, vocabulary=target.vocabulary)
    return Ngram(table, draft_length=config.ngram_tokens, device=target.device)


def llma(config: DrafterConfig, target: Backbone, corpora: Corpora) -> Llma:
    """Reads its reference documents.

    Raises:
        RequestError: none are named.
    """
    if config.llma_references is None:
        raise RequestError(
            "llma copies from reference documents, and none are named; expected "
            "--drafter.llma_references SOURCE, as in data.source"
        )
    return Llma(
        list(corpora.texts(config.llma_references, config.llma_documents)),
        draft_length=config.llma_tokens,
        longest=config.llma_longest,
        device=target.device,
    )


def rest(config: DrafterConfig, target: Backbone, corpora: Corpora) -> Rest:
    """Opens its datastore.

    Raises:
        RequestError: none is named, or it is of another tokenizer.
    """
    if config.rest_datastore is None:
        raise RequestError(
            "rest retrieves from a datastore, and none is named; expected --drafter.rest_datastore "
            "FOLDER; `draftsmith datastore build` makes one"
        )
    return Rest(
        corpora.datastore(config.rest_datastore),
        nodes=config.rest_nodes,
        longest=config.rest_longest,
        draft_length=config.rest_tokens,
        device=target.device,
    )


def lookahead(config: DrafterConfig, target: Backbone, _corpora: Corpora) -> Lookahead:
    """Lookahead needs nothing but the target's own text."""
    return Lookahead(
        window=config.lookahead_window,
        ngram=config.lookahead_ngram,
        guesses=config.lookahead_guesses,
        device=target.device,
    )
