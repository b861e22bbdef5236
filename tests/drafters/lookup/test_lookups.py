"""Drafters without a model: what they find equals a plain search; their decoding is the target's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.data.datastore import Datastore
from draftsmith.data.datastore_build import build_datastore
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Committed
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.extras.adaptive import AdaptiveDraft
from draftsmith.drafters.extras.llma import Llma
from draftsmith.drafters.extras.lookahead import Lookahead
from draftsmith.drafters.extras.ngram import Ngram, NgramTable
from draftsmith.drafters.extras.rest import Rest
from draftsmith.drafters.lookup.function import CallableDrafter
from draftsmith.drafters.lookup.prompt_lookup import OwnGrams, PromptLookup
from draftsmith.errors import RequestError
from helpers.models.toy_answers import answer_of, p_of_answers
from helpers.operation_counts import Numbers, calls_of
from hypothesis import given, settings
from hypothesis import strategies as st

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 12, 13, 12]]
GREEDY = Warper(0.0)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def propose(drafter, texts: list[list[int]], *, static: bool = False):  # noqa: ANN001, ANN201
    """The proposal behind texts whose last token was emitted last."""
    drafter.reset([text[:-1] or [9] for text in texts], 8, static=static)
    last = torch.tensor([text[-1] for text in texts])
    return drafter.propose(last, GREEDY, Uniforms(0, range(len(texts)), "cpu"))


def chains(proposal) -> list[list[int]]:  # noqa: ANN001
    counts = proposal.present_BN.sum(1).tolist()
    return [row[1:count] for row, count in zip(proposal.tokens_BN.tolist(), counts)]


def copied(source: list[int], suffix_of: list[int], *, longest: int, latest: bool, shortest: int = 1) -> list[int]:
    """What follows the longest match of the end of `suffix_of` in `source`, by plain search."""
    for size in range(min(longest, len(suffix_of)), shortest - 1, -1):
        wanted = suffix_of[-size:]
        ends = [at + size for at in range(len(source) - size + 1) if source[at : at + size] == wanted]
        # a token has to follow
        ends = [end for end in ends if end < len(source) and source[end] != -1]
        if ends:
            return source[ends[-1] if latest else ends[0] :]
    return []


@settings(deadline=None, max_examples=80)
@given(
    st.lists(texts.filter(lambda t: len(t) > 1), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_prompt_lookup_is_the_plain_search(rows: list[list[int]], longest: int, latest: bool, static: bool) -> None:
    """By the index of the host, and by the device's look through the text."""
    drafter = PromptLookup(draft_length=5, longest=longest, latest=latest)
    for found, row in zip(chains(propose(drafter, rows, static=static)), rows):
        assert found == copied(row, row, longest=longest, latest=latest)[:5]


