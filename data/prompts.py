"""Prompt sets: held-out library files, our JSONL shapes, Spec-Bench's and HumanEval's formats.

Read next: `eval/evaluate.py`, which decodes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, RequestError
from .stdlib import stdlib_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One request: the user's turns of a chat, or a text to go on with (`chat` false)."""

    id: str
    category: str
    turns: tuple[str, ...]
    chat: bool


def load_prompts(source: str, *, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts of `stdlib` or of a JSONL file; `limit` takes an even spread, not the first ones.

    Raises:
        RequestError: no such file. DataError: a line is not a prompt; named by file and line.
    """
    prompts = _stdlib_prompts() if source == "stdlib" else _read(Path(source))
    if not prompts:
        raise DataError(f"{source}: holds no prompt")
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[(at * len(prompts) + seed) // limit % len(prompts)] for at in range(limit)]


def render(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, answers: Sequence[str] = (),
    limit: int | None = None,
) -> list[int]:  # fmt: skip
    """Token ids of the turn that follows `answers`; of a longer prompt the last `limit` ids."""
    if prompt.chat and tokenizer.chat_template is not None:
        messages = []
        for at, turn in enumerate(prompt.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": turn})
            if at < len(answers):
                messages.append({"role": "assistant", "content": answers[at]})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = prompt.turns[len(answers)]
        text = "".join([*(f"{t}{a}" for t, a in zip(prompt.turns, answers)), text])
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids if limit is None else ids[-limit:]


def _stdlib_prompts() -> list[Prompt]:
    """Stretches of held-out library files, ending at a third and at two thirds of the file."""
    prompts = []
    for module, text in stdlib_texts("prompts"):
        if len(text) < 2000:
            continue
        for part in (1, 2):
            cut = text.rfind("\n", 0, len(text) * part // 3) + 1
            start = text.find("\n", max(0, cut - 1200)) + 1
            prompts.append(Prompt(f"{module}@{cut}", "code", (text[start:cut],), chat=False))
    return prompts


def _read(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RequestError(f"there is no prompt file {path}; expected JSONL or 'stdlib'") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from error
        prompts.append(_prompt(row, f"{path}:{number}", str(number)))
    return prompts


def _prompt(row: Any, where: str, number: str) -> Prompt:
    """A row of any known shape, by its keys."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: found {type(row).__name__}; expected an object")
    category = str(row.get("category", row.get("subject", "all")))
    name = str(row.get("question_id", row.get("task_id", row.get("id", number))))
    if "turns" in row:
        return Prompt(name, category, _texts(row["turns"], where), chat=True)
    if "task_id" in row and "prompt" in row:
        return Prompt(name, "humaneval", _texts([row["prompt"]], where), chat=False)
    for key, speaker, text, user in (
        ("messages", "role", "content", "user"), ("conversations", "from", "value", "human"),
    ):  # fmt: skip
        if key in row:
            turns = [m[text] for m in row[key] if m.get(speaker) in (user, "user")]
            return Prompt(name, category, _texts(turns, where), chat=True)
    for key, chat in (("prompt", True), ("instruction", True), ("text", False)):
        if key in row:
            return Prompt(name, category, _texts([row[key]], where), chat=chat)
    raise DataError(
        f"{where}: keys {sorted(row)} are no prompt; expected turns, messages, conversations, "
        "prompt, instruction or text"
    )


def _texts(turns: Any, where: str) -> tuple[str, ...]:
    if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns)):
        raise DataError(f"{where}: found turns {turns!r:.80}; expected one or more non-empty texts")
    return tuple(turns)
