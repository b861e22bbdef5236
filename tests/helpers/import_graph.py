"""The package's own imports: which file needs which, and which files need each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path


def for_typing(tree: ast.AST) -> set[ast.AST]:
    """Everything inside `if TYPE_CHECKING:`, which no run imports."""
    blocks = (
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def module_of(root: Path, path: Path, node: ast.ImportFrom) -> tuple[str, ...] | None:
    """The parts of the module that a relative import names, seen from `root`; None: outside of it."""
    folder = path.relative_to(root).parent.parts
    above = node.level - 1
    if above > len(folder):
        return None
    return (*folder[: len(folder) - above], *(node.module.split(".") if node.module else ()))


def file_of(root: Path, parts: tuple[str, ...]) -> Path | None:
    """The file that holds the module of those parts."""
    files = [root.joinpath(*parts, "__init__.py")]
    if parts:
        files.insert(0, root.joinpath(*parts).with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def imported_files(root: Path, path: Path, node: ast.ImportFrom) -> Iterator[Path]:
    """The package's files that a relative import loads for the names it takes."""
    parts = module_of(root, path, node)
    if parts is None:
        return
    for alias in node.names:
        file = file_of(root, (*parts, alias.name)) or file_of(root, parts)
        if file is not None:
            yield file


def import_graph(root: Path, trees: Mapping[Path, ast.Module]) -> dict[Path, set[Path]]:
    """File -> files that it imports at run time, at its top or inside a function."""
    graph: dict[Path, set[Path]] = {}
    for path, tree in trees.items():
        typing = for_typing(tree)
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)
        graph[path] = {file for node in imports if node not in typing for file in imported_files(root, path, node)}
    return graph


def circles(graph: Mapping[Path, set[Path]]) -> list[set[Path]]:
    """Sets of files that reach each other: the graph's strongly connected parts of more than one file."""
    reach = {path: _reached(graph, path) for path in graph}
    every: list[set[Path]] = []
    for path in graph:
        circle = {other for other in reach[path] if path in reach.get(other, ())}
        if circle and circle not in every:
            every.append(circle)
    return every


def _reached(graph: Mapping[Path, set[Path]], start: Path) -> set[Path]:
    seen: set[Path] = set()
    waiting = [*graph[start]]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += graph.get(path, ())
    return seen
