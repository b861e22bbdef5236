"""Targets of fewer bits: read as `transformers` reads them, refused where they cannot be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.features.model_hash import weights_hash
from draftsmith.decoding.backbone import quantised
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import LAST
from draftsmith.decoding.backbone.hub import load_config
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.identity import TargetIdentity
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.projection import Projection, check_logits
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from draftsmith.trainers.teacher.features import OnlineFeatures
from torch import nn
from transformers import LlamaConfig

PROMPTS = [[5, 9, 2, 33, 7, 9, 2], [11, 4], [1, 2, 3]]
GREEDY = Warper(temperature=0.0)
EIGHT = {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}, "quant_method": "torchao"}


@pytest.fixture(scope="module", params=["int8", "int4", "checkpoint"])
def target(request: pytest.FixtureRequest, served_folder: Path) -> Backbone:
    if request.param == "checkpoint":
        return load_target(str(request.getfixturevalue("int8_folder")))
    return load_target(str(served_folder), quantization=request.param)


def written(model: Any, prompt: list[int]) -> list[int]:
    """What transformers' own generate adds to a prompt."""
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0].tolist()


def test_greedy_text_is_that_of_transformers(target: Backbone) -> None:
    plain = copy.deepcopy(target.model)
    plain.set_attn_implementation("sdpa")
    wanted = [written(plain, prompt)[len(prompt) :] for prompt in PROMPTS]
    alone = autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=24)
    drafted = generate(target, PromptLookup(), PROMPTS, warper=GREEDY, max_new_tokens=24)
    assert [list(row) for row in alone.tokens] == [list(row) for row in drafted.tokens] == wanted


def test_the_layers_are_rounded_and_what_others_read_is_not(target: Backbone, served: Backbone) -> None:
    ids = torch.tensor([PROMPTS[0]])
    ours, theirs = target.model(ids).logits, served.model(ids).logits
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).norm() < 0.3 * theirs.norm()
    rounded = [each for _, each in quantised.linear(target.model) if type(each.weight) is not nn.Parameter]
    assert len(rounded) == 2 * 7
    assert ours.dtype == torch.float32
    weight = Projection.of(target.model).weight_VH
    assert torch.equal(weight, Projection.of(served.model).weight_VH)
    check_logits(target.model)
    assert not any(each.requires_grad for each in target.model.parameters())


def test_the_small_forward_passes_by_no_rounded_layer(target: Backbone) -> None:
    assert target._is_lean
    assert not target._can_stack


def test_it_is_known_by_its_bits(target: Backbone, served: Backbone) -> None:
    found = TargetIdentity.of(target)
    four = "torchao IntxWeightOnlyConfig groups of 32"  # of the usual ones the largest that divides 32, 64 and 128
    assert found.quantisation in ("torchao Int8WeightOnlyConfig", four)
    assert (found.quantisation == four) == (type_of_layers(target) == "IntxUnpackedToInt8Tensor")
    assert TargetIdentity.of(served).quantisation is None
    found.check_same(TargetIdentity.of(served), "x")
    assert weights_hash(target.model) not in ("", weights_hash(served.model))


@pytest.mark.parametrize(
    ("inputs", "group"), [((256, 128), 128), ((384, 64), 64), ((96, 160), 32), ((48, 176), 16), ((128,), 128)]
)
def test_the_largest_usual_group_that_divides_all_inputs(inputs: tuple[int, ...], group: int) -> None:
    assert quantised.group_for(nn.Sequential(*(nn.Linear(each, 2) for each in inputs))) == group


def type_of_layers(target: Backbone) -> str:
    """The class of their rounded weights."""
    return next(type(each.weight).__name__ for name, each in quantised.linear(target.model) if "proj" in name)


@pytest.mark.parametrize(
    ("how", "said", "size"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq 4 bits groups of 128", 0.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq 8 bits", 1.0),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq 4 bits groups of 64", 0.5),
        ({"quant_method": "fp8"}, "fp8", 1.0),
    ],
)
def test_groups_of_published_checkpoints_are_recorded(how: dict[str, Any], said: str, size: float) -> None:
    config = LlamaConfig(quantization_config=how)
    assert quantised.quantisation_of(config) == said
    assert quantised.bytes_a_weight(None, config) == size


