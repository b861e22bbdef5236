"""Whether the target stops where its chat template ends a turn.

A template may end answers by a token that is none of the target's ends: then it writes on behind them, to the
length limit, and what is measured and learnt is text behind the end. Read next: `rows/control.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....errors import DataError
from ..control import ControlTokens
from ..raw import BadRow
from ..shapes import Chat
from ..templates import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "ANSWERxOFxTHISxTURN"


def endless_answers(tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> str | None:
    """That answers do not end where the template ends them, in a sentence; None where they do, or nobody can tell."""
    end = _end_of_answers(tokenizer)
    if end is None:
        return None
    number = tokenizer.get_vocab()[end]
    if number in eos_ids:
        return None
    ends = ", ".join(f"{tokenizer.convert_ids_to_tokens(each)!r} ({each})" for each in eos_ids) or "none"
    return (
        f"the chat template ends answers by {end!r} ({number}), which is no end of the target, whose ends are {ends}: "
        "it writes on behind its answers, to the length limit; add the number to eos_token_id in the target's "
        "generation_config.json"
    )


def _end_of_answers(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The first control token that the template writes behind the last answer of a chat."""
    template = ChatTemplate(tokenizer, None)
    if not template.exists:
        return None
    chat = Chat([{"role": "user", "content": "why"}, {"role": "assistant", "content": _PROBE}])
    try:
        _, found, behind = template.write(chat).partition(_PROBE)
        first = ControlTokens.of(tokenizer, template).pattern.search(behind)
    except (BadRow, DataError):
        return None
    return first[0] if found and first else None
