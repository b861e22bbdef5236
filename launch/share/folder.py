"""What of a drafter folder goes up: its JSON and safetensors, and no path of this machine in them.

What a path would say of its user is cut to its last part, or refused where it cannot be. Read next: `push.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ...drafters.hub import FILES
from ...drafters.tree_file import NAME as TREE
from ...drafters.tuned_file import NAME as TUNED
from ...errors import RequestError
from ...storage import check_tensors

CARD = "README.md"
_REMEDY = "train the drafter anew"
_ABSOLUTE = re.compile(r"(/|~/|[A-Za-z]:[\\/])[^\n]*[\\/]\S")
_SOURCE = "held-out rows of "
_WORDS = "tokenizer.json"  # its strings are tokens; that some look like paths says nothing of a machine


@dataclass(frozen=True)
class Upload:
    """The files of a drafter by their names on the hub."""

    content: dict[str, Path | bytes]
    """Weights by their path here, JSON by its bytes."""
    cleaned: list[str]
    """Which files said a path, now its last part."""
    left_out: list[str]
    """Files of other kinds."""

    def size(self, name: str) -> int:
        """Bytes of a file."""
        content = self.content[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size


def upload_of(folder: Path, private: Sequence[str]) -> Upload:
    """What goes up of a drafter folder.

    Args:
        private: words that nothing may say, such as the run's whole path.

    Raises:
        RequestError: a file is damaged, or says one of `private`.
    """
    content: dict[str, Path | bytes] = {}
    cleaned: list[str] = []
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    kept = [path for path in paths if any(path.match(kind) for kind in FILES)]
    for path in kept:
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            check_tensors(path, remedy=_REMEDY)
            content[name] = path
            _check_says_nothing(_metadata(path), private, path)
        else:
            before = path.read_bytes()
            content[name] = made = before if path.name == _WORDS else _clean(path, before)
            if made != before:
                cleaned.append(name)
            if path.name != _WORDS:
                _check_says_nothing(made.decode(), private, path)
    names = {path.relative_to(folder).as_posix() for path in paths} - content.keys() - {CARD}
    return Upload(content, cleaned, sorted(names))


def without_folders(text: str) -> str:
    """The name of a source of rows or prompts, of a path its last part alone."""
    head, said, source = text.rpartition(_SOURCE)
    if not source.startswith("hub:"):
        source = PurePath(source.replace("\\", "/")).name or source
    return f"{head}{said}{source}"


def check_says_nothing(text: str, private: Sequence[str], what: str) -> None:
    """Raise RequestError where `text` says a word that is the user's own."""
    found = next((word for word in private if word in text), None)
    if found is not None:
        raise RequestError(
            f"{what} says {found!r}, a path of this machine, which everybody would read; take it out, and push again"
        )


def _check_says_nothing(text: str, private: Sequence[str], path: Path) -> None:
    check_says_nothing(text, private, str(path))


def _metadata(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return json.dumps(file.metadata() or {}, ensure_ascii=False)


def _clean(path: Path, raw: bytes) -> bytes:
    """A JSON file with the last part of each path that it says; the same bytes where it says none."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is damaged ({error!s:.100}); {_REMEDY}") from error
    made = _cut(content, named=path.name in (TUNED, TREE))
    return raw if made == content else (json.dumps(made, indent=1) + "\n").encode()


def _cut(value: Any, *, named: bool, key: str = "") -> Any:
    """Paths cut to their last part: absolute ones, and of `tuned.json` and `tree.json` what they name rows by."""
    if isinstance(value, dict):
        return {name: _cut(each, named=named, key=name) for name, each in value.items()}
    if isinstance(value, list):
        return [_cut(each, named=named, key=key) for each in value]
    if isinstance(value, str) and (_ABSOLUTE.match(value) or (named and key in ("prompts", "on"))):
        return without_folders(value)
    return value


def private_words(run: Path, target: str) -> Iterator[str]:
    """The whole paths that say where this user keeps things: home, here, the run, the target."""
    places = [Path.home(), Path.cwd(), run.resolve(), run.resolve().parent]
    places += [Path(target).resolve()] if Path(target).exists() else []
    # of "/" or "/x" alone any text may hold the letters
    yield from dict.fromkeys(str(place) for place in places if len(place.parts) > 2)
