"""The pre-flight for targets of 70 and 235 billion parameters, which no device of the described machine holds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.errors import EnvironmentFailure
from draftsmith.launch.check.check import check
from draftsmith.launch.check.devices import devices_of
from draftsmith.launch.check.memory import by_host, exchanged, parameters
from draftsmith.launch.check.models import Models
from draftsmith.launch.recipe.load import load_recipe
from rich.console import Console

DENSE = {"target.path": "a/70b", "target.sizes": "llama3-70b"}
EXPERTS = {"target.path": "a/235b", "target.sizes": "qwen3-235b-a22b"}
SMALL_CHUNK = ("objective.chunk", "256")
"""Of the loss: the larger one of the recipes is memory of its own, and the same beside every way to hold a target."""
CUT = {"target.sharding": "fully_shard"}
ENGINE = {
    "features.source": "engine",
    "features.server": "http://host:8000",
    "features.shared": "/dev/shm/states",
    "probe.every_steps": "",
}
SIZES = Path(draftsmith.__file__).parent / "recipes" / "assets" / "sizes"
P_DENSE, P_EXPERTS = 70_553_706_496, 235_093_634_560


def run(out: Path, *values: dict[str, str], recipe: str = "eagle3-8b") -> str:
    told = io.StringIO()
    overrides = [SMALL_CHUNK, *(pair for each in values for pair in each.items())]
    check(load_recipe(recipe, overrides), Console(file=told, width=1200), out)
    return " ".join(told.getvalue().split())


def refused(out: Path, *values: dict[str, str], recipe: str = "eagle3-8b") -> str:
    with pytest.raises(EnvironmentFailure, match="the pre-flight fails") as raised:
        run(out, *values, recipe=recipe)
    return str(raised.value)


def numbers_of(*values: dict[str, str]) -> tuple[Any, Any]:
    recipe = load_recipe("eagle3-8b", [pair for each in values for pair in each.items()]).recipe
    return recipe, Models(recipe).target()


@pytest.mark.parametrize(
    ("given", "sharding", "said"),
    [
        ({"processes": "1"}, "none", "1 device, 40 GB"),  # which has nothing to spread
        ({"processes": "1", "sharding": "zero2"}, "zero2", "1 device, 40 GB"),
        ({"processes": "1", "sharding": "zero3"}, "zero3", "1 device, 40 GB"),
        ({"processes": "2"}, "zero2", "2 devices, 40 GB each"),
        ({"processes": "2", "sharding": "none"}, "none", "2 devices, 40 GB each"),
    ],
)
def test_how_described_devices_share_what_is_trained(given: dict[str, str], sharding: str, said: str) -> None:
    values = [("machine.device_gb", "40"), *((f"machine.{name}", value) for name, value in given.items())]
    devices = devices_of(load_recipe("medusa-tiny", values).recipe)
    assert (devices.sharding, devices.described, str(devices)) == (sharding, True, said)


def test_a_70b_target_is_answered_with_what_fits(tmp_path: Path) -> None:
    """Embedding and projection whole, an eighth of the layers, two layers gathered; or all layers in an engine."""
    message = refused(tmp_path / "out", DENSE)
    assert "141 GB for the target" in message
    assert "The nearest change that fits is --target.sharding fully_shard: about 51.2 GB on each of 8" in message
    assert "With the target in an engine (features.source engine, docs/engine.md) it is about 29.1 GB on" in message
    message = run(tmp_path / "out", DENSE, CUT)
    assert "FAILS" not in message
    assert "21.3 GB for its share of the target, 3.42 GB for two gathered layers" in message
    assert parameters(numbers_of(DENSE)[1]) == P_DENSE


def test_a_235b_mixture_goes_to_the_hosts_or_to_an_engine(tmp_path: Path) -> None:
    """Eight devices of 80 GB do not hold 470 GB and what is trained beside them; their hosts do."""
    message = refused(tmp_path / "out", EXPERTS, CUT)
    assert "61 GB for its share of the target, 9.95 GB for two gathered layers" in message
    change = "The nearest change that fits is --target.offload true: about 25.2 GB on each of 8 devices, 80 GB each"
    assert f"{change}, and 58.5 GB of its host's memory" in message
    message = run(tmp_path / "out", EXPERTS, CUT, {"target.offload": "true"})
    assert "qwen3_moe, 235,093.6 M parameters (22,190.8 M of them for a token), 470 GB in bf16" in message
    assert "its host keeps 58.5 GB for each process" in message
    assert "in about 76.3 h (2 operations per weight that a token reads" in message


def test_parameters_of_a_mixture() -> None:
    """94 layers: attention with norms on its heads, a router and 128 experts of three products each."""
    recipe, target = numbers_of(EXPERTS, CUT, {"target.offload": "true"})
    H, inner, D, Q, G, E = 4096, 1536, 128, 64, 4, 128
    layer = H * D * (Q + 2 * G) + Q * D * H + 2 * H + 2 * D + E * H + E * 3 * H * inner
    assert parameters(target) == P_EXPERTS == 2 * 151_936 * H + 94 * layer + H
    assert by_host(recipe, target, devices_of(recipe)) == 94 * layer * 2 / 8


@pytest.mark.slow
def test_a_team_that_does_not_fit_is_offered_the_other_way(tmp_path: Path) -> None:
    message = refused(tmp_path / "out", EXPERTS, {"target.tensor_parallel": "4"})
    assert "119 GB for its share of the target" in message
    assert "is --target.tensor_parallel 1 --target.sharding fully_shard --target.offload true: about" in message
    with pytest.raises(Exception, match="does not divide the target's num_key_value_heads, 4"):
        run(tmp_path / "out", EXPERTS, {"target.tensor_parallel": "8"})


def test_one_device_is_offered_its_host(tmp_path: Path) -> None:
    """Cutting over one process alone would change nothing."""
    small = {"machine.processes": "1", "machine.device_gb": "24", "machine.sharding": "none", "loop.micro_rows": "1"}
    message = refused(tmp_path / "out", small)
    assert "is --target.sharding fully_shard --target.offload true: about 16 GB on each of 1 device" in message


def test_what_cannot_be_spread_takes_more_devices(tmp_path: Path) -> None:
    """The layers are with the host already; two gathered ones and the activations are on every device."""
    offloaded = CUT | {"target.offload": "true", "machine.device_gb": "19", "loop.micro_rows": "1"}
    offloaded |= {"eagle3.recompute": "true"}
    message = refused(tmp_path / "out", DENSE, offloaded)
    assert "The nearest change that fits is --machine.processes 16: about" in message


LONG = {"data.sequence_length": "8192", "loop.micro_rows": "1", "loop.batch_rows": "8"}


@pytest.mark.parametrize(
    ("recipe", "value", "device_gb"), [("pard-8b", "model.recompute", "48"), ("eagle3-8b", "eagle3.recompute", "24")]
)
def test_long_rows_are_offered_to_be_computed_again(recipe: str, value: str, device_gb: str, tmp_path: Path) -> None:
    """No other single change helps: the target is cut already, or activations alone are more than a device has left."""
    machine = LONG | {"machine.device_gb": device_gb} | (CUT if recipe == "eagle3-8b" else {})
    message = refused(tmp_path / "out", machine, recipe=recipe)
    assert f"The nearest change that fits is --{value} true: about" in message
    assert "FAILS" not in run(tmp_path / "out", machine, {value: "true"}, recipe=recipe)


@pytest.mark.slow
def test_what_needs_the_whole_target_is_offered_no_cut(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure) as raised:
        check(load_recipe("medusa2-8b", [*DENSE.items()]), Console(file=io.StringIO()), tmp_path / "out")
    assert "target.sharding" not in str(raised.value)
    assert "engine" not in str(raised.value)


def test_an_engine_leaves_the_ends_here(tmp_path: Path) -> None:
    """4.2 GB at 70B; 2.1 GB at 8B, with the same vocabulary."""
    message = run(tmp_path / "out", DENSE, ENGINE)
    assert "the engine has it, and 4.2 GB are here: embedding, norm and projection" in message
    assert "4.2 GB for the target's ends" in message
    assert "two gathered" not in message
    eight = json.loads((SIZES / "llama3-70b.json").read_text())
    eight |= {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    (tmp_path / "llama3-8b.json").write_text(json.dumps(eight))
    message = run(tmp_path / "out", {"target.sizes": str(tmp_path / "llama3-8b.json"), "target.path": "a/8b"}, ENGINE)
    assert "8,030.3 M parameters" in message
    assert "2.1 GB for the target's ends" in message


def test_layers_that_prove_an_engine_count_where_nothing_later_is_larger(tmp_path: Path) -> None:
    """They are there before anything is trained."""
    short = {"data.sequence_length": "64", "loop.micro_rows": "1", "machine.device_gb": "13", "eval.limit": "1"}
    message = refused(tmp_path / "out", EXPERTS, ENGINE, short)
    assert "2.49 GB for the target's ends" in message
    assert "GB for layers that prove the engine" in message


def test_what_a_pass_exchanges(tmp_path: Path) -> None:
    """A share of the layers, however few the rows; or two sums of each token's state in each layer."""
    recipe, target = numbers_of(DENSE, CUT)
    layers = P_DENSE - 2 * 128_256 * 8192 - 8192
    assert exchanged(recipe, target, devices_of(recipe)) == layers * 2 * 7 / 8
    team, _ = numbers_of(DENSE, {"target.tensor_parallel": "8"})
    per_token = 80 * 2 * 2 * 7 / 8 * 8192 * 2
    assert exchanged(team, target, devices_of(team)) == 8 * 2 * 2048 * per_token
    assert "target.tensor_parallel is 8, and each pass sends a process 150 GB" in run(
        tmp_path / "out", DENSE, {"target.tensor_parallel": "8"}
    )
