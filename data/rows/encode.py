"""Records as token ids, each with whether it counts in the loss.

Ids that came with a row, of this tokenizer and template, are taken as they are. Of text, a token counts
when it begins inside what an assistant generates; one that straddles the end of the prompt does not,
because the decoder, given that prompt, can never produce it.
Read next: `chats/turns.py`, where answers are; `packed.py`, which packs the documents.

Shapes: T tokens of a document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, RequestError
from ..config import DataConfig
from .chats.message import counts, is_empty
from .chats.spoken import text_of
from .chats.turns import pieces_of
from .chats.written import Origin, Turn, chained
from .control import ControlTokens, SpellsControlToken
from .packed import Document
from .raw import BadRow
from .shapes import Chat, Record, Text, Tokens
from .templates import ChatTemplate, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_OPENING = 64
"""Tokens at the end of a prompt in which it opens thoughts."""


class Encoded(NamedTuple):
    """The documents of a record, and what statistics and checks need of them."""

    documents: list[Document]
    """One, or of a chat whose template rewrites its history one for each answer."""
    masked: bool
    """Some tokens were left out of the loss on purpose, or could have been."""
    cut: bool
    """One is longer than a row."""
    straddles: int
    """Answers whose first characters share a token with the prompt."""
    spells: bool = False
    """Its content spells a control token."""
    ended: bool = False
    """An answer ended with a token that ends it, which was cut off."""
    answers: int = 0
    """Turns of a chat that are in the loss."""
    notes: Mapping[str, int] = {}
    """Answers that are not, or not as the row has them, by `turns.NOTES`."""
    by_ids: bool = False
    """The ids are those that came with the row."""

    @property
    def document(self) -> Document:
        """The first document."""
        return self.documents[0]


class _Written(NamedTuple):
    """Text, and the characters that count (None: all)."""

    text: str
    spans: list[Span] | None
    starts: bool  # with the tokenizer's beginning-of-text token, if it has the habit
    ends: bool  # with the end-of-text token
    cut_at: str | None = None  # a character that is no text: what stands around it is tokenised apart
    turns: Sequence[int] = ()
    expected: Mapping[int, list[int]] = {}  # turn -> the ids that the target wrote, where they are known


@dataclass(frozen=True)
class _Row:
    """The texts of a record."""

    texts: list[_Written]
    notes: Counter[str] = field(default_factory=Counter)
    spells: bool = False
    ended: bool = False


class _Tokenised(NamedTuple):
    """A text as a document."""

    document: Document
    masked: bool
    straddles: int
    answers: int
    notes: Counter[str]


@dataclass(frozen=True)
class Encoder:
    """Encodes records for one tokenizer and config."""

    tokenizer: PreTrainedTokenizerBase
    config: DataConfig
    template: ChatTemplate
    control: ControlTokens
    beginning: list[int]
    origin: Origin

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Encoder:
        """Reads the template and its control tokens.

        Raises:
            RequestError: `data.control_tokens: as_text`, and one of them is a single character.
        """
        template = ChatTemplate(tokenizer, config.chat_template, config.template_values, config.template_date)
        control = ControlTokens.of(tokenizer, template)
        if control.short and config.control_tokens == "as_text":
            raise RequestError(
                f"data.control_tokens: as_text takes control tokens apart, but {control.short!r}, which is one of "
                "this tokenizer's, is one character; take reject_answers or reject_rows"
            )
        origin = Origin.of(tokenizer, config.template_values)
        return cls(tokenizer, config, template, control, beginning(tokenizer), origin)

    def __call__(self, records: Sequence[Record]) -> list[Encoded | BadRow]:
        """Encode a batch; a record that cannot be encoded is returned as the reason.

        Raises:
            RequestError: chats, but the tokenizer has no template.
        """
        results: list[Encoded | BadRow | None] = [None] * len(records)
        rows: dict[int, _Row] = {}
        for at, record in enumerate(records):
            try:
                if isinstance(record, Tokens):
                    results[at] = self._given(record)
                elif isinstance(record, Chat) and record.written and record.written.origin == self.origin:
                    results[at] = self._as_written(record, record.written.turns)
                else:
                    rows[at] = self._write(record)
            except BadRow as bad:
                results[at] = bad
        tokenised = iter(self._encode([text for row in rows.values() for text in row.texts]))
        for at, row in rows.items():
            results[at] = self._together(row, [next(tokenised) for _ in row.texts])
        return [each for each in results if each is not None]

    def _write(self, record: Text | Chat) -> _Row:
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
            return self._as_it_stands(kept, ended=ended)
        if rule == "as_text":
            apart, mark = self.control.taken_apart(kept)
            return self._as_it_stands(apart, spells=True, cut_at=mark)
        if answer or rule == "reject_rows":
            what = "by which the chat template opens or ends a turn" if self.template.exists else "which ends a text"
            if found.endswith(tuple(map(repr, self.control.stops))):
                what = "at which the target stops by its generation_config.json"
            way_out = "" if self.control.short else ", or set data.control_tokens: as_text"
            raise SpellsControlToken(f"{found}, {what}; take it out{way_out}")
        return self._as_it_stands(kept, spells=True, ended=ended)

    def _as_it_stands(
        self, record: Text | Chat, *, spells: bool = False, ended: bool = False, cut_at: str | None = None
    ) -> _Row:
        if isinstance(record, Text):
            texts = [_Written(record.text, None, starts=True, ends=record.ends, cut_at=cut_at)]
            return _Row(texts, spells=spells, ended=ended)
        if not self.template.exists:
            return _Row([self._write_plain(record)._replace(cut_at=cut_at)], spells=spells, ended=ended)
        found, expected = pieces_of(self.template, record, self.config.loss_on), self._expected(record)
        texts = [
            _Written(
                each.text, each.spans, starts=False, ends=False, cut_at=cut_at, turns=each.turns, expected=expected
            )
            for each in found.texts
        ]
        return _Row(texts, found.notes, spells, ended)

    def _expected(self, chat: Chat) -> dict[int, list[int]]:
        """The ids of answers that came with a row, where another template has to write them anew."""
        if chat.written is None or chat.written.origin.tokenizer != self.origin.tokenizer:
            return {}
        return {each.turn: each.answer for each in chat.written.turns}

    def _as_written(self, chat: Chat, turns: Sequence[Turn]) -> Encoded:
        """The ids as they came: a document for every run of answers in which nothing is rewritten."""
        self._check_ids(chat, turns)
        chosen = turns[-1:] if self.config.loss_on == "last" else turns
        notes = Counter[str]({"cut": sum(not each.ended for each in chosen), "without ids": _without_ids(chat, turns)})
        documents, before, answers = [], list[int](), 0
        for group in chained(chosen):
            ids = group[-1].prompt + group[-1].answer
            in_loss = np.zeros(len(ids), dtype=np.bool_)
            if self.config.loss_on == "all":
                in_loss[len(commonprefix([before, ids])) :] = True
            for each in group:
                why = self._left_out(chat, each)
                in_loss[len(each.prompt) : len(each.prompt) + len(each.answer)] = why is None
                notes.update([why] if why else [])
                answers += why is None
            documents.append(self._fitted(Document(np.asarray(ids, dtype=np.int32), in_loss), masked=True))
            before = ids
        cut = any(is_cut for _, is_cut in documents)
        return Encoded([each for each, _ in documents], True, cut, 0, answers=answers, notes=+notes, by_ids=True)

    def _left_out(self, chat: Chat, turn: Turn) -> str | None:
        """Why an answer that came in ids is not in the loss."""
        message = chat.messages[turn.turn]
        if not counts(message):
            return "marked"
        if len(turn.answer) <= turn.ended:
            return "empty"
        # thoughts that the prompt opens stand in the row's text too
        written = text_of(self.tokenizer, turn.prompt[-_OPENING:] + turn.answer)
        return None if message["content"] in written else "edited"

    def _check_ids(self, chat: Chat, turns: Sequence[Turn]) -> None:
        """Raise BadRow where ids that came with a chat are not of its answers, or of the tokenizer."""
        last = len(self.tokenizer) - 1
        for each in turns:
            if not 0 <= each.turn < len(chat.messages) or chat.messages[each.turn]["role"] != "assistant":
                raise BadRow(f"ids of turn {each.turn + 1}, which is no answer of the row")
            if not each.prompt or not all(0 <= number <= last for number in [*each.prompt, *each.answer]):
                raise BadRow(f"ids of turn {each.turn + 1} are none of the tokenizer's, which are 0 to {last}")

    def _write_plain(self, chat: Chat) -> _Written:
        """Prompt and answer one after the other, as the decoder gets prompts without a template."""
        if not chat.plain:
            raise RequestError(
                "the rows are chats, but the tokenizer has no chat template to write them with; "
                "take a target that has one, or rows of prompt and completion"
            )
        *before, answer = (message["content"] for message in chat.messages)
        prompt = plain_prompt(before)
        spans = None if self.config.loss_on == "all" else [(len(prompt), len(prompt + answer))]
        ended = chat.messages[-1].get("ended", True)
        return _Written(prompt + answer, spans, starts=True, ends=bool(ended))

    def _encode(self, written: Sequence[_Written]) -> list[_Tokenised]:
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

    def _together(self, row: _Row, parts: Sequence[_Tokenised]) -> Encoded:
        """The documents of a record."""
        notes = row.notes + sum((each.notes for each in parts), Counter[str]())
        fitted = [self._fitted(each.document, masked=each.masked) for each in parts]
        return Encoded(
            [document for document, _ in fitted],
            any(each.masked for each in parts),
            any(cut for _, cut in fitted),
            sum(each.straddles for each in parts),
            row.spells,
            row.ended,
            sum(each.answers for each in parts),
            notes,
        )

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

    def _document(self, written: _Written, ids: list[int], offset_T2: NDArray[np.int64]) -> _Tokenised:
        before = self.beginning if written.starts else []
        eos = self.tokenizer.eos_token_id
        behind = [eos] if written.ends and eos is not None else []
        notes, answers = Counter[str](), set[int]()
        if written.spans is None:
            in_loss = np.ones(len(ids), dtype=np.bool_)
        else:
            in_loss = np.zeros(len(ids), dtype=np.bool_)
            for span, turn in zip(written.spans, written.turns or [-1] * len(written.spans), strict=True):
                inside = _inside(offset_T2, span)
                if turn in written.expected and np.asarray(ids)[inside].tolist() != written.expected[turn]:
                    notes["other tokens"] += 1
                    continue
                in_loss |= inside
                answers.add(turn)
        document = Document(
            np.asarray([*before, *ids, *behind], dtype=np.int32),
            np.concatenate([np.zeros(len(before), np.bool_), in_loss, np.ones(len(behind), np.bool_)]),
        )
        straddles = sum(_straddles(offset_T2, start) for start, _ in written.spans or ())
        return _Tokenised(document, written.spans is not None, straddles, len(answers), notes)

    def _given(self, record: Tokens) -> Encoded | BadRow:
        last = len(self.tokenizer) - 1
        # before they become an array: a file may hold numbers that no array takes
        if min(record.ids) < 0 or max(record.ids) > last:
            at, number = next((at, each) for at, each in enumerate(record.ids) if not 0 <= each <= last)
            raise BadRow(f"input_ids[{at}] is {number!s:.40}; the tokenizer's ids are 0 to {last}")
        mask = np.ones(len(record.ids), bool) if record.in_loss is None else np.asarray(record.in_loss)
        masked = record.in_loss is not None
        document, cut = self._fitted(Document(np.asarray(record.ids, dtype=np.int32), mask), masked=masked)
        return Encoded([document], masked, cut, 0)

    def _fitted(self, document: Document, *, masked: bool) -> tuple[Document, bool]:
        """A masked document loses what is longer than a row; a text will be cut into pieces. And whether it is longer.

        The rest of an answer without its prompt is nothing that the decoder ever meets.
        """
        length = self.config.sequence_length
        cut = len(document.ids) > length
        if masked and cut:
            document = Document(document.ids[:length], document.in_loss[:length])
        return document, cut


def _without_ids(chat: Chat, turns: Sequence[Turn]) -> int:
    """Answers that would be learnt, and have no ids beside those that have some."""
    known = {each.turn for each in turns}
    return sum(
        at > 0 and at not in known and each["role"] == "assistant" and counts(each) and not is_empty(each)
        for at, each in enumerate(chat.messages)
    )


def plain_prompt(before: Sequence[str]) -> str:
    """What stands in front of an answer without a template: a system text and the user's, an empty line between."""
    return "\n\n".join(before)


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning-of-text token, if the tokenizer puts it before plain text by itself."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    return [bos] if tokenizer("a")["input_ids"][:1] == [bos] else []


def _as_pairs(pairs: Sequence[Span]) -> NDArray[np.int64]:
    return np.asarray(pairs, dtype=np.int64).reshape(-1, 2)


def _inside(offset_T2: NDArray[np.int64], span: Span) -> NDArray[np.bool_]:
    """Tokens whose first character lies in a span."""
    inside: NDArray[np.bool_] = (offset_T2[:, 0] >= span[0]) & (offset_T2[:, 0] < span[1])
    return inside


def _straddles(offset_T2: NDArray[np.int64], boundary: int) -> int:
    return int(((offset_T2[:, 0] < boundary) & (offset_T2[:, 1] > boundary)).sum())
