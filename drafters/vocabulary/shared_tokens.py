"""Tokens of two tokenizers as bytes: which are the same, and a text of one in tokens of the other.

Bytes, not characters: a token may be a part of a character, and none of it may be lost on the way.
Read next: `translated_rows.py` and `foreign_draft.py`, which draft across vocabularies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ...errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encode = Callable[[str], list[int]]
_SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # and a byte that none of its pieces has
_LINE = b"\n"  # which no piece goes beyond
_KEPT = 4096  # answers that are remembered


class Vocabulary:
    """One tokenizer's tokens as bytes."""

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        *,
        specials: Mapping[int, str] | None = None,
        start: Sequence[int] = (),
        end: int | None = None,
        encode: Encode | None = None,
        last: Collection[int] = (),
    ) -> None:
        """A vocabulary by its tokens.

        Args:
            tokens: bytes of every ordinary token; None for special ones and for padding.
            specials: ids of special tokens, and how they are written.
            start: the ids that a text begins with.
            end: what ends one.
            encode: the tokenizer's own way; None for the longest token that fits, from the left.
            last: ids that stand for their bytes only where no other token has the same.
        """
        self.tokens, self.specials = list(tokens), dict(specials or {})
        self.start, self.end = list(start), end
        self._encode = encode
        having = self._by_bytes(last)
        self.ids: dict[bytes, int] = {token: numbers[0] for token, numbers in having.items()}
        self._longest = max(map(len, self.ids), default=0)
        for token, numbers in having.items():
            own = self.encode(token) if len(numbers) > 1 else []
            if len(own) == 1:  # of several, the one that a text of it has
                self.ids[token] = own[0]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, rows: int) -> Vocabulary:
        """The first `rows` tokens of a fast tokenizer.

        Raises:
            RequestError: it is not known how its tokens are written as bytes.
        """
        to_bytes = _reader(tokenizer)
        added = tokenizer.added_tokens_decoder
        # SentencePiece's decoder reads added tokens as it does the others
        literal = () if to_bytes is _sentence_piece else added.keys()
        tokens: list[bytes | None] = [None] * rows
        bytewise: list[int] = []
        for text, number in tokenizer.get_vocab().items():
            if number < rows and not (number in added and added[number].special):
                tokens[number] = text.encode() if number in literal else to_bytes(text)
                if to_bytes is _sentence_piece and _BYTE.fullmatch(text):
                    bytewise.append(number)
        specials = {n: each.content for n, each in added.items() if each.special and n < rows}
        bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        end = None if end is None or end >= rows else end
        begins = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        return cls(
            tokens,
            specials=specials,
            start=[bos] if begins else [],
            end=end,
            encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
            last=bytewise,
        )

    @cached_property
    def size(self) -> int:
        """Tokens that are different as bytes."""
        return len(self.ids)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The text of ordinary tokens; others have none."""
        return b"".join(self.tokens[number] or b"" for number in ids)

    def encode(self, data: bytes) -> list[int]:
        """Ordinary tokens whose bytes are `data`: as the tokenizer writes it, where that is so.

        A text that it puts a space in front of is written as after a line break. One that it would
        change otherwise (half a character) is written by the longest tokens that fit. Bytes that no
        token has are left out, as they cannot be said.
        """
        own = self.encode_text(data)
        if own is None or self.bytes_of(own) != data:
            own = self.encode_after(_LINE, data)
        return self._greedy(data) if own is None else own

    def encode_text(self, data: bytes) -> list[int] | None:
        """The tokenizer's own tokens; None for what is no text, or reads as special tokens."""
        if self._encode is None:
            return self._greedy(data)
        try:
            ids = self._encode(data.decode())
        except UnicodeDecodeError:
            return None
        known = all(0 <= n < len(self.tokens) and self.tokens[n] is not None for n in ids)
        return ids if known else None

    def encode_after(self, tail: bytes, data: bytes) -> list[int] | None:
        """The last tokens of the two texts together that are `data` to the byte."""
        both = _readable(tail, data)
        ids = None if both is None else self.encode_text(both)
        if not data or ids is None:
            return None
        at, missing = len(ids), len(data)
        while at and missing > 0:
            at -= 1
            missing -= len(self.tokens[ids[at]] or b"")
        return ids[at:] if self.bytes_of(ids[at:]) == data else None

    def _by_bytes(self, last: Collection[int]) -> dict[bytes, list[int]]:
        """The ids of each token's bytes, those of `last` after the others."""
        having: dict[bytes, list[int]] = {}
        for number in sorted(range(len(self.tokens)), key=set(last).__contains__):
            token = self.tokens[number]
            if token:
                having.setdefault(token, []).append(number)
        return having

    def _greedy(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                number = self.ids.get(data[at : at + size])
                if number is not None:
                    ids.append(number)
                    break
            at += size
        return ids


class VocabularyPair:
    """A draft's tokens beside the target's."""

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        self.draft, self.target = draft, target
        self.piece = lru_cache(_KEPT)(self._piece)
        """A target's token in the draft's tokens."""
        self.text = lru_cache(_KEPT)(self._text)
        """A prompt of the target in the draft's tokens, see `_text`."""
        self.after = lru_cache(_KEPT)(self._after)
        """What the draft wrote, in the target's tokens, see `_after`."""

    @cached_property
    def shared(self) -> list[tuple[int, int]]:
        """(draft's id, target's id) of the tokens that both have; each id at most once.

        The same bytes, special tokens that are written alike, and the two ends of a text.
        """
        draft, target = self.draft, self.target
        pairs = [(n, target.ids[token]) for token, n in draft.ids.items() if token in target.ids]
        written = {text: number for number, text in target.specials.items()}
        special = [(n, written[text]) for n, text in draft.specials.items() if text in written]
        mine, theirs = {n for n, _ in pairs + special}, {n for _, n in pairs + special}
        free = draft.end not in mine and target.end not in theirs
        if draft.end is not None and target.end is not None and free:
            special.append((draft.end, target.end))
        return sorted(pairs + special)

    @property
    def share(self) -> float:
        """Share of the draft's ordinary tokens that the target has too."""
        return self.common / max(1, self.draft.size)

    @property
    def common(self) -> int:
        """Ordinary tokens that both have."""
        return len(self.draft.ids.keys() & self.target.ids.keys())

    def _text(self, ids: tuple[int, ...]) -> list[int]:
        """A target's text in the draft's tokens: whole stretches between special tokens at once.

        As the draft was trained to read it, its start included, once; never empty.
        """
        text: list[int] = []
        run = b""
        for number in ids:
            token = self.target.tokens[number]
            if token is None:
                text += [*self.draft.encode(run), *self.piece(number)]
                run = b""
            else:
                run += token
        text += self.draft.encode(run)
        start = self.draft.start
        if text[: len(start)] != start:  # a start that both share has been translated already
            text = [*start, *text]
        return text or [self.draft.end or 0]

    def _piece(self, number: int) -> list[int]:
        token = self.target.tokens[number]
        if token is not None:
            return self.draft.encode(token)
        return self._special(number)

    @cached_property
    def _counterpart(self) -> dict[int, int]:
        return {theirs: mine for mine, theirs in self.shared}

    def _special(self, number: int) -> list[int]:
        """A shared one, or how it is written; nothing for padding and the start of a text."""
        if number in self._counterpart:
            return [self._counterpart[number]]
        if number in self.target.start:
            return []
        return self.draft.encode(self.target.specials.get(number, "").encode())

    def _after(self, tail: tuple[int, ...], drafted: tuple[int, ...]) -> list[int]:
        """Drafted tokens in the target's, as it would write them after its own tokens `tail`.

        Up to the first special one, which only an end of the text gets beyond. Where the target
        would join the end of `tail` and the beginning of the draft into one token, which the
        committed tokens rule out, the draft is written on its own.
        """
        own = self.draft.tokens
        count = next((n for n, each in enumerate(drafted) if own[each] is None), len(drafted))
        data = self.draft.bytes_of(drafted[:count])
        whole = _whole_characters(data)
        ids = self.target.encode_after(self._last_text(tail), whole)
        ids = self.target.encode(whole or data) if ids is None else ids
        ends = count < len(drafted) and drafted[count] == self.draft.end
        return [*ids, self.target.end] if ends and self.target.end is not None else ids

    def _last_text(self, ids: tuple[int, ...]) -> bytes:
        """The text of the ordinary tokens at the end."""
        ordinary = takewhile(lambda n: self.target.tokens[n] is not None, reversed(ids))
        return self.target.bytes_of(reversed(list(ordinary)))


def _whole_characters(data: bytes) -> bytes:
    """Without the beginning of a character at its end."""
    for cut in range(min(3, len(data)) + 1):
        try:
            data[: len(data) - cut].decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return data
        else:
            return data[: len(data) - cut]
    return data


def _readable(tail: bytes, data: bytes) -> bytes | None:
    """The end of `tail` from where on it is text, and `data`; None if that is none."""
    both, start = tail + data, 0
    while start <= len(tail):
        try:
            both[start:].decode()
        except UnicodeDecodeError as error:
            start += error.end
        else:
            return both[start:]
    return None


def _reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """From how a token is written in the vocabulary to its bytes."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    kinds = [] if backend is None else _decoders(backend.decoder)
    if "ByteLevel" in kinds:
        table = byte_level()
        return lambda text: bytes(table[letter] for letter in text)
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentence_piece
    name = type(tokenizer).__name__
    raise RequestError(
        f"the tokenizer {name} ({', '.join(kinds) or 'no decoder'}) writes tokens in a way that "
        "cannot be compared; across vocabularies, byte-level BPE and SentencePiece's can"
    )


def _decoders(decoder: Any) -> list[str]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [each["type"] for each in state.get("decoders", [state])]


def byte_level() -> dict[str, int]:
    """GPT-2's letters for bytes: those that can be printed stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def _sentence_piece(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()
