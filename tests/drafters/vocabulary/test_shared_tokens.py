"""Two tokenizers as bytes: nothing is lost on the way, and only what is the same is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.drafters.history import History
from draftsmith.drafters.vocabulary.across import _kind
from draftsmith.drafters.vocabulary.foreign_draft import IntersectionDraft, RetokenisedDraft
from draftsmith.drafters.vocabulary.shared_tokens import (
    Vocabulary,
    VocabularyPair,
    _readable,
    _whole_characters,
    byte_level,
)
from draftsmith.drafters.vocabulary.translated_rows import TranslatedRows
from draftsmith.errors import RequestError
from helpers.models.sentence_piece_tokenizer import sentence_piece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

CODE = ["def add(left, right):\n    return left + right  # a sum\n", "import os, sys\n"] * 20
PROSE = ["Ein Bär läuft über die Straße, añade 東京 und geht heim\n"] * 40

CODER = train_tokenizer(CODE, 340)
WRITER = train_tokenizer(PROSE, 360)
PIECES = sentence_piece()
TOKENIZERS = {"code": CODER, "prose": WRITER, "pieces": PIECES}
WORDS = {name: Vocabulary.of(each, len(each) + 3) for name, each in TOKENIZERS.items()}
BOTH = pytest.mark.parametrize(
    ("draft", "target"), [("code", "prose"), ("prose", "code"), ("pieces", "code"), ("code", "pieces")]
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(max_size=12), st.sampled_from(["def a(", " a", "läuft", "<s>", "東"])))
def test_bytes_of_what_a_tokenizer_writes_are_the_text(name: str, text: str) -> None:
    """By the library's own account: what `decode` reads from the ids."""
    tokenizer, words = TOKENIZERS[name], WORDS[name]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if any(words.tokens[n] is None for n in ids):
        return  # the text spells a special token
    in_front = " " if name == "pieces" and text else ""  # as SentencePiece has it
    assert words.bytes_of(ids).decode() == in_front + text


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.one_of(st.binary(max_size=16), st.text(max_size=10).map(str.encode)))
def test_every_byte_survives(name: str, data: bytes) -> None:
    """Whole characters or not, special tokens' own spelling too: by ordinary tokens alone."""
    words = WORDS[name]
    ids = words.encode(data)
    assert words.bytes_of(ids) == data
    assert all(words.tokens[n] is not None for n in ids)


@BOTH
@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.integers(0, 10_000), min_size=1, max_size=20))
def test_a_context_keeps_every_byte_whatever_the_tokens(draft: str, target: str, numbers: list[int]) -> None:
    """Token by token and as a prompt; special tokens between them cut the stretches."""
    pair = VocabularyPair(WORDS[draft], WORDS[target])
    ordinary = [n for n, token in enumerate(pair.target.tokens) if token is not None]
    ids = [ordinary[n % len(ordinary)] for n in numbers]
    text = pair.target.bytes_of(ids)
    assert b"".join(pair.draft.bytes_of(pair.piece(n)) for n in ids) == text
    assert pair.draft.bytes_of(pair.text(tuple(ids))) == text
    assert pair.text(tuple(ids))[: len(pair.draft.start)] == pair.draft.start


@BOTH
def test_shared_tokens_are_all_those_with_the_same_bytes(draft: str, target: str) -> None:
    pair = VocabularyPair(WORDS[draft], WORDS[target])
    by_hand = {
        (token, other)
        for token, mine in enumerate(pair.draft.tokens)
        for other, theirs in enumerate(pair.target.tokens)
        if mine is not None and mine == theirs
    }
    found = {(a, b) for a, b in pair.shared if pair.draft.tokens[a] is not None}
    assert found <= by_hand
    # of several ids with the same bytes one is taken: the one that a text of it has
    assert {pair.draft.tokens[a] for a, _ in by_hand} == {pair.draft.tokens[a] for a, _ in found}
    for letter, piece in (("a", "a"), ("e", "e"), ("\u0120", "\u2581")):  # the last one: a space
        ids = [
            TOKENIZERS[name].convert_tokens_to_ids(piece if name == "pieces" else letter) for name in (draft, target)
        ]
        assert tuple(ids) in found
    assert len({a for a, _ in pair.shared}) == len({b for _, b in pair.shared}) == len(pair.shared)
    assert (pair.draft.end, pair.target.end) in pair.shared
    special = {a for a, _ in pair.shared if a in pair.draft.specials}
    assert len(special) == (1 if "pieces" in (draft, target) else 4)