@settings(deadline=None, max_examples=80)
@given(texts, st.lists(texts, max_size=4), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_an_index_that_grows_is_that_of_the_whole_text(
    text: list[int], more: list[list[int]], shortest: int, longest: int, latest: bool
) -> None:
    index = OwnGrams(text, longest=longest, latest=latest)
    for tokens in more:
        index.extend(tokens)
        text = [*text, *tokens]
        found = copied(text, text, longest=longest, latest=latest, shortest=shortest)
        assert index.following(shortest, 4) == found[:4]


def test_prompt_lookup_s_draft_takes_no_more_work_in_a_longer_text() -> None:
    """Numbers that operations write, and calls on the host; a look through the text would write 100 times as many."""
    work = []
    for size in (100, 10_000):
        text = torch.randint(0, 50, (size,), generator=torch.Generator().manual_seed(0)).tolist()
        drafter = PromptLookup(draft_length=3)

        def draft():  # noqa: ANN202
            return drafter.propose(torch.tensor([61]), GREEDY, Uniforms(0, [0], "cpu"))  # noqa: B023

        for _ in range(2):  # the first draft of all fills what later ones read
            drafter.reset([[*text, 60, 61, 62, 63, *text, 60]], 8)
            calls = calls_of(draft)
        drafter.reset([[*text, 60, 61, 62, 63, *text, 60]], 8)
        with Numbers() as numbers:
            proposal = draft()
        assert chains(proposal) == [[62, 63, text[0]]]
        work.append((numbers.written, calls))
    assert work[0] == work[1] > (0, 0)


@settings(deadline=None, max_examples=80)
@given(st.lists(texts, min_size=1, max_size=3), st.lists(texts, min_size=1, max_size=3))
def test_llma_is_the_plain_search_and_stays_within_a_document(
    documents: list[list[int]], rows: list[list[int]]
) -> None:
    rows = [[9, *row] for row in rows]
    drafter = Llma(documents, draft_length=6, longest=3)
    flat = [token for document in documents for token in (*document, -1)]
    for found, row in zip(chains(propose(drafter, rows)), rows):
        expected = copied(flat, row, longest=3, latest=False)[:6]
        cut = expected.index(-1) if -1 in expected else len(expected)
        assert found == expected[:cut]


def test_llma_s_draft_takes_no_more_work_for_more_references() -> None:
    work = []
    for size in (100, 20_000):
        noise = torch.randint(0, 50, (size,), generator=torch.Generator().manual_seed(0)).tolist()
        drafter = Llma([noise, [60, 61, 62, 63], noise], draft_length=3)
        drafter.reset([[1, 2, 60]], 8)
        with Numbers() as numbers:
            proposal = drafter.propose(torch.tensor([61]), GREEDY, Uniforms(0, [0], "cpu"))
        assert chains(proposal) == [[62, 63]]
        work.append(numbers.written)
    assert work[0] == work[1] > 0


def test_rest_s_draft_takes_no_more_work_for_a_larger_datastore(tmp_path: Path) -> None:
    """A search by halves: 400 times the text, and calls on the host grow by the logarithm of it alone."""
    work = []
    for size in (500, 200_000):
        noise = torch.randint(0, 50, (size,), generator=torch.Generator().manual_seed(0)).tolist()
        documents = [noise, *[[60, 61, 62, 63]] * 5, noise]
        build_datastore(documents, tmp_path / str(size), vocabulary=64, tokenizer="t")
        drafter = Rest(Datastore(tmp_path / str(size)), nodes=8, draft_length=3)
        drafter.reset([[1, 2, 60]], 8)

        def draft():  # noqa: ANN202
            return drafter.propose(torch.tensor([61]), GREEDY, Uniforms(0, [0], "cpu"))  # noqa: B023

        assert draft().tokens_BN.tolist() == [[61, 62, 63]]
        work.append(calls_of(draft))
    assert work[1] < 1.8 * work[0], work


def test_llma_takes_ids_beyond_those_of_its_references_for_unknown() -> None:
    """With base 10, 12 in front of 2 would have the key of 2 in front of 3."""
    drafter = Llma([[2, 3, 9]], draft_length=2, longest=2)
    assert chains(propose(drafter, [[7, 12], [12, 2], [2, 3]])) == [[], [3, 9], [9]]


@settings(deadline=None, max_examples=80)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(2, 4), st.lists(texts, min_size=1, max_size=3))
def test_the_ngram_table_is_the_plain_count(documents: list[list[int]], order: int, rows: list[list[int]]) -> None:
    counts: dict[tuple[int, ...], Counter] = {}
    for text in documents:
        for length in range(1, order):
            for at in range(len(text) - length):
                context = tuple(text[at : at + length])
                counts.setdefault(context, Counter())[text[at + length]] += 1
    if not any(len(text) > 1 for text in documents):
        with pytest.raises(RequestError, match="no two tokens in a row"):
            NgramTable.count(documents, order=order, vocabulary=12)
        return
    drafter = Ngram(NgramTable.count(documents, order=order, vocabulary=12), draft_length=4)
    rows = [[9, *row] for row in rows]
    for found, row in zip(chains(propose(drafter, rows)), rows):
        text = list(row)
        for token in found:
            assert token == likeliest(counts, text, order)
            text.append(token)
        assert len(found) == 4 or likeliest(counts, text, order) is None


def likeliest(counts: dict, text: list[int], order: int) -> int | None:
    for length in range(order - 1, 0, -1):
        seen = counts.get(tuple(text[-length:])) if len(text) >= length else None
        if seen:
            return min(seen, key=lambda token: (-seen[token], token))
    return None