@pytest.mark.parametrize("kind", ["int8", "int4", "checkpoint"])
def test_states_have_the_precision_of_the_target(kind: str, int8_folder: Path, served_folder: Path) -> None:
    if kind == "checkpoint":
        target = load_target(str(int8_folder), dtype="bf16")
    else:
        target = load_target(str(served_folder), dtype="bf16", quantization=kind)
    states = OnlineFeatures(target.model, (0, 1, LAST))(text())
    assert [each.dtype for each in states] == [torch.bfloat16] * 3
    assert all(each.isfinite().all() for each in states)
    assert target.model(torch.tensor([PROMPTS[0]])).logits.dtype == torch.bfloat16


def text() -> dict[str, torch.Tensor]:
    ids = torch.tensor([PROMPTS[0]])
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    return {"input_ids": ids, "documents": torch.zeros_like(ids), "positions": positions, "loss_mask": mask}


def test_one_changed_weight_is_another_target(target: Backbone) -> None:
    before = weights_hash(target.model)
    layer = next(each for _, each in quantised.linear(target.model) if type(each.weight) is not nn.Parameter)
    part = max(quantised.plain_parts(layer.weight), key=torch.Tensor.numel)
    kept = part.flatten()[0].clone()
    part.view(-1)[0] = kept + 1
    changed = weights_hash(target.model)
    part.view(-1)[0] = kept
    assert changed != before == weights_hash(target.model)


def test_the_audit_passes(served_folder: Path) -> None:
    target = load_target(str(served_folder), quantization="int8")
    prompts = [[n, n + 1, 2 * n % 61][: 1 + n % 3] for n in range(1, 20)]
    evidence = AuditConfig(tokens=500, sequences=20_000, temperature=1.0, batch=4, prompts=4, max_new_tokens=40)
    report = audit(target, PromptLookup(), prompts, evidence)
    assert report.verdict == "lossless", report.text()
    assert report.replay.argmax == report.replay.tokens > 0


def test_a_config_may_name_known_quantisers_alone(served_folder: Path, tmp_path: Path) -> None:
    for how in (EIGHT, {"quant_method": "fp8"}, {"load_in_4bit": True}, {"quant_method": "gptq", "bits": 4}):
        quantised.check_quantisation("x", "config.json", how)
    nested = copy.deepcopy(EIGHT)
    nested["quant_type"]["default"]["_data"]["group"] = [{"_type": "evil", "_data": {}}]
    for how, name in ((nested, "evil"), ({"quant_method": "mxfp4"}, "mxfp4"), ("fp8", "fp8"), ({}, "None")):
        with pytest.raises(RequestError, match=name):
            quantised.check_quantisation("x", "config.json", how)


@pytest.mark.parametrize(
    ("how", "package"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptqmodel and optimum"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed_tensors"),
        ({"quant_method": "fp8"}, "capability 8.9"),
    ],
)
def test_what_is_not_here_is_named_before_weights_are_read(
    how: dict[str, Any], package: str, served_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = json.loads((served_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    with pytest.raises(EnvironmentFailure, match=package):
        load_target(str(tmp_path))


def test_asking_twice_and_without_torchao(
    int8_folder: Path, served_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="quantised already"):
        load_target(str(int8_folder), quantization="int8")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(
        EnvironmentFailure, match=r"package torchao, which is not here: pip install 'draftsmith\[quant\]'"
    ):
        load_target(str(served_folder), quantization="int8")
    assert quantised.quantisation_of(load_config(str(int8_folder))) == "torchao Int8WeightOnlyConfig"


def test_a_rounded_projection_is_refused(served_folder: Path) -> None:
    from torchao.quantization import quantize_

    model = load_target(str(served_folder)).model
    quantised.check_projection(model, "x")
    quantize_(model, quantised.torchao_config(8, None), filter_fn=lambda each, name: name == "lm_head")
    with pytest.raises(RequestError, match="the output projection of 'x' is quantised too"):
        quantised.check_projection(model, "x")
