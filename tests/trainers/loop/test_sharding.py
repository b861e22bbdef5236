"""What DeepSpeed is told of the module that it is to spread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.trainers.loop.sharding import fit_buckets
from torch import nn

NAMES = ("reduce_bucket_size", "allgather_bucket_size")


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 12), (dict.fromkeys(NAMES, "auto"), 12), (dict.fromkeys(NAMES, 7), 7)]
)
def test_buckets_hold_what_is_trained_unless_a_configuration_sizes_them(given: dict[str, Any], expected: int) -> None:
    module = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(50, 50)])
    module[1].requires_grad_(False)
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2, **given}})
    team: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    fit_buckets(team, module)
    zero = plugin.deepspeed_config["zero_optimization"]
    assert [zero[name] for name in NAMES] == [expected] * 2


def test_an_odd_number_of_weights_has_an_even_bucket() -> None:
    """ZeRO-2 ends with an assertion otherwise."""
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2}})
    team: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    fit_buckets(team, nn.Linear(2, 1))
    assert plugin.deepspeed_config["zero_optimization"]["allgather_bucket_size"] == 4
