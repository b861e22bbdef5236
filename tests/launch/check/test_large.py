"""Recipes at 7-8B size: the pre-flight on a machine that has neither the weights nor the GPUs."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import layer_count
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.layers.row_split import RowSplit
from draftsmith.errors import DraftsmithError, EnvironmentFailure, RequestError
from draftsmith.launch.check.check import check
from draftsmith.launch.check.devices import Devices, devices_of
from draftsmith.launch.check.memory import needs, parameters
from draftsmith.launch.check.models import Models
from draftsmith.launch.recipe.load import load_recipe, shipped_recipes
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import methods
from draftsmith.trainers.methods import METHODS
from draftsmith.trainers.packed import passes
from draftsmith.trainers.teacher.tuned import TunedTarget
from helpers.models.method_objectives import objective_of
from rich.console import Console
from torch import nn

LARGE = [path.stem for path in shipped_recipes() if path.stem.endswith("-8b")]
P_TARGET = 8_190_735_360


def run(name: str, out: Path, **flags: str) -> str:
    told = io.StringIO()
    overrides = [(flag.replace("__", "."), value) for flag, value in flags.items()]
    check(load_recipe(name, overrides), Console(file=told, width=400), out)
    return told.getvalue()


def save(_module: nn.Module, _folder: Path) -> None:
    pytest.fail("nothing is written here")


def trained_by(recipe: Recipe, target: Any) -> Any:
    """What the recipe's trainer would train, made by that trainer itself."""
    frozen = (
        TunedTarget(Backbone(target, name="t"), recipe.tune, row_tokens=recipe.row_tokens)
        if recipe.tunes_target
        else target
    )
    return objective_of(recipe, frozen, save).module


def test_activations_are_told_for_each_token_too(tmp_path: Path) -> None:
    """Rows twice as long hold twice as much, and as much for each token."""
    told = []
    for length in ("4096", "8192"):
        message = run("eagle-8b", tmp_path / "out", data__sequence_length=length, loop__micro_rows="1")
        found = re.search(r"([\d.]+) GB for activations \(([\d.]+) kB a token\)", message)
        assert found is not None, message
        total, each = map(float, found.groups())
        assert total * 1e6 == pytest.approx(each * int(length), rel=0.01)
        told.append(each)
    assert told[1] == pytest.approx(told[0], rel=0.05)


def test_there_is_one_for_every_method() -> None:
    trained = {name for name, method in METHODS.items() if method.has_target}
    variants = {"distill-on-policy", "prune", "hass"}
    assert set(LARGE) == {f"{name}-8b" for name in trained | variants}


@pytest.mark.parametrize("name", LARGE)
def test_the_pre_flight_passes_without_the_weights(name: str, tmp_path: Path) -> None:
    """No hub is asked, no GPU is there; what cannot be known here is said to wait."""
    message = run(name, tmp_path / "out")
    assert message.count(" ok ") == 8
    assert message.count(" waits ") == 2
    assert "8,190.7 M parameters, 16.4 GB in bf16, vocabulary 151,936" in message
    assert "not here, taken to be like qwen3-8b (target.sizes)" in message
    assert "8 devices, 80 GB each, sharding zero2" in message
    assert "data and disk could not be looked at" in message
    assert "ready to train" not in message
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there_is_no_described_target(tmp_path: Path) -> None:
    """A recipe's own `sizes` speak of a model of the hub, not of a path that was mistyped."""
    with pytest.raises(RequestError, match="no-such-model, and there is no such folder"):
        run("dflash-8b", tmp_path / "out", target__path=str(tmp_path / "no-such-model"))


# a draft model's are counted below
DRAFTS = {"distill-8b", "distill-on-policy-8b", "prune-8b", "boost-8b", "pard-8b"}


@pytest.mark.parametrize("name", sorted(set(LARGE) - DRAFTS))
def test_parameters_are_those_that_would_be_trained(name: str) -> None:
    recipe = load_recipe(name).recipe
    models = Models(recipe)
    found = parameters(models.student())
    with torch.device("meta"):
        module = trained_by(recipe, Models(recipe).target())
    assert parameters(models.target()) == P_TARGET
    assert found == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_parameters_of_the_draft_are_those_of_its_layers() -> None:
    """A tied embedding; 28 layers of attention with norms on its heads, feed-forward part, norms."""
    H, inner, D, Q, G = 1024, 3072, 128, 16, 8
    layer = H * D * (Q + 2 * G) + Q * D * H + 3 * H * inner + 2 * H + 2 * D
    found = parameters(Models(load_recipe("distill-8b").recipe).student())
    assert found == 151_936 * H + 28 * layer + H


