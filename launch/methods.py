"""Methods by name: from `--method` and the recipe to proposers that the engine decodes with.

The names are those of `drafters/families.py`, beside `trained`, the drafter of the run.
Read next: `measure/run.py`, which measures them; docs/methods.md says which to choose when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..drafters.families import FAMILIES, training_free, wrapping
from ..drafters.record import function
from ..errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..decoding.backbone.backbone import Backbone
    from ..decoding.proposal import Proposer
    from .recipe.model import Recipe

TRAINED = "trained"
"""The drafter of the run, whatever its family."""
SKELETON = "skeleton-of-thought"


def need_draft() -> list[str]:
    """The methods that load the run's drafter."""
    return [TRAINED, *wrapping()]


def split_methods(text: str) -> list[str]:
    """`a,b` as names.

    Raises:
        RequestError: a name is unknown or comes twice, or Skeleton-of-Thought stands beside others.
    """
    names = [name.strip() for name in text.split(",")]
    known = [*need_draft(), *training_free(), SKELETON]
    for name in names:
        if name not in known:
            between = "" if name else " (nothing stands between two commas)"
            raise RequestError(f"no method is called {name!r}{between}; known: {', '.join(known)}")
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
    if name == TRAINED:
        return trained()
    family = FAMILIES[name]
    texts = TargetTexts(target.tokenizer, target.vocabulary)
    if family.wrap is not None:
        return cast("Proposer", function(family.wrap)(recipe.drafter, trained(), texts))
    return cast("Proposer", function(family.make or "")(recipe.drafter, target, texts))


class TargetTexts:
    """The corpora of drafters without training, in the tokens of a target."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None) -> None:
        """`vocabulary`: ids that the target has, for datastores."""
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def texts(self, source: str, limit: int | None = None) -> Iterator[list[int]]:
        """The texts of a source as token ids."""
        from ..data.config import DataConfig
        from ..data.rows.prepare import all_texts

        for text in all_texts(DataConfig(source=source), limit):
            yield self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def datastore(self, folder: str) -> Any:
        """An opened datastore; it must be of this tokenizer."""
        from ..data.datastore import Datastore
        from ..drafters.identity import fingerprint

        return Datastore(Path(folder), tokenizer=fingerprint(self._tokenizer), ids=self._vocabulary)