def test_too_wide_a_table_is_refused() -> None:
    with pytest.raises(RequestError, match="order 5 over 151936 tokens"):
        NgramTable.count([[1, 2]], order=5, vocabulary=151_936)


def make(family: str, target):  # noqa: ANN001, ANN201
    def echo(text: list[int]) -> list[int]:
        return text[-3:]

    def fork(text: list[int]) -> tuple[list[int], list[int]]:
        return [text[-1], text[0], 5], [-1, -1, 0]

    own = autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=40).tokens
    return {
        "prompt-lookup": lambda: PromptLookup(draft_length=4),
        "llma": lambda: Llma(own, draft_length=6),
        "ngram": lambda: Ngram(NgramTable.count(own, order=3, vocabulary=61)),
        "lookahead": lambda: Lookahead(window=4, ngram=3, guesses=3),
        "function": lambda: CallableDrafter(echo, draft_length=3, remembers=False),
        "function-tree": lambda: CallableDrafter(fork, draft_length=2, nodes=4, remembers=False),
        "adaptive-draft": lambda: AdaptiveDraft(make_drafter(target).backbone, target.vocabulary, longest=5),
    }[family]()


FAMILIES = ["prompt-lookup", "llma", "ngram", "lookahead", "function", "function-tree", "adaptive-draft"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("static", [False, True])
def test_greedy_output_is_the_targets_own(family: str, static: bool) -> None:
    target = make_target("qwen3")
    base = autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=40)
    own = generate(target, make(family, target), PROMPTS, warper=GREEDY, max_new_tokens=40, static=static)
    assert own.tokens == base.tokens
    accepted = sum(origin.count("draft") for origin in own.origin)
    assert accepted > 0 or family.startswith("function")
    assert own.target_calls <= base.target_calls


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("warper", [GREEDY, Warper(1.0), Warper(0.7, top_k=9, top_p=0.9)])
def test_a_row_alone_writes_what_it_writes_in_a_batch(family: str, warper: Warper) -> None:
    target = make_target("qwen3")
    drafter = make(family, target)
    common = {"warper": warper, "max_new_tokens": 30, "seed": 4}
    together = generate(target, drafter, PROMPTS, **common)
    late = generate(target, drafter, PROMPTS, static=True, **common)
    if family != "adaptive-draft":  # its plan comes a step later there
        assert late.tokens == together.tokens
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, [prompt], requests=[row], **common)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.origin[0] == together.origin[row]


def second_answers(*, remembers: bool) -> Iterator[list[int]]:
    """Each drafted, by a function that knows it, from an answer that was drawn with the same seed."""
    for seed in range(1000):
        known: list[int] = []

        def cached(text: list[int], known: list[int] = known) -> list[int]:
            return known[len(text) - 1 :]

        drafter = CallableDrafter(cached, draft_length=3, remembers=remembers)
        known += answer_of(drafter, seed)
        yield answer_of(drafter, seed)


@pytest.mark.slow
def test_a_function_may_know_what_the_target_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.Generator().manual_seed(0)
    drawn = lambda count: bytes(torch.randint(0, 256, (count,), generator=numbers).tolist())  # noqa: E731
    monkeypatch.setattr("draftsmith.drafters.lookup.function.secrets.token_bytes", drawn)
    assert p_of_answers(second_answers(remembers=True)) > 1e-4
    assert p_of_answers(second_answers(remembers=False)) < 1e-5  # what `remembers` is for


def test_lookahead_guesses_what_the_target_said_before() -> None:
    """A text that repeats is foreseen: fewer calls than tokens."""
    target = make_target("qwen3")
    own = generate(target, Lookahead(window=6, ngram=4, guesses=4), [[3, 3, 3, 3]], warper=GREEDY, max_new_tokens=150)
    assert own.target_calls < 149


def test_lookahead_nodes_see_their_column_and_the_row_before_them() -> None:
    drafter = Lookahead(window=3, ngram=3, guesses=1)
    tree = propose(drafter, [[1, 2, 3]]).tree
    nodes = tree.on(torch.device("cpu"))
    # node 4 + j is column j of row 1: it sees the root, row 0 up to column j, and itself
    for column in range(3):
        seen = nodes.ancestors_BNN[0, 4 + column].nonzero().flatten().tolist()
        assert seen == [0, *range(1, 2 + column), 4 + column]
        assert nodes.depths_BN[0, 4 + column] == column + 2


