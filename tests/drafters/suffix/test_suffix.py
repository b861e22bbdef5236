"""Suffix decoding: counts, drafts and forgetting equal a plain search through the texts."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, make_drafter, make_target
from draftsmith.data.datastore import Datastore
from draftsmith.data.datastore_build import build_datastore
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.suffix.hybrid import beside
from draftsmith.drafters.suffix.index import AnswerMemory, Match, OwnText
from draftsmith.drafters.suffix.proposer import SuffixDecoding
from draftsmith.drafters.suffix.windows import Node, WindowTree
from draftsmith.errors import RequestError
from helpers.models.toy_answers import answer_of, p_of_answers
from helpers.operation_counts import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st

GREEDY = Warper(0.0)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
Counts = Callable[[Sequence[int]], dict[int, int]]


def counts_in(documents: Sequence[Sequence[int]], depth: int) -> Counts:
    """What follows a string, by looking at every position; a string with its follower has `depth` tokens at most."""

    def followers(string: Sequence[int]) -> dict[int, int]:
        size = len(string)
        if size >= depth:
            return {}
        return Counter(
            text[at + size]
            for text in documents
            for at in range(len(text) - size)
            if list(text[at : at + size]) == list(string)
        )

    return followers


def every_string(followers: Counts, end: Sequence[int], deepest: int, least: float) -> list[tuple[float, tuple]]:
    """All strings that may follow, with their probabilities."""
    found, level = [], [(1.0, ())]
    for _ in range(deepest):
        wider = []
        for probability, path in level:
            counts = followers([*end, *path])
            likely = [(probability * (n / sum(counts.values())), (*path, token)) for token, n in counts.items()]
            wider += [each for each in likely if each[0] >= least]
        found += wider
        level = wider
    return sorted(found, key=lambda each: (-each[0], len(each[1]), each[1]))


def plain_draft(sources: Sequence[tuple[Counts, int]], text: list[int], drafter: SuffixDecoding) -> tuple[float, list]:
    """The best draft over all matches, as paths, by the definition."""
    best: tuple[float, list] = (0.0, [])
    for followers, longest in sources:
        for size in range(min(drafter.depth - 1, longest), 0, -1):
            end = text[-size:]
            most = min(drafter.nodes - 1, int(drafter.factor * size))
            deepest = min(drafter.draft_length, drafter.depth - size)
            strings = every_string(followers, end, deepest, drafter.least)
            if drafter.branching:
                taken = strings[:most]
            else:
                taken = []
                while len(taken) < min(most, deepest):
                    path = taken[-1][1] if taken else ()
                    nexts = [each for each in strings if len(each[1]) == len(path) + 1 and each[1][:-1] == path]
                    counts = followers([*end, *path])
                    top = min(counts, key=lambda token: (-counts[token], token), default=None)
                    if top is None or (*path, top) not in [each[1] for each in nexts]:
                        break
                    taken.append(next(each for each in nexts if each[1][-1] == top))
            score = 0.0
            for probability, _ in taken:  # `sum` rounds in another way
                score += probability
            if score > best[0]:
                best = (score, [path for _, path in taken])
    return best


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@settings(deadline=None, max_examples=60)
@given(
    st.lists(texts.filter(lambda t: len(t) > 1), min_size=1, max_size=3),
    st.lists(texts, max_size=3),
    st.sampled_from([None, 2, 5]),
    st.sampled_from([(2, 1.0), (4, 2.0), (3, 0.5)]),
    st.sampled_from([0.0, 0.1, 0.4]),
)
def test_the_draft_is_that_of_a_plain_search(
    rows: list[list[int]], answers: list[list[int]], nodes: int | None, size: tuple[int, float], least: float
) -> None:
    memory = AnswerMemory(tokens=100, depth=6)
    for answer in answers:
        memory.add(answer)
    drafter = SuffixDecoding(draft_length=size[0], factor=size[1], nodes=nodes, depth=6, least=least, memory=memory)
    drafter.reset([row[:-1] for row in rows], 8)
    for draft, row in zip(drafter.look_up(torch.tensor([row[-1] for row in rows])), rows):
        # an end is no match of itself: a token has to follow
        sources = [(counts_in([row], 6), len(row) - 1), (counts_in(answers, 6), len(row))]
        score, paths = plain_draft(sources, row, drafter)
        assert paths_of(draft.tokens, draft.parents) == paths
        assert draft.score == pytest.approx(score)


@settings(deadline=None, max_examples=50)
@given(texts, st.integers(1, 23), st.integers(2, 5))
def test_a_text_that_grows_counts_as_the_whole_text(text: list[int], cut: int, depth: int) -> None:
    """Token by token or at once, full windows or not: the same followers of every end."""
    grown, whole = OwnText(text[:cut], depth), OwnText(text, depth)
    for token in text[cut:]:
        grown.extend([token])
    followers = counts_in([text], depth)
    for index in (grown, whole):
        found = {size: dict(match.followers()) for size, match in index.matches(index.tokens)}
        expected = {size: followers(text[-size:]) for size in range(1, min(depth, len(text)))}
        assert found == {size: counts for size, counts in expected.items() if counts}


def shape(node: Node) -> tuple:
    assert list(node.ranking()) == sorted((-child.count, token) for token, child in node.children.items())
    assert node.count - node.ends == sum(child.count for child in node.children.values())
    return node.label, node.count, node.ends, sorted(map(shape, node.children.values()))


@settings(deadline=None, max_examples=50)
@given(st.lists(texts, min_size=1, max_size=8), st.integers(1, 40), st.integers(2, 5))
def test_what_is_forgotten_leaves_no_trace(answers: list[list[int]], limit: int, depth: int) -> None:
    """First in, first out; the tree is that of the answers that stayed, node by node."""
    memory = AnswerMemory(tokens=limit, depth=depth)
    for answer in answers:
        memory.add(answer)
        assert len(memory) == sum(map(len, memory.answers)) <= limit
    kept = memory.answers
    assert kept == [answer[-limit:] for answer in answers[len(answers) - len(kept) :]]
    if len(kept) < len(answers):  # what went had to go
        assert len(memory) + len(answers[-len(kept) - 1][-limit:]) > limit
    fresh = WindowTree()
    for answer in kept:
        for at in range(len(answer)):
            fresh.add(tuple(answer[at : at + depth]))
    assert shape(memory._tree.root) == shape(fresh.root)


@pytest.mark.parametrize("window", [(1, 2, 4), (1, 2), (5,)])
def test_what_was_never_put_in_is_not_taken_out(window: tuple[int, ...]) -> None:
    tree = WindowTree()
    tree.add((1, 2, 3))
    tree.add((1, 3))
    before = shape(tree.root)
    with pytest.raises(ValueError, match="window"):
        tree.remove(window)
    assert shape(tree.root) == before


def test_a_ranking_is_of_the_tokens_that_followed_wherever_a_run_was_split() -> None:
    """40 tokens have followed a string, and were asked for; then a window parts from it in its middle."""
    tree = WindowTree()
    for follower in range(40):
        for _ in range(1 + follower % 3):
            tree.add((1, 2, 3, 100 + follower))
    place = tree.find((1, 2, 3))
    assert place is not None
    assert len(place.ranking()) == 40
    tree.add((1, 2, 9))
    for prefix, expected in (((1, 2), [(-79, 3), (-1, 9)]), ((1,), [(-80, 2)])):
        place = tree.find(prefix)
        assert place is not None
        assert list(place.ranking()) == expected
    place = tree.find((1, 2, 3))
    assert place is not None
    assert list(place.ranking()) == sorted((-1 - n % 3, 100 + n) for n in range(40))


def test_the_same_text_again_is_drafted_whole() -> None:
    target = make_target("qwen3")
    common = {"warper": GREEDY, "max_new_tokens": 60}
    drafter = SuffixDecoding(draft_length=12, memory=AnswerMemory(depth=24))
    base = autoregressive(target, [[1, 2, 3], [7, 8]], **common)
    first = generate(target, drafter, [[1, 2, 3], [7, 8]], **common)
    again = generate(target, drafter, [[1, 2, 3], [7, 8]], **common)
    assert first.tokens == again.tokens == base.tokens
    assert again.target_calls < first.target_calls
    # a match of one token drafts one, and so on: 2 + 3 + 5 + 9 tokens, then 13 a call
    assert again.target_calls <= 8
    drafter.remember()
    assert drafter.memory.answers == 2 * base.tokens


def test_what_stands_behind_the_end_of_an_answer_is_not_remembered() -> None:
    """Tokens that a step accepted behind EOS or the limit were never written."""
    target = make_target("qwen3")
    drafter = SuffixDecoding(draft_length=12, memory=AnswerMemory(depth=24))
    prompts, whole = [[1, 2, 3], [7, 8]], {"warper": GREEDY, "max_new_tokens": 60}
    generate(target, drafter, prompts, **whole)
    (text, _) = autoregressive(target, prompts, **whole).tokens
    ends = {"warper": GREEDY, "max_new_tokens": 40, "eos_ids": [text[20]]}
    for static in (False, True):
        done = generate(target, drafter, prompts, static=static, **ends)
        assert len(done.tokens[0]) < len(done.tokens[1])  # the first ends, and its neighbour goes on
        drafter.remember()
        assert drafter.memory.answers[-2:] == done.tokens


def pairs_of_calls(seeds: range) -> list[tuple[list[int], list[int]]]:
    """Two answers with one memory and the same seed, for every seed."""
    found = []
    for seed in seeds:
        drafter = SuffixDecoding(draft_length=3, depth=5, factor=4.0, least=0.0, memory=AnswerMemory(depth=5))
        first, second = (answer_of(drafter, seed) for _ in range(2))
        found.append((first, second))
    return found


def test_a_call_does_not_take_the_numbers_that_its_memory_was_drawn_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts out of an answer that the same coins have drawn would be judged by coins that they depend on."""
    assert p_of_answers(second for _, second in pairs_of_calls(range(500))) > 1e-4
    monkeypatch.setattr(AnswerMemory, "salt", lambda _self: 0)  # the planted bug
    assert p_of_answers(second for _, second in pairs_of_calls(range(500))) < 1e-5


