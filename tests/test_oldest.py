"""The list of oldest releases is that of the floors in pyproject.toml, so `make test-oldest` tries what is allowed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import draftsmith
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(draftsmith.__file__).parent


def test_every_floor_is_what_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["dev"]))
    floors = {
        canonicalize_name(each.name): Version(spec.version)
        for each in named
        for spec in each.specifier
        if spec.operator == ">="
    }
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tried = {
        canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)
    }
    assert len(floors) > 20
    assert {name: tried.get(name) for name in floors} == floors
