"""Records as token ids, each with whether it counts in the loss.

A token counts when it begins inside what an assistant generates; one that straddles the end of the
prompt does not, because the decoder, given that prompt, can never produce it.
Read next: `rows/packed.py`, which packs the documents.

Shapes: T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import RequestError
from ..config import DataConfig
from .packed import Document
from .shapes import BadRow, Chat, Record, Text, Tokens
from .templates import ChatTemplate, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoded(NamedTuple):
    """A document, and what statistics and checks need of it."""

    document: Document
    masked: bool
    """Some tokens were left out of the loss on purpose, or could have been."""
    cut: bool
    """It is longer than a row."""
    straddles: int
    """Answers whose first characters share a token with the prompt."""


class _Written(NamedTuple):
    """Text, and the characters that count (None: all)."""

    text: str
    spans: list[Span] | None
    starts: bool  # with the tokenizer's beginning-of-text token, if it has the habit
    ends: bool  # with the end-of-text token


@dataclass(frozen=True)
class Encoder:
    """Encodes records for one tokenizer and config."""

    tokenizer: PreTrainedTokenizerBase
    config: DataConfig
    template: ChatTemplate
    beginning: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Encoder:
        template = ChatTemplate(tokenizer, config.chat_template)
        return cls(tokenizer, config, template, beginning(tokenizer))

    def __call__(self, records: Sequence[Record]) -> list[Encoded | BadRow]:
        """Encode a batch; a record that cannot be encoded is returned as the reason.

        Raises:
            RequestError: chats, but the tokenizer has no template.
        """
        results: list[Encoded | BadRow | None] = [None] * len(records)
        written: dict[int, _Written] = {}
        for at, record in enumerate(records):
            try:
                if isinstance(record, Tokens):
                    results[at] = self._given(record)
                else:
                    written[at] = self._write(record)
            except BadRow as bad:
                results[at] = bad
        for at, each in zip(written, self._encode(list(written.values())), strict=True):
            results[at] = each
        return [each for each in results if each is not None]

    def _write(self, record: Text | Chat) -> _Written:
        if isinstance(record, Text):
            return _Written(record.text, None, starts=True, ends=record.ends)
        whole = self.config.loss_on == "all"
        if not self.template.exists:
            return self._write_plain(record, whole=whole)
        text = self.template.write(record)
        self.template.compare_prompts(record, text)
        spans = None if whole else self.template.answers(record, text)
        return _Written(text, spans, starts=False, ends=False)

    def _write_plain(self, chat: Chat, *, whole: bool) -> _Written:
        """Prompt and answer one after the other, as the decoder gets prompts without a template."""
        if not chat.plain:
            raise RequestError(
                "the rows are chats, but the tokenizer has no chat template to write them with; "
                "take a target that has one, or rows of prompt and completion"
            )
        prompt, answer = (message["content"] for message in chat.messages)
        text = prompt + answer
        spans = None if whole else [(len(prompt), len(text))]
        return _Written(text, spans, starts=True, ends=True)

    def _encode(self, written: Sequence[_Written]) -> list[Encoded | BadRow]:
        if not written:
            return []
        masked = any(each.spans is not None for each in written)
        if masked and not self.tokenizer.is_fast:
            raise RequestError(
                f"{type(self.tokenizer).__name__} cannot report which characters a token stands for, "
                "so answers cannot be separated from prompts; use its fast version or data.loss_on: all"
            )
        batch = self.tokenizer(
            [each.text for each in written], add_special_tokens=False, verbose=False, return_offsets_mapping=masked
        )
        offsets = batch["offset_mapping"] if masked else [()] * len(written)
        return [
            self._document(each, ids, _as_pairs(pairs))
            for each, ids, pairs in zip(written, batch["input_ids"], offsets, strict=True)
        ]

    def _document(self, written: _Written, ids: list[int], offset_T2: NDArray[np.int64]) -> Encoded | BadRow:
        before = self.beginning if written.starts else []
        eos = self.tokenizer.eos_token_id
        behind = [eos] if written.ends and eos is not None else []
        if written.spans is None:
            in_loss = np.ones(len(ids), dtype=np.bool_)
        else:
            in_loss = _inside(offset_T2, written.spans)
        document = Document(
            np.asarray([*before, *ids, *behind], dtype=np.int32),
            np.concatenate([np.zeros(len(before), np.bool_), in_loss, np.ones(len(behind), np.bool_)]),
        )
        straddles = sum(_straddles(offset_T2, start) for start, _ in written.spans or ())
        return self._fitted(document, masked=written.spans is not None, straddles=straddles)

    def _given(self, record: Tokens) -> Encoded | BadRow:
        last = len(self.tokenizer) - 1
        # before they become an array: a file may hold numbers that no array takes
        if min(record.ids) < 0 or max(record.ids) > last:
            at, number = next((at, each) for at, each in enumerate(record.ids) if not 0 <= each <= last)
            raise BadRow(f"input_ids[{at}] is {number!s:.40}; the tokenizer's ids are 0 to {last}")
        mask = np.ones(len(record.ids), bool) if record.in_loss is None else np.asarray(record.in_loss)
        document = Document(np.asarray(record.ids, dtype=np.int32), mask)
        return self._fitted(document, masked=record.in_loss is not None, straddles=0)

    def _fitted(self, document: Document, *, masked: bool, straddles: int) -> Encoded | BadRow:
        """A masked document loses what is longer than a row; a text will be cut into pieces.

        The rest of an answer without its prompt is nothing that the decoder ever meets.
        """
        length = self.config.sequence_length
        cut = len(document.ids) > length
        if masked and cut:
            document = Document(document.ids[:length], document.in_loss[:length])
        return Encoded(document, masked, cut, straddles)


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning-of-text token, if the tokenizer puts it before plain text by itself."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    return [bos] if tokenizer("a")["input_ids"][:1] == [bos] else []


def _as_pairs(pairs: Sequence[Span]) -> NDArray[np.int64]:
    return np.asarray(pairs, dtype=np.int64).reshape(-1, 2)


def _inside(offset_T2: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Tokens whose first character lies in a span."""
    in_loss = np.zeros(len(offset_T2), dtype=np.bool_)
    for start, end in spans:
        in_loss |= (offset_T2[:, 0] >= start) & (offset_T2[:, 0] < end)
    return in_loss


def _straddles(offset_T2: NDArray[np.int64], boundary: int) -> int:
    return int(((offset_T2[:, 0] < boundary) & (offset_T2[:, 1] > boundary)).sum())