def test_of_tokens_with_the_same_bytes_the_one_that_a_text_has_is_taken() -> None:
    """Added tokens go before others, pieces before bytes, and a run of spaces is no letter."""
    spaces = train_tokenizer(CODE, 340)
    spaces.add_tokens(["  "])
    merged, added = spaces.convert_tokens_to_ids(["\u0120\u0120", "  "])
    words = Vocabulary.of(spaces, len(spaces))
    assert words.tokens[merged] == words.tokens[added] == b"  "
    assert words.ids[b"  "] == added == spaces("  ")["input_ids"][0]
    pieces = sentence_piece()
    pieces.add_tokens([AddedToken("\u2581\u2581", normalized=False), "\n"])
    runs, line = pieces.convert_tokens_to_ids(["\u2581\u2581", "\n"])
    words = Vocabulary.of(pieces, len(pieces))
    assert pieces.decode([runs, line]) == "  \n"
    assert (words.tokens[runs], words.ids[b"\n"]) == (b"  ", line)
    # and where there is nothing to ask, by order
    assert Vocabulary([b"a", b"b", b"a", b"b"], last=[0]).ids == {b"a": 2, b"b": 1}


def test_an_end_that_is_an_ordinary_token_is_shared_once() -> None:
    pair = VocabularyPair(Vocabulary([b"a", b"b"], end=1), Vocabulary([b"b", b"a", None], end=2))
    assert pair.shared == [(0, 1), (1, 0)]


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="adef \n\u6771", min_size=1, max_size=20))
def test_a_tokenizer_that_puts_a_space_in_front_writes_the_text_its_own_way(text: str) -> None:
    """With that space, and without one; these merges are not the longest tokens from the left."""
    pieces = [*"\u2581adef", "ef", "de", "\u2581a"]
    tokenizer = sentence_piece(pieces, [("e", "f"), ("d", "e"), ("\u2581", "a")])
    words = Vocabulary.of(tokenizer, len(tokenizer))
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert words.encode(b" " + text.encode()) == own
    assert tokenizer.convert_ids_to_tokens(words.encode(b"def a")) == ["d", "ef", "\u2581a"]


def test_special_tokens_of_a_prompt() -> None:
    """The same one, the other's end, or how it is written; the start of a text once."""
    pair = VocabularyPair(WORDS["pieces"], WORDS["code"])
    end, pad, turn = (CODER.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|pad|>", "<|im_start|>"))
    assert pair.piece(end) == [PIECES.eos_token_id]
    assert pair.draft.bytes_of(pair.piece(turn)) == b"<|im_start|>"
    ids = (turn, *CODER("def")["input_ids"])
    assert pair.text(ids)[0] == PIECES.bos_token_id
    assert pair.draft.bytes_of(pair.text(ids)) == b"<|im_start|>def"
    assert pad != end
    same = VocabularyPair(WORDS["pieces"], WORDS["pieces"])
    ids = tuple(PIECES("def a")["input_ids"])
    assert ids[0] == PIECES.bos_token_id
    assert same.text(ids) == same.text(ids[1:]) == list(ids)
    back = VocabularyPair(WORDS["code"], WORDS["pieces"])
    assert back.piece(PIECES.bos_token_id) == []
    assert back.piece(len(PIECES) + 1) == []  # padding of the target's head
    assert back.text((PIECES.bos_token_id,)) == [CODER.eos_token_id]


@pytest.mark.parametrize("data", [b"", b"a", "läß".encode(), "läß".encode()[:-1], b"\xff\xfeab", b"\xe6\x9d"])
@pytest.mark.parametrize("tail", [b"", b"def ", "東".encode()[:2], b"\xff def ad"])
@pytest.mark.parametrize("target", ["code", "prose", "pieces"])
def test_what_is_proposed_is_what_was_drafted(target: str, tail: bytes, data: bytes) -> None:
    """Behind any committed tokens, to the byte; half a character at its end may wait."""
    pair = VocabularyPair(WORDS["prose"], WORDS[target])
    tail_ids, drafted = pair.target.encode(tail), pair.draft.encode(data)
    found = pair.target.bytes_of(pair.after(tuple(tail_ids), tuple(drafted)))
    assert data.startswith(found)
    assert len(data) - len(found) < 4 if data else found == b""


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 40), text=st.sampled_from([*CODE[:2], "    return add(os, sys)\n" * 2]))
def test_the_proposal_is_the_target_s_own_way_of_writing(cut: int, text: str) -> None:
    """Where its tokens of the whole text have a border at the cut, those behind it are proposed."""
    ids = CODER(text)["input_ids"]
    at = cut % len(ids)
    pair = VocabularyPair(WORDS["prose"], WORDS["code"])
    data = pair.target.bytes_of(ids[at:])
    assert pair.after(tuple(ids[:at]), tuple(pair.draft.encode(data))) == ids[at:]


