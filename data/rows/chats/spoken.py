"""An answer that was written in token ids: as a turn of the chat, and in ids where the next prompt goes on behind it.

The next turn is asked by rendering the chat with this answer in it. Where the template leaves the answer as it was
written, the prompt keeps its ids, and text is tokenised from its end on alone; where it rewrites it (thoughts are
dropped), the whole prompt is tokenised. Read next: `written.py`, which keeps these ids; `data/prompts.py`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ..raw import BadRow
from ..templates import Values, render_chat
from .tags import CLOSING, EMPTY, closed_by, inline
from .thoughts import opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# gpt-oss writes its answers in parts, each with a channel in front
_PART = re.compile(
    r"(?:<\|start\|>assistant)?(?P<to>[^<]*)<\|channel\|>(?P<channel>\w+)(?P<more>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?=<\|(?:end|return|call|start)\|>|$)(?:<\|(?:end|return|call)\|>)?",
    re.DOTALL,
)
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_PROBE = "ANSWERxOFxTHISxTURN"


class Spoken(NamedTuple):
    """A prompt and the answer to it, in ids; the end is among them if it was written."""

    prompt: list[int]
    answer: list[int]
    ended: bool

    @property
    def body(self) -> list[int]:
        """The answer without its end."""
        return self.answer[:-1] if self.ended else self.answer


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of ids, special tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def message_of(
    tokenizer: PreTrainedTokenizerBase, text: str, prompt: str, *, ended: bool = True, values: Values | None = None
) -> dict[str, Any]:
    """An answer as a turn of the chat, for templates: thoughts and calls under their names, where they are told apart.

    Args:
        text: of the answer, special tokens included, without its end.
        prompt: the text that it goes on behind; thoughts that it opens belong to the turn.
        values: the template's own variables.
    """
    parts = _by_tokenizer(tokenizer, text, prompt) or _by_channels(text)
    parts = parts or _by_template(_Writer(tokenizer, values or {}), opening(prompt) + text)
    return {"role": "assistant", **parts, **({} if ended else {"ended": False})}


def prompt_behind(tokenizer: PreTrainedTokenizerBase, text: str, before: str, spoken: Spoken) -> list[int]:
    """The ids of a prompt, which keeps those of the answer in it where its text still has it as it was written.

    Args:
        text: of the prompt.
        before: of the prompt that `spoken` answers.
    """
    head = before + text_of(tokenizer, spoken.body)
    if not text.startswith(head):
        return ids_of(tokenizer, text)
    return [*spoken.prompt, *spoken.body, *_ids_behind(tokenizer, text[len(head) :])]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text, with nothing put in front or behind."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _ids_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that goes on behind another: tokenizers that begin one with a blank put none there."""
    feed, both = ids_of(tokenizer, "\n"), ids_of(tokenizer, f"\n{text}")
    return both[len(feed) :] if both[: len(feed)] == feed else ids_of(tokenizer, text)


def _by_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str, prompt: str) -> dict[str, Any] | None:
    """As the tokenizer's own template of answers parts it, if it has one."""
    if getattr(tokenizer, "response_template", None) is None:
        return None
    parse: Any = tokenizer.parse_response
    try:
        found = parse(text, prefix=prompt)
    except Exception:  # noqa: BLE001 - a stranger's pattern, for an answer that may be cut off
        return None
    if not isinstance(found, dict):
        return None
    made = {"content": found.get("content") or ""}
    thoughts = found.get("reasoning_content") or found.get("thinking")
    made |= {"reasoning_content": thoughts} if thoughts else {}
    return made | ({"tool_calls": found["tool_calls"]} if found.get("tool_calls") else {})


class _Writer(NamedTuple):
    """How a template writes a turn in a chat of its own."""

    tokenizer: PreTrainedTokenizerBase
    values: Values

    def __call__(self, parts: dict[str, Any]) -> str:
        """What stands behind the prompt, or behind its tags for thoughts; empty where the turn begins otherwise."""
        asked = [{"role": "user", "content": "why"}]
        prompt = render_chat(self.tokenizer, asked, answer_next=True, values=self.values)
        turn = {"role": "assistant", **parts}
        written = render_chat(self.tokenizer, [*asked, turn], answer_next=False, values=self.values)
        closed, opened = closed_by(prompt), opening(prompt)
        if not opened and written.startswith(prompt):
            return written.removeprefix(prompt)
        head = prompt[: closed.start()] if closed else prompt.removesuffix(opened)
        return written.removeprefix(head) if written.startswith(head) else ""


def _by_template(write: _Writer, text: str) -> dict[str, Any]:
    """As the template writes it again: whole, or without the tags that it would write a second time around each part.

    Whole where neither gives the text back and no pair of tags is doubled.
    """
    whole: dict[str, Any] = {"content": text}
    try:
        again = write(whole)
        if again.startswith(text):
            return whole
        found = inline(text)
        thoughts = {"reasoning_content": found[0].strip("\n")} if found and found[0].strip() else {}
        tags = EMPTY.match(again) or CLOSING.match(again)
        if tags and found and again[tags.end() :].startswith(text):
            return {"content": found[1], **thoughts}
        before, _, behind = write({"content": _PROBE, **thoughts}).partition(_PROBE)
        parted = {"content": _without_end(text.removeprefix(before), behind), **thoughts}
        return parted if write(parted).startswith(text) else whole
    except BadRow:
        return whole


def _without_end(text: str, end: str) -> str:
    """A text without as much of an end as it has: the last token of an answer is not among its ids."""
    length = next((n for n in range(len(end), 0, -1) if text.endswith(end[:n])), 0)
    return text[: len(text) - length]


def _by_channels(text: str) -> dict[str, Any] | None:
    """The parts of an answer that is written in channels; None for any other."""
    if not _PART.match(text):
        return None
    made: dict[str, Any] = {"content": ""}
    thoughts: list[str] = []
    for part in _PART.finditer(text):
        to = _TO.search(part["to"] + part["more"])
        if to is not None:
            made.setdefault("tool_calls", []).append(_call(to[1], part["text"]))
        elif part["channel"] == "final":
            made["content"] += part["text"]
        else:
            thoughts.append(part["text"])
    return made | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})


def _call(name: str, arguments: str) -> dict[str, Any]:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = arguments
    return {"type": "function", "function": {"name": name, "arguments": given}}
