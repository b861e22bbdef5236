"""Which target a drafter was made for, and the refusal of any other.

Read next: `folder.py`, which stores it beside the weights.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..decoding.backbone.quantised import quantisation_of
from ..decoding.gguf.file import ORIGIN
from ..errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..decoding.backbone.backbone import Backbone

TUNED = "draftsmith_tuned"
"""Entry of a target's own config, where a run has changed its weights."""


@dataclass(frozen=True)
class TargetIdentity:
    """What must be the same for a drafter to fit a target."""

    name: str
    revision: str | None
    hidden_size: int
    vocabulary: int | None
    tokenizer: str | None
    """SHA-256 over the tokens and their numbers; None, as the vocabulary, where a drafter of others does not say."""
    tuned: str | None = None
    """SHA-256 of what a run has changed in the weights; None for a target as it was published."""
    quantisation: str | None = None
    """How its weights are quantised; None where they are not. A drafter fits the target however that is."""
    file: str | None = None
    """The GGUF file that it was read or converted from; None for any other."""
    sha256: str | None = None
    """The checksum of that file."""

    @classmethod
    def of(cls, target: Backbone) -> TargetIdentity:
        identity = cls.of_parts(target.model.config, target.tokenizer, name=target.name, revision=target.revision)
        return replace(identity, vocabulary=target.vocabulary)

    @classmethod
    def of_parts(
        cls, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, name: str, revision: str | None = None
    ) -> TargetIdentity:
        """That of a target whose weights are not read."""
        sizes = config.get_text_config(decoder=True)
        tuned = dict(getattr(config, TUNED, None) or {})
        origin = dict(getattr(config, ORIGIN, None) or {})
        from_gguf = f"gguf {origin['quantisation']}" if "quantisation" in origin else None
        return cls(
            name=tuned.get("from", _last_part(name)),
            revision=revision,
            hidden_size=int(sizes.hidden_size),
            vocabulary=int(sizes.vocab_size),
            tokenizer=fingerprint(tokenizer),
            tuned=tuned.get("sha256"),
            quantisation=quantisation_of(config) or from_gguf,
            file=origin.get("file"),
            sha256=origin.get("sha256"),
        )

    def to_dict(self) -> dict[str, Any]:
        """As a drafter's config has it; where it was read from only for a target that was a GGUF file."""
        absent = {key for key in ("file", "sha256") if getattr(self, key) is None}
        return {key: value for key, value in asdict(self).items() if key not in absent}

    def check_same(self, target: TargetIdentity, drafter: str, *, hint: str = "", any_states: bool = False) -> None:
        """Raise RequestError naming the first field that differs; the name alone may.

        Args:
            hint: what else to do where it is the tokenizer.
            any_states: it drafts from the text alone, for every target of the tokenizer, however wide, tuned or not,
                and with whatever padding behind its tokens.
        """
        for field in ("tokenizer",) if any_states else ("tokenizer", "vocabulary", "hidden_size"):
            mine, theirs = getattr(self, field), getattr(target, field)
            if mine is not None and mine != theirs:
                raise RequestError(
                    f"the drafter {drafter} was made for target {self.name!r} with {field} "
                    f"{_short(mine)}; this target {target.name!r} has {field} {_short(theirs)}. "
                    "Use the target it was trained for, or train a drafter for this one"
                    + (hint if field == "tokenizer" else "")
                )
        # a drafter of others does not say of which weights it is
        if self.tuned != target.tuned and self.tokenizer is not None and not any_states:
            raise RequestError(
                f"the drafter {drafter} was made for target {self.name!r} {_version(self)}; this "
                f"target {target.name!r} is one {_version(target)}. Use the folder `target` of the "
                "run that trained the drafter, or train a drafter for this one"
            )


def mark_tuned(model: PreTrainedModel, *, name: str, identity: str) -> None:
    """Write into a target's config that its weights are no longer those of `name`."""
    setattr(model.config, TUNED, {"from": _last_part(name), "sha256": identity})


def tuning_of(model: PreTrainedModel) -> dict[str, str]:
    """`from` and `sha256` of a target that a run has changed; empty for any other."""
    return dict(getattr(model.config, TUNED, None) or {})


def shown_name(target: Backbone) -> str:
    """A target's name for people, which says whether a run has changed its weights."""
    tuned = tuning_of(target.model)
    return f"{tuned['from']} (tuned)" if tuned else _last_part(target.name)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash that two tokenizers share if and only if every token has the same number in both."""
    listed = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _last_part(name: str) -> str:
    return str(name).rstrip("/").rsplit("/", 1)[-1]


def _version(identity: TargetIdentity) -> str:
    tuned = identity.tuned
    return "whose weights no run has changed" if tuned is None else f"as tuned to {_short(tuned)}"


def _short(value: object) -> str:
    return f"{value}"[:12]