def test_every_call_of_a_memory_has_a_number_of_its_own() -> None:
    memory, other = AnswerMemory(), AnswerMemory()
    first = memory.salt()
    assert first == 0  # nothing is known: a call as of any drafter
    other.add([1, 2])
    salts = [memory.salt(), memory.salt(), other.salt(), other.salt()]
    other.add([1, 2])
    salts.append(other.salt())
    assert len({first, *salts}) == 6
    saved = AnswerMemory()
    for answer in other.answers:
        saved.add(answer)
    assert saved.salt() not in {0, *salts}
    assert SuffixDecoding().salt() == 0


def test_a_draft_costs_no_more_where_many_tokens_have_followed() -> None:
    """Work for a one-token match by how many different tokens stood behind it."""

    def work(followers: int) -> int:
        memory = AnswerMemory(tokens=10**6, depth=4)
        for token in range(followers):
            memory.add([0, 1 + token, 0, 1 + token])
        memory.add([0, 7, 0, 7])
        drafter = SuffixDecoding(draft_length=2, depth=4, memory=memory)
        drafter.reset([[followers + 9]], 8)
        assert drafter.look_up(torch.tensor([0]))[0].tokens == []  # no follower is likely
        match = next(match for _, match in memory.matches([0]))
        assert next(match.followers())[0] == 7
        place = match.place
        assert place is not None
        ranking = place.ranking()
        assert ranking is place.ranking()  # kept, not made anew
        return calls_of(lambda: next(match.followers()))

    assert work(4_000) == work(100)


