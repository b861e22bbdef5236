"""`model.recompute`, `tune.recompute` and the switches of deep drafters: less is kept, and no bit differs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.benchmarks.common.random_models import EXPERTS, GROUPED, RECURRENT, WINDOWED
from draftsmith.decoding.backbone.attention import use_own_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.errors import RequestError, Stopped
from draftsmith.launch.check.models import Models
from draftsmith.launch.check.unread import check_read
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import ObjectiveConfig
from draftsmith.trainers.loop.compiled import Compiled
from draftsmith.trainers.loop.objective import Batch
from draftsmith.trainers.method_config import BlockConfig, MedusaConfig, PardConfig, PeagleConfig, TuneConfig
from draftsmith.trainers.packed.passes import hidden_states
from draftsmith.trainers.student.distillation import DraftStudent, teacher_of
from draftsmith.trainers.student.lora import add_adapter
from draftsmith.trainers.student.recomputed import decoder_layers, layers_within, recompute_layers
from draftsmith.trainers.teacher.tuned import TunedTarget
from faults import ranks, recomputed_ranks, toy
from faults.recomputed_ranks import draft
from helpers.models.method_objectives import build
from helpers.models.random_models import random_model
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

CHUNK = ObjectiveConfig(chunk=16)
SHORT = {"steps": 5, "every": 2, "validate_every": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": GROUPED,
    "gemma2": GROUPED | WINDOWED["gemma2"],
    "gpt2": {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 64},  # with dropout of its own
    "qwen3_moe": GROUPED | EXPERTS | {"num_experts": 4},
}
HYBRID = ["lfm2", "qwen3_next", "nemotron_h", "zamba2"]


def kept(work: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What it gives, and the bytes that its forward pass leaves for the backward pass."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = work()
    return out, sum(storages.values())


def learnt(module: nn.Module, batch: Batch, teacher: Any) -> tuple[dict[str, Tensor], int]:
    """Loss, terms and every gradient, by name; and what was kept."""
    module.zero_grad()
    torch.manual_seed(3)  # dropout
    terms: dict[str, Tensor] = {}

    def run() -> Tensor:
        loss, told = module(batch, teacher)
        terms.update(told)
        return loss

    loss, size = kept(run)
    loss.backward()
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    assert found
    assert all(bool(torch.isfinite(each).all()) for each in found.values())
    return {"": loss.detach(), **terms, **found}, size


def check_same(plain: dict[str, Tensor], mine: dict[str, Tensor]) -> None:
    assert plain.keys() == mine.keys()
    assert [name for name, each in plain.items() if not torch.equal(each, mine[name])] == []


def packed(length: int = 24) -> Batch:
    """Two rows of several documents, with prompts that are no labels."""
    batch = toy.Asked().batch([1, 6])
    documents = torch.tensor([[0] * 9 + [1] * (length - 9), [0] * 15 + [1] * (length - 15)])
    positions = torch.cat([torch.arange(n) for row in ([9, length - 9], [15, length - 15]) for n in row]).view(2, -1)
    return batch | {"documents": documents, "positions": positions, "loss_mask": batch["loss_mask"] & (positions > 0)}


def trainable(family: str, settings: dict[str, Any]) -> Any:
    """A model as `model.start_from` hands it over."""
    model = random_model(family, **settings).requires_grad_(True)
    use_own_attention(model)
    return model


def student(model: Any) -> tuple[DraftStudent, Any]:
    target = make_target("qwen3").model
    made = DraftStudent(model, target, CHUNK)
    with torch.no_grad():
        batch = packed()
        return made, teacher_of(target, hidden_states(target, batch), batch)


def recomputed_layers(model: Any) -> list[nn.Module]:
    """Those that keep their inputs alone."""
    return [layer for layer in layers_within(model) if layer.gradient_checkpointing]


def check_model(model: Any, share: float) -> None:
    """With and without, on equal weights; `share` of the bytes at most."""
    again = copy.deepcopy(model)
    recompute_layers(again, "it", row_tokens=64)
    assert recomputed_layers(model) == []
    assert not again.get_input_embeddings()._forward_hooks, "no gradient is asked of what may be frozen"
    assert len(recomputed_layers(again)) == len(decoder_layers(again))
    (plain, teacher), (mine, _) = student(model), student(again)
    wanted, whole = learnt(plain, packed(), teacher)
    found, less = learnt(mine, packed(), teacher)
    check_same(wanted, found)
    assert less < share * whole


# ---- draft models -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_of_a_draft_differs(family: str) -> None:
    check_model(trainable(family, FAMILIES[family]), 0.8)


@pytest.mark.parametrize("family", HYBRID)
def test_no_bit_of_a_recurrent_draft_differs(family: str) -> None:
    """They read document by document: each layer is computed again for each of them."""
    check_model(trainable(family, RECURRENT[family]), 0.9)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_no_bit_of_an_adapter_differs(dropout: float) -> None:
    """Frozen layers in front of the first change, and dropout that falls alike the second time."""
    model = make_target("qwen3").model
    add_adapter(model, "own", rank=2, alpha=4, dropout=dropout, layers=["q_proj", "down_proj"], section="lora")
    for name, each in model.named_parameters():
        if "lora_B" in name:  # zero at first, under which the other half learns nothing
            nn.init.normal_(each, std=0.1, generator=torch.Generator().manual_seed(1))
    check_model(model, 0.7)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_no_bit_differs_in_lower_precision(precision: torch.dtype) -> None:
    with torch.autocast("cpu", precision):
        check_model(trainable("qwen3", GROUPED), 0.8)


def test_no_bit_of_pard_differs() -> None:
    """Text and masks in one pass."""
    target = make_target("qwen3").model
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        goal = build("pard", target, pard=PardConfig(drafts=3), objective=CHUNK, **draft(recompute))
        found.append(learnt(goal.module, packed(), goal.prepare(packed())))
    check_same(found[0][0], found[1][0])
    assert found[1][1] < 0.7 * found[0][1]


def test_documents_of_long_rows_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Document by document, without a mask."""
    monkeypatch.setattr("draftsmith.trainers.packed.passes.MASKED", 8)
    check_model(trainable("qwen3", GROUPED), 0.8)


