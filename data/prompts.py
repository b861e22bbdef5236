"""Prompt sets: held-out library files, our JSONL shapes, Spec-Bench's and HumanEval's formats.

Read next: `eval/measure/evaluate.py`, which decodes them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError, RequestError
from .config import DataConfig
from .prompt_rows import Message, prompt_of
from .prompt_rows import Prompt as Prompt  # for those who ask for prompts here
from .rows.chats.spoken import Spoken, ids_of, message_of, prompt_behind, text_of
from .rows.encode import beginning, plain_prompt
from .rows.raw import BadRow, RawRow, Rejected
from .rows.readers import read_jsonl
from .rows.sources import stdlib_texts
from .rows.templates import check_values, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
SECOND = "stdlib-second"
"""Other stretches of the same held-out files as `stdlib`."""


def load_prompts(
    source: str, *, limit: int | None = None, seed: int = 0, data: DataConfig | None = None
) -> list[Prompt]:
    """Prompts of a built-in set or of a JSONL file; `limit` takes an even spread, not the first ones.

    Args:
        data: whose variables and day chats are rendered with.

    Raises:
        RequestError: no such file. DataError: a line is not a prompt; named by file and line.
    """
    prompts = list(_BUILT_IN[source].prompts()) if source in _BUILT_IN else _read(Path(source))
    if not prompts:
        raise DataError(f"{source}: holds no prompt")
    if data is not None and (data.template_values or data.template_date):
        values, day = data.template_values, data.template_date
        prompts = [replace(each, template_values=values, template_date=day) if each.chat else each for each in prompts]
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[(at * len(prompts) + seed) // limit % len(prompts)] for at in range(limit)]


def render(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answers: Sequence[str | Spoken] = (),
    limit: int | None = None,
) -> list[int]:
    """Token ids of the turn that follows `answers`; of a longer text the last `limit` ids.

    Chats go through the same renderer as training rows; plain text begins as training text does.
    A chat is not cut: without its beginning it is none (`fitting` leaves out what is too long).

    Args:
        answers: to the turns asked before; in ids, as `Spoken`, these are kept where the template leaves them.

    Raises:
        DataError: the tokenizer's template refuses the chat. RequestError: it reads no such variable.
    """
    if prompt.chat and tokenizer.chat_template is not None:
        return _render_chat(prompt, tokenizer, answers)
    if prompt.messages:
        raise DataError(
            f"prompt {prompt.id} ({prompt.category}) is a chat with tools, or with other turns than a user's, and the "
            "target's tokenizer has no chat template to write it with; take a target that has one, or leave it out"
        )
    last = answers[-1] if answers else None
    if isinstance(last, Spoken):
        ids = [*last.prompt, *last.body, *ids_of(tokenizer, prompt.turns[len(answers)])]
    else:
        earlier = [str(part) for pair in zip(prompt.turns, answers) for part in pair]
        system = [] if prompt.system is None else [plain_prompt([prompt.system, ""])]
        text = "".join([*system, *earlier, prompt.turns[len(answers)]])
        ids = [*beginning(tokenizer), *ids_of(tokenizer, text)]
    return ids if limit is None else ids[-limit:]


def _render_chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, answers: Sequence[str | Spoken]) -> list[int]:
    check_values(tokenizer, prompt.template_values)
    given: list[Message] = []
    text = before = ""
    for turn in range(len(answers) + 1):
        before, text = text, ""
        if turn == len(answers) or isinstance(answers[turn], Spoken):
            text = _text_before(prompt, tokenizer, turn, given)
        if turn < len(answers):
            answer = answers[turn]
            if isinstance(answer, Spoken):
                own = text_of(tokenizer, answer.body)
                given.append(message_of(tokenizer, own, text, ended=answer.ended))
            else:
                given.append({"role": "assistant", "content": answer})
    last = answers[-1] if answers else None
    if isinstance(last, Spoken):
        return prompt_behind(tokenizer, text, before, last)
    return ids_of(tokenizer, text)


def _text_before(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, turn: int, given: Sequence[Message]) -> str:
    try:
        return render_chat(
            tokenizer,
            prompt.before(turn, given),
            answer_next=True,
            tools=prompt.tools,
            values=prompt.template_values,
            day=prompt.template_date,
        )
    except BadRow as bad:
        raise DataError(f"prompt {prompt.id} ({prompt.category}): {bad}") from bad


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


def second_set(
    source: str, first: Sequence[Prompt], *, limit: int | None, seed: int, data: DataConfig | None = None
) -> list[Prompt]:
    """Prompts as of `load_prompts`, none of which is in the first set.

    Raises:
        RequestError: one is.
    """
    prompts = load_prompts(source, limit=limit, seed=seed, data=data)
    asked = {_asked(each) for each in first}
    common = [each.id for each in prompts if _asked(each) in asked]
    if common:
        raise RequestError(
            f"{len(common)} of the {len(prompts)} prompts of eval.second_prompts {source} are in eval.prompts too, "
            f"the first is {common[0]}; expected sets without a common prompt: name another file, or leave it out"
        )
    return prompts


def _asked(prompt: Prompt) -> tuple[str, ...]:
    """All that a prompt says, by which one is another."""
    return (
        (*prompt.turns, json.dumps([prompt.messages, prompt.tools], default=str)) if prompt.messages else prompt.turns
    )


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
        return prompt_of(row.columns, str(row.line))
    except BadRow as bad:
        raise DataError(f"{row.file}:{row.line}: {bad}") from bad
    except RecursionError as error:
        raise DataError(f"{row.file}:{row.line}: nested too deeply") from error