def test_the_adaptive_length_follows_acceptance() -> None:
    target = make_target("qwen3")
    good = AdaptiveDraft(make_drafter(target, noise=0.0).backbone, 61, longest=6)
    bad = AdaptiveDraft(make_drafter(target, noise=3.0).backbone, 61, longest=6)
    for drafter in (good, bad):
        generate(target, drafter, PROMPTS, warper=GREEDY, max_new_tokens=60)
    assert good.plan().min() == 6
    assert bad.plan().max() == 1


@pytest.mark.parametrize(
    ("guess", "message"),
    [
        ([99], "token id 99; expected 0 to 60"),
        (([1, 2], [0, -1]), "node 0 the parent 0"),
        (([1] * 9, [-1] * 9), "9 tokens and 9 parents"),
        (([1, 2, 3], [-1, 0, 1]), "went 3 deep"),
        ([-1], "token id -1; expected 0 to 60"),
        (None, r"gave is None; expected a list of token ids, \[\] for no draft"),
        ("ab", "gave is 'ab'; expected a list of token ids"),
        (["a"], "gave holds 'a'; expected a list of token ids"),
        ([3.7], "gave holds 3.7; expected a list of token ids"),
        (torch.tensor([3.7, 1.0]), "expected a list of token ids"),
        ((1, 2, 3), "a tuple of 3; expected a list of token ids"),
        ((1, 2), "gave is 1; expected a list of token ids"),
    ],
)
def test_a_function_that_guesses_nonsense_is_named(guess: object, message: str) -> None:
    drafter = CallableDrafter(lambda _: guess, draft_length=2, nodes=5, vocabulary=61)
    with pytest.raises(RequestError, match=message):
        propose(drafter, [[1, 2]])
    told = CallableDrafter(lambda _: guess, draft_length=2, nodes=5)  # the engine knows the target's vocabulary
    with pytest.raises(RequestError, match=message):
        generate(make_target("qwen3"), told, PROMPTS, warper=GREEDY, max_new_tokens=4)


def test_a_function_may_give_any_sequence_of_ids() -> None:
    guesses = [[3, 4], range(3, 5), torch.tensor([3, 4]), np.array([3, 4]), (np.array([3, 4]), [-1, 0])]
    drafted = [propose(CallableDrafter(lambda _, each=each: each), [[1, 2]]).tokens_BN.tolist() for each in guesses]
    assert drafted == [[[2, 3, 4]]] * 5


def test_a_vocabulary_of_the_functions_own_stands_below_the_targets() -> None:
    drafter = CallableDrafter(lambda _: [40], vocabulary=20)
    drafter.hold_to(61)
    with pytest.raises(RequestError, match="token id 40; expected 0 to 19"):
        propose(drafter, [[1, 2]])


def test_a_tree_of_fewer_nodes_than_a_draft_may_be_long_fits_a_short_request(target) -> None:  # noqa: ANN001
    drafter = CallableDrafter(lambda _: ([1], [-1]), draft_length=20, nodes=2)
    told = generate(target, drafter, [[5]], warper=GREEDY, max_new_tokens=3)
    assert told.tokens == autoregressive(target, [[5]], warper=GREEDY, max_new_tokens=3).tokens


class Foreign:
    """A datastore without a bound of its own, which knows one continuation."""

    salt = 1
    trie = staticmethod(Datastore.trie)

    def continuations(self, _context: object, **_how: int) -> np.ndarray:
        return np.array([[5, 61]])


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (lambda: Llma([[1, 2, 61]]), "a reference of llma"),
        (lambda: Ngram(NgramTable.count([[1, 2, 61]], order=3, vocabulary=70)), "the corpus of an n-gram table"),
        (lambda: Rest(Foreign()), "rest's datastore"),
    ],
)
def test_texts_of_another_vocabulary_are_refused(target, make, source: str) -> None:  # noqa: ANN001
    with pytest.raises(RequestError, match=f"{source} has the token id 61; expected 0 to 60, the target's"):
        generate(target, make(), [[1, 2, 3]], warper=GREEDY, max_new_tokens=4)


