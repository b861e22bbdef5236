"""Tokens of two tokenizers as bytes: which are the same, and a text of one in tokens of the other.

Bytes, not characters: a token may be a part of a character, and none of it may be lost on the way.
Read next: `translated_rows.py` and `foreign_draft.py`, which draft across vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encode = Callable[[str], list[int]]
_SPACE = "\u2581"  # how SentencePiece writes a space
_KEPT = 4096  # answers that are remembered


class Vocabulary:
    """One tokenizer's tokens as bytes."""

    def __init__(
        self, tokens: Sequence[bytes | None], *, specials: Mapping[int, str] | None = None,
        start: Sequence[int] = (), end: int | None = None, encode: Encode | None = None,
    ) -> None:  # fmt: skip
        """A vocabulary by its tokens.

        Args:
            tokens: bytes of every ordinary token; None for special ones and for padding.
            specials: ids of special tokens, and how they are written.
            start: what stands in front of a text.
            end: what ends one.
            encode: the tokenizer's own way; None for the longest token that fits, from the left.
        """
        self.tokens, self.specials = list(tokens), dict(specials or {})
        self.start, self.end = list(start), end
        self._encode = encode
        self.ids: dict[bytes, int] = {}
        for number, token in enumerate(self.tokens):
            if token:
                self.ids.setdefault(token, number)
        self._longest = max(map(len, self.ids), default=0)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, rows: int) -> Vocabulary:
        """The first `rows` tokens of a fast tokenizer.

        Raises:
            RequestError: it is not known how its tokens are written as bytes.
        """
        to_bytes = _reader(tokenizer)
        added = tokenizer.added_tokens_decoder
        tokens: list[bytes | None] = [None] * rows
        for text, number in tokenizer.get_vocab().items():
            if number < rows and not (number in added and added[number].special):
                tokens[number] = text.encode() if number in added else to_bytes(text)
        specials = {n: each.content for n, each in added.items() if each.special and n < rows}
        bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        end = None if end is None or end >= rows else end
        begins = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        return cls(
            tokens, specials=specials, start=[bos] if begins else [], end=end,
            encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        )  # fmt: skip

    @cached_property
    def size(self) -> int:
        """Tokens that are different as bytes."""
        return len(self.ids)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The text of ordinary tokens; others have none."""
        return b"".join(self.tokens[number] or b"" for number in ids)

    def encode(self, data: bytes) -> list[int]:
        """Ordinary tokens whose bytes are `data`: as the tokenizer writes it, where that is so.

        A text that it would change (a space put in front, half a character) is written by the
        longest tokens that fit. Bytes that no token has are left out, as they cannot be said.
        """
        own = self.encode_text(data)
        return own if own is not None and self.bytes_of(own) == data else self._greedy(data)

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
        self.behind = lru_cache(_KEPT)(self._behind)
        """What the draft wrote, in the target's tokens, see `_behind`."""

    @cached_property
    def shared(self) -> list[tuple[int, int]]:
        """(draft's id, target's id) of the tokens that both have; each id at most once.

        The same bytes, special tokens that are written alike, and the two ends of a text.
        """
        draft, target = self.draft, self.target
        pairs = [(n, target.ids[token]) for token, n in draft.ids.items() if token in target.ids]
        written = {text: number for number, text in target.specials.items()}
        special = [(n, written[text]) for n, text in draft.specials.items() if text in written]
        mine, theirs = {n for n, _ in special}, {n for _, n in special}
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

        As the draft was trained to read it, its start included; never empty.
        """
        found, run = list(self.draft.start), b""
        for number in ids:
            token = self.target.tokens[number]
            if token is None:
                found += [*self.draft.encode(run), *self.piece(number)]
                run = b""
            else:
                run += token
        found += self.draft.encode(run)
        return found or [self.draft.end or 0]

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

    def _behind(self, tail: tuple[int, ...], drafted: tuple[int, ...]) -> list[int]:
        """Drafted tokens in the target's, as it would write them behind its own tokens `tail`.

        Up to the first special one, which only an end of the text gets beyond. Where the target
        would join the end of `tail` and the beginning of the draft into one token, which the
        committed tokens rule out, the draft is written on its own.
        """
        own = self.draft.tokens
        count = next((n for n, each in enumerate(drafted) if own[each] is None), len(drafted))
        data = self.draft.bytes_of(drafted[:count])
        whole = _whole_characters(data)
        ids = self._joined(self._last_text(tail), whole)
        ids = self.target.encode(whole or data) if ids is None else ids
        ends = count < len(drafted) and drafted[count] == self.draft.end
        return [*ids, self.target.end] if ends and self.target.end is not None else ids

    def _last_text(self, ids: tuple[int, ...]) -> bytes:
        """The text of the ordinary tokens at the end."""
        ordinary = takewhile(lambda n: self.target.tokens[n] is not None, reversed(ids))
        return self.target.bytes_of(reversed(list(ordinary)))

    def _joined(self, tail: bytes, data: bytes) -> list[int] | None:
        """The last tokens of the two texts together that are `data` to the byte."""
        both = _readable(tail, data)
        ids = None if both is None else self.target.encode_text(both)
        if not data or ids is None:
            return None
        taken: list[int] = []
        while ids and len(self.target.bytes_of(taken)) < len(data):
            taken.insert(0, ids.pop())
        return taken if self.target.bytes_of(taken) == data else None


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
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def _sentence_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode()
