"""A prompt, and a row of any known shape as one: the columns that sets of prompts come in, as a table.

Read next: `prompt_sets.py`, the sets that papers report, by name; `prompts.py`, which renders prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .rows.chats.message import chat_messages
from .rows.raw import BadRow, clean_text, filled, kind_of
from .rows.shapes import instruction_text, shown_names, system_text, tools_of, with_system

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One request: the user's turns of a chat, or a text to continue (`chat` false)."""

    id: str
    category: str
    turns: tuple[str, ...]
    """The user's; of a chat that has more than these and a system text, `messages` has all."""
    chat: bool
    system: str | None = None
    messages: tuple[Message | None, ...] = ()
    """Every turn of a chat with tools, or with system turns in its middle, up to the last of a user or a tool; None
    for an answer, which is the model's to give. Calls of tools stay as given, for their results follow."""
    tools: list[Message] | None = None
    template_values: Mapping[str, Any] | None = None
    """Variables of the chat template (`data.template_values`)."""
    template_date: str | None = None
    """The day that its clock shows (`data.template_date`)."""
    set: str | None = None
    """The set it is of, where sets were named; None for a file by itself."""
    stream: int | None = None
    """Number of its random stream, the same in any selection; None: its place among what is decoded."""

    @property
    def points(self) -> list[int]:
        """The turns that are asked for, as indices of `messages`, or counted where that is empty."""
        if not self.messages:
            return list(range(len(self.turns)))
        asked = [at for at, each in enumerate(self.messages) if at and (each is None or each["role"] == "assistant")]
        return [*asked, len(self.messages)]

    def before(self, turn: int, given: Sequence[Message] = ()) -> list[Message]:
        """The messages in front of an asked turn, `given` being the answers to the turns asked before it."""
        points = self.points
        if self.messages:
            answers = dict(zip(points, given, strict=False))
            return [answers[at] if each is None else each for at, each in enumerate(self.messages[: points[turn]])]
        made = [] if self.system is None else [{"role": "system", "content": self.system}]
        for at, text in enumerate(self.turns[: turn + 1]):
            made.append({"role": "user", "content": text})
            made += given[at : at + 1] if at < turn else []
        return made


def prompt_of(row: Mapping[str, Any], number: str) -> Prompt:
    """A row of any known shape, by its columns; `number` names one that has no name.

    Raises:
        BadRow: it has no known shape, or one that may mean several prompts.
    """
    category = clean_text(str(_given(row, "category", "subject") or "all"), "category")
    given = _given(row, "question_id", "task_id", "id")
    name = clean_text(str(number if given is None else given), "the prompt's name")
    filled_in = {column for column, value in row.items() if value is not None}
    for present in (filled_in, set(row)):  # a table has columns that another row's shape needs
        for shape, read in _SHAPES.items():
            if present.issuperset(shape):
                _check_alone(row, shape[-1])
                return read(row, shape[-1], name, category)
    columns = dict.fromkeys(shape[-1] for shape in _SHAPES)
    raise BadRow(f"keys {shown_names(sorted(row))} are no prompt; expected one of {', '.join(columns)}")


def _check_alone(row: Mapping[str, Any], column: str) -> None:
    """Raise BadRow where a text stands beside another one that may be the prompt as well."""
    also = [each for each in _ONE_OF if row.get(each)] if column in _ONE_OF else []
    if len(also) > 1:
        raise BadRow(
            f"{' and '.join(also)} may each be the prompt; expected one of them: name the set (--prompts NAME=FILE), "
            "or write what is to be asked to `prompt` or `messages`"
        )


def _given(row: Mapping[str, Any], *names: str) -> Any:
    """The first of these columns that holds something."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _user_turns(row: Mapping[str, Any], column: str, name: str, category: str) -> Prompt:
    return _simple(name, category, _turns(row[column], column), row)


def _dialogue(row: Mapping[str, Any], column: str, name: str, category: str) -> Prompt:
    return _chat(name, category, with_system(chat_messages(row[column], column), row), tools_of(row))


def _prompt_column(row: Mapping[str, Any], column: str, name: str, category: str) -> Prompt:
    """A text, the user's turns as MT-Bench has them on the hub, or messages."""
    value = row[column]
    if not isinstance(value, list):
        return _asked(row, column, name, category)
    texts = bool(value) and all(isinstance(each, str) for each in value)
    return (_user_turns if texts else _dialogue)(row, column, name, category)