def test_parameters_of_a_pruned_draft_are_those_that_are_kept() -> None:
    """The target's untied tables at half the width, 8 layers, 16 heads in 4 groups."""
    H, inner, D, Q, G = 2048, 6144, 128, 16, 4
    layer = H * D * (Q + 2 * G) + Q * D * H + 3 * H * inner + 2 * H + 2 * D
    found = parameters(Models(load_recipe("prune-8b").recipe).student())
    assert found == 2 * 151_936 * H + 8 * layer + H


def test_a_smaller_model_of_the_family_for_the_4b(tmp_path: Path) -> None:
    """Qwen3-4B ties its tables; the draft is the whole Qwen3-0.6B, on a single GPU."""
    H, inner, D, Q, G = 2560, 9728, 128, 32, 8
    layer = H * D * (Q + 2 * G) + Q * D * H + 3 * H * inner + 2 * H + 2 * D
    models = Models(load_recipe("distill-qwen3-4b").recipe)
    assert parameters(models.target()) == 151_936 * H + 36 * layer + H
    assert parameters(models.student()) == parameters(Models(load_recipe("distill-8b").recipe).student())
    message = run("distill-qwen3-4b", tmp_path / "out")
    assert "FAILS" not in message
    assert "4,022.5 M parameters, 8.04 GB in bf16" in message
    assert "1 device, 80 GB" in message
    assert "data and disk could not be looked at" in message


@pytest.mark.parametrize(("sharding", "per_number"), [("zero2", 2 + 18 / 8), ("zero3", 18 / 8), ("none", 16 + 4 + 2)])
def test_weights_and_moments_are_spread_as_the_launch_says(sharding: str, per_number: float) -> None:
    """ZeRO as DeepSpeed sums it up: 2 bytes of weights, 18 in pieces; DDP 16, buckets and casts."""
    recipe = load_recipe("eagle-8b", [("machine.sharding", sharding)]).recipe
    models = Models(recipe)
    need = needs(recipe, models.student(), models.target())
    largest = 12288 * 4096 * 4 if sharding == "zero3" else 0  # gathered, with its gradient
    P = parameters(models.student())
    found = need["weights, gradient and moments"]
    assert found == pytest.approx(per_number * P + largest)
    assert need["the target"] == 2 * P_TARGET
    assert need["a chunk of logits"] == 2048 * 151_936 * 4 * 4


