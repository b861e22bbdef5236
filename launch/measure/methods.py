"""Methods by name: from `--method` and the recipe to proposers that the engine decodes with.

Read next: `measure/run.py`, which measures them; docs/methods.md says which to choose when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...decoding.proposal import Proposer
    from ...decoding.target.backbone import Backbone
    from ..recipe.load import Recipe

SKELETON = "skeleton-of-thought"
Make = Callable[["Recipe", "Backbone"], "Proposer"]


def split_methods(words: str) -> list[str]:
    """`a,b` as names.

    Raises:
        RequestError: a name is unknown or comes twice, or Skeleton-of-Thought stands beside others.
    """
    names = [word.strip() for word in words.split(",")]
    known = [*NEED_DRAFT, *TRAINING_FREE, SKELETON]
    for name in names:
        if name not in known:
            raise RequestError(f"no method is called {name!r}; known: {', '.join(known)}")
        if names.count(name) > 1:
            raise RequestError(f"--method names {name!r} twice")
    if SKELETON in names and len(names) > 1:
        raise RequestError(
            f"{SKELETON} writes other answers and has no acceptance: it cannot stand in a table of "
            "acceptance. Run it alone"
        )
    return names


def make_method(name: str, recipe: Recipe, target: Backbone, trained: Callable[[], Proposer]) -> Proposer:
    """The proposer of a method; `trained` loads the drafter of those that have one."""
    if name == "trained":
        return trained()
    if name == "adaptive-draft":
        return _adaptive(recipe, trained())
    return TRAINING_FREE[name](recipe, target)


def token_texts(tokenizer: PreTrainedTokenizerBase, source: str, limit: int | None = None) -> Iterator[list[int]]:
    """The texts of a source as token ids."""
    from ...data.config import DataConfig
    from ...data.rows.prepare import all_texts

    for text in all_texts(DataConfig(source=source), limit):
        yield tokenizer(text, add_special_tokens=False)["input_ids"]


def _adaptive(recipe: Recipe, draft: Proposer) -> Proposer:
    from ...drafters.model.adaptive import AdaptiveDraft
    from ...drafters.model.draft_model import DraftModel

    if not isinstance(draft, DraftModel):
        raise RequestError(
            "adaptive-draft needs a draft model of the target's tokenizer, and this is none; use --method trained"
        )

    config = recipe.drafter
    return AdaptiveDraft(draft.backbone, draft.vocabulary, longest=config.adaptive_longest, policy=config.policy)


def _prompt_lookup(recipe: Recipe, target: Backbone) -> Proposer:
    from ...drafters.lookup.prompt_lookup import PromptLookup

    config = recipe.drafter
    return PromptLookup(
        draft_length=config.lookup_tokens,
        longest=config.lookup_longest,
        latest=config.lookup_latest,
        device=target.device,
    )


def _ngram(recipe: Recipe, target: Backbone) -> Proposer:
    from ...drafters.lookup.ngram import Ngram, NgramTable

    config = recipe.drafter
    texts = token_texts(target.tokenizer, config.ngram_corpus, config.ngram_documents)
    table = NgramTable.count(texts, order=config.ngram_order, vocabulary=target.vocabulary)
    return Ngram(table, draft_length=config.ngram_tokens, device=target.device)


def _llma(recipe: Recipe, target: Backbone) -> Proposer:
    from ...drafters.lookup.llma import Llma

    config = recipe.drafter
    if config.llma_references is None:
        raise RequestError(
            "llma copies from reference documents, and none are named; expected "
            "--drafter.llma_references SOURCE, as in data.source"
        )
    return Llma(
        list(token_texts(target.tokenizer, config.llma_references, config.llma_documents)),
        draft_length=config.llma_tokens,
        longest=config.llma_longest,
        device=target.device,
    )


def _rest(recipe: Recipe, target: Backbone) -> Proposer:
    from ...data.datastore import Datastore
    from ...drafters.identity import fingerprint
    from ...drafters.lookup.rest import Rest

    config = recipe.drafter
    if config.rest_datastore is None:
        raise RequestError(
            "rest retrieves from a datastore, and none is named; expected --drafter.rest_datastore "
            "FOLDER; `draftsmith datastore build` makes one"
        )
    store = Datastore(Path(config.rest_datastore), tokenizer=fingerprint(target.tokenizer))
    return Rest(
        store,
        nodes=config.rest_nodes,
        longest=config.rest_longest,
        draft_length=config.rest_tokens,
        device=target.device,
    )


def _lookahead(recipe: Recipe, target: Backbone) -> Proposer:
    from ...drafters.lookup.lookahead import Lookahead

    config = recipe.drafter
    return Lookahead(
        window=config.lookahead_window,
        ngram=config.lookahead_ngram,
        guesses=config.lookahead_guesses,
        device=target.device,
    )


NEED_DRAFT = ("trained", "adaptive-draft")
TRAINING_FREE: dict[str, Make] = {
    "prompt-lookup": _prompt_lookup,
    "ngram": _ngram,
    "llma": _llma,
    "rest": _rest,
    "lookahead": _lookahead,
}
