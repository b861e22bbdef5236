"""Drafters that ride on the target under every launch configuration: as in one process."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from draftsmith.drafters.families import FAMILIES
from draftsmith.trainers.methods import METHODS
from helpers.runs.launcher import launched, train_each
from helpers.runs.method_runs import COMMON, LAUNCHER, RECIPES, assert_same_run, write_recipes


def test_every_method_on_a_target_is_here() -> None:
    built = {name for name, family in FAMILIES.items() if family.build}
    # a draft that reads rows of its own, masks behind some of their tokens
    assert set(RECIPES) == {name for name, method in METHODS.items() if method.family in built} | {"pard"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    assert train_each(str(folder), write_recipes(folder, list(RECIPES))) == 0
    return folder


@pytest.mark.slow
@pytest.mark.run
@pytest.mark.parametrize(
    ("config", "methods"),
    [
        ("multi_cpu", list(RECIPES)),
        ("zero2", list(RECIPES)),
        # a target that learns too is not cut into pieces; and every engine of ZeRO-3 keeps buffers
        # of two GB, so one launch for each
        *[("zero3", [method]) for method in RECIPES if method != "medusa2"],
    ],
)
def test_heads_train_the_same_in_two_processes(config: str, methods: list[str], alone: Path, tmp_path: Path) -> None:
    """Three held-out rows for two processes: the second one makes up a round for ZeRO-3."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    message = launched(config, LAUNCHER, str(tmp_path), *write_recipes(tmp_path, methods))
    assert message.count("2 processes: ") == len(methods)
    for method in methods:
        assert_same_run(tmp_path / method, alone / method)


AGAIN = {"medusa2": "tune: {", "hydra": "medusa: {", "peagle": "peagle: {", "dflash": "block: {", "pard": "model: {"}


@pytest.mark.slow
@pytest.mark.run
@pytest.mark.parametrize(
    ("config", "methods"), [("multi_cpu", list(AGAIN)), ("zero2", list(AGAIN)), ("zero3", ["pard"])]
)
def test_what_is_computed_again_is_the_same(config: str, methods: list[str], alone: Path, tmp_path: Path) -> None:
    """`recompute`, beside runs of one process that keep everything."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    recipes = write_recipes(tmp_path, methods)
    for recipe, method in zip(map(Path, recipes), methods, strict=True):
        text = recipe.read_text()
        assert text.count(AGAIN[method]) == 1
        recipe.write_text(text.replace(AGAIN[method], f"{AGAIN[method]}recompute: true, "))
    launched(config, LAUNCHER, str(tmp_path), *recipes)
    for method in methods:
        assert_same_run(tmp_path / method, alone / method)


@pytest.mark.slow
@pytest.mark.run
def test_two_machines_of_one_process_each(alone: Path, tmp_path: Path) -> None:
    """Both of them this one: the launch and the meeting are real, the network is not."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    recipes = write_recipes(tmp_path, ["eagle"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]

    def machine(rank: int) -> str:
        words = ["--machine_rank", str(rank), *meeting, LAUNCHER, str(tmp_path), *recipes]
        return launched("zero2_nodes", *words)

    with ThreadPoolExecutor(2) as both:
        message = list(both.map(machine, (0, 1)))
    assert "2 processes: DEEPSPEED ZeRO-2" in message[0]
    assert_same_run(tmp_path / "eagle", alone / "eagle")


@pytest.mark.run
@pytest.mark.slow
def test_a_process_with_nothing_to_compare(tmp_path: Path) -> None:
    """Rows of two tokens have a label and nothing that EAGLE could say of it."""
    rows = [{"text": "x" if n % 2 else f"a line of several words, {n}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = f"method: eagle\n{RECIPES['eagle']}{COMMON}".replace(
        "limit_rows: 30", f"packing: false, validation_share: 0.2, source: {tmp_path}/rows.jsonl"
    ).replace("batch_rows: 8, micro_rows: 2", "batch_rows: 2, micro_rows: 1")
    (tmp_path / "short.yaml").write_text(recipe)
    words = [str(tmp_path / "short.yaml")]
    assert train_each(str(tmp_path / "one"), words) == 0
    launched("multi_cpu", LAUNCHER, str(tmp_path / "two"), *words)
    assert_same_run(tmp_path / "two" / "short", tmp_path / "one" / "short")
