"""Files that other programs read: workflow, hooks, forms, citation. What they name is what there is."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.launch.verbs import VERBS
from helpers.benchmark_scripts import load
from packaging.specifiers import SpecifierSet
from ruamel.yaml import YAML

ROOT = Path(draftsmith.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
PINNED = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
PYTHONS = load("dist", ROOT / ".ci").PYTHONS
"""Those that `make dist` tries the wheel on."""


def read(path: str | Path) -> Any:
    return YAML(typ="safe").load((ROOT / path).read_text(encoding="utf-8"))


WORKFLOW = read(".github/workflows/ci.yml")
STEPS = [(name, step) for name, job in WORKFLOW["jobs"].items() for step in job["steps"]]
HOOKS = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]


def made(command: str) -> list[str]:
    """The targets that a command makes, if it does nothing else."""
    program, *targets = shlex.split(command)
    assert program == "make", command
    return targets


def test_the_workflow_makes_targets_and_nothing_else() -> None:
    by_job: dict[str, list[str]] = {}
    for name, step in STEPS:
        if "run" in step:
            by_job.setdefault(name, []).extend(made(step["run"]))
    assert by_job.keys() == WORKFLOW["jobs"].keys()
    assert {target for targets in by_job.values() for target in targets} <= TARGETS
    assert by_job["style"] == re.findall(r"^check: (.*)$", MAKEFILE, re.MULTILINE)[0].split()
    assert by_job["test"] == ["test"]
    assert by_job["docs"] == ["docs"]
    assert by_job["wheel"] == ["dist"]


def test_the_workflow_may_read_and_no_more() -> None:
    assert WORKFLOW["permissions"] == {}
    assert "secrets" not in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    for job in WORKFLOW["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        assert job["timeout-minutes"] <= 60
    assert len([action for _, action in STEPS if "uses" in action]) > len(WORKFLOW["jobs"])
    for _, step in STEPS:
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), "an action is named by its commit"
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


def test_pythons_of_the_workflow_are_those_of_the_docs() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    tested = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert len(tested) == 2
    assert set(tested) <= set(PYTHONS)
    assert all(f"{version}.0" in allowed for version in PYTHONS)
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "docs/install.md").read_text(encoding="utf-8")
    set_up = {name: step["with"] for name, step in STEPS if step.get("uses", "").startswith("actions/setup-python@")}
    assert set_up.keys() == WORKFLOW["jobs"].keys()
    assert sorted(set_up["wheel"]["python-version"].split()) == sorted(PYTHONS)
    assert {set_up[name]["python-version"] for name in ("style", "docs")} <= set(tested)
    for settings in set_up.values():
        assert settings["cache"] == "pip"
        assert all((ROOT / name).is_file() for name in settings["cache-dependency-path"].split())


def test_hooks_are_those_of_make_check() -> None:
    """The tools, their versions and their words."""
    assert [hook["id"] for hook in HOOKS] == ["ruff-check", "ruff-format", "types"]
    for hook in HOOKS:
        if hook["language"] == "python":
            assert hook["additional_dependencies"]
            assert set(hook["additional_dependencies"]) <= set(PINNED)
            assert f"$(BIN)/{hook['entry'].removesuffix(' --force-exclude')}" in MAKEFILE
        else:
            assert set(made(hook["entry"])) <= TARGETS


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_forms_ask_for_what_there_is(form: Path) -> None:
    asked = {field["id"]: field for field in read(form)["body"] if "id" in field}
    assert {"name", "description", "body"} <= read(form).keys()
    assert asked["doctor"]["attributes"]["label"] == "The output of `draftsmith doctor`"
    assert form.stem == "idea" or asked["doctor"]["validations"]["required"]
    verbs = set(re.findall(r"draftsmith ([a-z-]+)", form.read_text(encoding="utf-8")))
    assert "doctor" in verbs
    assert verbs <= VERBS.keys()


def test_there_are_forms() -> None:
    assert [form.stem for form in FORMS] == ["bug", "figure", "idea"]


def test_the_citation_is_of_this_version() -> None:
    cited = read("CITATION.cff")
    assert cited["version"] == draftsmith.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["title"] == PROJECT["name"]