@pytest.mark.parametrize(
    ("flags", "kind", "reason"),
    [
        ({"machine__device_gb": "24"}, EnvironmentFailure, "each of 8 devices has 24 GB"),
        ({"machine__processes": "1"}, EnvironmentFailure, "the device has 80 GB, a tenth of it"),
        ({"machine__processes": "7"}, RequestError, "loop.batch_rows is 64"),
        ({"optimizer__name": "muon"}, RequestError, "DeepSpeed takes one optimiser"),
        ({"machine__sharding": "zero3", "loop__ema": "0.999"}, RequestError, "ZeRO-3 shards the weights"),
        ({"target__sizes": "qwen4"}, RequestError, "no sizes are called 'qwen4'"),
        ({"data__sequence_length": "65536"}, RequestError, "is 40960 tokens. Lower"),
        ({"data__source": "nowhere"}, RequestError, "nowhere"),
    ],
)
def test_what_would_fail_there_fails_here(
    flags: dict[str, str], kind: type[DraftsmithError], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(DraftsmithError, match="the pre-flight fails") as raised:
        run("medusa-8b", tmp_path / "out", **flags)
    assert type(raised.value) is kind
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    [
        ("medusa2-8b", {}, "medusa2 trains it"),
        ("boost-8b", {}, "boost learns from texts that it writes"),
        ("prune-8b", {}, "cuts the draft out of it"),
        ("distill-on-policy-8b", {}, "rollouts.share has it follow texts"),
        ("eagle-8b", {"features__source": "engine"}, "the engine holds the target"),
    ],
)
def test_what_needs_the_whole_target_refuses_a_cut_one(
    name: str, flags: dict[str, str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="target.sharding is fully_shard") as raised:
        run(name, tmp_path / "out", target__sharding="fully_shard", **flags)
    assert reason in str(raised.value)


def test_a_tuned_target_is_not_cut_into_pieces(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="use zero2"):
        run("medusa2-8b", tmp_path / "out", machine__sharding="zero3")


def test_rows_of_a_described_target_are_read(tmp_path: Path) -> None:
    message = run("eagle-8b", tmp_path / "out", data__source="stdlib", data__validation_split="")
    assert "of the first 200 rows have a known shape (text)" in message


def test_a_target_that_is_here_is_looked_at(tmp_path: Path) -> None:
    """Then the sizes' file says nothing, and the rows can be rendered."""
    flags = {"data__source": "stdlib", "data__validation_split": "", "data__sequence_length": "512"}
    message = run("eagle-8b", tmp_path / "out", target__path="tiny", **flags)
    assert "not here" not in message
    assert "12.0 M parameters" in message
    assert "rows 200 are usable" in message


def test_the_machine_at_hand_is_the_default() -> None:
    found = devices_of(load_recipe("eagle-tiny").recipe)
    assert (found.processes, found.described) == (1, False)
    assert str(Devices(2, 8e10, "none", described=True)) == "2 devices, 80 GB each"


# ---- activations --------------------------------------------------------------------------


def kept_bytes(module: nn.Module, forward: Callable[[], tuple[torch.Tensor, Any]], chunk: int) -> int:
    """What a forward pass leaves for the backward pass, weights and chunks of logits apart."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_chunk = tensor.ndim == 2 and len(tensor) <= chunk and tensor.shape[1] >= 2048
        if storage.data_ptr() not in weights and not is_chunk:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = forward()
    loss.backward()
    return sum(kept.values())


def with_other_parts(split: RowSplit, x: torch.Tensor, length: int) -> torch.Tensor:
    """What a gather would give, without other processes: zeros for their parts."""
    own = split.own(length)
    return nn.functional.pad(x, (0, 0, own.start, length - own.stop))


def estimated_and_counted(name: str, more: dict[str, str] | None = None, tokens: int = 256) -> tuple[float, int]:
    """Bytes of activations by the pre-flight, and those that a real pass keeps, tensor by tensor.

    Where processes share rows, those of the one with their ends.
    """
    sizes = {"loop.precision": "fp32", "loop.micro_rows": "2", "objective.chunk": "256"}
    sizes["data.sequence_length"] = str(tokens)
    recipe = load_recipe(f"{name}-tiny", list((sizes | (more or {})).items())).recipe
    target = load_target("tiny")
    goal = objective_of(
        recipe, TunedTarget(target, recipe.tune, row_tokens=recipe.row_tokens) if recipe.tunes_target else target.model
    )
    rows = {
        "input_ids": torch.randint(0, target.vocabulary, (2, tokens)),
        "positions": torch.arange(tokens).repeat(2, 1),
        "documents": torch.zeros(2, tokens).long(),
        "loss_mask": (torch.arange(tokens) > 0).repeat(2, 1),
    }
    parts = recipe.loop.context_parallel
    if parts > 1:
        goal.split_rows(RowSplit(parts - 1, parts))
    teacher_output = goal.prepare(rows)
    with mock.patch.object(RowSplit, "gathered", with_other_parts):
        counted = kept_bytes(goal.module, lambda: goal.module(rows, teacher_output), 256)
    models = Models(recipe)
    return needs(recipe, models.student(), models.target())["activations"], counted


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    ["medusa", "hydra", "bpd", "eagle", "hass", "eagle3", "dflash", "dflash2", "dspark", "peagle", "mtp", "pard"],
)
def test_activations_are_what_a_forward_pass_keeps(name: str) -> None:
    estimate, counted = estimated_and_counted(name)
    assert 1 <= estimate / counted < 1.6, (estimate, counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"), [("peagle", {}), ("pard", {"model.layers": "3"}), ("dflash", {"block.anchors": "192"})]
)
def test_masks_that_grow_with_the_row_are_counted(name: str, more: dict[str, str]) -> None:
    """In every layer: mask pairs and slots against the text, PARD's masks against themselves too."""
    estimate, counted = estimated_and_counted(name, more, tokens=1536)
    assert 1 <= estimate / counted < 1.6, (estimate, counted)


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_slots_of_long_rows_have_no_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MASKED", 511)
    monkeypatch.setattr(methods, "MASKED", 511)
    estimate, counted = estimated_and_counted(name, {"block.anchors": "64"}, tokens=512)
    assert 1 <= estimate / counted < 1.6, (estimate, counted)


def test_passes_that_are_computed_again_keep_less() -> None:
    """What goes into a pass is held by who computes it again, and not counted: the estimate lies above."""
    whole, counted_whole = estimated_and_counted("eagle3")
    ends, counted_ends = estimated_and_counted("eagle3", {"eagle3.recompute": "true"})
    assert counted_ends < ends < 0.65 * whole
    assert counted_ends < 0.4 * counted_whole


# where the switch is, what says how many layers it is about (of a tuned target that is the target), and the
# share that is kept with it at most
BY_LAYERS = {
    "distill": ("model.recompute", "model.layers", 0.3),
    "pard": ("model.recompute", "model.layers", 0.3),
    "dflash": ("block.recompute", "block.decoder_layers", 0.3),
    "dflash2": ("block.recompute", "block.decoder_layers", 0.3),
    "peagle": ("peagle.recompute", "peagle.decoder_layers", 0.3),
    "medusa2": ("tune.recompute", None, 0.3),
    # what their losses read is kept, and a layer in front of Hydra's
    "medusa": ("medusa.recompute", "medusa.heads", 0.85),
    "hydra-plus": ("medusa.recompute", "medusa.heads", 0.6),
}
DAILY = {"distill", "dflash2", "hydra-plus"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else [pytest.mark.slow]) for name in BY_LAYERS]
)
def test_layers_that_are_computed_again_keep_less(name: str) -> None:
    """What they read, and one of them whole while its gradient is made."""
    switch, count, most = BY_LAYERS[name]
    layers = layer_count(load_target("tiny").model) if count is None else 4
    flags = {} if count is None else {count: str(layers)}
    whole, counted_whole = estimated_and_counted(name, flags)
    estimate, counted = estimated_and_counted(name, flags | {switch: "true"})
    peak = counted + (counted_whole - counted) / layers
    print(
        f"{name}: {counted / counted_whole:.3f} kept, estimated {estimate / peak:.2f} times, "
        f"without {whole / counted_whole:.2f} times"
    )
    assert counted < most * counted_whole
    assert estimate < (0.3 + 0.7 * most) * whole
    assert 1 <= estimate / peak < 1.6, (estimate, peak)


