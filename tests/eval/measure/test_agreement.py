"""Votes against a count by hand; rows with random numbers of their own; one call per prompt."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from conftest import make_drafter, make_target
from draftsmith.decoding.engine import autoregressive
from draftsmith.decoding.sampling import Warper
from draftsmith.errors import RequestError
from draftsmith.eval.measure import agreement as module
from draftsmith.eval.measure.agreement import NORMALISERS, agreement, agreement_table, majority, summarise
from rich.cells import cell_len
from rich.console import Console

PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7], [3]]
HOT = Warper(1.5)


def ids_as_text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def asked(target, drafter, prompts=PROMPTS, **settings) -> dict:
    usual = {"samples": 4, "warper": HOT, "max_new_tokens": 8, "normalise": ids_as_text, "seed": 3}
    return agreement(target, drafter, prompts, **(usual | settings))


@pytest.fixture(scope="module")
def pair():
    target = make_target("qwen3")
    return target, make_drafter(target)


def test_the_vote_against_brute_force() -> None:
    for answers in itertools.product("abc", repeat=5):
        for greedy in "abd":
            most = max(answers.count(each) for each in answers)
            tied = [each for each in answers if answers.count(each) == most]
            right = greedy if greedy in tied else tied[0]
            assert majority(answers, greedy) == right


@pytest.mark.parametrize(
    ("answers", "greedy", "vote"),
    [
        (["7", "8", "8"], "7", "8"),
        (["7", "8", "8", "7"], "7", "7"),
        (["8", "7", "7", "8"], "7", "7"),
        (["8", "7", "7", "8"], "9", "8"),
        (["1", "2", "3"], "3", "3"),
        (["1", "2", "3"], "9", "1"),
    ],
)
def test_ties(answers: list[str], greedy: str, vote: str) -> None:
    assert majority(answers, greedy) == vote


def scripted(monkeypatch, greedy: list[str], drawn: list[list[str]], **settings) -> dict:
    """The result if the model had written these texts, as numbers of a list."""
    texts = sorted({*greedy, *itertools.chain(*drawn)})

    def writer(*_args):
        def write(prompts, requests, warper):
            if warper.greedy:
                return [[texts.index(greedy[prompt[0]])] for prompt in prompts]
            return [[texts.index(text)] for text in drawn[prompts[0][0]]]

        return write

    monkeypatch.setattr(module, "_writer", writer)
    return agreement(
        None,
        None,
        [[n] for n in range(len(greedy))],
        samples=len(drawn[0]),
        warper=HOT,
        max_new_tokens=1,
        normalise=lambda ids: texts[ids[0]],
        **settings,
    )


def test_counts_by_hand(monkeypatch) -> None:
    drawn = [["4", "4", "5", "4"], ["6", "5", "6", "5"], ["8", "8", "9", "7"], ["1", "2", "2", "1"]]
    agreed = scripted(monkeypatch, ["4", "5", "7", "3"], drawn, references=["4", "6", " 8 ", None])
    assert [row["agreement"] for row in agreed["rows"]] == [0.75, 0.5, 0.25, 0]
    assert [row["vote"] for row in agreed["rows"]] == ["4", "5", "8", "1"]
    assert [row["votes"] for row in agreed["rows"]] == [3, 2, 2, 2]
    assert [row["vote_is_greedy"] for row in agreed["rows"]] == [True, True, False, False]
    assert agreed["agreement"][0] == pytest.approx(1.5 / 4)
    assert agreed["vote_differs"][0] == pytest.approx(0.5)
    assert agreed["agreement"][1] <= agreed["agreement"][0] <= agreed["agreement"][2]
    assert agreed["prompts"] == 4
    assert agreed["references"] == 3
    assert agreed["greedy_accuracy"][0] == pytest.approx(1 / 3)
    assert agreed["vote_accuracy"][0] == pytest.approx(2 / 3)


def test_the_interval_covers_the_mean_of_many_prompts() -> None:
    row = {"vote": "a", "greedy": "a", "reference": None}
    agreed = summarise([row | {"agreement": n / 40} for n in range(41)])
    middle, low, high = agreed["agreement"]
    assert middle == pytest.approx(0.5)
    # 1.96 standard errors of a uniform spread over 41 prompts
    assert high - low == pytest.approx(2 * 1.96 * 0.2958 / 41**0.5, rel=0.1)
    assert agreed["greedy_accuracy"] == [None, None, None]


def test_samples_of_a_prompt_are_one_batch(pair, monkeypatch) -> None:
    calls = []

    def counted(_target, prompts, *, warper, requests, **_more):
        calls.append((warper.temperature, [list(p) for p in prompts], list(requests)))
        return real(_target, prompts, warper=warper, requests=requests, **_more)

    real = module.autoregressive
    monkeypatch.setattr(module, "autoregressive", counted)
    asked(pair[0], None)
    assert [(temperature, prompts) for temperature, prompts, _ in calls] == [
        (0, PROMPTS),
        *((HOT.temperature, [prompt] * 4) for prompt in PROMPTS),
    ]
    sampled = [number for _, _, requests in calls[1:] for number in requests]
    assert len(set(sampled)) == len(sampled) == 12


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_rows_are_independent(pair, speculative: bool) -> None:
    target, drafter = pair[0], pair[1] if speculative else None
    agreed = asked(target, drafter)
    assert agreed["speculative"] is speculative
    for row in agreed["rows"]:
        assert len(set(row["answers"])) > 1, "hot rows differ among themselves"
    # more samples, or fewer prompts, change none that are there already
    more = asked(target, drafter, samples=7)
    fewer = asked(target, drafter, PROMPTS[:2])
    for row, longer in zip(agreed["rows"], more["rows"], strict=True):
        assert longer["answers"][:4] == row["answers"]
    assert fewer["rows"] == agreed["rows"][:2]
    assert asked(target, drafter) == agreed
    assert asked(target, drafter, seed=4)["rows"] != agreed["rows"]
    # equal prompts are not equal rows
    twins = asked(target, drafter, [PROMPTS[0]] * 2)["rows"]
    assert twins[0]["answers"] != twins[1]["answers"]
    assert twins[0]["greedy"] == twins[1]["greedy"]


def test_speculative_and_plain_have_the_same_greedy_answers(pair) -> None:
    target, drafter = pair
    plain, own = asked(target, None), asked(target, drafter)
    right = autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=8).tokens
    for row, other, tokens in zip(plain["rows"], own["rows"], right, strict=True):
        assert row["greedy"] == other["greedy"] == ids_as_text(tokens)


def test_cold_samples_agree(pair) -> None:
    agreed = asked(*pair, warper=Warper(1e-4))
    assert agreed["agreement"][0] == 1
    assert agreed["vote_differs"][0] == 0


def test_answers_end_at_eos(pair) -> None:
    free = asked(pair[0], None, PROMPTS[:1])["rows"][0]["greedy"].split()
    ended = asked(pair[0], None, PROMPTS[:1], eos_ids=[int(free[2])])["rows"][0]["greedy"].split()
    assert ended == free[: free.index(free[2]) + 1]


def test_a_normaliser_by_name_reads_the_targets_text(pair, monkeypatch) -> None:
    class Words:
        def decode(self, ids, *, skip_special_tokens):
            assert skip_special_tokens
            return f"\n first {ids[0] % 2} \n then #### 1,0{ids[0] % 2}0\n"

    target = make_target("qwen3")
    target.tokenizer = Words()
    for name, kind in (("first_line", "first "), ("last_number", "10"), ("stripped", "first")):
        rows = asked(target, None, normalise=name, max_new_tokens=2)["rows"]
        assert all(answer.startswith(kind) for row in rows for answer in row["answers"])
    rows = asked(target, None, normalise="last_number", references=["#### 1000.0", None, "1"])["rows"]
    assert [row["reference"] for row in rows] == ["1000", None, "1"]


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("stripped", "  a b\n", "a b"),
        ("first_line", "\n \n  yes, it is \nno", "yes, it is"),
        ("first_line", " \n", ""),
        ("last_number", "7 and 8 are 15.\n#### 15\n\nQuestion: 3 and 4?", "15"),
        ("last_number", "#### $1,042.50 dollars", "1042.5"),
        ("last_number", "first 3, then -4", "-4"),
        ("last_number", "9-4", "4"),
        ("last_number", "it is 12.0.", "12"),
        ("last_number", "out of 5 ####", "5"),
        ("last_number", "1,2,3", "3"),
        ("last_number", "in 100", "100"),
        ("last_number", "so.42 it is", "42"),
        ("last_number", "1.2.3", "1.2"),
        ("last_number", "no idea", ""),
    ],
)
def test_normalisers(name: str, text: str, right: str) -> None:
    assert NORMALISERS[name](text) == right


@pytest.mark.parametrize("references", [None, ["4", "6", "8", None]])
def test_the_table_fits(monkeypatch, references: list[str | None] | None) -> None:
    drawn = [["4", "4", "5", "4"], ["6", "5", "6", "5"], ["8", "8", "9", "7"], ["1", "2", "2", "1"]]
    agreed = scripted(monkeypatch, ["4", "5", "7", "3"], drawn, references=references)
    agreed = json.loads(json.dumps(agreed))
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(agreement_table(agreed), crop=False)
    text = out.getvalue()
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "vote of 4" in text
    assert "0.38 [" in text
    assert "0.50 [" in text
    assert ("accuracy" in text) == (references is not None)
    assert ("0.67 [" in text) == (references is not None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"warper": Warper(0.0)}, "temperature above 0"),
        ({"prompts": []}, "no prompt"),
        ({"normalise": "shout"}, "known: stripped, first_line, last_number"),
        ({"references": ["1"]}, "1 references for 3 prompts"),
        ({"prompts": [[]]}, "a prompt is empty"),
    ],
)
def test_bad_requests_are_refused(pair, change: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        asked(pair[0], None, **change)
