"""What DeepSpeed is told of the module that it is to spread."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.loop import sharding
from draftsmith.trainers.loop.sharding import fit_buckets, held_weights, standalone
from draftsmith.trainers.student.architecture import fresh_model
from safetensors.torch import load_file
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


def test_a_tied_projection_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ZeRO-3 has cut is exported as a copy, whose embedding and projection are one weight as before."""
    sizes = ModelConfig(layers=1, hidden=16, intermediate=16, heads=1, kv_heads=1, tied=True)
    model = fresh_model(sizes, vocabulary=32, eos=None)
    monkeypatch.setattr(sharding, "is_sharded", lambda _model: True)
    copy: Any = standalone(model)
    assert copy is not model
    copy.save_pretrained(tmp_path / "copy")
    model.save_pretrained(tmp_path / "model")
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("copy", "model"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("rank", "mine"), [(0, [1.0, 2.0]), (1, [1.0]), (2, [])])
def test_padding_of_a_piece_is_nobodys_weight(rank: int, mine: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three numbers over three processes, two to each: DeepSpeed leaves what lies behind the last as memory was."""
    module, piece = nn.Linear(3, 1, bias=False), torch.tensor([1.0, 2.0 if rank == 0 else torch.nan])
    if rank == 2:
        piece[0] = torch.nan
    weight: Any = module.weight
    weight.ds_tensor, weight.ds_numel, weight.ds_process_group = piece, 3, "the group of all"
    monkeypatch.setattr(torch.distributed, "get_rank", {"the group of all": rank}.__getitem__)
    monkeypatch.setattr("deepspeed.utils.safe_get_local_fp32_param", lambda _weight: piece)
    assert [(name, value.tolist()) for name, value in held_weights(module)] == [("weight", mine)] * 2
