"""The prompt sets that papers report, by name, and the words by which prompts are asked for.

A set's file comes from the hub at one commit, or is the user's own. What is asked is worded as in DFlash's benchmark
(gsm8k, math500, aime, humaneval, mbpp, alpaca, livecodebench); a row that holds `turns` or messages, as EAGLE's and
Spec-Bench's copies do, is asked as it stands. Read next: `prompt_rows.py`, rows in their own shapes; `prompts.py`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DataError, EnvironmentFailure, RequestError
from .prompt_rows import Prompt, prompt_of
from .rows.raw import BadRow, RawRow, Rejected, Rows, filled
from .rows.readers import SUFFIXES, TEXT_SUFFIXES, read_file, read_jsonl
from .rows.shapes import shown_names
from .rows.sources import stdlib_texts


@dataclass(frozen=True)
class PromptSet:
    """A set as its field uses it."""

    repository: str | None
    """On the hub, of a data set; None where the hub has no file of it that is whole."""
    revision: str
    """The commit that is read unless another is named; where there is no repository, who publishes the file."""
    file: str
    column: str
    """What a row holds that is the set's own."""
    prompts: int
    """How many papers take; an even spread where the file has more."""
    licence: str | None
    """As its card states it; None where it states none."""
    template: str | None = None
    """What is asked, of a row's columns (jinja); None: the column as `prompt_of` reads it."""
    first_turn: bool = False
    """Whether later turns of a chat are left out."""

    @property
    def origin(self) -> str:
        """Where its file is, for people and results."""
        publisher = self.revision if self.repository is None else f"{self.repository}@{self.revision}"
        return f"{self.file} of {publisher}, licence: {self.licence or 'none stated'}"


_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_SOLUTION = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{{ prompt }}\n```"
)
_PROGRAM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{{ question_content }}\n\n"
    "{% if starter_code %}### Format: Use the following code structure:\n```python\n{{ starter_code }}\n```"
    "{% else %}### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```{% endif %}"
    "\n\n### Answer: (use the provided format with backticks)"
)
_MT_BENCH = PromptSet(
    "HuggingFaceH4/mt_bench_prompts",
    "e3a795c5e9a82ee40611c416b8a7786c73198991",
    "raw/question.jsonl",
    "prompt",
    80,
    "apache-2.0",
)
SETS: dict[str, PromptSet] = {
    "mt-bench": _MT_BENCH,
    "mt-bench-first": replace(_MT_BENCH, first_turn=True),
    "humaneval": PromptSet(
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        "openai_humaneval/test-00000-of-00001.parquet",
        "prompt",
        164,
        "mit",
        _SOLUTION,
    ),
    "gsm8k": PromptSet(
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        "main/test-00000-of-00001.parquet",
        "question",
        128,
        "mit",
        "{{ question }}" + _BOXED,
    ),
    "math500": PromptSet(
        "HuggingFaceH4/MATH-500",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        "test.jsonl",
        "problem",
        128,
        None,
        "{{ problem }}" + _BOXED,
    ),
    "mbpp": PromptSet(
        "google-research-datasets/mbpp",
        "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        "sanitized/test-00000-of-00001.parquet",
        "test_list",
        128,
        "cc-by-4.0",
    ),
    "alpaca": PromptSet(
        "tatsu-lab/alpaca",
        "dce01c9b08f87459cf36a430d809084718273017",
        "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",
        "instruction",
        128,
        "cc-by-nc-4.0",
        "{{ instruction }}{% if input %}\n\nInput:\n{{ input }}{% endif %}",
    ),
    "cnn-dm": PromptSet(
        "abisee/cnn_dailymail",
        "96df5e686bee6baa90b8bee7c28b81fa3fa6223d",
        "3.0.0/test-00000-of-00001.parquet",
        "article",
        80,
        "apache-2.0",
    ),
    "nq": PromptSet(
        "google-research-datasets/nq_open",
        "5dd9790a83002ad084ddeb7c420dc716852c6f28",
        "nq_open/validation-00000-of-00001.parquet",
        "question",
        80,
        "cc-by-sa-3.0",
    ),
    "aime": PromptSet(
        "math-ai/aime25",
        "563bb8404243c5f09de6ec262f2db674fe5bce9b",
        "test.jsonl",
        "problem",
        30,
        None,
        "{{ problem }}" + _BOXED,
    ),
    "livecodebench": PromptSet(
        "livecodebench/code_generation_lite",
        "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        "test6.jsonl",  # what release 6 added: the others have 4 GB
        "question_content",
        128,
        "cc",
        _PROGRAM,
    ),
    "spec-bench": PromptSet(
        None, "github.com/hemingkx/Spec-Bench", "data/spec_bench/question.jsonl", "turns", 480, None
    ),
    "speed-bench": PromptSet(  # its licence forbids to pass it on, so the hub's file lacks what others own
        None,
        "nvidia/SPEED-Bench, as its own prepare script writes it",
        "the split qualitative",
        "turns",
        880,
        "nvidia-evaluation-dataset-license",
    ),
}
"""What `--prompts` may name. Another commit is named by NAME@REVISION, a file of one's own by NAME=FILE."""
_ASKED_AS_IT_STANDS = ("turns", "messages", "conversations")
_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""What SPEED-Bench's published file has in place of prompts."""

