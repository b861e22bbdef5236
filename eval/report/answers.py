"""`answers.jsonl`: what was written for each request, step by step, beside the `results.json` that sums it up.

A line is one turn of a prompt at one temperature, by a method or (method null) by plain decoding. Read next:
`results.py`; `launch/share/spec_bench.py`, which hands these lines to others' scripts.

Shapes: R requests, T steps, B rows of a batch, G batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...decoding.engine import Generation
    from ..config import EvalConfig
    from ..measure.arms import Arm
    from ..measure.requests import Request
    from ..measure.rounds import AllRounds

ANSWERS = "answers.jsonl"
_FIELDS = ("method", "temperature", "set", "id", "category", "turn", "tokens", "steps", "seconds", "text")


def answers_of(
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[Request],
    decoded: Sequence[tuple[Arm, AllRounds]],
    config: EvalConfig,
    temperature: float,
) -> Iterator[dict[str, Any]]:
    """The lines of one temperature: plain decoding, which all arms took turns with, and then every arm.

    `seconds` is one answer's time, its prompt included, the mean of `config.repeats`; null where several were decoded
    together.
    """
    plain = decoded[0][1]
    steps = [[1] * (len(tokens) - 1) for tokens in plain.baseline_texts]
    sides: list[tuple[str | None, Any, Any, list[float], list[float]]] = [
        (None, plain.baseline_texts, steps, plain.baseline_seconds_G, plain.baseline_prefills_G)
    ]
    for arm, run in decoded:
        written = [tokens for each in run.generations for tokens in each.tokens]
        emitted = [row for each in run.generations for row in _emitted(each)]
        sides.append((arm.name, written, emitted, run.seconds_G, run.prefills_G))
    for name, texts, steps_RT, seconds_G, prefills_G in sides:
        for at, (request, tokens, steps_T) in enumerate(zip(requests, texts, steps_RT, strict=True)):
            alone = (seconds_G[at] + prefills_G[at]) / config.repeats if config.batch == 1 else None
            values = (name, temperature, request.prompt.set, request.prompt.id, request.prompt.category, request.turn)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            yield dict(zip(_FIELDS, (*values, len(tokens), steps_T, alone, text), strict=True))


def _emitted(generation: Generation) -> Iterator[list[int]]:
    """Of each row the tokens of every step in which it ran; the first token of all is the prefill's."""
    kept_TB = generation.steps.kept_TB
    for kept_T in kept_TB.T:
        yield kept_T[kept_T > 0].tolist()


def as_lines(answers: Sequence[dict[str, Any]]) -> str:
    """The file's text."""
    return "".join(json.dumps(each) + "\n" for each in answers)


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The lines beside a `results.json`.

    Raises:
        RequestError: there are none, or a line is damaged.
    """
    path = folder / ANSWERS
    if not path.is_file():
        raise RequestError(
            f"{path} is missing: `draftsmith eval` and `compare` write it beside results.json, which alone does not "
            "say what each answer took; measure again"
        )
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            values = json.loads(line)
            found.append({name: values[name] for name in _FIELDS})
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise RequestError(
                f"{path}:{number} is damaged ({type(error).__name__}: {error!s:.80}); measure again"
            ) from error
    return found