# ---- runs -------------------------------------------------------------------------------------


def run(out: Path, recompute: bool, *, stop_at: int | None = None, **loop: Any) -> Any:
    made = toy.loop_in(out, "distill", given=draft(recompute), **SHORT | loop)
    toy.run(made, stop_at=stop_at)
    return made


def test_a_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Weights, moments and losses; stopped on the way too, and what is written says nothing of it."""
    loops = {name: run(tmp_path / name, name == "again") for name in ("plain", "again")}
    assert len(recomputed_layers(loops["again"].objective.draft())) == 3
    wanted = toy.state_files(tmp_path / "plain", 5)
    assert toy.state_files(tmp_path / "again", 5) == wanted
    for recompute in (True, False):  # it may be another when a run goes on
        with pytest.raises(Stopped):
            run(tmp_path / f"stopped-{recompute}", True, stop_at=2)
        run(tmp_path / f"stopped-{recompute}", recompute)
        assert toy.state_files(tmp_path / f"stopped-{recompute}", 5) == wanted
    assert toy.losses(tmp_path / "again") == toy.losses(tmp_path / "plain")
    for name, loop in loops.items():
        loop.objective.draft().save_pretrained(tmp_path / f"{name}-model")
    files = sorted(path.name for path in (tmp_path / "plain-model").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again-model").iterdir())
    for name in files:
        assert (tmp_path / "plain-model" / name).read_bytes() == (tmp_path / "again-model" / name).read_bytes(), name


@pytest.mark.slow
def test_two_processes_end_with_the_same_bits(tmp_path: Path) -> None:
    """DDP adds up the gradients of what is computed again."""
    for name in ("plain", "again"):
        ranks.run(2, recomputed_ranks.train, tmp_path / name, name == "again")
    assert toy.state_files(tmp_path / "again", 4) == toy.state_files(tmp_path / "plain", 4)
    assert toy.losses(tmp_path / "again") == toy.losses(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_compiled_pass(dropout: float) -> None:
    """torch.compile takes it whole, and computes again by itself: less is kept there too, the loss but for rounding."""
    model = make_target("qwen3").model
    add_adapter(model, "own", rank=2, alpha=4, dropout=dropout, layers=["q_proj", "down_proj"], section="lora")
    model.requires_grad_(True)
    found = {}
    for name in ("plain", "compiled", "again"):
        mine = copy.deepcopy(model)
        if name == "again":
            recompute_layers(mine, "it", row_tokens=64)
        goal, teacher = student(mine)
        if name != "plain":
            torch._dynamo.reset()
            goal.static = Compiled("aot_eager")
        found[name] = learnt(goal, packed(), teacher)
    wanted, whole = found["compiled"]
    mine, less = found["again"]
    assert wanted.keys() == mine.keys() == found["plain"][0].keys()
    for name, each in wanted.items():
        torch.testing.assert_close(mine[name], each, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(mine[name], found["plain"][0][name], rtol=1e-3, atol=1e-5)
    assert less < 0.8 * whole


def test_rows_that_the_draft_writes_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """While it trains it writes with a KV cache, which a layer that is computed again would drop."""
    caplog.set_level(logging.WARNING)
    target, rows = make_target("qwen3").model, toy.Asked()
    rollouts = {"share": 0.5, "prompt_tokens": 4, "new_tokens": 8, "temperature": 0.0}
    written = []
    for recompute in (False, True):
        torch.manual_seed(0)
        goal = build("distill", target, rollouts=rollouts, data={"sequence_length": 24}, **draft(recompute))
        assert goal.module.training
        written.append(goal.rollouts.rewrite([rows.batch([0, 1, 2, 3])], range(4), 0, 0)[0]["input_ids"])
    assert torch.equal(*written)
    assert not torch.equal(written[0], rows.batch([0, 1, 2, 3])["input_ids"])
    assert "incompatible" not in caplog.text


# ---- deep drafters, and targets that are tuned --------------------------------------------------

DEEP: dict[str, dict[str, Any]] = {
    "peagle": {"peagle": PeagleConfig(depths=3, decoder_layers=3, layers=(0, 1, 2))},
    "dflash": {"block": BlockConfig(size=4, decoder_layers=3, anchors=6)},
    "dspark": {"block": BlockConfig(size=4, decoder_layers=3, anchors=6)},
    "dflash2": {"block": BlockConfig(size=4, decoder_layers=3, anchors=6)},
    "medusa": {"medusa": MedusaConfig(heads=3, layers=2)},
    "hydra": {"medusa": MedusaConfig(heads=3, layers=2, prefix=True)},
}


def switched_on(sections: dict[str, Any], name: str) -> dict[str, Any]:
    return sections | {name: sections[name].model_copy(update={"recompute": True})}


@pytest.mark.parametrize("method", DEEP)
def test_no_bit_of_a_deep_drafter_differs(method: str) -> None:
    target = make_target("qwen3").model
    (section,) = DEEP[method]
    found = []
    for sections in (DEEP[method], switched_on(DEEP[method], section)):
        torch.manual_seed(0)
        goal = build(method, target, objective=CHUNK, **sections)
        goal.module.train()
        found.append(learnt(goal.module, packed(), goal.prepare(packed())))
    check_same(found[0][0], found[1][0])
    assert found[1][1] < (0.85 if section == "medusa" else 0.7) * found[0][1]


@pytest.mark.parametrize("how", ["lora", "full"])
@pytest.mark.parametrize("method", ["medusa2", "bpd"])
def test_no_bit_of_a_tuned_target_differs(method: str, how: str) -> None:
    """With dropout in its adapters."""
    more = {"bpd": {"backbone": "tuned", "every_head": True}} if method == "bpd" else {"medusa": MedusaConfig(heads=2)}
    found = []
    for recompute in (False, True):
        tune = TuneConfig(how=how, rank=2, dropout=0.2, recompute=recompute)
        torch.manual_seed(0)
        tuned = TunedTarget(Backbone(make_target("qwen3").model, name="t"), tune, row_tokens=64)
        assert bool(recomputed_layers(tuned.model)) == recompute
        goal = build(method, tuned, objective=ObjectiveConfig(kl=0, ce=1, chunk=16), tune=tune, **more)
        if hasattr(goal, "begin_step"):
            goal.begin_step(0, 0)
        found.append(learnt(goal.module, packed(), goal.prepare(packed())))
    check_same(found[0][0], found[1][0])
    assert found[1][1] < 0.8 * found[0][1]


# ---- refusals, and who reads it ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "section"),
    [("distill", "model"), ("medusa2", "tune"), ("dflash", "block"), ("peagle", "peagle"), ("eagle3", "eagle3")],
)
def test_a_run_goes_on_with_another_value(method: str, section: str) -> None:
    """No checkpoint is of another run by it."""
    one, other = Recipe(method=method), Recipe(method=method, **{section: {"recompute": True}})
    assert one != other
    assert one.identity == other.identity


def test_a_model_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained, by the pre-flight too."""
    monkeypatch.setattr(Qwen3ForCausalLM, "supports_gradient_checkpointing", False)
    wanted = "model.recompute is on, and .* is a Qwen3ForCausalLM: it does not support gradient checkpointing"
    with pytest.raises(RequestError, match=wanted):
        build("distill", make_target("qwen3").model, **draft(recompute=True))
    recipe = load_recipe("distill-tiny", [("model.recompute", "true")]).recipe
    with pytest.raises(RequestError, match=wanted):
        Models(recipe).student()


def test_layers_that_would_be_kept_are_refused() -> None:
    """Some of which the library's switch would pass over without a word."""

    class Own(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

    model: Any = make_target("qwen3").model
    model.model.layers[1] = Own(model.model.layers[1])
    with pytest.raises(RequestError, match="tune.recompute is on, and the target 't' .*: its Own does not support"):
        TunedTarget(Backbone(model, name="t"), TuneConfig(recompute=True), row_tokens=64)


@pytest.mark.parametrize(
    ("method", "value"), [("medusa", "model"), ("eagle3", "model"), ("bpd", "tune"), ("hydra", "block")]
)
def test_who_does_not_read_it_says_so(method: str, value: str) -> None:
    with pytest.raises(RequestError, match=f"{value}.recompute is True"):
        check_read(Recipe(method=method, **{value: {"recompute": True}}))