@pytest.mark.parametrize("name", ["hass", "eagle3", "mtp"])
def test_processes_that_share_rows_keep_their_parts(name: str) -> None:
    """Own numbers of a quarter; keys, values and square attention of whole rows."""
    _, counted_whole = estimated_and_counted(name)
    estimate, counted = estimated_and_counted(name, {"loop.context_parallel": "4"})
    print(f"{name}: {counted / counted_whole:.3f} of whole rows', estimated {estimate / counted:.2f} times")
    assert 1 <= estimate / counted < 1.6, (estimate, counted)
    assert counted < 0.5 * counted_whole


def test_the_pre_flight_speaks_of_rows_that_are_shared(tmp_path: Path) -> None:
    long = {"data__sequence_length": "32768", "loop__micro_rows": "1"}
    with pytest.raises(EnvironmentFailure, match="for activations"):
        run("eagle3-8b", tmp_path / "out", **long)
    message = run("eagle3-8b", tmp_path / "out", **long, loop__context_parallel="8")
    assert "1 rows on each of 1 group of 8 processes, which share each row" in message
    with pytest.raises(RequestError, match="context_parallel is 3, and 8 processes are no multiple of it; launch 6 "):
        run("eagle3-8b", tmp_path / "out", loop__context_parallel="3")
    with pytest.raises(RequestError, match="train with `eagle` or `eagle3` or `mtp`"):
        run("medusa-8b", tmp_path / "out", loop__context_parallel="8")
