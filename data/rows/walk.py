"""The files that a pattern names: every real folder is entered once, every real file read once.

Links are followed, as `glob` does, but not to what the walk has met already, so links in a circle
end. Read next: `sources.py`, which reads the files.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path


def glob_files(pattern: Path) -> list[Path]:
    """What matches: `*`, `?` and `[]` inside a name, `**` for folders of any depth; dot files by name alone."""
    parts = list(pattern.parts)
    at = next(at for at, part in enumerate(parts) if glob.has_magic(part))
    found = [Path(*parts[:at])]
    if parts[-1] == "**":
        parts.append("*")
    for part in parts[at:]:
        entered: set[str] = set()
        found = once(each for path in found for each in _step(path, part, entered))
    return found


def once(files: Iterable[Path]) -> list[Path]:
    """The paths, each real file or folder under the first of its names."""
    seen: dict[str, Path] = {}
    for path in files:
        seen.setdefault(os.path.realpath(path), path)
    return list(seen.values())


def own_names_first(files: Iterable[Path]) -> list[Path]:
    """In order of name, links behind what is no link."""
    return sorted(files, key=lambda path: (path.is_symlink(), path))


def _step(path: Path, part: str, entered: set[str]) -> Iterator[Path]:
    """What one part of a pattern leads to from `path`."""
    if part == "**":
        yield from _folders(path, entered)
    elif not glob.has_magic(part):
        yield from (each for each in [path / part] if each.exists())
    else:
        hidden = part.startswith(".")
        yield from (each for each in _entries(path, hidden=hidden) if fnmatch(each.name, part))


def _folders(folder: Path, entered: set[str]) -> Iterator[Path]:
    """The folder and all below it, each real one once."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        real = os.path.realpath(path)
        if real not in entered and path.is_dir():
            entered.add(real)
            yield path
            waiting += reversed(_entries(path, hidden=False))


def _entries(folder: Path, *, hidden: bool) -> list[Path]:
    """What a folder holds; nothing where it is none, or may not be looked into."""
    try:
        return own_names_first(each for each in folder.iterdir() if hidden or not each.name.startswith("."))
    except OSError:
        return []