SECOND = "stdlib-second"
"""Other stretches of the same held-out files as `stdlib`."""


@dataclass(frozen=True)
class _Stretches:
    """Stretches of held-out library files, which end at some parts of a file's length."""

    parts: tuple[int, ...]
    of: int
    shortest: int
    """Characters of a file that has them all."""

    def prompts(self) -> Iterator[Prompt]:
        for module, text in stdlib_texts("prompts"):
            for part in self.parts if len(text) >= self.shortest else ():
                cut = text.rfind("\n", 0, len(text) * part // self.of) + 1
                start = text.find("\n", max(0, cut - _STRETCH)) + 1
                yield Prompt(f"{module}@{cut}", "code", (text[start:cut],), chat=False)


_STRETCH = 1200  # characters
# a sixth of the second one's files is longer than a stretch and its answer, so that it meets none of the first
_BUILT_IN = {"stdlib": _Stretches((1, 2), 3, 2_000), SECOND: _Stretches((1, 3, 5), 6, 12_000)}


@dataclass(frozen=True)
class ChosenSet:
    """One of the sets that `--prompts` names."""

    name: str
    record: PromptSet | None = None
    file: str | None = None
    """The user's own; None: a built-in set, or the record's on the hub."""

    @property
    def source(self) -> str:
        """Where its rows are from, for results."""
        return self.file or (self.name if self.record is None else self.record.origin)

    def prompts(self) -> list[Prompt]:
        """All prompts, in the set's own order.

        Raises:
            RequestError: no such file. DataError: a line is not a prompt; named by file and line.
            EnvironmentFailure: the hub cannot be asked for it.
        """
        if self.file is None and self.record is None:
            return list(_BUILT_IN[self.name].prompts())
        path = Path(self.file) if self.file is not None else _fetched(self)
        prompts = [self._judged(row) for row in _rows(path)]
        if not prompts:
            raise DataError(f"{path}: holds no prompt")
        return prompts

    def _judged(self, row: RawRow | Rejected) -> Prompt:
        if isinstance(row, Rejected):
            raise DataError(f"{row.file}:{row.line}: {row.reason}")
        try:
            return _worded(self, row.columns, str(row.line))
        except BadRow as bad:
            raise DataError(f"{row.file}:{row.line}: {bad}") from bad
        except RecursionError as error:
            raise DataError(f"{row.file}:{row.line}: nested too deeply") from error


def chosen_sets(words: str) -> list[ChosenSet]:
    """The sets that `--prompts` or `eval.prompts` names, in that order; nothing is read.

    Raises:
        RequestError: a name that is none, a name twice, or no such file.
    """
    if words in _BUILT_IN or Path(words).is_file():
        return [ChosenSet(words, file=None if words in _BUILT_IN else words)]
    parts = [part.strip() for part in words.split(",")]
    asked = [_named(part, alone=len(parts) == 1) for part in parts]
    names = [each.name for each in asked]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"the prompts {words!r} name {twice} twice; expected each set once")
    return asked


