"""Spec-Bench's answer files: our runs written so that its scripts read them, and its files as our `results.json`.

A line is a question with the times and steps of all its turns; a file is a method, and plain decoding is a file too.
Of github.com/hemingkx/Spec-Bench, evaluation/eval.py writes them and evaluation/speed.py reads them. Read next:
`eval/report/answers.py`, our own lines; `eval/report/results.py`.

Shapes: S steps.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import RequestError
from ...eval.measure.arms import NOT_AUDITED
from ...eval.measure.by_set import fields_by_set
from ...eval.measure.metrics import Counts, acceptance, acceptance_fields
from ...eval.measure.rounds import AllRounds, speed_fields
from ...eval.report.answers import ANSWERS, read_answers
from ...eval.report.report import results_in
from ...eval.report.results import read_results, results_of_others
from ...eval.report.tables import verdict_of
from ...storage import writable_folder, write_text

if TYPE_CHECKING:
    from ..requests import ConvertResultsRequest

PLAIN = "plain-decoding"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories that Spec-Bench's own script counts as one task, `mt_bench`; every other one is a task by itself."""
_OF_CHOICE: dict[str, tuple[type, ...]] = {
    "turns": (str,),
    "decoding_steps": (int,),
    "new_tokens": (int,),
    "wall_time": (int, float),
    "accept_lengths": (int,),
}
_STATED = re.compile(r"temp(?:erature)?-(\d+(?:\.\d+)?)")
_NOT_THERE = (
    "The files say nothing of the machine, its software, how drafts were made, or costs, nor how many drafted tokens "
    "were tested: alpha and acceptance by depth are left out.",
    "Every step counts, those too that the length limit may have cut: tau is not quite what our count would be.",
    "Seconds hold the prompts', so speed-up is lower than without; intervals resample questions.",
)
_SEED = 0


def convert_results(request: ConvertResultsRequest) -> str:
    """Write a run's answers as Spec-Bench's files, or such files as a `results.json`; what was written.

    Raises:
        RequestError: what is named is neither, or damaged, or does not say what the other form needs.
    """
    folders = [path for path in request.source if path.is_dir()]
    named = [*request.source, *([] if request.baseline is None else [request.baseline])]
    missing = next((path for path in named if not path.exists()), None)
    if missing is not None:
        raise RequestError(
            f"there is no {missing}; expected a folder with results.json, or answer files of Spec-Bench"
        )
    if folders and len(request.source) > 1:
        raise RequestError(
            f"{folders[0]} is a folder, and {len(request.source)} are named; convert one folder at a time"
        )
    if folders:
        return "\n".join(f"answers: {path}" for path in write_answer_files(folders[0], writable_folder(request.out)))
    results = results_of(request.source, request.baseline, request.target, request.temperature)
    path = writable_folder(request.out) / "results.json"
    write_text(path, json.dumps(results, indent=1) + "\n")
    return "\n".join([f"results: {path}", *results["converted"]["notes"], f"next: draftsmith report {request.out}"])


# ---- ours as theirs -------------------------------------------------------------------------------


def write_answer_files(run: Path, out: Path) -> list[Path]:
    """A file of plain decoding and of each method, per temperature.

    Raises:
        RequestError: the run has no answers, or they were not timed one by one.
    """
    folder = results_in(run)
    results, answers = read_results(folder / "results.json"), read_answers(folder)
    if any(each["seconds"] is None for each in answers):
        raise RequestError(
            f"{folder / ANSWERS} has no seconds of single answers: they were decoded together, eval.batch = "
            f"{results['settings']['batch']}; measure again with --eval.batch 1"
        )
    made = []
    for row in _with_plain(results["rows"]):
        mine = [
            each for each in answers if (each["method"], each["temperature"]) == (row["method"], row["temperature"])
        ]
        if len(mine) != row["requests"]:
            raise RequestError(
                f"{folder / ANSWERS} has {len(mine)} answers of {row['method'] or PLAIN} at T = "
                f"{row['temperature']:g}, and results.json has {row['requests']}; measure again"
            )
        name = f"{_file_name(row['method'] or PLAIN)}-temperature-{float(row['temperature'])}"
        path = out / f"{name}.jsonl"
        if path in made:
            raise RequestError(
                f"two methods would both be {path.name}; measure them apart, each with an --out of its own"
            )
        when = (folder / "results.json").stat().st_mtime
        write_text(path, "".join(json.dumps(each) + "\n" for each in _questions(mine, name, row, when)))
        made.append(path)
    return made


