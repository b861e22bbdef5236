"""Prompts of one or several sets, and how they become token ids.

Read next: `prompt_sets.py`, the sets; `eval/measure/evaluate.py`, which decodes them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import DataError, RequestError
from .config import DataConfig
from .prompt_rows import Message
from .prompt_rows import Prompt as Prompt  # for those who ask for prompts here
from .prompt_sets import SECOND as SECOND
from .prompt_sets import ChosenSet, chosen_sets, stream_of
from .rows.chats.spoken import Spoken, ids_of, message_of, prompt_behind, text_of
from .rows.encode import beginning, plain_prompt
from .rows.raw import BadRow
from .rows.templates import check_values, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def load_prompts(
    source: str, *, limit: int | None = None, seed: int = 0, data: DataConfig | None = None
) -> list[Prompt]:
    """Prompts of a file, or of sets by name; `limit` takes an even spread of each set, not the first ones.

    Args:
        source: a file, `stdlib`, or names of `prompt_sets.SETS` with commas between, each as NAME, NAME@REVISION or
            NAME=FILE. Sets follow one another, each in its own order.
        data: whose variables and day chats are rendered with.

    Raises:
        RequestError: no such file or set. DataError: a line is not a prompt; named by file and line.
        EnvironmentFailure: the hub cannot be asked for a set.
    """
    asked = chosen_sets(source)
    prompts = [each for one in asked for each in _taken(one, limit, seed, several=len(asked) > 1)]
    if data is not None and (data.template_values or data.template_date):
        values, day = data.template_values, data.template_date
        prompts = [replace(each, template_values=values, template_date=day) if each.chat else each for each in prompts]
    return prompts


def _taken(asked: ChosenSet, limit: int | None, seed: int, *, several: bool) -> list[Prompt]:
    """The prompts of one set that are used; of a set by name as many as papers take, with streams of their own."""
    prompts = asked.prompts()
    if not several and asked.record is None:
        return [prompts[at] for at in _spread(len(prompts), limit, seed)]
    most = len(prompts) if asked.record is None else asked.record.prompts
    taken = sorted(_spread(len(prompts), min(most, limit or most), seed))
    return [
        replace(
            prompts[at],
            set=asked.name,
            stream=stream_of(asked.name, at),
            category=_category(asked.name, prompts[at].category) if several else prompts[at].category,
        )
        for at in taken
    ]


def _category(name: str, category: str) -> str:
    """A category among those of several sets."""
    return name if category in ("all", name) else f"{name}/{category}"


def _spread(count: int, limit: int | None, seed: int) -> list[int]:
    if limit is None or limit >= count:
        return list(range(count))
    return [(at * count + seed) // limit % count for at in range(limit)]


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
        ids = _render_chat(prompt, tokenizer, answers)
        if not ids:
            raise DataError(
                f"the target's chat template writes prompt {prompt.id} ({prompt.category}) as nothing, not a token; "
                "expected a text that ends where the answer begins: take the template that the target was trained with"
            )
        return ids
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
        system = [plain_prompt([prompt.system, ""])] if prompt.system else []
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
                given.append(message_of(tokenizer, own, text, ended=answer.ended, values=prompt.template_values))
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
        RequestError: none is left, of a set. DataError: as for `render`.
    """
    rendered = [(each, render(each, tokenizer, limit=longest)) for each in prompts]
    kept = [(each, ids) for each, ids in rendered if len(ids) <= longest]
    for name in dict.fromkeys(each.set for each in prompts):
        _check_some(name, [len(ids) for each, ids in rendered if each.set == name], longest)
    lengths = [len(ids) for _, ids in rendered]
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


def _check_some(name: str | None, lengths: Sequence[int], longest: int) -> None:
    """Raise RequestError where no prompt of a set fits: a mean over sets would be one over the others."""
    if min(lengths) > longest:
        raise RequestError(
            f"all {len(lengths)} prompts {f'of {name} ' if name else ''}are longer than eval.prompt_tokens = "
            f"{longest}: chats of {min(lengths)} to {max(lengths)} tokens, which are never cut; set "
            f"--eval.prompt_tokens {max(lengths)}{', or leave that set out' if name else ''}"
        )


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
