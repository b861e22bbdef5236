"""`tree.json`: a static tree chosen from measured acceptance, kept beside a drafter's weights.

`draftsmith tree` writes it (`launch/measure/tree.py`), `drafter.tree` names it. Read next: `registry.py`,
which reads it; `eval/measure/tree_choice.py`, what it is measured from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..decoding.tree.build import tree_of_paths
from ..decoding.tree.search import Path as IndexPath
from ..errors import RequestError
from ..storage import write_text
from ..storage.formats import TREE
from .config import CHAIN_TREE, DEFAULT_TREE, OPTIMISED_TREE
from .sizes import MOST_PARTS

NAME = "tree.json"


def write_tree(path: Path, paths: Sequence[IndexPath], facts: Mapping[str, Any]) -> None:
    """Write index paths (`tree_of_paths`), and what they were chosen from."""
    content = {"format": TREE.number, "nodes": 1 + len(paths), **facts, "paths": list(paths)}
    write_text(path, json.dumps(content) + "\n")


def read_tree(path: Path) -> tuple[IndexPath, ...]:
    """The index paths of a tree file.

    Raises:
        RequestError: there is none, it is of another format, or holds no tree.
    """
    if not path.is_file():
        raise RequestError(f"there is no tree file {path}; `draftsmith tree RUN` measures a drafter and writes one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != TREE.number:
            raise ValueError(f"format {content['format']!r}, this version reads {TREE.number}")
        paths = tuple(tuple(int(rank) for rank in each) for each in content["paths"])
        if len(paths) > MOST_PARTS:
            raise ValueError(f"{len(paths):,} paths; expected at most {MOST_PARTS:,}")
        tree_of_paths(paths)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"{path} holds no tree ({error}); expected a file that `draftsmith tree` wrote") from error
    return paths


def named_tree(name: str, folder: Path, depth: int) -> tuple[IndexPath, ...] | None:
    """The tree that `drafter.tree` names for the drafter in `folder`; None is its default.

    Args:
        depth: tokens of a chain.

    Raises:
        RequestError: as for `read_tree`.
    """
    if name == DEFAULT_TREE:
        return None
    if name == CHAIN_TREE:
        return tuple((0,) * length for length in range(1, depth + 1))
    return read_tree(folder / NAME if name == OPTIMISED_TREE else Path(name))
