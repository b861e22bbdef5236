"""Trained drafters, prompts, a vLLM process, and what the session found."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.launch.cli import main
from engines.cases import RUNS, TRAINING, Trained
from engines.engine import Vllm
from engines.findings import RUNS_KEPT, Findings

# text of the library that the target was trained on, and K and lengths as recipes have them
MODULES = [
    "argparse",
    "bisect",
    "calendar",
    "csv",
    "difflib",
    "heapq",
    "shlex",
    "textwrap",
    "ast",
    "bdb",
    "cmd",
    "code",
    "dis",
    "glob",
    "queue",
    "string",
]
CHARACTERS = 300


@pytest.fixture(scope="session")
def target() -> Backbone:
    return load_target("tiny")


@pytest.fixture(scope="session")
def prompts(target: Backbone) -> list[list[int]]:
    texts = [inspect.getsource(import_module(name))[:CHARACTERS] for name in MODULES]
    return [list(target.tokenizer(text)["input_ids"]) for text in texts]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run by its name in `cases.py`, trained when it is first asked for.

    DRAFTSMITH_ENGINES_RUNS names a folder whose runs are taken instead, for work on these tests.
    """
    kept = os.environ.get(RUNS_KEPT)
    place = Path(kept) if kept else tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        recipe, own = RUNS[name]
        if not (place / name / "drafter").is_dir():
            flags = [word for key, value in (TRAINING | own).items() for word in (f"--{key}", str(value))]
            assert main(["train", recipe, "--out", str(place / name), *flags]) == 0
        return place / name

    return run


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    process = Vllm(tmp_path_factory.mktemp("vllm"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def findings() -> Iterator[Findings]:
    """What every case gave; written as a record where `make test-engines` asks for it."""
    found = Findings(Path(embedded_target()))
    yield found
    found.write()
