"""Sets by name: the words that name them, rows of every set in its own shape, the hub, and streams of their own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.data.prompt_sets import SETS, ChosenSet, chosen_sets
from draftsmith.data.prompts import Prompt, load_prompts
from draftsmith.errors import DataError, EnvironmentFailure, RequestError
from helpers.servers import fake_hub

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# a row of every set as its file on the hub has it, and what is asked
OWN = {
    "mt-bench": ({"question_id": 81, "category": "writing", "prompt": ["a", "b"]}, ("a", "b")),
    "mt-bench-first": ({"question_id": 81, "category": "writing", "prompt": ["a", "b"]}, ("a",)),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```",
        ),
    ),
    "gsm8k": ({"question": "{a} < b?", "answer": "#### 1"}, ("{a} < b?" + BOXED,)),
    "math500": ({"problem": "$x$", "subject": "Algebra", "level": 2}, ("$x$" + BOXED,)),
    "mbpp": ({"task_id": 2, "prompt": "a", "code": "b", "test_list": ["c"]}, ("a",)),
    "alpaca": ({"instruction": "a", "input": "b", "output": "c", "text": "abc"}, ("a\n\nInput:\nb",)),
    "cnn-dm": ({"article": "a", "highlights": "b", "id": "0f"}, ("Summarize the following article.\n\na",)),
    "nq": ({"question": "who", "answer": ["a"]}, ("who",)),
    "aime": ({"problem": "a", "answer": "70", "id": "0"}, ("a" + BOXED,)),
    "livecodebench": ({"question_content": "a", "starter_code": "", "question_id": "x"}, ("# YOUR CODE HERE",)),
    "spec-bench": ({"question_id": 1, "category": "qa", "turns": ["a", "b"]}, ("a", "b")),
    "speed-bench": ({"question_id": "0f", "category": None, "turns": ["a"]}, ("a",)),
}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_set_has_a_row_here() -> None:
    assert set(OWN) == set(SETS)
    for record in SETS.values():
        assert record.repository is None or re.fullmatch("[0-9a-f]{40}", record.revision)


@pytest.mark.parametrize("name", OWN)
def test_a_row_in_the_sets_own_shape(name: str, tmp_path: Path) -> None:
    row, turns = OWN[name]
    [prompt] = load_prompts(f"{name}={written(tmp_path / 'own.jsonl', row)}")
    assert prompt.chat
    assert prompt.set == name
    if name == "livecodebench":
        assert turns[0] in prompt.turns[0]
        assert "### Question:\na\n\n### Format: Write your code" in prompt.turns[0]
        [given] = load_prompts(f"{name}={written(tmp_path / 'starter.jsonl', {**row, 'starter_code': 'class S:'})}")
        assert "following code structure:\n```python\nclass S:\n```" in given.turns[0]
    else:
        assert prompt.turns == turns


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "alpaca", "cnn-dm"])
def test_a_papers_copy_is_asked_as_it_stands(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "question.jsonl", {"question_id": 1, "category": "c", "turns": ["as it stands"]})
    [prompt] = load_prompts(f"{name}={path}")
    assert prompt.turns == ("as it stands",)


def test_several_sets_keep_their_order_and_their_streams(tmp_path: Path) -> None:
    """Whatever is chosen beside a set, and however many of it, a prompt draws the same numbers."""
    gsm = written(tmp_path / "g.jsonl", *({"question": f"q{n}"} for n in range(6)))
    spec = written(tmp_path / "s.jsonl", *({"turns": [f"t{n}"], "category": "qa", "question_id": n} for n in range(4)))
    both = load_prompts(f"spec-bench={spec}, gsm8k={gsm}")
    assert [each.turns[0].split("\n")[0] for each in both] == [
        *(f"t{n}" for n in range(4)),
        *(f"q{n}" for n in range(6)),
    ]
    assert {each.category for each in both} == {"spec-bench/qa", "gsm8k"}
    streams = [each.stream for each in both]
    assert len(set(streams)) == 10
    assert all(stream is not None and stream % 256 == 0 and stream < 2**64 for stream in streams)
    assert load_prompts(f"gsm8k={gsm},spec-bench={spec}") == [*both[4:], *both[:4]]
    alone = load_prompts(f"gsm8k={gsm}")
    assert [each.stream for each in alone] == streams[4:]
    # of each set so many, in its own order whatever the seed
    few = load_prompts(f"gsm8k={gsm},spec-bench={spec}", limit=3, seed=2)
    assert [(each.set, each.stream) for each in few] == [
        *(("gsm8k", streams[4 + at]) for at in (0, 2, 4)),
        *(("spec-bench", streams[at]) for at in (0, 2, 3)),
    ]
    wrapped = load_prompts(f"gsm8k={gsm}", limit=3, seed=16)
    assert [alone.index(each) for each in wrapped] == [1, 3, 5]


def test_a_file_by_itself_is_as_it_was(tmp_path: Path) -> None:
    """No set, no stream; in a list it has the name of the file."""
    path = written(tmp_path / "mine,and yours.jsonl", {"prompt": "a"})
    assert load_prompts(str(path)) == [Prompt("1", "all", ("a",), chat=True)]
    other = written(tmp_path / "other.jsonl", {"prompt": "a"})
    one, two = load_prompts(f"{other},mbpp={written(tmp_path / 'm.jsonl', OWN['mbpp'][0])}")
    assert (one.set, two.set) == ("other", "mbpp")
    assert one.stream is not None


def test_papers_take_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.jsonl", *({"problem": f"p{n}"} for n in range(8)))
    monkeypatch.setitem(SETS, "aime", replace(SETS["aime"], prompts=4))
    assert [each.id for each in load_prompts(f"aime={path}")] == ["1", "3", "5", "7"]
    assert len(load_prompts(f"aime={path}", limit=6)) == 4
    assert len(load_prompts(f"aime={path}", limit=2)) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("gsm8", "no prompt file gsm8, nor a set of that name: did you mean gsm8k?"),
        ("gsm8=q.jsonl", "did you mean gsm8k?"),
        ("gsm8k,", "there is no prompt file ; expected a file"),
        ("gsm8k@", "did you mean gsm8k?"),
        ("gsm8k,gsm8k@main", "name gsm8k twice; expected each set once"),
        ("gsm8k=none.jsonl", "no prompt file 'none.jsonl' for gsm8k; expected a file with a column question"),
        ("spec-bench@main", "not on the hub; name your file by spec-bench=FILE"),
    ],
)
def test_words_that_name_nothing(words: str, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        chosen_sets(words)


def test_rows_of_another_set_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", OWN["humaneval"][0])
    message = "p.jsonl:1: gsm8k has a column question, or turns or messages; found entry_point, prompt, task_id"
    with pytest.raises(DataError, match=re.escape(message)):
        load_prompts(f"gsm8k={path}")
    for value, reason in (({"text": "a"}, "question is an object; expected text"), (" ", "question is empty")):
        with pytest.raises(DataError, match=reason):
            load_prompts(f"gsm8k={written(path, {'question': value})}")
    withheld = {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}
    with pytest.raises(DataError, match="prepare script, .* name that by speed-bench=FILE"):
        load_prompts(f"speed-bench={written(path, withheld)}")


def test_other_files_than_json_lines(tmp_path: Path) -> None:
    from datasets import Dataset

    (tmp_path / "list.json").write_text(json.dumps([{"question": "a"}, {"question": "b"}]))
    assert [each.id for each in load_prompts(f"nq={tmp_path / 'list.json'}")] == ["1", "1"]
    Dataset.from_list([OWN["mbpp"][0]]).to_parquet(tmp_path / "m.parquet")
    assert [each.turns for each in load_prompts(f"mbpp={tmp_path / 'm.parquet'}")] == [("a",)]


def test_sets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the pinned commit, kept in the hub's cache; another commit by name."""
    record = SETS["math500"]
    with fake_hub.running() as hub:
        fake_hub.use(hub, tmp_path / "cache", monkeypatch, token=False)
        held = hub.repositories.setdefault(str(record.repository), fake_hub.Repository())
        held.commits.append((record.revision, {record.file: b'{"problem": "pinned"}\n'}))
        held.commits.append(("b" * 40, {record.file: b'{"problem": "newer"}\n'}))
        assert load_prompts("math500")[0].turns == ("pinned" + BOXED,)
        assert load_prompts("math500@" + "b" * 40)[0].turns == ("newer" + BOXED,)
        with pytest.raises(RequestError, match=r"math500 .* are not there.* by math500@REVISION, .*math500=FILE"):
            load_prompts("math500@" + "c" * 40)
        with pytest.raises(RequestError, match=r"gsm8k .*openai/gsm8k@7403.* are not there"):
            load_prompts("gsm8k")
    [prompt] = load_prompts("math500")  # from the cache
    assert prompt.turns == ("pinned" + BOXED,)
    assert chosen_sets("math500")[0].source == (
        f"test.jsonl of HuggingFaceH4/MATH-500@{record.revision}, licence: none stated"
    )


def test_without_a_network_the_file_to_bring_is_named() -> None:
    message = r"the prompts nq \(nq_open/validation-.*parquet of google-research-datasets/nq_open@5dd97.*cc-by-sa-3.0\) cannot be "
    with pytest.raises(EnvironmentFailure, match=message + r"fetched \(.*\); connect, or bring .*--prompts nq=FILE$"):
        load_prompts("nq")
    with pytest.raises(RequestError, match=r"spec-bench is not on the hub; .*spec-bench=FILE: data/spec_bench/quest"):
        ChosenSet("spec-bench", SETS["spec-bench"]).prompts()


def test_the_page_lists_every_set() -> None:
    page = (Path(draftsmith.__file__).parent / "docs" / "evaluation.md").read_text()
    for name, record in SETS.items():
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"`{record.file}` | {record.prompts} | {record.licence or 'none stated'} |" in line
        assert (record.repository or record.revision) in line
