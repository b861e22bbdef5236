"""Drafters that search given texts: the numbers they draw with, how far they copy, what a draft costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.data.datastore import Datastore
from draftsmith.data.datastore_build import build_datastore
from draftsmith.decoding.proposal import Committed, Proposer
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.extras.llma import Llma
from draftsmith.drafters.extras.ngram import Ngram, NgramTable
from draftsmith.drafters.extras.rest import Rest
from draftsmith.drafters.suffix.index import AnswerMemory
from draftsmith.drafters.suffix.proposer import SuffixDecoding, likeliest_tree
from helpers.models.toy_answers import answer_of, p_of_answers
from helpers.operation_counts import calls_of

SEEDS = range(1000)
Over = Callable[[list[int], Path], Proposer]


def store_of(texts: list[list[int]], folder: Path, vocabulary: int = 3) -> Datastore:
    build_datastore(texts, folder, vocabulary=vocabulary, tokenizer="t", replace=True)
    return Datastore(folder, tokenizer="t")


def by_suffix(text: list[int], folder: Path) -> SuffixDecoding:
    return SuffixDecoding(draft_length=3, depth=5, factor=4.0, least=0.0, store=store_of([text], folder))


def by_rest(text: list[int], folder: Path) -> Rest:
    return Rest(store_of([text], folder), nodes=4, shortest=1, draft_length=3)


def by_llma(text: list[int], _folder: Path) -> Llma:
    return Llma([text], draft_length=3)


def by_ngram(text: list[int], _folder: Path) -> Ngram:
    return Ngram(NgramTable.count([text], order=3, vocabulary=3), draft_length=3)


OVER: list[Over] = [by_suffix, by_rest, by_llma, by_ngram]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("over", [by_suffix, by_llma])
def test_a_text_is_not_searched_with_the_numbers_it_was_drawn_with(
    over: Over, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is searched in a second call of the same seed, as a process later would do."""
    alone = SuffixDecoding(draft_length=3, depth=5, factor=4.0, least=0.0)
    firsts = [tuple(answer_of(alone, seed)) for seed in SEEDS]

    known = {text: over([0, *text], tmp_path / str(text)) for text in set(firsts)}

    def seconds() -> float:
        return p_of_answers(answer_of(known[first], seed) for seed, first in zip(SEEDS, firsts))

    assert seconds() > 1e-4
    monkeypatch.setattr(type(next(iter(known.values()))), "salt", lambda _self: 0)  # the planted bug
    assert seconds() < 1e-5


def test_texts_have_numbers_of_their_own(tmp_path: Path) -> None:
    salts = set()
    for number, text in enumerate([[0, 1], [0, 2], [1, 0]]):
        for over in OVER:
            drafter = over(text, tmp_path / str(number))
            assert drafter.salt() == drafter.salt() != 0  # known texts change nothing from call to call
            salts.add(drafter.salt())
    assert len(salts) == 3 * len(OVER)
    memory = AnswerMemory(depth=5)
    memory.add([1, 2])
    both = SuffixDecoding(draft_length=3, depth=5, memory=memory, store=store_of([[0, 1]], tmp_path / "0"))
    assert len({both.salt(), both.salt(), memory.salt()} - salts) == 3


@pytest.mark.parametrize("nodes", [None, 20])
def test_a_long_match_of_a_datastore_is_drafted_from_as_of_a_memory(nodes: int | None, tmp_path: Path) -> None:
    """A document of 400 tokens is written again: the longer the match, the longer the draft, to the end."""
    document = np.random.default_rng(0).integers(0, 60, 400).tolist()
    store = store_of([document], tmp_path / "store", vocabulary=60)
    drafter = SuffixDecoding(draft_length=16, nodes=nodes, store=store)
    for at in (8, 12, 20, 60, 300):
        drafter.reset([document[:at]], 40)
        (draft,) = drafter.look_up(torch.tensor([document[at]]))
        assert draft.tokens == document[at + 1 : at + 1 + min(16, at + 1)]


def test_a_draft_comes_down_to_what_strings_allow() -> None:
    assert SuffixDecoding().draft_length == 12  # of 24 tokens as many drafted as matched
    assert SuffixDecoding(factor=4.0).draft_length == 16
    assert SuffixDecoding(depth=8).draft_length == 4
    assert SuffixDecoding(draft_length=3).draft_length == 3


def test_a_tree_opens_no_more_followers_than_it_has_room_for() -> None:
    """Where nothing is too unlikely to be drafted, many followers cost no more than a few."""

    def work(followers: int) -> int:
        memory = AnswerMemory(tokens=10**6, depth=4)
        for token in range(followers):
            memory.add([0, 1 + token])
        match = next(match for _, match in memory.matches([0]))
        match.place.ranking()  # made once, and kept
        return calls_of(lambda: likeliest_tree(match, 6, 3, 0.0))

    assert work(4_000) == work(100)


def test_a_row_that_has_ended_does_not_widen_its_neighbour_s_calls() -> None:
    memory = AnswerMemory()
    memory.add(range(30))
    drafter = SuffixDecoding(memory=memory)
    drafter.reset([[0, 1, 2, 3, 4], [40]], 20)
    last_B = torch.tensor([5, 41])
    assert drafter.propose(last_B, Warper(0.0), Uniforms(0, [0, 1], "cpu")).tokens_BN.shape[1] == 7
    none_BD, one_B = torch.empty(2, 0, dtype=torch.long), torch.tensor([0, 1])
    drafter.observe(Committed(torch.tensor([[6], [42]]), one_B, none_BD, torch.zeros(2, 1, 50), None, is_chain=True))
    assert drafter.propose(torch.tensor([5, 42]), Warper(0.0), Uniforms(0, [0, 1], "cpu")).tokens_BN.shape[1] == 1