@pytest.mark.parametrize("nodes", [None, 6])
def test_a_row_alone_writes_what_it_writes_in_a_batch(nodes: int | None) -> None:
    target = make_target("qwen3")
    drafter = SuffixDecoding(draft_length=3, nodes=nodes, factor=2.0)
    prompts = [[1, 2, 3, 1, 2], [12, 13, 12, 13, 12]]
    common = {"warper": Warper(0.7, top_k=4), "max_new_tokens": 30, "seed": 4}
    together = generate(target, drafter, prompts, **common)
    late = generate(target, drafter, prompts, static=True, **common)
    assert late.tokens == together.tokens
    assert any("draft" in origin for origin in together.origin)
    for row, prompt in enumerate(prompts):
        alone = generate(target, drafter, [prompt], requests=[row], **common)
        assert alone.tokens[0] == together.tokens[row]


def test_a_neighbour_s_answer_is_not_read_before_both_are_done() -> None:
    target = make_target("qwen3")
    common = {"warper": Warper(1.0), "max_new_tokens": 30, "seed": 3}
    prompts = [[4, 5, 6], [4, 5, 6, 7]]
    together = generate(target, SuffixDecoding(memory=AnswerMemory()), prompts, **common)
    for row, prompt in enumerate(prompts):
        alone = generate(target, SuffixDecoding(memory=AnswerMemory()), [prompt], requests=[row], **common)
        assert alone.tokens[0] == together.tokens[row]