def _named(word: str, *, alone: bool) -> ChosenSet:
    name, given, file = word.partition("=")
    if given and name in SETS:
        if not Path(file).is_file():
            raise RequestError(f"there is no prompt file {file!r} for {name}; expected {_bring(SETS[name])}")
        return ChosenSet(name, SETS[name], file)
    name, at, revision = word.partition("@")
    if name in SETS and (revision or not at):
        record = SETS[name]
        if at and record.repository is None:
            raise RequestError(f"{word}: {name} is not on the hub; name your file by {name}=FILE: {_bring(record)}")
        return ChosenSet(name, replace(record, revision=revision) if at else record)
    if word in _BUILT_IN:
        return ChosenSet(word)
    if Path(word).is_file():
        return ChosenSet(word if alone else Path(word).stem, file=word)
    near = difflib.get_close_matches(name.partition("=")[0], [*SETS, *_BUILT_IN], 1)
    raise RequestError(
        f"there is no prompt file {word}{f', nor a set of that name: did you mean {near[0]}?' if near else ''}; "
        f"expected a file, {', '.join(_BUILT_IN)}, or sets with commas between: {', '.join(SETS)}, each as NAME, "
        "NAME@REVISION or NAME=FILE"
    )


def _bring(record: PromptSet) -> str:
    return f"a file with a column {record.column}, or turns or messages, such as {record.origin}"


def _rows(path: Path) -> Rows:
    """The rows of a file, which are JSON lines unless its name says otherwise."""
    if path.suffix.lower() in set(SUFFIXES).difference(TEXT_SUFFIXES):
        yield from read_file(path, block=1)
        return
    with path.open("rb") as stream:
        yield from read_jsonl(stream, str(path))


def _worded(asked: ChosenSet, row: Mapping[str, Any], number: str) -> Prompt:
    """A row as the set's field asks it."""
    record, given = asked.record, [each for each in _ASKED_AS_IT_STANDS if row.get(each) is not None]
    if record is not None and not given and row.get(record.column) is None:
        raise BadRow(
            f"{asked.name} has a column {record.column}, or turns or messages; found {shown_names(sorted(row))}"
        )
    if record is not None and record.template is not None and not given:
        filled(row[record.column], record.column)
        row = {**row, "turns": [_filled_in(record.template, row)]}
    prompt = prompt_of(row, number)
    if any(turn.startswith(_WITHHELD) for turn in prompt.turns):
        raise BadRow(
            "the prompt itself is not in this file, only a note in its place; write the file by SPEED-Bench's own "
            "prepare script, which fetches what it may not pass on, and name that by speed-bench=FILE"
        )
    if record is not None and record.first_turn and not prompt.messages:
        return replace(prompt, turns=prompt.turns[:1])
    return prompt


def _filled_in(template: str, row: Mapping[str, Any]) -> str:
    from jinja2 import Environment

    return Environment(keep_trailing_newline=True).from_string(template).render(row)  # noqa: S701 - text, no page


def _fetched(asked: ChosenSet) -> Path:
    """The set's file in the hub's cache."""
    import httpx2
    from huggingface_hub import constants, errors, hf_hub_download

    record = asked.record
    if record is None or record.repository is None:
        raise RequestError(f"{asked.name} is not on the hub; name your file by {asked.name}=FILE: {asked.source}")
    what = f"the prompts {asked.name} ({record.origin})"
    instead = f"bring that file and name it, --prompts {asked.name}=FILE"
    try:
        return Path(
            hf_hub_download(
                record.repository,
                record.file,
                repo_type="dataset",
                revision=record.revision,
                endpoint=os.environ.get("HF_ENDPOINT") or constants.ENDPOINT,
                token=os.environ.get("HF_TOKEN") or False,
            )
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise RequestError(
            f"{what} are not there, or not for us to see ({_first_line(error)}); name another revision by "
            f"{asked.name}@REVISION, set HF_TOKEN where it is private, or {instead}"
        ) from error
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError) as error:
        raise EnvironmentFailure(
            f"{what} cannot be fetched ({_first_line(error.__cause__ or error)}); connect, or {instead}"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")[:300]


def stream_of(name: str, place: int) -> int:
    """The number of a prompt's random stream, whatever is decoded beside it; 256 turns have numbers of their own."""
    return int.from_bytes(hashlib.sha256(f"{name}/{place}".encode()).digest()[:7], "big") << 8
