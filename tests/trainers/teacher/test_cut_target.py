"""A target that is cut over two processes: the states of the whole one to the bit, and no process left waiting."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from draftsmith.benchmarks.common.random_models import EXPERTS, GROUPED, RECURRENT
from draftsmith.data.features.model_hash import weights_hash
from draftsmith.decoding.backbone.cut import Cut, _cut_products, check_layers, check_team
from draftsmith.decoding.backbone.hidden_states import decoder_of
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.eval.measure.speed import bytes_of
from draftsmith.trainers.packed import passes
from draftsmith.trainers.teacher.features import states_of
from faults import cut_ranks, ranks, stalls
from helpers.models.random_models import random_model
from transformers import PreTrainedModel

# an older release, which is allowed, cuts products in another way, and is refused
teams = pytest.mark.skipif(
    not hasattr(PreTrainedModel, "_expand_parallel_plan"), reason="needs a newer transformers than is installed"
)
BY_PRODUCTS = pytest.param(Cut(team=2), marks=teams, id="products")
FAMILIES = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": GROUPED,
    "qwen3_moe": GROUPED | EXPERTS | {"num_experts": 4},
    "gemma3_text": GROUPED | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
}


def saved(folder: Path, families: list[str]) -> list[str]:
    for family in families:
        random_model(family, **(FAMILIES | RECURRENT)[family]).save_pretrained(folder / family)
    return [str(folder / family) for family in families]


def expected(folder: str, rank: int, dtype: str = "fp32") -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return states_of(decoder_of(load_target(folder, dtype=dtype).model), cut_ranks.rows(rank), cut_ranks.LAYERS)


def check_families(out: Path, folders: list[str], dtype: str, cut: Cut) -> None:
    world = 4 if cut.team == 2 else 2  # two teams
    ranks.run(world, cut_ranks.families, out, folders, dtype, cut)
    for folder in folders:
        name = Path(folder).name
        whole = load_target(folder, dtype=dtype)
        numbers = [each.numel() for each in whole.model.parameters()]
        for rank in range(world):
            said = json.loads((out / f"said-{rank}.json").read_text())[name]
            states = torch.load(out / f"{name}-{rank}.pt")
            assert said["hash"] == weights_hash(whole.model)
            assert said["bytes"] == bytes_of(whole.model)
            if cut.team == 1:
                assert_by_layers(states, expected(folder, rank, dtype), said, whole.model)
                continue
            for mine, theirs in zip(states, expected(folder, rank, dtype), strict=True):
                assert (mine - theirs).norm() < {"fp32": 2e-6, "bf16": 5e-2}[dtype] * theirs.norm(), (name, dtype)
            assert sum(numbers) / 2 < said["held"] < 0.7 * sum(numbers)
            if dtype == "fp32":
                assert said["written"] == cut_ranks.written(whole)


def assert_by_layers(
    states: list[torch.Tensor], wanted: tuple[torch.Tensor, ...], said: dict[str, Any], model: Any
) -> None:
    """The states of the whole model to the bit, half of its layers, and no decoding."""
    for mine, theirs in zip(states, wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert "cut over processes" in said["refused"]
    embedding = model.get_input_embeddings().weight.numel()
    whole = sum(each.numel() for each in model.parameters())
    outside = embedding * (1 if model.config.tie_word_embeddings else 2) + model.config.hidden_size
    assert said["held"] == outside + (whole - outside) // 2


@pytest.mark.parametrize("cut", [pytest.param(Cut(), id="layers"), BY_PRODUCTS])
def test_a_cut_target_has_the_states_of_the_whole_one(cut: Cut, tmp_path: Path) -> None:
    check_families(tmp_path, saved(tmp_path / "targets", ["llama"]), "fp32", cut)


@teams
def test_no_process_ever_holds_the_whole(tmp_path: Path) -> None:
    """Of the files each reads its share alone, part by part, into a model that was cut before it had any weight."""
    model = random_model("llama", **FAMILIES["llama"] | {"num_hidden_layers": 6, "hidden_size": 64})
    model.save_pretrained(tmp_path / "target")
    ranks.run(2, cut_ranks.loaded, tmp_path, str(tmp_path / "target"))
    numbers = sum(each.numel() for each in model.parameters())
    layers = sum(each.numel() for name, each in model.named_parameters() if ".layers." in name)
    norms = sum(each.numel() for name, each in model.named_parameters() if ".layers." in name and each.ndim == 1)
    assert layers > 0.9 * numbers
    share = {"layers": layers / 2, "offloaded": layers / 2, "products": (layers - norms) / 2 + norms}
    for rank in (0, 1):
        said = json.loads((tmp_path / f"loaded-{rank}.json").read_text())
        assert said["made"] == [0, 0, 0]
        assert said["whole"]["read"] == 4 * numbers
        for how, own in share.items():
            assert said[how]["held"] == numbers - layers + own, how
            assert said[how]["read"] == 4 * said[how]["held"], how


@pytest.mark.slow
@pytest.mark.parametrize("cut", [Cut(), Cut(offload=True), Cut(team=2)], ids=["layers", "offloaded", "products"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_of_every_family(dtype: str, cut: Cut, tmp_path: Path) -> None:
    check_families(tmp_path, saved(tmp_path / "targets", list(FAMILIES)), dtype, cut)


@pytest.mark.slow
@torch.no_grad()
def test_processes_make_equal_passes_for_unequal_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows are read document by document, without a mask, layers with a window too."""
    folders = saved(tmp_path / "targets", ["gemma3_text", "qwen3"])
    ranks.run(2, cut_ranks.long_rows, tmp_path, folders)
    monkeypatch.setattr(passes, "MASKED", cut_ranks.TOKENS - 1)
    for folder in folders:
        decoder = decoder_of(load_target(folder).model)
        for rank in (0, 1):
            found = torch.load(tmp_path / f"long-{Path(folder).name}-{rank}.pt")
            wanted = states_of(decoder, cut_ranks.apart(rank), cut_ranks.LAYERS)
            torch.testing.assert_close(found, list(wanted), rtol=1e-5, atol=1e-5)


