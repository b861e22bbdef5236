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

from ...errors import DataError, RequestError
from ..config import DataConfig
from .control import ControlTokens, SpellsControlToken
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
    spells: bool = False
    """Its content spells a control token."""
    ended: bool = False
    """An answer ended with a token that ends it, which was cut off."""


class _Written(NamedTuple):
    """Text, and the characters that count (None: all)."""

    text: str
    spans: list[Span] | None
    starts: bool  # with the tokenizer's beginning-of-text token, if it has the habit
    ends: bool  # with the end-of-text token
    spells: bool = False
    ended: bool = False
    cut_at: str | None = None  # a character that is no text: what stands around it is tokenised apart


@dataclass(frozen=True)
class Encoder:
    """Encodes records for one tokenizer and config."""

    tokenizer: PreTrainedTokenizerBase
    config: DataConfig
    template: ChatTemplate
    control: ControlTokens
    beginning: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Encoder:
        """Reads the template and its control tokens.

        Raises:
            RequestError: `data.control_tokens: as_text`, and one of them is a single character.
        """
        template = ChatTemplate(tokenizer, config.chat_template)
        control = ControlTokens.of(tokenizer, template)
        if control.short and config.control_tokens == "as_text":
            raise RequestError(
                f"data.control_tokens: as_text takes control tokens apart, but {control.short!r}, which is one of "
                "this tokenizer's, is one character; take reject_answers or reject_rows"
            )
        return cls(tokenizer, config, template, control, beginning(tokenizer))

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
        """The record as text, under the rule for control tokens.

        Raises:
            BadRow: it cannot be written. SpellsControlToken: its content may not be read as it stands.
            DataError: the template can write no chat.
        """
        if isinstance(record, Chat) and self.control.endless:
            raise DataError(f"{self.control.endless}: no chat can be written by it")
        rule, whole = self.config.control_tokens, self.config.loss_on == "all"
        kept = record if rule == "as_text" else self.control.without_ends(record, all_count=whole)
        answer, other = self.control.where(kept, all_count=whole)
        found, ended = answer or other, kept is not record
        if found is None:
            return self._as_it_stands(kept)._replace(ended=ended)
        if rule == "as_text":
            apart, mark = self.control.taken_apart(kept)
            return self._as_it_stands(apart)._replace(spells=True, cut_at=mark)
        if answer or rule == "reject_rows":
            what = "by which the chat template opens or ends a turn" if self.template.exists else "which ends a text"
            way_out = "" if self.control.short else ", or set data.control_tokens: as_text"
            raise SpellsControlToken(f"{found}, {what}; take it out{way_out}")
        return self._as_it_stands(kept)._replace(spells=True, ended=ended)

    def _as_it_stands(self, record: Text | Chat) -> _Written:
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

    def _encode(self, written: Sequence[_Written]) -> list[Encoded]:
        if not written:
            return []
        masked = any(each.spans is not None for each in written)
        if masked and not self.tokenizer.is_fast:
            raise RequestError(
                f"{type(self.tokenizer).__name__} cannot report which characters a token stands for, "
                "so answers cannot be separated from prompts; use its fast version or data.loss_on: all"
            )
        whole = [each.text if each.cut_at is None else "" for each in written]
        tokenised = zip(written, self._tokenise(whole, offsets=masked), strict=True)
        return [
            self._document(each, *(found if each.cut_at is None else self._in_parts(each, offsets=masked)))
            for each, found in tokenised
        ]

    def _tokenise(self, texts: list[str], *, offsets: bool) -> list[tuple[list[int], NDArray[np.int64]]]:
        """Ids of each text, and with `offsets` the characters [T, 2] that they stand for."""
        batch = self.tokenizer(texts, add_special_tokens=False, verbose=False, return_offsets_mapping=offsets)
        pairs = batch["offset_mapping"] if offsets else [()] * len(texts)
        return [(ids, _as_pairs(each)) for ids, each in zip(batch["input_ids"], pairs, strict=True)]

    def _in_parts(self, written: _Written, *, offsets: bool) -> tuple[list[int], NDArray[np.int64]]:
        """As `_tokenise`, of a text whose parts are tokenised each alone; its marks are no tokens."""
        parts = written.text.split(written.cut_at)
        # behind a line feed, or tokenizers that begin a text with a blank would put one into the middle of it
        tokenised = self._tokenise(["\n", *("\n" * (at > 0) + part for at, part in enumerate(parts))], offsets=offsets)
        (feed, _), *found = tokenised
        ids: list[int] = []
        offset_T2, start = [_as_pairs(())], 0
        for at, (part, (own, pairs)) in enumerate(zip(parts, found, strict=True)):
            if at:
                if own[: len(feed)] != feed:  # it has run together with what follows
                    ((own, pairs),) = self._tokenise([part], offsets=offsets)
                else:
                    own, pairs = own[len(feed) :], pairs[len(feed) :] - 1
            ids += own
            offset_T2.append(pairs + start)
            start += len(part) + 1
        return ids, np.concatenate(offset_T2)

    def _document(self, written: _Written, ids: list[int], offset_T2: NDArray[np.int64]) -> Encoded:
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
        fitted = self._fitted(document, masked=written.spans is not None, straddles=straddles)
        return fitted._replace(spells=written.spells, ended=written.ended)

    def _given(self, record: Tokens) -> Encoded | BadRow:
        last = len(self.tokenizer) - 1
        # before they become an array: a file may hold numbers that no array takes
        if min(record.ids) < 0 or max(record.ids) > last:
            at, number = next((at, each) for at, each in enumerate(record.ids) if not 0 <= each <= last)
            raise BadRow(f"input_ids[{at}] is {number!s:.40}; the tokenizer's ids are 0 to {last}")
        mask = np.ones(len(record.ids), bool) if record.in_loss is None else np.asarray(record.in_loss)
        document = Document(np.asarray(record.ids, dtype=np.int32), mask)
        return self._fitted(document, masked=record.in_loss is not None, straddles=0)

    def _fitted(self, document: Document, *, masked: bool, straddles: int) -> Encoded:
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
