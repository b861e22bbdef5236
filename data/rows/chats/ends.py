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
    written = _ends_of_answers(tokenizer)
    numbers = [tokenizer.get_vocab()[each] for each in written]
    # a tag may close an answer in front of the end of its turn
    if not written or any(each in eos_ids for each in numbers):
        return None
    found = " and ".join(f"{end!r} ({number})" for end, number in zip(written, numbers, strict=True))
    ends = ", ".join(f"{tokenizer.convert_ids_to_tokens(each)!r} ({each})" for each in eos_ids) or "none"
    which = "the number" if len(written) == 1 else "that of the end"
    return (
        f"the chat template ends answers by {found}, which is no end of the target, whose ends are {ends}: it writes "
        f"on behind its answers, to the length limit; add {which} to eos_token_id in the target's "
        "generation_config.json"
    )


def _ends_of_answers(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The control tokens that the template writes behind the last answer of a chat, in order."""
    template = ChatTemplate(tokenizer, None)
    if not template.exists:
        return []
    chat = Chat([{"role": "user", "content": "why"}, {"role": "assistant", "content": _PROBE}])
    try:
        _, found, behind = template.write(chat).partition(_PROBE)
        return ControlTokens.of(tokenizer, template).pattern.findall(behind) if found else []
    except (BadRow, DataError):
        return []