MIXED = ["kimi_linear", "bailing_hybrid", "olmo_hybrid"]
"""Their checkpoints have three convolutions where the models have one."""
READ = [family for family in RECURRENT if family not in MIXED]


@pytest.mark.parametrize("family", MIXED)
def test_weights_that_are_joined_by_rows_are_refused(family: str) -> None:
    model = random_model(family, **RECURRENT[family])
    with pytest.raises(RequestError, match=r"makes .*conv1d.weight of other weights than its checkpoint has"):
        check_layers(model)


@pytest.mark.parametrize("family", [*FAMILIES, *READ])
def test_others_are_not(family: str) -> None:
    """Those whose states are compared below."""
    check_layers(random_model(family, **(FAMILIES | RECURRENT)[family]))


@pytest.mark.slow
@torch.no_grad()
def test_why_they_are_refused(tmp_path: Path) -> None:
    """transformers reads them without a word; where it reads them right, they can be let in."""
    (folder,) = saved(tmp_path / "targets", ["kimi_linear"])
    ranks.run(2, cut_ranks.long_rows, tmp_path, [folder], False)
    found = torch.load(tmp_path / "long-kimi_linear-0.pt")
    wanted = states_of(decoder_of(load_target(folder).model), cut_ranks.apart(0), cut_ranks.LAYERS)
    assert torch.equal(found[0], wanted[0])
    assert (found[1] - wanted[1]).norm() > 0.1 * wanted[1].norm()


@pytest.mark.parametrize("families", [["lfm2"], pytest.param(READ, marks=pytest.mark.slow)], ids=len)
@torch.no_grad()
def test_recurrent_layers_of_a_cut_target(families: list[str], tmp_path: Path) -> None:
    """They read rows document by document, of which the second process has more."""
    folders = saved(tmp_path / "targets", families)
    ranks.run(2, cut_ranks.long_rows, tmp_path, folders)
    for folder in folders:
        whole = load_target(folder).model
        numbers = sum(each.numel() for each in whole.parameters())
        ends = sum(each.weight.numel() for each in (whole.get_input_embeddings(), whole.get_output_embeddings()))
        for rank in (0, 1):
            name = f"{Path(folder).name}-{rank}"
            found = torch.load(tmp_path / f"long-{name}.pt")
            wanted = states_of(decoder_of(whole), cut_ranks.apart(rank), cut_ranks.LAYERS)
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(
                    mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
                )
            held = int((tmp_path / f"held-{name}").read_text()) - ends
            assert held < 0.6 * (numbers - ends), name


@pytest.mark.slow
def test_processes_that_decode_other_tokens_are_seen(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path / "targets", ["llama"])
    team = ranks.start(2, cut_ranks.parted, tmp_path, folder)
    for process in team:
        process.join()
    assert all("have decoded different tokens" in ranks.error(tmp_path, rank) for rank in (0, 1))


def test_an_older_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no plan of a model's parts to lay over a team."""
    for owner in PreTrainedModel.__mro__:
        if "_expand_parallel_plan" in vars(owner):
            monkeypatch.delattr(owner, "_expand_parallel_plan")
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(EnvironmentFailure, match=rf"newer transformers than {transformers.__version__}"):
        _cut_products(random_model("qwen3", **GROUPED), mesh)


@pytest.mark.parametrize(
    ("family", "sizes", "team", "said"),
    [
        ("qwen3", GROUPED, 3, "does not divide the target's num_attention_heads"),
        ("falcon_h1", {}, 2, "recurrent layers"),
    ],
)
def test_what_a_team_cannot_share_is_refused(family: str, sizes: dict[str, Any], team: int, said: str) -> None:
    model = random_model(family, **sizes)
    with pytest.raises(RequestError, match=said):
        check_team(model, team)


@pytest.mark.slow
def test_processes_agree_on_what_the_cache_lacks(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path / "targets", ["llama"])
    ranks.run(2, cut_ranks.unequal_misses, tmp_path, folder)
    for rank in (0, 1):
        states = torch.load(tmp_path / f"cached-{rank}.pt")
        for mine, theirs in zip(states, expected(folder, rank), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "stops"])
@pytest.mark.parametrize(("world", "cut"), [(2, Cut()), (2, Cut(team=2)), (4, Cut(team=2))])
def test_a_process_that_fails_ends_the_others(world: int, cut: Cut, how: str, tmp_path: Path) -> None:
    """Within `loop.stall_seconds` and the time that it takes to see which one is silent."""
    (folder,) = saved(tmp_path / "targets", ["llama"])
    processes = ranks.start(world, cut_ranks.one_ends, tmp_path, folder, cut, how)
    failing = processes.pop(1)
    for each in processes:
        each.join(120)
    told = [ranks.error(tmp_path, rank) for rank in range(world)]
    failing.kill()  # a launcher does it
    failing.join()
    assert [each.exitcode for each in processes] == [EnvironmentFailure.exit_code] * (world - 1), told
    assert f"process 1 of {world}" in told[0]
    assert ("planted" in told[1]) == (how == "raises")
    assert all(stalls.waited(tmp_path, rank) < cut_ranks.BOUND + 10 for rank in range(world) if rank != 1)
