"""Prompt sets: held-out library files, our JSONL shapes, Spec-Bench's and HumanEval's formats.

Read next: `eval/measure/evaluate.py`, which decodes them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, RequestError
from .rows.encode import beginning
from .rows.raw import RawRow, Rejected
from .rows.readers import read_jsonl
from .rows.shapes import BadRow, chat_messages, clean_text, filled, instruction_text, kind_of, shown_names
from .rows.stdlib import stdlib_texts
from .rows.templates import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
SECOND = "stdlib-second"
"""Other stretches of the same held-out files as `stdlib`."""


@dataclass(frozen=True)
class Prompt:
    """One request: the user's turns of a chat, or a text to continue (`chat` false)."""

    id: str
    category: str
    turns: tuple[str, ...]
    chat: bool
    system: str | None = None


def load_prompts(source: str, *, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts of a built-in set or of a JSONL file; `limit` takes an even spread, not the first ones.

    Raises:
        RequestError: no such file. DataError: a line is not a prompt; named by file and line.
    """
    prompts = list(_BUILT_IN[source].prompts()) if source in _BUILT_IN else _read(Path(source))
    if not prompts:
        raise DataError(f"{source}: holds no prompt")
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[(at * len(prompts) + seed) // limit % len(prompts)] for at in range(limit)]


def render(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, answers: Sequence[str] = (), limit: int | None = None
) -> list[int]:
    """Token ids of the turn that follows `answers`; of a longer text the last `limit` ids.

    Chats go through the same renderer as training rows; plain text begins as training text does.
    A chat is not cut: without its beginning it is none (`fitting` leaves out what is too long).

    Raises:
        DataError: the tokenizer's template refuses the chat.
    """
    turns = prompt.turns[: len(answers) + 1]
    if prompt.chat and tokenizer.chat_template is not None:
        text, before, limit = _render_turns(prompt, turns, answers, tokenizer), [], None
    else:
        earlier = [part for pair in zip(turns, answers) for part in pair]
        text, before = "".join([*earlier, turns[len(answers)]]), beginning(tokenizer)
    ids = [*before, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    return ids if limit is None else ids[-limit:]


def fitting(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, longest: int, *, warn: bool = False
) -> list[Prompt]:
    """The prompts of `fitting_ids`, without their ids."""
    return [prompt for prompt, _ in fitting_ids(prompts, tokenizer, longest, warn=warn)]


def fitting_ids(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, longest: int, *, warn: bool = False
) -> list[tuple[Prompt, list[int]]]:
    """Prompts whose first turn has at most `longest` tokens, with its ids; texts are cut to fit.

    Args:
        warn: log how many are left out; for one of several calls with the same prompts.

    Raises:
        RequestError: none is left. DataError: as for `render`.
    """
    rendered = [(each, render(each, tokenizer, limit=longest)) for each in prompts]
    lengths = [len(ids) for _, ids in rendered]
    kept = [(each, ids) for each, ids in rendered if len(ids) <= longest]
    if not kept:
        raise RequestError(
            f"all {len(prompts)} prompts are longer than eval.prompt_tokens = {longest}: chats of "
            f"{min(lengths)} to {max(lengths)} tokens, which are never cut; set "
            f"--eval.prompt_tokens {max(lengths)}"
        )
    if warn and len(kept) < len(prompts):
        _log.warning(
            "%d of %d prompts are left out: chats longer than eval.prompt_tokens = %d; with "
            "--eval.prompt_tokens %d all of them are taken",
            len(prompts) - len(kept),
            len(prompts),
            longest,
            max(lengths),
        )
    return kept


def _render_turns(
    prompt: Prompt, turns: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> str:
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    for at, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if at < len(answers):
            messages.append({"role": "assistant", "content": answers[at]})
    try:
        return render_chat(tokenizer, messages, answer_next=True)
    except BadRow as bad:
        raise DataError(f"prompt {prompt.id} ({prompt.category}): {bad}") from bad


def second_set(source: str, first: Sequence[Prompt], *, limit: int | None, seed: int) -> list[Prompt]:
    """Prompts as of `load_prompts`, none of which is in the first set.

    Raises:
        RequestError: one is.
    """
    prompts = load_prompts(source, limit=limit, seed=seed)
    asked = {each.turns for each in first}
    common = [each.id for each in prompts if each.turns in asked]
    if common:
        raise RequestError(
            f"{len(common)} of the {len(prompts)} prompts of eval.second_prompts {source} are in eval.prompts too, "
            f"the first is {common[0]}; expected sets without a common prompt: name another file, or leave it out"
        )
    return prompts


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


def _read(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise RequestError(f"there is no prompt file {path}; expected JSONL, {' or '.join(map(repr, _BUILT_IN))}")
    with path.open("rb") as stream:
        return [_judged(row) for row in read_jsonl(stream, str(path))]


def _judged(row: RawRow | Rejected) -> Prompt:
    if isinstance(row, Rejected):
        raise DataError(f"{row.file}:{row.line}: {row.reason}")
    try:
        return _prompt(row.columns, str(row.line))
    except BadRow as bad:
        raise DataError(f"{row.file}:{row.line}: {bad}") from bad
    except RecursionError as error:
        raise DataError(f"{row.file}:{row.line}: nested too deeply") from error


def _prompt(row: Mapping[str, Any], number: str) -> Prompt:
    """A row of any known shape, by its keys."""
    category = clean_text(str(row.get("category", row.get("subject", "all"))), "category")
    name = clean_text(str(row.get("question_id", row.get("task_id", row.get("id", number)))), "the prompt's name")
    if "turns" in row:  # Spec-Bench, MT-Bench
        return Prompt(name, category, _turns(row["turns"]), chat=True)
    if "task_id" in row and "prompt" in row:  # HumanEval
        return Prompt(name, "humaneval", (filled(row["prompt"], "prompt"),), chat=False)
    for column in ("messages", "conversations"):
        if column in row:
            return _chat(name, category, chat_messages(row[column], column), row.get("system"))
    if "prompt" in row:
        if isinstance(row["prompt"], list):
            return _chat(name, category, chat_messages(row["prompt"], "prompt"), None)
        return Prompt(name, category, (filled(row["prompt"], "prompt"),), chat=True)
    if "instruction" in row:
        return Prompt(name, category, (instruction_text(row),), chat=True)
    if "text" in row:
        return Prompt(name, category, (filled(row["text"], "text"),), chat=False)
    raise BadRow(
        f"keys {shown_names(sorted(row))} are no prompt; expected turns, messages, conversations, "
        "prompt, instruction or text"
    )


def _chat(name: str, category: str, messages: list[dict[str, Any]], system: Any) -> Prompt:
    """The user's turns; the answers are the model's to give."""
    if messages[0]["role"] in ("system", "developer"):
        system = messages[0]["content"]
    turns = [message["content"] for message in messages if message["role"] == "user"]
    before = None if not system else clean_text(system, "system")
    return Prompt(name, category, _turns(turns), chat=True, system=before)


def _turns(turns: Any) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"turns is {'an empty list' if turns == [] else kind_of(turns)}; expected texts of the user")
    return tuple(filled(turn, f"turns[{at}]") for at, turn in enumerate(turns))
