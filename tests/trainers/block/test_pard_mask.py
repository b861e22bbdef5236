"""Which id stands for the tokens of a PARD draft that nobody has chosen yet."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import VOCABULARY, make_target
from draftsmith.errors import RequestError
from draftsmith.trainers.block.pard import _mask as mask_for
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


def tokenizer_of(words: dict[str, int], **special: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), **special)


def full(**special: str) -> Any:
    """One whose every row is some token's."""
    names = {0: "<unk>", 1: "<start>", 2: "<end>", 3: "<pad>"}
    return tokenizer_of({names.get(n, f"w{n}"): n for n in range(VOCABULARY)}, **special)


def test_an_id_that_no_token_has_is_found_between_others() -> None:
    """The number of tokens is no such id where ids have gaps: here it is the end of a text."""
    words = {"<unk>": 0, "a": 1, "b": 2, "<end>": 4}
    tokenizer = tokenizer_of(words, unk_token="<unk>", eos_token="<end>")
    assert len(tokenizer) == tokenizer.eos_token_id == 4
    assert mask_for(make_target("qwen3").model, None, tokenizer) == 3


def test_padding_stands_in_where_texts_never_have_it() -> None:
    assert mask_for(make_target("qwen3").model, None, full(pad_token="<pad>", eos_token="<end>")) == 3
    for shared in ("eos_token", "bos_token", "unk_token"):
        draft: Any = make_target("qwen3").model
        tokenizer = full(pad_token="<pad>", **{shared: "<pad>"})
        assert mask_for(draft, None, tokenizer) == VOCABULARY
        assert len(draft.get_input_embeddings().weight) == VOCABULARY + 1


def test_an_id_without_a_row_is_refused() -> None:
    with pytest.raises(RequestError, match=r"pard.mask_token is 99; the draft has embeddings of ids 0 to 60"):
        mask_for(make_target("qwen3").model, 99, full())
