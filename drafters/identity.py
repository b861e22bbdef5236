"""Which target a drafter was made for, and the refusal of any other.

Read next: `checkpoint.py`, which stores it beside the weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..decoding.backbone import Backbone


@dataclass(frozen=True)
class TargetIdentity:
    """What must be the same for a drafter to fit a target."""

    name: str
    revision: str | None
    hidden_size: int
    vocabulary: int
    tokenizer: str
    """SHA-256 over the tokens and their numbers."""

    @classmethod
    def of(cls, target: Backbone) -> TargetIdentity:
        return cls(
            name=str(target.name).rstrip("/").rsplit("/", 1)[-1],
            revision=target.revision,
            hidden_size=int(target.model.config.hidden_size),
            vocabulary=target.vocabulary,
            tokenizer=fingerprint(target.tokenizer),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def refuse_other(self, found: TargetIdentity, drafter: str) -> None:
        """Raise RequestError naming the first field that differs; the name alone may."""
        for field in ("tokenizer", "vocabulary", "hidden_size"):
            mine, theirs = getattr(self, field), getattr(found, field)
            if mine != theirs:
                raise RequestError(
                    f"the drafter {drafter} was made for target {self.name!r} with {field} "
                    f"{_short(mine)}; this target {found.name!r} has {field} {_short(theirs)}. "
                    "Use the target it was trained for, or train a drafter for this one"
                )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash that two tokenizers share if and only if every token has the same number in both."""
    listed = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _short(value: object) -> str:
    return f"{value}"[:12]
