"""Control tokens in content: the tokens by which a template opens and ends turns, where a row spells them.

A tokenizer makes no difference between `<|im_end|>` that the template writes and `<|im_end|>` in what
somebody said: both become the token. In an answer it forges an end, and all behind it would be trained on.
Read next: `encode.py`, which asks here; `config.py`, the setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...decoding.backbone.hub import generation_ends
from ...errors import DataError
from .bounded import TooMuchWork
from .raw import BadRow
from .shapes import Chat, Record, Text, Tokens
from .templates import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = ("FIRSTxQUESTION", "FIRSTxANSWER", "SECONDxQUESTION", "SECONDxANSWER")
# what an answer itself begins with, though some templates write it
_THOUGHTS = re.compile(r"think|reason|channel", re.IGNORECASE)
_BRACKETS = re.compile(r"[<\[{｟].+[>\]}｠]", re.DOTALL)
# characters without a meaning, one of which no row has
_MARKS = [chr(code) for code in range(0xE000, 0xE100)]


class SpellsControlToken(BadRow):
    """A row left out because of a control token in its content."""


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of one template, and rows that spell them."""

    tokens: tuple[str, ...]
    ends: tuple[str, ...] = ()
    """Those of them that end a text or a turn, of more than one character: a letter may end any word."""
    stops: tuple[str, ...] = ()
    """Those that neither template nor tokenizer names, but the model's generation settings."""
    endless: str | None = None
    """Why the template can write no chat at all: four short turns are too much work for it."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> ControlTokens:
        """The end-of-text token, all that the template writes around turns, and the model's other ends.

        Tokens of thinking are left out: answers write them.

        Raises:
            RequestError: the generation_config.json beside the tokenizer is damaged.
        """
        end = [str(tokenizer.eos_token)] if tokenizer.eos_token and str(tokenizer.eos_token).strip() else []
        if not template.exists:
            return cls(tuple(end), _long(end))._stopped_by(_stops(tokenizer))
        added = [token for token in tokenizer.get_added_vocab() if _is_control(token, tokenizer)]
        around, endless = _around_turns(template)
        ends = [*end, *_ends_of_turns(around or [], _pattern(added))]
        if around is None:  # it refuses the probe: then its special tokens, wherever it writes them
            around, added = [template.source], [each for each in added if each in tokenizer.all_special_tokens]
        tokens = _unlike([*end, *_pattern(added).findall("\n".join(around))])
        return cls(tokens, _long(_unlike(ends)), endless=endless)._stopped_by(_stops(tokenizer))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Any of the tokens, in a text."""
        return _pattern(self.tokens)

    def where(self, record: Record, *, all_count: bool) -> tuple[str | None, str | None]:
        """The first control token in what counts in the loss, and in anything else; each with its place.

        Args:
            all_count: every turn counts, not the assistant's alone.
        """
        if isinstance(record, Tokens):
            return None, None
        if isinstance(record, Text):
            return None, self._first(record.text, "text")
        answers: list[str | None] = []
        others = [self._first(record.tools, "tools")]
        for at, message in enumerate(record.messages):
            counts = all_count or message["role"] == "assistant"
            found = self._first(message, f"turn {at + 1} ({message['role']})")
            (answers if counts else others).append(found)
        return next(filter(None, answers), None), next(filter(None, others), None)

    def without_ends(self, record: Chat | Text, *, all_count: bool) -> Chat | Text:
        """The record, if nothing in it ends with a token that ends it; else without these, and the blanks around.

        Nothing stands behind them, so nothing is forged, and the template writes the end itself. What is
        nothing else stays as it is, and so does what does not count (`all_count` as for `where`).
        """
        if isinstance(record, Text):
            return record
        messages = [
            {**each, "content": self._without_ends(each["content"])}
            if all_count or each["role"] == "assistant"
            else each
            for each in record.messages
        ]
        return record if messages == record.messages else replace(record, messages=messages)

    @property
    def short(self) -> str | None:
        """A token of one character, which cannot be taken apart."""
        return next((each for each in self.tokens if len(each) < 2), None)

    def taken_apart(self, record: Chat | Text) -> tuple[Chat | Text, str]:
        """The record with a mark inside every control token, where its text is to be cut; and the mark.

        Cut there, it is no token for any tokenizer, whatever kind of token it is. None may be `short`.
        """
        content = [record.text] if isinstance(record, Text) else [*_texts([record.messages, record.tools])]
        mark = next((each for each in _MARKS if not any(each in text for text in [*content, *self.tokens])), None)
        if mark is None:
            raise BadRow("the row holds every private character of Unicode, one of which has to mark where to cut")
        if isinstance(record, Text):
            return replace(record, text=self._cut(record.text, mark)), mark
        return replace(record, messages=self._cut(record.messages, mark), tools=self._cut(record.tools, mark)), mark

    def _first(self, value: Any, place: str) -> str | None:
        found = next((match for text in _texts(value) if (match := self.pattern.search(text))), None)
        return None if found is None else f"{place} spells {found[0]!r}"

    def _stopped_by(self, stops: Sequence[str]) -> ControlTokens:
        others = tuple(each for each in stops if each not in self.tokens)
        return replace(self, tokens=self.tokens + others, ends=_unlike([*self.ends, *_long(stops)]), stops=others)

    def _without_ends(self, text: str) -> str:
        end = before = len(text)
        found: str | None = ""
        while found is not None:
            end = before
            while before and text[before - 1].isspace():
                before -= 1
            found = next((each for each in self.ends if text.endswith(each, 0, before)), None)
            before -= len(found or "")
        kept = text[:before]
        return kept if kept and end < len(text) else text

    def _cut(self, value: Any, mark: str) -> Any:
        if isinstance(value, dict):
            return {self._cut(key, mark): self._cut(each, mark) for key, each in value.items()}
        if isinstance(value, list):
            return [self._cut(each, mark) for each in value]
        if not isinstance(value, str):
            return value
        while self.pattern.search(value):  # again where a shorter one stands inside what was cut
            value = self.pattern.sub(lambda match: match[0][:1] + mark + match[0][1:], value)
        return value


