"""Drafters that ride on the target under every launch configuration: as in one process."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from draftsmith.drafters.families import FAMILIES
from draftsmith.trainers.methods import METHODS
from launching import launched, train_each
from small_run import drafter

LAUNCHING = Path(__file__).parents[2] / "launching.py"
COMMON = """\
data: {limit_rows: 30, sequence_length: 64}
optimizer: {lr: 1e-3, warmup_steps: 2}
loop: {steps: 6, batch_rows: 8, micro_rows: 2, precision: fp32, validate_rows: 3, log_every: 1}
checkpoint: {every_steps: 6}
probe: {prompts: 1, max_new_tokens: 6}
"""
# every process draws its own noise, so there is none here
RECIPES = {
    "medusa": "medusa: {heads: 2}\nobjective: {kl: 0.0, ce: 1.0, chunk: 64}\n",
    "hydra": "medusa: {heads: 2}\nobjective: {chunk: 64}\n",
    "eagle": "eagle: {noise: 0.0, passes: 2, top_k: 1.0}\nobjective: {chunk: 64}\n",
    "eagle3": "eagle3: {passes: 3, vocabulary: 512}\nobjective: {chunk: 64}\n",
    "bpd": "bpd: {block: 3}\nobjective: {kl: 0.0, ce: 1.0, chunk: 64}\n",
    "medusa2": (
        "medusa: {heads: 2}\nmedusa2: {self_distillation: true}\ntune: {dropout: 0.0, rest_steps: 1}\n"
        "objective: {kl: 0.0, ce: 1.0, chunk: 64}\n"
    ),
}
CLOCKS = {"tokens_per_second", "data_wait", "memory_gb"}


def write_recipes(folder: Path, methods: list[str]) -> list[str]:
    for method in methods:
        recipe = f"method: {method}\nname: {method}\n{RECIPES[method]}{COMMON}"
        (folder / f"{method}.yaml").write_text(recipe)
    return [str(folder / f"{method}.yaml") for method in methods]


def records(run: Path) -> dict[tuple[str, int], dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {(line["kind"], line["step"]): line for line in lines}


def assert_same_run(mine: Path, alone: Path) -> None:
    """Every term of every record, and the exported weights; rounding alone may differ."""
    found, wanted = records(mine), records(alone)
    assert found.keys() == wanted.keys()
    assert len(found) >= 7
    for key, values in wanted.items():
        assert found[key].keys() == values.keys(), key
        for name in values.keys() - CLOCKS - {"kind"}:
            assert found[key][name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), (key, name)
    weights, exported = drafter(alone), drafter(mine)
    assert weights.keys() == exported.keys()
    for name, weight in weights.items():
        assert exported[name].dtype == weight.dtype
        distance = (exported[name].double() - weight.double()).norm()
        assert distance <= 1e-3 * weight.double().norm(), name


def test_every_method_on_a_target_is_here() -> None:
    built = {name for name, family in FAMILIES.items() if family.build}
    assert set(RECIPES) == {name for name, method in METHODS.items() if method.family in built}


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
    message = launched(config, str(LAUNCHING), str(tmp_path), *write_recipes(tmp_path, methods))
    assert message.count("2 processes: ") == len(methods)
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
        words = ["--machine_rank", str(rank), *meeting, str(LAUNCHING), str(tmp_path), *recipes]
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
    launched("multi_cpu", str(LAUNCHING), str(tmp_path / "two"), *words)
    assert_same_run(tmp_path / "two" / "short", tmp_path / "one" / "short")
