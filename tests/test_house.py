"""Rules that no single file can check: arrows, circles, folders, late torch, read fields, docstrings."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.launch.recipe.load import field_paths
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.recipe import TrainingRecipe
from helpers.field_reads import reads_of
from helpers.import_graph import circles, import_graph, imported_files, module_of

ROOT = Path(draftsmith.__file__).parent
# room -> rooms that it may import (docs/design.md, section 2); the root's own files are for all
ARROWS = {
    "decoding": set(),
    "drafters": {"decoding"},
    "data": {"drafters", "decoding"},
    "trainers": {"data", "drafters", "decoding"},
    "eval": {"data", "drafters", "decoding"},
    "launch": {"trainers", "eval", "data", "drafters", "decoding"},
    "storage": set(),
}
FOR_ALL = {"storage"}
SOURCES = [path for room in ARROWS for path in sorted((ROOT / room).rglob("*.py"))]
ALL = [*sorted(ROOT.glob("*.py")), *SOURCES]
EVERY = [*ALL, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ALL}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fault_of(path: Path, node: ast.Import | ast.ImportFrom) -> str | None:
    """What is wrong with an import of a room's file."""
    if isinstance(node, ast.Import):
        absolute = any(alias.name.split(".")[0] == "draftsmith" for alias in node.names)
        return "inside, imports are relative" if absolute else None
    if not node.level:
        absolute = (node.module or "").startswith("draftsmith")
        return "inside, imports are relative" if absolute else None
    room, parts = path.relative_to(ROOT).parts[0], module_of(ROOT, path, node)
    if parts is None:
        return "reaches outside the package"
    names = [parts[0]] if parts else [alias.name for alias in node.names]
    others = {name for name in names if (ROOT / name).is_dir()} - {room}
    if not others <= ARROWS[room] | FOR_ALL:
        return f"{room} may not import {others}"
    return None if [*imported_files(ROOT, path, node)] else "imports what is not there"


def faults_of_imports(path: Path, tree: ast.AST) -> list[str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    said = [(node.lineno, fault_of(path, node)) for node in imports]
    return [f"{name_of(path)}:{line}: {fault}" for line, fault in said if fault]


def test_arrows() -> None:
    """A room imports itself, the root's own files, and rooms that its arrows lead to."""
    assert [fault for path in SOURCES for fault in faults_of_imports(path, TREES[path])] == []


def test_a_wrong_arrow_is_seen() -> None:
    path = ROOT / "decoding" / "decoder.py"
    for text, fault in {
        "import draftsmith.errors": "inside, imports are relative",
        "from draftsmith import errors": "inside, imports are relative",
        "from ... import errors": "reaches outside the package",
        "from ..drafters import families": "decoding may not import {'drafters'}",
        "from .nowhere import thing": "imports what is not there",
    }.items():
        assert faults_of_imports(path, ast.parse(text)) == [f"decoding/decoder.py:1: {fault}"]
    assert faults_of_imports(path, ast.parse("import torch\nfrom ..errors import RequestError")) == []


def test_arrows_see_every_level() -> None:
    """A relative import of any depth is the module that Python would load."""
    path = ROOT / "trainers" / "loop" / "loop.py"
    for text, parts in {
        "from ...errors import Stopped": ("errors",),
        "from . import checkpoint": ("trainers", "loop"),
        "from ..config import LoopConfig": ("trainers", "config"),
        "from ...launch.check import room": ("launch", "check"),
        "from ....outside import thing": None,
    }.items():
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.ImportFrom)
        assert module_of(ROOT, path, node) == parts


def test_no_circle_of_files() -> None:
    """No file needs itself by way of others, imports inside functions counted; those for types not."""
    assert [sorted(map(name_of, circle)) for circle in circles(import_graph(ROOT, TREES))] == []


def test_no_circle_of_families() -> None:
    """What two families need of each other stands in a room of its own (`drafters/layers`)."""
    graph = import_graph(ROOT, TREES)
    rooms: dict[Path, set[Path]] = {}
    for path, others in graph.items():
        if path.parent.parent == ROOT / "drafters":
            needed = {other.parent for other in others if other.parent.parent == ROOT / "drafters"}
            rooms.setdefault(path.parent, set()).update(needed - {path.parent})
    assert ROOT / "drafters/layers" in rooms[ROOT / "drafters/block"]
    assert circles(rooms) == []


def circles_of_folders(graph: Mapping[Path, set[Path]]) -> list[set[Path]]:
    """Sets of folders whose files need each other, in a circle of any length; a folder needs what stands inside of
    it, and is needed by it, as one."""
    needs: dict[Path, set[Path]] = {}
    for path, others in graph.items():
        apart = (other.parent for other in others)
        mine = needs.setdefault(path.parent, set())
        mine.update(each for each in apart if not (each.is_relative_to(path.parent) or path.is_relative_to(each)))
    return circles(needs)