def _asked(row: Mapping[str, Any], column: str, name: str, category: str) -> Prompt:
    return _simple(name, category, (filled(row[column], column),), row)


def _instruction(row: Mapping[str, Any], column: str, name: str, category: str) -> Prompt:
    return _simple(name, category, (instruction_text(row),), row)


def _article(row: Mapping[str, Any], column: str, name: str, category: str) -> Prompt:
    return _simple(name, category, (f"Summarize the following article.\n\n{filled(row[column], column)}",), row)


def _code(row: Mapping[str, Any], column: str, name: str, category: str) -> Prompt:
    return Prompt(name, "humaneval", (filled(row[column], column),), chat=False)


def _continued(row: Mapping[str, Any], column: str, name: str, category: str) -> Prompt:
    return Prompt(name, category, (filled(row[column], column),), chat=False)


_SHAPES: dict[tuple[str, ...], Callable[[Mapping[str, Any], str, str, str], Prompt]] = {
    ("turns",): _user_turns,  # Spec-Bench, MT-Bench, SPEED-Bench
    ("task_id", "test_list", "prompt"): _asked,  # MBPP, sanitized
    ("task_id", "test_list", "text"): _asked,  # MBPP, full
    ("task_id", "prompt"): _code,  # HumanEval
    ("messages",): _dialogue,
    ("conversations",): _dialogue,
    ("prompt",): _prompt_column,
    ("instruction",): _instruction,  # Alpaca, which has `text` too
    ("text",): _continued,
    ("question",): _asked,  # GSM8K, Natural Questions
    ("problem",): _asked,  # MATH, AIME
    ("Problem",): _asked,
    ("question_content",): _asked,  # LiveCodeBench
    ("article",): _article,  # CNN/DailyMail
}
"""The columns that a shape needs, the last one holding the prompt; tried in this order."""
_ONE_OF = ("text", "question", "problem", "Problem", "question_content", "article")
"""Columns of which a row has one, or nobody knows what is asked."""


def _simple(name: str, category: str, turns: tuple[str, ...], row: Mapping[str, Any]) -> Prompt:
    """The user's turns as texts, with a system text and tools of columns of their own."""
    system, tools = system_text(row), tools_of(row)
    messages: tuple[Message | None, ...] = ()
    if tools is not None:
        users = [{"role": "user", "content": turn} for turn in turns]
        head = [] if system is None else [{"role": "system", "content": system}]
        messages = (*head, *[each for user in users for each in (user, None)][:-1])
    return Prompt(name, category, turns, chat=True, system=system, messages=messages, tools=tools)


def _chat(name: str, category: str, messages: list[Message], tools: list[Message] | None) -> Prompt:
    """The user's turns, the answers being the model's to give; with whatever else stands between them."""
    while messages and messages[-1]["role"] == "assistant" and len(messages) > 1:
        messages = messages[:-1]
    turns = _turns([each["content"] for each in messages if each["role"] == "user"])
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    others = messages[1:] if system is not None else messages
    if tools is None and _takes_turns(others):
        return Prompt(name, category, turns, chat=True, system=system)
    kept = tuple(
        None if at and each["role"] == "assistant" and not each.get("tool_calls") else each
        for at, each in enumerate(messages)
    )
    return Prompt(name, category, turns, chat=True, system=system, messages=kept, tools=tools)


def _takes_turns(messages: Sequence[Message]) -> bool:
    """Whether these are a user's texts and a model's answers by turns, no calls or names among them."""
    roles = [each["role"] for each in messages]
    expected = [("user", "assistant")[at % 2] for at in range(len(roles))]
    return roles == expected and not any(each.get("tool_calls") or each.get("name") for each in messages)


def _turns(turns: Any, what: str = "turns") -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{what} is {'an empty list' if turns == [] else kind_of(turns)}; expected texts of the user")
    return tuple(filled(turn, f"{what}[{at}]") for at, turn in enumerate(turns))