def test_the_draft_s_end_of_text_is_proposed_as_the_target_s() -> None:
    pair = VocabularyPair(WORDS["prose"], WORDS["code"])
    drafted = (*pair.draft.encode(b"def"), WRITER.eos_token_id, *pair.draft.encode(b"add"))
    found = pair.after((), drafted)
    assert found == [*CODER("def")["input_ids"], CODER.eos_token_id]
    stop = (*pair.draft.encode(b"def"), WRITER.pad_token_id, *pair.draft.encode(b"add"))
    assert pair.after((), stop) == CODER("def")["input_ids"]


def test_the_letters_of_bytes_are_the_library_s() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_level()) == set(ByteLevel.alphabet())
    assert sorted(byte_level().values()) == list(range(256))


def test_a_tokenizer_that_cannot_be_compared_is_refused() -> None:
    raw = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match=r"\(WordPiece\) writes tokens in a way"):
        Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=raw), 2)


@pytest.mark.parametrize("letter", ["ä", "東", "🐍"])
def test_the_beginning_of_a_character_at_the_end_is_cut_off(letter: str) -> None:
    data = letter.encode()
    for count in range(1, len(data)):
        assert _whole_characters(b"a" + data[:count]) == b"a"
        assert _whole_characters(data[:count]) == b""
    assert _whole_characters(b"a" + data) == b"a" + data


@pytest.mark.parametrize("data", [b"", b"a\x80", b"\xff", b"\xe6\x9d" + b"a"])
def test_what_is_no_text_stays_as_it_is(data: bytes) -> None:
    assert _whole_characters(data) == data


@pytest.mark.parametrize(
    ("draft", "target", "share", "kind"),
    [
        ([b"a", b"b", b"c", None], [b"a", b"b", b"d", b"e", b"f"], 2 / 3, IntersectionDraft),
        ([b"a", b"x"], [b"a", b"b", b"c"], 1 / 2, IntersectionDraft),
        ([b"a", b"x", b"y", b"z", b"b"], [b"a", b"b"], 2 / 5, RetokenisedDraft),
        ([None], [b"a"], 0.0, RetokenisedDraft),
    ],
)
def test_the_share_is_of_the_draft_s_ordinary_tokens(
    draft: list[bytes | None], target: list[bytes | None], share: float, kind: type
) -> None:
    """With half of them, `auto` drafts those alone."""
    pair = VocabularyPair(Vocabulary(draft), Vocabulary(target))
    assert pair.share == pytest.approx(share)
    assert _kind("auto", pair) is kind


def test_the_tail_of_a_row_is_its_last_tokens_or_all_of_them() -> None:
    nothing: Any = None
    texts, rows = [list(range(count)) for count in (2, 11, 12, 13, 20, 30)], TranslatedRows(nothing, nothing)
    rows._history, rows._seen = History([text[:-1] for text in texts], 4, "cpu"), [len(text) for text in texts]
    rows._history.write_last(torch.tensor([text[-1] for text in texts]))
    assert rows.tail(12) == [tuple(text[-12:]) for text in texts]


@pytest.mark.parametrize(
    ("tail", "data", "text"),
    [
        (b"ab", b"c", b"abc"),
        (b"\xa4b", b"c", b"bc"),  # the end of a character that began before
        (b"a\xff", b"c", b"c"),  # nothing of it can be read
        (b"\xe6\x9d", b"\xb1", b"\xe6\x9d\xb1"),
        (b"a", b"\xffc", None),
        (b"", b"c", b"c"),
    ],
)
def test_what_is_read_before_a_draft_is_the_text_at_its_end(tail: bytes, data: bytes, text: bytes | None) -> None:
    assert _readable(tail, data) == text