def test_no_folders_need_each_other() -> None:
    """At run time, imports inside functions counted."""
    assert [sorted(map(name_of, circle)) for circle in circles_of_folders(import_graph(ROOT, TREES))] == []


def test_folders_that_need_each_other_are_seen() -> None:
    """By two files of each, or by way of a third; a folder inside the other is none."""
    one, other, inner = ROOT / "launch/check", ROOT / "launch/train", ROOT / "launch/check/inner"
    graph = {
        one / "a.py": {other / "b.py", inner / "d.py"},
        other / "c.py": {one / "e.py"},
        inner / "d.py": {one / "a.py"},
    }
    assert circles_of_folders(graph) == [{one, other}]
    third = ROOT / "launch/measure"
    graph[other / "c.py"] = {third / "f.py"}
    assert circles_of_folders(graph) == []
    graph[third / "g.py"] = {one / "e.py"}
    assert circles_of_folders(graph) == [{one, other, third}]


FEWEST_LINES = 40


def test_no_small_file_has_one_reader() -> None:
    """What one file alone needs of so few lines stands in that file."""
    readers: dict[Path, set[Path]] = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                for file in imported_files(ROOT, path, node):
                    readers.setdefault(file, set()).add(path)
    small = [
        path for path in ALL if not path.stem.startswith("__") and len(path.read_text().splitlines()) < FEWEST_LINES
    ]
    assert {name_of(path) for path in small if len(readers.get(path, ())) == 1} == set()