class Asked(AnswerMemory):
    """While it is read, another thread wants to add an answer."""

    def matches(self, text: Sequence[int]) -> Iterator[tuple[int, Match]]:
        began, self.done = threading.Event(), threading.Event()

        def add() -> None:
            began.set()
            self.add([7, 7, 7])
            self.done.set()

        self.thread = threading.Thread(target=add)
        self.thread.start()
        began.wait()
        self.too_early = self.done.wait(0.2)
        yield from super().matches(text)


def test_nothing_comes_or_goes_while_a_batch_drafts() -> None:
    memory = Asked(tokens=20, depth=6)
    memory.add([1, 2, 3, 4])
    drafter = SuffixDecoding(draft_length=3, depth=6, memory=memory)
    drafter.reset([[9, 1]], 8)
    assert drafter.look_up(torch.tensor([2]))[0].tokens == [3, 4]
    memory.thread.join()
    assert memory.done.is_set()
    assert not memory.too_early
    assert memory.answers == [[1, 2, 3, 4], [7, 7, 7]]


def test_threads_share_a_memory() -> None:
    """Answers of four threads, more than it holds: the index is that of the ones that stayed, and drafts are theirs."""
    memory = AnswerMemory(tokens=120, depth=5)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        drafter = SuffixDecoding(draft_length=3, depth=5, memory=memory)
        try:
            for _ in range(40):
                memory.add(rng.integers(0, 3, rng.integers(1, 30)).tolist())
                drafter.reset([rng.integers(0, 3, 4).tolist()], 8)
                drafter.look_up(torch.tensor([1]))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert errors == []
    fresh = AnswerMemory(tokens=120, depth=5)
    for answer in memory.answers:
        fresh.add(answer)
    assert len(memory) == sum(map(len, memory.answers)) <= 120
    assert shape(memory._tree.root)[2] == shape(fresh._tree.root)[2]


def test_answers_are_saved_as_a_datastore_and_read_again(tmp_path: Path) -> None:
    memory = AnswerMemory(tokens=1000)
    rng = np.random.default_rng(0)
    for _ in range(5):
        memory.add(rng.integers(0, 60, 40).tolist())
    build_datastore(memory.answers, tmp_path / "answers", vocabulary=61, tokenizer="t", shard_tokens=100)
    store = Datastore(tmp_path / "answers", tokenizer="t")
    assert list(store.documents()) == memory.answers

    again = AnswerMemory(tokens=1000)
    for answer in store.documents():
        again.add(answer)
    text = memory.answers[3]
    for source in ({"memory": again}, {"store": store}):
        drafter = SuffixDecoding(draft_length=8, **source)
        drafter.reset([text[:15]], 8)
        assert drafter.look_up(torch.tensor([text[15]]))[0].tokens == text[16:24]