def _is_control(token: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it is made for a template: no blanks, no word of the language."""
    special = token in tokenizer.all_special_tokens or bool(_BRACKETS.fullmatch(token))
    return special and bool(token.strip()) and not _THOUGHTS.search(token)


def _stops(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens at which the model of this tokenizer stops, but for words and blanks: they are text."""
    ids = set(generation_ends(tokenizer.name_or_path))
    added = sorted((number, token) for token, number in tokenizer.get_added_vocab().items() if number in ids)
    return [token for _, token in added if _is_control(token, tokenizer)]


def _around_turns(template: ChatTemplate) -> tuple[list[str] | None, str | None]:
    """What the template writes before, between and behind the turns of a chat; None, and why, if it takes none."""
    turns = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user", "assistant"), _PROBES)
    ]
    for chat in (Chat(turns), Chat(turns[:2])):
        try:
            return re.split("|".join(_PROBES), template.write(chat)), None
        except BadRow as bad:
            if isinstance(bad.__cause__, TooMuchWork):
                return None, str(bad)
        except DataError:  # no valid Jinja: told with the first chat, and of no importance for texts
            break
    return None, None


def _ends_of_turns(around: Sequence[str], control: re.Pattern[str]) -> list[str]:
    """The first control token behind each turn; between turns one alone is what opens the next."""
    behind = [control.findall(each) for each in around[1:]]
    return [each[0] for at, each in enumerate(behind, 1) if len(each) > (at < len(behind))]


def _unlike(tokens: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tokens))


def _long(tokens: Iterable[str]) -> tuple[str, ...]:
    return tuple(each for each in tokens if len(each) > 1)


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    # the longest first: it is the token where a shorter one begins it
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a nested value, keys too: they are written out where a call is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for text in _texts(pair))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts(each))
