"""Chat rows out of the standard library's documentation: `python tests/chats/make_rows.py` writes them anew.

A question for a public function, class or method, and its docstring as the answer: real text under a free licence (PSF),
which differs a little from one Python to the next. `docs/chat-model.md` trains and measures on these rows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = [
    "argparse",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "email.utils",
    "enum",
    "fileinput",
    "fnmatch",
    "fractions",
    "functools",
    "glob",
    "gzip",
    "hashlib",
    "heapq",
    "html",
    "inspect",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "linecache",
    "locale",
    "logging",
    "math",
    "mimetypes",
    "operator",
    "os.path",
    "pathlib",
    "pprint",
    "queue",
    "random",
    "re",
    "sched",
    "secrets",
    "shlex",
    "shutil",
    "statistics",
    "string",
    "struct",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "traceback",
    "types",
    "typing",
    "urllib.parse",
    "uuid",
    "warnings",
    "weakref",
    "zipfile",
]
SHORTEST, LONGEST = 80, 900  # characters of an answer
EVERY = 12  # of so many rows one is kept as a prompt to measure on, one as a prompt to tune on: no training reads them


def rows() -> Iterator[tuple[str, str]]:
    """Questions and answers, each answer once."""
    seen: set[str] = set()
    for module in MODULES:
        for name, thing in sorted(vars(import_module(module)).items()):
            if name.startswith("_") or getattr(thing, "__module__", None) != module:
                continue
            for question, each in _questions(f"{module}.{name}", thing):
                text = (inspect.getdoc(each) or "").strip()
                if SHORTEST <= len(text) <= LONGEST and text.isascii() and text not in seen:
                    seen.add(text)
                    yield question, text


def _questions(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isclass(thing):
        yield f"What is {name} for?", thing
        for own, each in sorted(vars(thing).items()):
            if not own.startswith("_") and callable(each):
                yield f"What does the method {own} of {name} do?", each
    elif callable(thing):
        yield f"What does {name} do?", thing


def main() -> None:
    folder = Path(__file__).parent
    found = list(rows())
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for number, (asked, answer) in enumerate(found)
        if number % (EVERY // 2)
    ]
    kept = [[{"prompt": asked} for asked, _ in found[first::EVERY]] for first in (0, EVERY // 2)]
    for name, content in (("chats", chats), ("prompts", kept[0]), ("tuning", kept[1])):
        lines = "".join(json.dumps(each) + "\n" for each in content)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