def test_no_class_name_is_taken_twice() -> None:
    """A name that a search finds twice is asked about at every reading."""
    names = [node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    public = Counter(name for name in names if not name.startswith("_"))
    assert {name for name, count in public.items() if count > 1} == set()


def test_a_circle_is_seen() -> None:
    """Two files that import each other, one of them inside a function; a type's import is no arrow."""
    sources = {
        "errors.py": "def late():\n    from .storage.files import write_text",
        "storage/files.py": "from .. import errors",
        "config.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import config",
    }
    trees = {ROOT / name: ast.parse(source) for name, source in sources.items()}
    assert circles(import_graph(ROOT, trees)) == [{ROOT / "errors.py", ROOT / "storage/files.py"}]


FOLDERS = sorted({path.parent for path in SOURCES})


def test_no_folder_is_too_wide() -> None:
    """More than a reader takes in at a glance goes into sub-folders by subject."""
    counts = {folder: len({*folder.glob("*.py")} - {folder / "__init__.py"}) for folder in FOLDERS}
    assert {name_of(folder): count for folder, count in counts.items() if count > 16} == {}


def test_what_tests_share_has_a_folder() -> None:
    """Beside fixtures, the root of `tests/` holds tests alone; helpers are found in `tests/helpers/`."""
    tests = ROOT / "tests"
    assert [name_of(path) for path in tests.glob("*.py") if not path.name.startswith(("test_", "conftest"))] == []
    for folder in (tests / "helpers", *filter(Path.is_dir, (tests / "helpers").iterdir())):
        assert len([*folder.glob("*.py")]) <= 16, name_of(folder)


def test_the_wheel_has_every_folder() -> None:
    """pyproject.toml lists each folder that holds code or is read by it, once; those with code are packages."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {".".join(("draftsmith", *folder.relative_to(ROOT).parts)) for folder in FOLDERS}
    folders_read = ("launch.configs", "recipes", "recipes.assets", "recipes.assets.sizes", "recipes.bases")
    read = {f"draftsmith.{name}" for name in folders_read}
    assert sorted(listed) == sorted(folders | {"draftsmith"} | read)
    assert all((folder / "__init__.py").is_file() for folder in FOLDERS)


def test_the_formatter_is_never_overruled() -> None:
    mark = "# fmt: " + "skip"
    assert [name_of(path) for path in EVERY if mark in path.read_text(encoding="utf-8")] == []


def test_tests_and_benchmarks_import_as_users_do() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert len(files) > 20
    relative = [
        f"{name_of(path)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def without_docstring(tree: ast.Module) -> list[str]:
    """The public functions and classes that have none, and the file itself."""
    missing = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)
    ]
    return missing if ast.get_docstring(tree) else ["the file", *missing]


def test_docstrings() -> None:
    """A file says what it is; a public function or class says what it does, in its own line."""
    missing = {name_of(path): without_docstring(tree) for path, tree in TREES.items() if path.read_bytes()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_a_missing_docstring_is_seen() -> None:
    assert without_docstring(ast.parse("def own(): ...\ndef _own(): ...\nclass Own: ...")) == [
        "the file",
        "own",
        "Own",
    ]


def test_files_that_a_docstring_names_are_there() -> None:
    """By their path from the file's own folder, from its room or from the root: "read next" leads somewhere."""
    lost = {}
    for path in EVERY:
        tree = TREES.get(path) or ast.parse(path.read_text(encoding="utf-8"))
        bases = (path.parent, ROOT / path.relative_to(ROOT).parts[0], ROOT)
        named = re.findall(r"`([\w./-]+\.py)`", ast.get_docstring(tree) or "")
        lost[name_of(path)] = [each for each in named if not any((base / each).is_file() for base in bases)]
    assert {path: names for path, names in lost.items() if names} == {}


def unsafe(tree: ast.AST) -> list[int]:
    """Lines with pickle, YAML or code from data, remote code by default, HTML as it comes."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if names & {"pickle", "dill", "cloudpickle", "yaml"}:
                lines.append(node.lineno)
        elif isinstance(node, ast.Call):
            given = {(keyword.arg, ast.unparse(keyword.value)) for keyword in node.keywords}
            wrong = given & {("trust_remote_code", "True"), ("autoescape", "False")}
            if wrong or ast.unparse(node.func) in {"eval", "exec", "torch.load"}:
                lines.append(node.lineno)
    return lines


def test_nothing_unsafe() -> None:
    """No pickle, no YAML or code from data, no remote code by default."""
    found = {name_of(path): unsafe(tree) for path, tree in TREES.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_what_is_unsafe_is_seen() -> None:
    for text in (
        "import pickle",
        "from yaml import load",
        "eval(text)",
        "torch.load(path)",
        "make(path, trust_remote_code=True)",
        "Environment(autoescape=False)",
    ):
        assert unsafe(ast.parse(text)) == [1], text
    assert unsafe(ast.parse("make(path, trust_remote_code=asked)\nmodel.eval()")) == []


READS = functools.cache(lambda: reads_of(ROOT, TREES, [path for path in ALL if not path.name.endswith("config.py")]))


def unread(fields: list[str]) -> list[str]:
    """Fields that nothing reads on a value that is known to be their section.

    Known by types: `recipe.SECTION.FIELD`, or FIELD of what is annotated with the section's class.
    """
    return [path for path in fields if (owner(path), path.split(".")[-1]) not in READS()]


def owner(path: str) -> str:
    """The name of the class whose field stands at a dotted path of a recipe."""
    kind: Any = Recipe
    own = set(Recipe.model_fields) - set(TrainingRecipe.model_fields)
    for section in path.split(".")[:-1]:
        info = kind.model_fields.get(section) if hasattr(kind, "model_fields") else None
        kind = None if info is None else info.annotation
    if kind is Recipe:
        return "_Recipe" if path in own else "TrainingRecipe"
    return getattr(kind, "__name__", "")


def test_every_field_is_read() -> None:
    """A declared recipe field that nothing reads would be a promise broken in silence."""
    assert unread(field_paths()) == []


def test_a_field_of_the_same_name_elsewhere_is_no_read() -> None:
    """Names that other sections, and the very files that read the section, are full of."""
    planted = ["loop.stepz", "audit.schedule", "columns", "optimizer.steps", "medusa.top_k", "probe.layers"]
    planted += [
        "drafter.rest.factor",
        "drafter.medusa.depth",
        "tune.chunk",
        "eagle.heads",
        "objective.steps",
        "checkpoint.seed",
        "bpd.rank",
        "loop.path",
    ]
    assert unread(planted) == planted


def test_reads_follow_types() -> None:
    """A parameter, a field of a class, a return value, a local name; and what is none of these."""
    source = """
        from __future__ import annotations
        from typing import Any
        class Config:
            a: int
            b: int
            c: int
            d: int
            e: int
            f: int
        class Holder:
            own: Config | None
            def __init__(self, config: Config) -> None:
                self._kept = config
            def look(self, other: Any) -> int:
                return self._kept.a + self.own.b + other.f
        def make() -> Config: ...
        def use(configs: list[Config], holder: Holder, unknown) -> None:
            local = make()
            def inner() -> int:
                return local.c
            print([each.d for each in configs], unknown.f, holder.f)
            configs[0].e = 1
    """
    tree = {ROOT / "config.py": ast.parse(textwrap.dedent(source))}
    reads = {name for owner, name in reads_of(ROOT, tree, [*tree]) if owner == "Config"}
    assert reads == {"a", "b", "c", "d"}


LIGHT = [
    "import draftsmith",
    "from draftsmith.launch.cli import main; main(['--help'])",
    "from draftsmith.launch.cli import main; assert main(['ls']) == 0",
    "from draftsmith.launch.cli import main; assert main(['recommend', 'tiny']) == 0",
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
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docs").rglob("*.json"),
        ROOT / "README.md",
        *(ROOT / "recipes" / "assets").rglob("*.json*"),
    ]
    found = [name_of(path) for path in places if wrong.search(path.read_text(encoding="utf-8"))]
    assert found == []
