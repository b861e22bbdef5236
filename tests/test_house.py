"""Rules of the house that no single file can check: arrows, late torch, read fields, docstrings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import draftsmith
import pytest
from draftsmith.launch.recipe.load import Recipe, field_paths

ROOT = Path(draftsmith.__file__).parent
ROOMS = ("decoding", "drafters", "data", "trainers", "eval", "launch")
# room -> rooms that it may import (docs/design.md, section 2); the root's own files are for all
ARROWS = {
    "decoding": set(),
    "drafters": {"decoding"},
    "data": {"drafters", "decoding"},
    "trainers": {"data", "drafters", "decoding"},
    "eval": {"data", "drafters", "decoding"},
    "launch": {"trainers", "eval", "data", "drafters", "decoding"},
}
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
ALL = [*sorted(ROOT.glob("*.py")), *SOURCES]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ALL}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_arrows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "draftsmith" for alias in node.names)
        if not isinstance(node, ast.ImportFrom):
            continue
        assert not (node.module or "").startswith("draftsmith"), "inside, imports are relative"
        assert node.level <= 2, f"line {node.lineno} reaches outside the package"
        if node.level == 2:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            others = {name.split(".")[0] for name in names if (ROOT / name.split(".")[0]).is_dir()}
            assert others <= ARROWS[room], f"{room} may not import {others} (line {node.lineno})"


def test_tests_and_benchmarks_import_as_users_do() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    assert len(files) > 20
    relative = [
        f"{name_of(path)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


@pytest.mark.parametrize("path", [p for p in ALL if p.read_bytes()], ids=name_of)
def test_docstrings(path: Path) -> None:
    """A file says what it is; a public function or class says what it does, in its own line."""
    assert ast.get_docstring(TREES[path])
    missing = [
        node.name
        for node in TREES[path].body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not missing


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_nothing_unsafe(path: Path) -> None:
    """No pickle, no YAML or code from data, no remote code by default."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "dill", "cloudpickle", "yaml"} & set(names)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load"}
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    assert ast.unparse(keyword.value) != "True"
                if keyword.arg == "autoescape":
                    assert ast.unparse(keyword.value) != "False"


def unread(fields: list[str]) -> list[str]:
    """Fields that no file reads which knows their section, by its class or as `recipe.SECTION`."""
    classes = {
        name: info.annotation.__name__
        for name, info in Recipe.model_fields.items()
        if isinstance(info.annotation, type)
    }
    read: set[tuple[str, str]] = set()
    for path, tree in TREES.items():
        if path.name == "config.py":
            continue
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        for section, found in classes.items():
            if path.name != "recipe.py" and (section in attributes or found in names):
                read |= {(section, each) for each in attributes}
        if {"Recipe", "Resolved", "load_recipe"} & names:
            read |= {("", each) for each in attributes}
    return [path for path in fields if tuple(("." + path).split(".")[-2:]) not in read]


def test_every_field_is_read() -> None:
    """A declared recipe field that nothing reads would be a promise broken in silence."""
    assert unread(["loop.stepz", "audit.schedule", "columns"]) == ["loop.stepz", "audit.schedule", "columns"]
    assert unread(field_paths()) == []


LIGHT = [
    "import draftsmith",
    "from draftsmith.launch.cli import main; main(['--help'])",
    "from draftsmith.launch.cli import main; assert main(['ls']) == 0",
    "from draftsmith.launch.cli import main; assert main(['show', 'distill-tiny']) == 0",
    "from draftsmith.launch.cli import main; assert main(['show', 'nothing']) == 2",
    "from draftsmith.launch.cli import main; assert main(['train', 'distill-tiny', '--a.b', '1']) == 2",
]


@pytest.mark.parametrize("code", LIGHT)
def test_torch_is_not_imported_before_it_is_needed(code: str) -> None:
    heavy = "{'torch', 'transformers', 'accelerate', 'datasets', 'matplotlib'}"
    check = f"import sys; {code}; found = {heavy} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    for name in draftsmith.__all__:
        assert getattr(draftsmith, name) is not None
    with pytest.raises(AttributeError, match="no public name"):
        _ = draftsmith.nothing


def test_no_path_of_any_machine() -> None:
    """Shipped files speak of no home folder, no scratch folder, no private host."""
    folders = ("home", "root", "work", "tmp", "Users")
    wrong = re.compile("|".join(f"/{name}/" for name in folders))
    places = [
        *ALL,
        *(ROOT / "recipes").rglob("*.yaml"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        *(ROOT / "recipes" / "assets").rglob("*.json*"),
    ]
    found = [name_of(path) for path in places if wrong.search(path.read_text(encoding="utf-8"))]
    assert found == []
