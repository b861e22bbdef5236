"""A target that is cut over two processes: the states of the whole one to the bit, and no process left waiting."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from draftsmith.benchmarks.common.random_models import EXPERTS, GROUPED
from draftsmith.decoding.target.hidden_states import decoder_of
from draftsmith.decoding.target.loading import load_target
from draftsmith.trainers.teacher.feature_cache import weights_hash
from draftsmith.trainers.teacher.features import states_of
from faults import cut_ranks, ranks
from random_models import random_model

FAMILIES = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": GROUPED,
    "qwen3_moe": GROUPED | EXPERTS | {"num_experts": 4},
    "gemma3_text": GROUPED | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
}


def saved(folder: Path, families: list[str]) -> list[str]:
    for family in families:
        random_model(family, **FAMILIES[family]).save_pretrained(folder / family)
    return [str(folder / family) for family in families]


def expected(folder: str, rank: int, dtype: str = "fp32") -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return states_of(decoder_of(load_target(folder, dtype=dtype).model), cut_ranks.rows(rank), cut_ranks.LAYERS)


def check_families(out: Path, folders: list[str], dtype: str) -> None:
    ranks.run(2, cut_ranks.families, out, folders, dtype)
    for folder in folders:
        name = Path(folder).name
        model = load_target(folder, dtype=dtype).model
        embedding = model.get_input_embeddings().weight.numel()
        whole = sum(each.numel() for each in model.parameters())
        for rank in (0, 1):
            said = json.loads((out / f"said-{rank}.json").read_text())[name]
            states = torch.load(out / f"{name}-{rank}.pt")
            for mine, theirs in zip(states, expected(folder, rank, dtype), strict=True):
                assert torch.equal(mine, theirs), (name, dtype)
            assert said["hash"] == weights_hash(model)
            assert "cut over processes" in said["refused"]
            outside = embedding * (1 if model.config.tie_word_embeddings else 2) + model.config.hidden_size
            assert said["held"] == outside + (whole - outside) // 2


def test_a_cut_target_has_the_states_of_the_whole_one(tmp_path: Path) -> None:
    check_families(tmp_path, saved(tmp_path / "targets", ["llama"]), "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_of_every_family(dtype: str, tmp_path: Path) -> None:
    check_families(tmp_path, saved(tmp_path / "targets", list(FAMILIES)), dtype)


@pytest.mark.slow
def test_processes_agree_on_what_the_cache_lacks(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path / "targets", ["llama"])
    ranks.run(2, cut_ranks.unequal_misses, tmp_path, folder)
    for rank in (0, 1):
        states = torch.load(tmp_path / f"cached-{rank}.pt")
        for mine, theirs in zip(states, expected(folder, rank), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path / "targets", ["llama"])
    began = time.monotonic()
    team = ranks.start(2, cut_ranks.one_raises, tmp_path, folder)
    for process in team:
        process.join(120)
    print(f"{time.monotonic() - began:.0f} s")
    assert "planted" in ranks.error(tmp_path, 1)
    assert "process 1 of 2" in ranks.error(tmp_path, 0)
