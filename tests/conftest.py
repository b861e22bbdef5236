"""Fixtures that several rooms use: tiny random models, small enough for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# tiny models gain nothing from threads, and two workers with two threads each lose a great deal
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
if not any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev")):  # noqa: PTH208
    os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from draftsmith.decoding.backbone.backbone import Backbone
    from draftsmith.drafters.model.draft_model import DraftModel
    from pretended_cuda.device import PretendedCuda

VOCABULARY = 61

# what started the tests may have had these ignored (nohup, a job in the background): runs are to be stopped by them
for each, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(each) is signal.SIG_IGN:
        signal.signal(each, usual)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected and imported, a million objects and more, stays to the end: each search for garbage among it
    takes a second, and a test that measures asks for several."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked `one_in(N)`, every Nth case is left to `make test`; the others are slow."""
    seen: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or item.get_closest_marker("slow") is not None:
            continue
        name = item.nodeid.partition("[")[0]
        if seen.setdefault(name, 0) % mark.args[0]:
            item.add_marker("slow")
        seen[name] += 1


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process that leaves all to Python."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(scope="session")
def target() -> Backbone:
    """A random Qwen3 target whose greedy text does not repeat at once."""
    return make_target("qwen3")


def make_target(architecture: str, *, seed: int = 0) -> Backbone:
    import torch
    from draftsmith.decoding.backbone.backbone import Backbone
    from draftsmith.trainers.config import ModelConfig
    from draftsmith.trainers.student.architecture import fresh_model

    torch.manual_seed(seed)
    sizes = ModelConfig(
        architecture=architecture, layers=2, hidden=32, heads=4, kv_heads=2, head_size=16, max_positions=256
    )
    model = fresh_model(sizes, vocabulary=VOCABULARY, eos=None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return Backbone(model, name="random")


def make_drafter(target: Backbone, *, noise: float = 0.02, seed: int = 1, **settings) -> DraftModel:
    """The target's own weights, shaken: accepts something, never everything."""
    import copy

    import torch
    from draftsmith.decoding.backbone.backbone import Backbone
    from draftsmith.drafters.model.draft_model import DraftModel

    g = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=g).to(parameter.device))
    return DraftModel(Backbone(model, name="draft"), target.vocabulary, **settings)


@pytest.fixture
def cuda() -> Iterator[PretendedCuda]:
    """A GPU where there is none: tensors that say they lie on cuda:0."""
    from pretended_cuda.patches import pretended_cuda

    with pretended_cuda() as device:
        yield device


@pytest.fixture
def drafter(target: Backbone) -> DraftModel:
    return make_drafter(target)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenised data of tests stays out of the user's cache; the workers share one."""
    place = tmp_path_factory.getbasetemp()
    shared = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    os.environ["XDG_CACHE_HOME"] = str(shared / "cache")


@pytest.fixture(scope="session", autouse=True)
def _shallow_target() -> None:
    """Is made where a test file asks for it."""
    if (shallow_target := sys.modules.get("helpers.models.shallow_target")) is not None:
        shallow_target.make()


@pytest.fixture(scope="session")
def chat_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level tokenizer with the package's own chat template."""
    from draftsmith.data.rows.templates import named_template
    from draftsmith.data.rows.tokenizer import train_tokenizer

    words = ["the quick brown fox asks, and a lazy dog answers: yes, no, perhaps\n"] * 20
    folder = tmp_path_factory.mktemp("chat-tokenizer")
    template = named_template("chatml")
    train_tokenizer(words, 400, chat_template=template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer_folder: Path) -> Path:
    """The target of `served_target` on disk."""
    from helpers.servers.served_target import small_target

    return small_target(tmp_path_factory.mktemp("served") / "target", chat_tokenizer_folder)


@pytest.fixture(scope="session")
def int8_folder(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target quantised by transformers and written by it."""
    from draftsmith.benchmarks.common.random_models import in_int8

    folder = tmp_path_factory.mktemp("int8") / "target"
    in_int8(served_folder).save_pretrained(folder)
    for file in served_folder.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="session")
def served(served_folder: Path) -> Backbone:
    from draftsmith.decoding.backbone.loading import load_target

    return load_target(str(served_folder))