def test_a_draft_takes_no_more_work_in_a_longer_text() -> None:
    """The same phrase in ever longer texts: a search through the text would cost 40 times as much."""
    phrase = list(range(200, 230))
    work = []
    for size in (300, 12_000):
        rng = np.random.default_rng(1)
        noise = rng.integers(0, 200, size).tolist()
        memory = AnswerMemory(tokens=20_000)
        memory.add([*noise, *phrase])
        drafter = SuffixDecoding(memory=memory)
        drafter.reset([[*noise, *phrase, *noise[:50], *phrase[:9]]], 8)
        last = torch.tensor([phrase[9]])
        work.append(calls_of(lambda: drafter.propose(last, GREEDY, Uniforms(0, [0], "cpu"))))  # noqa: B023
        assert drafter._drafts[0].tokens == phrase[10:20]
    assert work[1] <= 1.2 * work[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"draft_length": 0},
            "draft_length is 0: input should be greater than or equal to 1, as drafter.suffix.tokens",
        ),
        ({"nodes": -3}, "nodes is -3: input should be greater than or equal to 2"),
        ({"factor": float("nan")}, "factor is nan: input should be"),
        ({"least": 2}, "least is 2: input should be less than or equal to 1"),
        ({"draft_length": 2.0}, "draft_length is 2.0: input should be a valid integer"),
        ({"factor": 0.01}, "draft up to 16 tokens, 0.01 for each of a match, by strings of 24, which drafts none"),
        ({"memory": AnswerMemory(depth=9)}, "strings of 9 tokens; expected 24"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SuffixDecoding(**settings)


def test_a_memory_is_not_changed_from_outside_or_by_half() -> None:
    memory = AnswerMemory(tokens=4)
    memory.add([1, 2])
    memory.answers[0].append(3)
    for wrong in ([2**70], [1, -1], [1, 1.5], [[1, 2]], "ab", 5, torch.tensor([0.5])):
        with pytest.raises(RequestError, match="an answer for an AnswerMemory .*; expected a list of token ids"):
            memory.add(wrong)
    assert (memory.answers, len(memory)) == ([[1, 2]], 2)
    memory.add([4, 5, 6])  # for which the first one makes room
    assert memory.answers == [[4, 5, 6]]


@pytest.mark.parametrize("tokens", [0, 1.5, "x"])
def test_a_memory_of_nothing_is_refused(tokens: object) -> None:
    with pytest.raises(RequestError, match=f"tokens of an AnswerMemory is {tokens!r}; expected a whole number"):
        AnswerMemory(tokens=tokens)
    with pytest.raises(RequestError, match="depth of an AnswerMemory is 1; expected a whole number of at least 2"):
        AnswerMemory(depth=1)


@pytest.mark.parametrize("branching", [False, True])
def test_a_memory_of_another_vocabulary_is_refused_where_it_drafts(target: Backbone, branching: bool) -> None:
    """A memory knows no target: what it drafts is held to that of the call."""
    (first,) = autoregressive(target, [[5, 6, 7]], warper=GREEDY, max_new_tokens=1).tokens[0]
    memory = AnswerMemory()
    memory.add([7, first, VOCABULARY - 1])
    drafter = SuffixDecoding(memory=memory, nodes=4 if branching else None)
    generate(target, drafter, [[5, 6, 7]], warper=GREEDY, max_new_tokens=4)
    memory.add([6, 7, first, VOCABULARY])
    message = f"memory or datastore has the token id {VOCABULARY}; expected 0 to {VOCABULARY - 1}, the target's"
    with pytest.raises(RequestError, match=message):
        generate(target, drafter, [[5, 6, 7]], warper=GREEDY, max_new_tokens=4)
    hybrid = beside(make_drafter(target), SuffixDecoding(memory=memory))
    with pytest.raises(RequestError, match=message):
        generate(target, hybrid, [[5, 6, 7]], warper=GREEDY, max_new_tokens=4)