def _with_plain(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Plain decoding of each temperature, then its rows."""
    for _, group in groupby(rows, lambda row: row["temperature"]):
        own = list(group)
        yield {**own[0], "method": None, "verdict": "lossless", "distance": None, "rule": None, "audited": None}
        yield from own


def _file_name(method: str) -> str:
    return re.sub(r"[^\w.]+", "-", method, flags=re.ASCII).strip("-.") or "method"


def _questions(
    answers: Sequence[dict[str, Any]], name: str, row: dict[str, Any], when: float
) -> Iterator[dict[str, Any]]:
    """The lines of a file; the turns of a question follow one another in ours."""
    prompts = list(_by_prompt(answers))
    ids = [each[0]["id"] for each in prompts]
    if len({each["set"] for each in answers}) > 1 or not all(map(str.isdecimal, ids)) or len(set(ids)) < len(ids):
        ids = list(range(1, len(ids) + 1))  # theirs are numbers, each once
    for number, turns in zip(map(int, ids), prompts, strict=True):
        yield {
            "question_id": number,
            "category": turns[0]["category"].rpartition("/")[2],  # of several sets the name stands in front
            "answer_id": hashlib.sha256(f"{name}/{number}".encode()).hexdigest()[:22],
            "model_id": name,
            "choices": [_choice(turns, plain=row["method"] is None)],
            "tstamp": when,
            "audit": "plain decoding" if row["method"] is None else verdict_of(row),
        }


def _by_prompt(answers: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The turns of each prompt; a first turn begins another, whatever its name."""
    starts = [at for at, each in enumerate(answers) if each["turn"] == 0]
    for start, end in zip(starts, [*starts[1:], len(answers)], strict=True):
        yield list(answers[start:end])


def _choice(turns: Sequence[dict[str, Any]], *, plain: bool) -> dict[str, Any]:
    """As their decoders count: a step's tokens, of plain decoding the first one too."""
    steps = [[1] * each["tokens"] if plain else each["steps"] for each in turns]
    return {
        "index": 0,
        "turns": [each["text"].strip() for each in turns],
        "decoding_steps": [len(each) for each in steps],
        "new_tokens": [each["tokens"] for each in turns],
        "wall_time": [each["seconds"] for each in turns],
        "accept_lengths": [count for each in steps for count in each],
    }


# ---- theirs as ours -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """A question of theirs with all its turns."""

    question: int | str
    category: str
    model: str
    texts: list[str]
    tokens: int
    seconds: float
    steps_S: list[int]


def results_of(
    files: Sequence[Path], baseline: Path | None, target: str | None, temperature: float | None
) -> dict[str, Any]:
    """The `results.json` of answer files, one a method; null where they do not say what it holds.

    Args:
        baseline: the file of plain decoding; without it there is no speed-up.

    Raises:
        RequestError: a file is not of that form; two are not of the same questions; nobody says the temperature.
    """
    plain = None if baseline is None else read_file(baseline)
    rows, notes = [], list(_NOT_THERE)
    first: tuple[Path, Sequence[Answered]] | None = None
    for path in files:
        answers = read_file(path)
        first = first or (baseline or path, plain or answers)
        _check_alike(path, answers, *first)
        heat = _temperature(path, answers[0].model) if temperature is None else temperature
        rows.append(_row(path, answers, plain, heat))
        if failed := sum(text == "ERROR" for each in answers for text in each.texts):
            notes.append(f"{path.name}: {failed} turns hold ERROR, where its decoder failed.")
    if plain is None:
        notes.append("No file of plain decoding was named (--baseline), so nothing says what is gained.")
    made = results_of_others(rows, target or (plain[0].model if plain else "not stated"))
    return made | {"converted": {"form": "Spec-Bench", "files": [path.name for path in files], "notes": notes}}


def read_file(path: Path) -> list[Answered]:
    """The questions of one of their files.

    Raises:
        RequestError: a line is not of that form, or a question stands twice.
    """
    found: dict[int | str, Answered] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            each = _answered(json.loads(line))
            if each.question in found:
                raise ValueError(f"question {each.question} stands twice")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise RequestError(
                f"{path}:{number} is no answer as Spec-Bench's scripts write it ({what:.120}); expected JSON lines "
                f"with question_id, category, model_id and choices[0] of {', '.join(_OF_CHOICE)}"
            ) from error
        found[each.question] = each
    if not found:
        raise RequestError(f"{path} holds no answer; expected JSON lines as Spec-Bench's scripts write them")
    return list(found.values())


def _answered(line: Mapping[str, Any]) -> Answered:
    choice = line["choices"][0]
    for name, kind in _OF_CHOICE.items():
        if not isinstance(choice[name], list) or not all(
            isinstance(each, kind) and not isinstance(each, bool) for each in choice[name]
        ):
            raise TypeError(f"{name} is {json.dumps(choice[name])[:40]}")
    tokens, seconds = sum(choice["new_tokens"]), sum(choice["wall_time"])
    if tokens < 1 or not 0 < seconds < float("inf") or min(choice["accept_lengths"], default=0) < 0:
        raise ValueError(f"{tokens} new_tokens in a wall_time of {seconds} s")
    return Answered(
        line["question_id"],
        str(line["category"]),
        str(line["model_id"]),
        choice["turns"],
        tokens,
        float(seconds),
        choice["accept_lengths"],
    )


def _check_alike(path: Path, answers: Sequence[Answered], other: Path, others: Sequence[Answered]) -> None:
    own, base = ({each.question for each in some} for some in (answers, others))
    if own != base:
        one = next(iter(own ^ base))
        raise RequestError(
            f"{path} and {other} are not of the same questions: {one} is in one alone ({len(own)} and {len(base)}); "
            "name files that answered the same ones"
        )


def _temperature(path: Path, model: str) -> float:
    """What the name of the file or of the model says of it, as their scripts write them."""
    found = _STATED.search(model) or _STATED.search(path.stem)
    if found is None:
        raise RequestError(
            f"neither {path.name} nor its model_id {model!r} says the temperature; name it: --temperature 0"
        )
    return float(found[1])


def _row(
    path: Path, answers: Sequence[Answered], plain: Sequence[Answered] | None, temperature: float
) -> dict[str, Any]:
    base = None if plain is None else {each.question: each for each in plain}
    tasks: dict[str, list[Answered]] = {}
    for each in answers:
        tasks.setdefault("mt_bench" if each.category in _MT_BENCH else each.category, []).append(each)
    whole = _rounds(answers, base)
    unknown = {"distinct_2": None, "loop_share": None, "flagged": False}
    sets: dict[str, Any] = {}
    if len(tasks) > 1:
        runs = {name: (path.name, _turns(some), _rounds(some, base)) for name, some in tasks.items()}
        sets = fields_by_set(runs, _SEED, NOT_AUDITED)
        sets["sets"] = [each | unknown for each in sets["sets"]]
        sets["over_sets"]["flagged"] = False
    by_category = groupby(sorted(answers, key=lambda each: each.category), lambda each: each.category)
    blank = ("draft_length", "draft_steps", "nodes", "mean_nodes", "rule", "audited", "distance")
    return {
        "method": answers[0].model,
        "temperature": temperature,
        "prompts": "Spec-Bench",
        "requests": _turns(answers),
        **dict.fromkeys((*blank, "mbsu", "c", "c_v", "predicted_speedup")),
        "verdict": NOT_AUDITED,
        **acceptance_fields(acceptance(whole.counts, seed=_SEED)),
        **speed_fields(whole, _SEED),
        "tokens_per_second": sum(whole.tokens_G) / sum(whole.seconds_G),
        "prefill_seconds": None,
        **unknown,
        "differing_rows": _differing(answers, base) if temperature == 0 and base else None,
        "categories": [_category(name, list(some)) for name, some in by_category],
        **sets,
        "sample": [],
    }


def _category(name: str, answers: Sequence[Answered]) -> dict[str, Any]:
    fields = acceptance_fields(acceptance(_rounds(answers, None).counts, seed=_SEED))
    return {"category": name, "requests": _turns(answers), "verdict": NOT_AUDITED, **fields}


def _rounds(answers: Sequence[Answered], base: Mapping[int | str, Answered] | None) -> AllRounds:
    """Questions as our measures count requests; nothing is known of single depths."""
    run = AllRounds(counts=[_counts(each) for each in answers])
    for each in answers:
        plain = None if base is None else base[each.question]
        run.seconds_G.append(each.seconds)
        run.tokens_G.append(each.tokens)
        run.baseline_seconds_G.append(0.0 if plain is None else plain.seconds)
        run.baseline_tokens_G.append(0 if plain is None else plain.tokens)
    return run


def _counts(answer: Answered) -> Counts:
    none_D = np.zeros(0)
    return Counts(len(answer.steps_S), sum(answer.steps_S), 0, none_D, none_D, none_D)


def _turns(answers: Sequence[Answered]) -> int:
    return sum(len(each.texts) for each in answers)


def _differing(answers: Sequence[Answered], base: Mapping[int | str, Answered]) -> int:
    """Turns whose text is not that of plain decoding; one that is not there is another text."""
    return sum(a != b for each in answers for a, b in zip_longest(each.texts, base[each.question].texts))
