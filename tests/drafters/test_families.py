"""One record per family and per method, and no other list of either: what the two tables promise."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import draftsmith
import pytest
from draftsmith import drafters
from draftsmith.drafters.families import FAMILIES, family_of
from draftsmith.drafters.record import Family, function
from draftsmith.errors import RequestError
from draftsmith.eval.audit.toys import Toy
from draftsmith.trainers.methods import METHODS, Method

ROOT = Path(draftsmith.__file__).parent
TABLES = (ROOT / "drafters" / "families.py", ROOT / "trainers" / "methods.py")


def references(family: Family) -> list[str]:
    own = (family.build, family.load, family.proposer, family.make, family.wrap)
    made = [form.make for form in family.exports.values()]
    return [each for each in (*own, *made) if each]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_record_leads_to_what_it_names(family: Family) -> None:
    assert all(callable(function(each)) for each in references(family))
    assert (ROOT / "docs" / family.page).is_file()
    # a module that is trained is built from settings, drafts in training, and is loaded again
    assert not family.build or (family.load and family.proposer)
    # what is written anew is read first; a model is served as it is
    assert all((form.make is None) == (family.kind == "model") for form in family.exports.values())
    assert family.build or all(form.make is None for form in family.exports.values())


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_a_method_leads_to_its_module(method: Method) -> None:
    code = method.code()
    begins = {"build", "build_tuned", "run"} & vars(code).keys()
    assert begins, f"{code.__name__} has nothing that a run begins with"
    for name in ("check_recipe", "student", *begins):
        assert inspect.isfunction(getattr(code, name)), f"{code.__name__} has no {name}"
    assert (method.family is not None) == method.has_target
    assert method.family is None or FAMILIES[method.family].proposer


def test_every_proposer_has_a_record() -> None:
    """A class that names its family is in the table under that name."""
    names = set()
    for module in pkgutil.walk_packages(drafters.__path__, "draftsmith.drafters."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            family = vars(kind).get("family")
            if isinstance(family, str) and family:
                names.add(family)
    assert names == set(FAMILIES)


DRAFTERS = [
    SimpleNamespace(
        policy=policy,
        factors=factors,
        kind=kind,
        least=least,
        members=[SimpleNamespace(policy=policy, factors=factors)],
    )
    for policy, factors in (("sample", ()), ("sample", (0.8,)), ("argmax", ()))
    for kind in ("chain", "static", "dynamic")
    for least in (0.0, 0.5)
]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_the_audit_makes_every_family_s_toy(family: Family) -> None:
    """Whatever its policy, temperatures and tree."""
    names = {family.toy(SimpleNamespace(family=family.name, **vars(each))) for each in DRAFTERS}
    for name in names:
        proposer = Toy.of(name, seed=0).proposer()
        assert getattr(proposer, "family", None) == ("draft_model" if family.kind == "from target" else family.name)


def test_the_tables_need_no_torch() -> None:
    code = "import sys, draftsmith.trainers.methods, draftsmith.drafters.families; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(RequestError, match="here is a drafter of family 'tarot'; this version knows draft_model, "):
        family_of("tarot", "here")


# words of other subjects too; a list of families has others beside them
NAMES = {*FAMILIES, *METHODS} - {"target", "function", "rest"}


def lists_of_families(tree: ast.AST) -> list[int]:
    """Lines of literals that hold two names of the tables or more, and of comparisons with one."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts, most = node.elts, 1
        elif isinstance(node, ast.Dict):
            parts, most = [key for key in node.keys if key is not None], 1
        elif isinstance(node, ast.Compare):
            parts, most = [node.left, *node.comparators], 0
        else:
            continue
        names = {part.value for part in parts if isinstance(part, ast.Constant) and part.value in NAMES}
        if len(names) > most:
            lines.append(node.lineno)
    return lines


# makers of toys by the names of toys, some of them a family's own; the test above finds one that is missing
EXEMPT = ROOT / "eval" / "audit" / "toys.py"
SOURCES = [
    path
    for room in ("decoding", "drafters", "data", "trainers", "eval", "launch", "storage")
    for path in sorted((ROOT / room).rglob("*.py"))
    if path not in (*TABLES, EXEMPT)
]


def test_there_is_no_other_list() -> None:
    """Who has to know the families asks the tables: a list of its own would fall behind in silence."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    found = {str(path.relative_to(ROOT)): lists_of_families(tree) for path, tree in trees.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_list_is_seen() -> None:
    for text in ('x in ("medusa", "hydra")', 'x == "eagle3"', '{"bpd": 1, "eagle": 2}', '["distill", "boost"]'):
        assert lists_of_families(ast.parse(text)) == [1]
    assert lists_of_families(ast.parse('save(module, "medusa")')) == []
