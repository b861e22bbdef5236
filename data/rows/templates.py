"""Chats as text by a tokenizer's template, and which characters an assistant has to generate.

Where the template marks generation, its marks are taken; elsewhere the spans come from comparing
rendered prefixes. Prompts of the decoder go through the same `render_chat`.
Read next: `encode.py`, which turns characters into tokens; `prompts.py`, the decoder's side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DataError, DraftsmithError, RequestError
from .sandbox.bounded import bounded
from .shapes import BadRow, Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
Messages = Sequence[dict[str, Any]]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "ANSWERxOFxTHISxTURN"


class PromptDiffers(BadRow):
    """The text that is trained on does not begin with the prompt that the decoder would get."""


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
) -> str:
    """The chat as text by `template`, or by the tokenizer's own.

    Args:
        answer_next: end where an assistant's answer begins (`add_generation_prompt`).

    Raises:
        BadRow: the template refuses these messages. DataError: the template is no valid Jinja.
    """
    render: Any = tokenizer.apply_chat_template  # its return type depends on `tokenize`
    with _refusals(messages, tools):
        text = str(
            render(
                list(messages), tools=tools, chat_template=template, tokenize=False, add_generation_prompt=answer_next
            )
        )
        text.encode()  # a template may write half of a UTF-16 pair, which no tokenizer takes
    return text


@contextmanager
def _refusals(messages: Messages, tools: list[dict[str, Any]] | None) -> Iterator[None]:
    """Inside, whatever a template raises is its refusal of the messages: it is a program of a stranger."""
    from jinja2 import TemplateSyntaxError

    try:
        with bounded(messages, tools):
            yield
    except TemplateSyntaxError as error:
        raise DataError(f"the chat template is not valid Jinja: {error} (line {error.lineno})") from error
    except (DraftsmithError, BadRow, ImportError):
        raise
    except Exception as error:  # noqa: BLE001 - a division by zero as well as what it raises on purpose
        raise BadRow(f"the chat template refuses the messages ({_first_line(error)})") from error


class ChatTemplate:
    """How the chats of a run are written, and where answers stand in the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: str | None) -> None:
        """`path`: a Jinja file in place of the tokenizer's own template."""
        self.tokenizer = tokenizer
        self.override = None if path is None else _read_template(path, "data.chat_template")
        if self.override is not None and tokenizer.chat_template is None:
            raise RequestError(
                "data.chat_template is set, but the target's tokenizer has no template of its own, "
                "so the decoder would get prompts as plain text. Store the template with the "
                "tokenizer (tokenizer.chat_template of the recipe that trains the target)"
            )
        self.exists = tokenizer.chat_template is not None

    @property
    def method(self) -> str:
        """How answers are found, for the report."""
        return "generation marks" if self._marked(None) else "rendered prefixes"

    @property
    def source(self) -> str:
        """The Jinja text by which chats without tools are written."""
        return self._source(None)

    def write(self, chat: Chat) -> str:
        """The whole chat as text."""
        return self._render(chat, chat.messages)

    def compare_prompts(self, chat: Chat, text: str) -> None:
        """The first answer's prompt, as the decoder renders it, must be how `text` begins.

        Raises:
            PromptDiffers: it is not.
        """
        before = next(at for at, m in enumerate(chat.messages) if m["role"] == "assistant")
        if before == 0:
            return
        prompt = render_chat(self.tokenizer, chat.messages[:before], answer_next=True, tools=chat.tools)
        if not text.startswith(prompt):
            raise PromptDiffers(_difference(prompt, text))

    def answers(self, chat: Chat, text: str) -> list[Span]:
        """The characters of `text` (as `write` made it) that an assistant generates.

        Raises:
            BadRow: an answer cannot be found in the text.
        """
        if self._marked(chat.tools):
            return self._by_marks(chat, text)
        return list(self._by_prefixes(chat, text))

    def _marked(self, tools: list[dict[str, Any]] | None) -> bool:
        return bool(_MARK.search(self._source(tools)))

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        if self.override is not None or not self.exists:
            return self.override or ""
        return self.tokenizer.get_chat_template(tools=tools)

    def _render(self, chat: Chat, messages: Messages, *, answer_next: bool = False) -> str:
        return render_chat(self.tokenizer, messages, answer_next=answer_next, tools=chat.tools, template=self.override)

    def _by_marks(self, chat: Chat, text: str) -> list[Span]:
        from transformers.utils import chat_template_utils

        messages = [{k: v for k, v in m.items() if v is not None} for m in chat.messages]
        render: Any = chat_template_utils.render_jinja_template
        with _refusals(messages, chat.tools):
            rendered, spans = render(
                conversations=[messages],
                tools=chat.tools,
                chat_template=self._source(chat.tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        if rendered[0] != text:  # a template with a clock or a die in it
            raise BadRow("the chat template renders the same messages in two ways")
        return [(start, end) for start, end in spans[0]]

    def _by_prefixes(self, chat: Chat, text: str) -> Iterator[Span]:
        for at, message in enumerate(chat.messages):
            # nobody asks for an opening word: the decoder always has a prompt
            if message["role"] != "assistant" or at == 0:
                continue
            prompt = self._render(chat, chat.messages[:at], answer_next=True)
            if not text.startswith(prompt):
                raise PromptDiffers(f"turn {at + 1}: {_difference(prompt, text)}")
            end = self._end_of_turn(chat, at, text)
            yield len(prompt), max(len(prompt), self._without_tail(text, len(prompt), end))

    def _end_of_turn(self, chat: Chat, at: int, text: str) -> int:
        """Where turn `at` ends: the chat up to it is a prefix of the whole, as a rule.

        Templates that write the last turn in another way (Qwen3 keeps reasoning there alone) break
        the rule; then a probe in place of the answer shows what stands behind it.
        """
        if at == len(chat.messages) - 1:
            return len(text)
        upto = self._render(chat, chat.messages[: at + 1])
        if text.startswith(upto):
            return len(upto)
        probed = [*chat.messages]
        probed[at] = {**probed[at], "content": _PROBE}
        _, probe, behind = self._render(chat, probed).partition(_PROBE)
        if not probe or not text.endswith(behind):
            raise BadRow(f"the end of turn {at + 1} cannot be found in what the template renders")
        stop = self._specials.match(behind)
        return len(text) - len(behind) + (stop.end() if stop else 0)

    def _without_tail(self, text: str, start: int, end: int) -> int:
        """The end without blanks behind the last special token: the decoder stops before them."""
        tail = re.search(rf"(?:{self._specials.pattern})(\s+)$", text[start:end])
        return start + tail.start(1) if tail else end

    @property
    def _specials(self) -> re.Pattern[str]:
        return _any_of(tuple(self.tokenizer.all_special_tokens))


@cache
def _any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    # a pattern that matches nowhere, for tokenizers without special tokens
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def _difference(prompt: str, text: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prompt, text)) if a != b), min(len(prompt), len(text)))
    start = max(0, at - 20)
    return f"the decoder's prompt reads {prompt[start : at + 40]!r}, the text to train on {text[start : at + 40]!r}"


def _read_template(path: str, field: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"{field}: there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{field}: {path} cannot be read as UTF-8 ({error})") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
