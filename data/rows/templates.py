"""Chats as text by a tokenizer's template: whole, or up to where an answer begins.

Prompts of the decoder go through the same `render_chat` as rows to train on, with the same variables
and the same day. Read next: `chats/turns.py`, which finds what an assistant has to generate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...decoding.backbone.hub import generation_ends
from ...errors import DataError, DraftsmithError, RequestError
from .bounded import CLOCK, GIVEN, render, unmarked
from .chats.calls import with_text
from .chats.message import THOUGHTS
from .chats.tags import inline, own_thoughts
from .raw import BadRow
from .shapes import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
Messages = Sequence[dict[str, Any]]
Values = Mapping[str, Any]

# a template that looks for thoughts among the parts of a content: Mistral's
_IN_PARTS = re.compile(r"""==\s*['"]thinking['"]""")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# two times of which no part is the same
_TIMES = ("2003-12-31T23:58:59", "2034-01-02T00:01:02")
_TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
_CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def named_template(name: str) -> str:
    """`chatml`, the template that comes with the package and marks generation, or a Jinja file.

    Raises:
        RequestError: no such file, or it is not UTF-8 text.
    """
    if name == "chatml":
        return files(__package__).joinpath("chat.jinja").read_text(encoding="utf-8")
    return _read_template(name, "tokenizer.chat_template")


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    answer_next: bool,
    tools: list[dict[str, Any]] | None = None,
    template: str | None = None,
    values: Values | None = None,
    day: str | None = None,
) -> str:
    """The chat as text by `template`, or by the tokenizer's own.

    Args:
        answer_next: end where an assistant's answer begins (`add_generation_prompt`).
        values: the template's own variables.
        day: what its clock shows; None: today.

    Raises:
        BadRow: the template refuses these messages. DataError: the template is no valid Jinja.
    """

    def rendered(given: list[dict[str, Any]]) -> str:
        with _refusals():
            source = tokenizer.get_chat_template(template, tools)
            given = _in_parts(given, source)
            named = {**tokenizer.special_tokens_map, **(values or {})}
            text = render(source, given, answer_next=answer_next, tools=tools, values=named, day=day)
            text.encode()  # a template may write half of a UTF-16 pair, which no tokenizer takes
        return text

    if not messages:
        raise BadRow("a chat without messages is no text")
    named = _with_thoughts_named(messages)
    try:
        return rendered(named)
    except BadRow:
        as_text = with_text(named)
        if as_text is None:
            raise
        # a template that puts the arguments of calls together as texts takes no objects
        return rendered(as_text)


def _with_thoughts_named(messages: Messages) -> list[dict[str, Any]]:
    """Messages as engines hand them to templates: without what is None, thoughts by every name that one reads.

    That is `thinking` for gpt-oss, another one for others. Thoughts are handed over once, and none are no thoughts.
    """
    made = []
    for each in messages:
        thoughts = own_thoughts(each)
        message = {
            name: value for name, value in each.items() if value is not None and (name not in THOUGHTS or thoughts)
        }
        held = inline(message["content"]) if thoughts and isinstance(message.get("content"), str) else None
        if thoughts and held and held[0].strip() == thoughts.strip():
            message["content"] = held[1].lstrip("\n")
        named = {**dict.fromkeys(THOUGHTS, thoughts), **message, THOUGHTS[0]: thoughts}
        made.append(named if thoughts else message)
    return made


def _in_parts(messages: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """The messages, with thoughts as the first part of their content for a template that looks for them there."""
    if not _IN_PARTS.search(source):
        return messages
    return [
        {
            **{name: value for name, value in each.items() if name not in THOUGHTS},
            "content": [
                {"type": "thinking", "thinking": thoughts},
                {"type": "text", "text": each.get("content") or ""},
            ],
        }
        if (thoughts := own_thoughts(each))
        else each
        for each in messages
    ]


@contextmanager
def _refusals() -> Iterator[None]:
    """Inside, whatever a template raises is its refusal of the messages: it is a program of a stranger."""
    from jinja2 import TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError as error:
        raise DataError(f"the chat template is not valid Jinja: {error} (line {error.lineno})") from error
    except (DraftsmithError, BadRow, ImportError):
        raise
    except Exception as error:  # noqa: BLE001 - a division by zero as well as what it raises on purpose
        raise BadRow(f"the chat template refuses the messages ({_first_line(error)})") from error


def check_values(tokenizer: PreTrainedTokenizerBase, values: Values | None) -> None:
    """Raise RequestError for a variable that the chat template of the tokenizer never reads."""
    if not values:
        return
    if tokenizer.chat_template is None:
        raise RequestError(
            "data.template_values is set, and the target's tokenizer has no chat template; leave it out"
        )
    source = _all_sources(tokenizer.chat_template)
    if taken := next((name for name in values if name in GIVEN), None):
        raise RequestError(f"data.template_values sets {taken!r}, which every template is given already; leave it out")
    unread = next((name for name in values if not re.search(rf"\b{re.escape(name)}\b", source)), None)
    if unread is not None:
        asked = sorted(set(re.findall(r"\b(\w+) is (?:not )?defined", source)))
        raise RequestError(
            f"data.template_values sets {unread!r}, which the target's chat template does not read"
            + (f"; it asks for {', '.join(asked[:8])}" if asked else "; it asks for no variable")
        )


def reads_clock(
    tokenizer: PreTrainedTokenizerBase, *, template: str | None = None, values: Values | None = None
) -> bool:
    """Whether chats are other texts on another day.

    Raises:
        DataError: the template is no valid Jinja.
    """
    source = template if template is not None else tokenizer.chat_template
    if source is None or CLOCK not in _all_sources(source):
        return False
    asked: Messages = [{"role": "user", "content": "why"}]
    told: Messages = [{"role": "system", "content": "so"}, *asked, {"role": "assistant", "content": "so"}, *asked]
    called: Messages = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "so"},
    ]
    for messages, tools in ((asked, None), (asked, [_TOOL]), (told, None), (called, [_TOOL])):
        try:
            first, second = (
                render_chat(
                    tokenizer, messages, answer_next=True, tools=tools, template=template, values=values, day=each
                )
                for each in _TIMES
            )
        except BadRow:
            if messages is asked:
                return True  # it names the clock, and refuses to show what for
            continue  # it takes no such turns
        if first != second:
            return True
    return False


