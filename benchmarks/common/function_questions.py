"""Chats about functions of Python source: prompts for an instruct model that every machine has.

Read next: `smollm2.py` in the folder above, which has them answered and measures on others.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

QUESTIONS = (
    "Explain in plain words what this Python function does.\n\n```python\n{code}\n```",
    "Write a docstring for this Python function.\n\n```python\n{code}\n```",
    "Which mistakes could a caller of this Python function make?\n\n```python\n{code}\n```",
    "Write a short example that calls `{name}`, and say what it returns.\n\n```python\n{code}\n```",
)
"""One of them is asked of a function, by its hash."""
LETTERS = (120, 1200)
"""Of a function that is asked about: neither a line nor a page."""


def questions(text: str) -> Iterator[dict[str, Any]]:
    """A chat about every documented function of a module; its answer is the docstring."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or not ast.get_docstring(node):
            continue
        code = dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
        if not LETTERS[0] <= len(code) <= LETTERS[1]:
            continue
        question = QUESTIONS[int(digest(code)[:8], 16) % len(QUESTIONS)].format(code=code, name=node.name)
        answer = str(ast.get_docstring(node))
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
