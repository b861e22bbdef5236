"""The token ids in which prompts were asked and answers written, kept beside the text of a row.

Text forgets them: special tokens, thoughts that a template takes out of the history, pieces that a
tokenizer would cut in another way. Read next: `rows/encode.py`, which trains on them; `data/generate/answers.py`.

Shapes: none; ids are lists of whole numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..raw import BadRow, is_object, kind_of
from ..tokenizer import tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDS = "ids"
"""The column that holds them."""


class Turn(NamedTuple):
    """One answer: the index of its message, the ids of its prompt and its own, the end included if it was written."""

    turn: int
    prompt: list[int]
    answer: list[int]
    ended: bool


@dataclass(frozen=True)
class Origin:
    """Whose ids they are: hashes of the tokenizer, and of the template with its variables."""

    tokenizer: str
    template: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any] | None) -> Origin:
        """Of what the decoder writes prompts with."""
        template = json.dumps([tokenizer.chat_template, dict(values or {})], sort_keys=True, default=str)
        return cls(
            tokenizer_hash(tokenizer, with_template=False)[:16], hashlib.sha256(template.encode()).hexdigest()[:16]
        )


@dataclass(frozen=True)
class Written:
    """The ids of a row's answers, in order."""

    origin: Origin
    turns: tuple[Turn, ...]

    def to_row(self) -> dict[str, Any]:
        """As the column holds them."""
        return {**vars(self.origin), "turns": [each._asdict() for each in self.turns]}


def read_written(value: Any) -> Written | None:
    """What the column `ids` holds; None where it is empty, or of another kind: others use the name too.

    Raises:
        BadRow: it is of our kind and damaged.
    """
    if not (is_object(value) and {"tokenizer", "template", "turns"} <= set(value)):
        return None
    if not isinstance(value["turns"], list):
        raise BadRow(f"ids.turns is {kind_of(value['turns'])}; expected a list of answers")
    turns = tuple(_turn(each, f"ids.turns[{at}]") for at, each in enumerate(value["turns"]))
    return Written(Origin(str(value["tokenizer"]), str(value["template"])), turns)


def chained(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The answers in groups: in each, every prompt begins with the prompt and the answer in front of it."""
    groups: list[list[Turn]] = []
    for turn in turns:
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and turn.prompt[: len(before.prompt) + len(before.answer)] == before.prompt + before.answer
        ):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return groups


def _turn(value: Any, what: str) -> Turn:
    if not is_object(value) or not isinstance(value.get("turn"), int) or not isinstance(value.get("ended"), bool):
        raise BadRow(f"{what} is no answer; expected turn, prompt, answer and ended")
    for name in ("prompt", "answer"):
        ids = value.get(name)
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise BadRow(f"{name} of {what} is {kind_of(ids)}; expected a list of whole numbers")
    return Turn(value["turn"], value["prompt"], value["answer"], value["ended"])