def today() -> str:
    """The day that a run's templates are told where the recipe names none."""
    return date.today().isoformat()


class ChatTemplate:
    """How the chats of a run are written, with its variables and its day."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        path: str | None,
        values: Values | None = None,
        day: str | None = None,
    ) -> None:
        """`path`: a Jinja file in place of the tokenizer's own template.

        Raises:
            RequestError: no such file, the tokenizer has no template, or it reads no such variable.
        """
        self.tokenizer, self.values, self.day = tokenizer, values, day
        self.override = None if path is None else _read_template(path, "data.chat_template")
        if self.override is not None and tokenizer.chat_template is None:
            raise RequestError(
                "data.chat_template is set, but the target's tokenizer has no template of its own, "
                "so the decoder would get prompts as plain text. Store the template with the "
                "tokenizer (tokenizer.chat_template of the recipe that trains the target)"
            )
        self.exists = tokenizer.chat_template is not None
        check_values(tokenizer, values)

    @property
    def method(self) -> str:
        """How answers are found, for the report."""
        return "generation marks" if self.is_marked(None) else "rendered prefixes"

    @property
    def source(self) -> str:
        """The Jinja text by which chats without tools are written."""
        return self._source(None)

    @property
    def reads_clock(self) -> bool:
        """Whether chats, or the decoder's prompts, are other texts on another day."""
        return any(reads_clock(self.tokenizer, template=each, values=self.values) for each in {None, self.override})

    def write(self, chat: Chat, messages: Messages | None = None) -> str:
        """The whole chat as text, or the chat of these messages in its place."""
        return self._render(chat, chat.messages if messages is None else messages, template=self.override)

    def prompt(self, chat: Chat, at: int, *, answer_next: bool = True) -> str:
        """What stands in front of turn `at`, as the decoder renders it: by the tokenizer's own template."""
        return self._render(chat, chat.messages[:at], template=None, answer_next=answer_next)

    def is_marked(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether the template marks what is generated."""
        return bool(_MARK.search(self._source(tools)))

    def marks(self, chat: Chat, messages: Messages, text: str) -> list[Span]:
        """The characters of `text`, as `write` made it of the messages, that the template marks as generated."""
        named = {**self.tokenizer.special_tokens_map, **(self.values or {})}
        with _refusals():
            source = self._source(chat.tools)
            given = _in_parts(_with_thoughts_named(messages), source)
            marked = render(source, given, tools=chat.tools, values=named, day=self.day, mark=True)
            rendered, spans = unmarked(marked)
        if rendered != text:  # a template with a die in it
            raise BadRow("the chat template renders the same messages in two ways")
        return spans

    def without_tail(self, text: str, start: int) -> int:
        """The end of `text` without blanks behind its last special token: the decoder stops before them."""
        tail = re.search(rf"(?:{self.specials.pattern})(\s+)$", text[start:])
        return start + tail.start(1) if tail else len(text)

    @cached_property
    def ends(self) -> re.Pattern[str]:
        """Any token at which the target ends its answers."""
        ids = generation_ends(self.tokenizer.name_or_path)
        named = {str(each) for each in self.tokenizer.convert_ids_to_tokens(list(ids))} | {self.tokenizer.eos_token}
        return _any_of(tuple(sorted(each for each in named if each)))

    @property
    def specials(self) -> re.Pattern[str]:
        """Any special token of the tokenizer."""
        return _any_of(tuple(self.tokenizer.all_special_tokens))

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        if self.override is not None or not self.exists:
            return self.override or ""
        return self.tokenizer.get_chat_template(tools=tools)

    def _render(self, chat: Chat, messages: Messages, *, template: str | None, answer_next: bool = False) -> str:
        return render_chat(
            self.tokenizer,
            messages,
            answer_next=answer_next,
            tools=chat.tools,
            template=template,
            values=self.values,
            day=self.day,
        )


@cache
def _any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    # a pattern that matches nowhere, for tokenizers without special tokens
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def _all_sources(template: Any) -> str:
    """A template's text; of several by name, all of them."""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def _read_template(path: str, field: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"{field}: there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{field}: {path} cannot be read as UTF-8 ({error})") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