TABLE = NgramTable.count([[1, 2]], order=2, vocabulary=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptLookup(draft_length=0), "draft_length is 0: .* 1, as drafter.lookup.tokens of a recipe"),
        (lambda: PromptLookup(draft_length=2.5), "draft_length is 2.5: .*, as drafter.lookup.tokens"),
        (lambda: PromptLookup(draft_length="8"), "draft_length is '8': .*, as drafter.lookup.tokens"),
        (lambda: PromptLookup(longest=0), "longest is 0: .*, as drafter.lookup.longest"),
        (lambda: PromptLookup(longest=2, shortest=3), "shortest is 3; .* from 1 to 2, the longest"),
        (lambda: PromptLookup(shortest=0), "shortest is 0; expected a whole number from 1"),
        (lambda: Llma([[1, 2]], draft_length=-1), "draft_length is -1: .*, as drafter.llma.tokens"),
        (lambda: Llma([[1, 2]], longest=0), "longest is 0: .*, as drafter.llma.longest"),
        (lambda: Llma([[1, 2]], shortest=9), "shortest is 9"),
        (lambda: Ngram(TABLE, draft_length=0), "draft_length is 0: .*, as drafter.ngram.tokens"),
        (lambda: Rest(Foreign(), draft_length=0), "draft_length is 0: .*, as drafter.rest.tokens"),
        (lambda: Rest(Foreign(), nodes=1), "nodes is 1: .*, as drafter.rest.nodes"),
        (lambda: Rest(Foreign(), longest=3, shortest=4), "shortest is 4"),
        (lambda: Lookahead(window=0), "window is 0: .*, as drafter.lookahead.window"),
        (lambda: Lookahead(ngram=1), "ngram is 1: .*, as drafter.lookahead.ngram"),
        (lambda: CallableDrafter(list, draft_length=-1), "draft_length is -1; expected a whole number of at least 1"),
        (lambda: CallableDrafter(list, nodes=2.5), "nodes is 2.5; expected a whole number"),
        (lambda: CallableDrafter(list, vocabulary=0), "vocabulary is 0; expected a whole number"),
        (lambda: CallableDrafter([1, 2]), r"the drafting function is \[1, 2\]; expected one that takes"),
    ],
)
def test_what_drafts_nothing_is_refused_where_it_is_made(make, message: str) -> None:  # noqa: ANN001
    with pytest.raises(RequestError, match=message):
        make()


def test_history_is_what_was_committed() -> None:
    drafter = PromptLookup(draft_length=2)
    propose(drafter, [[1, 2, 3], [4, 5, 6]])
    nothing = torch.zeros(2, 1)
    committed = torch.tensor([[7, 8, 9], [7, 8, 9]])
    drafter.observe(Committed(committed, torch.tensor([3, 1]), nothing, nothing))
    drafter._history.write_last(torch.tensor([9, 7]))
    assert drafter._history.recent(4).tolist() == [[9, 8, 7, 3], [7, 6, 5, 4]]


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.integers(0, 60), max_size=3),
    st.integers(1, 20),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
)
def test_nothing_after_eos_and_never_too_long(
    family: str, eos: list[int], limit: int, temperature: float, static: bool
) -> None:
    """Trees, absent nodes and late hosts change neither where a text ends nor what it says."""
    target = make_target("qwen3")
    drafter = make(family, target)
    common = {"warper": Warper(temperature), "max_new_tokens": limit, "seed": limit}
    done = generate(target, drafter, PROMPTS, eos_ids=eos, static=static, **common)
    free = generate(target, drafter, PROMPTS, static=static, **common)
    for tokens, unbounded, origin in zip(done.tokens, free.tokens, done.origin):
        assert 1 <= len(tokens) <= limit
        assert not set(eos) & set(tokens[:-1])
        assert len(tokens) == limit or tokens[-1] in eos
        assert len(origin) == len(tokens)
        assert tokens == unbounded[: len(tokens)]
    assert done.steps.kept_TB.sum(0).tolist() == [len(tokens) - 1 for tokens in done.tokens]
