"""Packed rows and recurrent layers: no document sees another, in states that are learnt from and in training."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCABULARY
from draftsmith.benchmarks.common.random_models import RECURRENT
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.packed import Document, PackedRows, documents_by_length, pack
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.distill import DistillObjective
from draftsmith.trainers.method_config import Eagle3Config, EagleConfig
from draftsmith.trainers.packed.passes import hidden_states
from draftsmith.trainers.teacher.features import states_of
from draftsmith.trainers.teacher.mixture import write
from helpers.models.method_objectives import build, nothing
from helpers.models.random_models import own_text, random_model, ready
from hypothesis import given, settings
from hypothesis import strategies as st

KINDS = ("lfm2", "qwen3_next", "falcon_h1", "kimi_linear")
LENGTHS = [9, 3, 4, 2, 14, 7, 5]


def packed(lengths: list[int], length: int = 16) -> tuple[PackedRows, list[list[int]]]:
    g = np.random.default_rng(0)
    texts = [g.integers(0, VOCABULARY, count).tolist() for count in lengths]
    documents = [Document(np.array(text, dtype=np.int32), np.ones(len(text), dtype=np.bool_)) for text in texts]
    return pack(documents, length, pad=0, fingerprint="test"), texts


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=9))
def test_every_token_of_a_document_is_read_once(lengths: list[int]) -> None:
    rows, texts = packed(lengths)
    batch = rows.batch(range(len(rows)))
    found, slots = [], []
    for slots_DL, real_DL in documents_by_length(batch["documents"]):
        counts = real_DL.sum(1)
        assert counts.max() == slots_DL.shape[1] < 2 * counts.min()
        for slot_L, real_L in zip(slots_DL, real_DL, strict=True):
            slots += slot_L[real_L].tolist()
            found.append(batch["input_ids"].flatten()[slot_L[real_L]].tolist())
    assert sorted(found) == sorted(texts)
    assert sorted(slots) == (batch["documents"].flatten() >= 0).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("family", KINDS)
def test_states_of_a_document_are_those_of_the_document_alone(family: str) -> None:
    model = random_model(family, **RECURRENT[family])
    rows, texts = packed(LENGTHS)
    batch = rows.batch(range(len(rows)))
    layers = (0, 1, 2)
    found = states_of(model.get_decoder(), batch, layers)
    torch.testing.assert_close(hidden_states(model, batch), found[-1])
    for text in texts:
        at = next(
            (row, slot)
            for row in range(len(rows))
            for slot in range(16)
            if rows.ids_RS[row, slot : slot + len(text)].tolist() == text
        )
        own = model.get_decoder()(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        for layer, state_RSH in zip(layers, found, strict=True):
            there_LH = state_RSH[at[0], at[1] : at[1] + len(text)]
            torch.testing.assert_close(there_LH, own[layer][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", KINDS)
def test_why_a_mask_is_not_enough(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(family, **RECURRENT[family])
    rows, _ = packed(LENGTHS)
    batch = rows.batch(range(len(rows)))
    right_RSH = hidden_states(model, batch)
    monkeypatch.setattr("draftsmith.trainers.packed.passes.is_recurrent", lambda _: False)
    masked_RSH = hidden_states(model, batch)
    first, later = batch["documents"] == 0, batch["documents"] > 0
    torch.testing.assert_close(masked_RSH[first], right_RSH[first], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(masked_RSH[later], right_RSH[later], atol=1e-3)


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_the_documents(family: str) -> None:
    model = random_model(family, **RECURRENT[family]).requires_grad_(True)
    rows, texts = packed(LENGTHS)
    batch = rows.batch(range(len(rows)))
    # no squares: behind a norm their sum is a constant, whose gradient is rounding
    weight_H = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    (hidden_states(model, batch) @ weight_H).sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    for text in texts:
        (model.get_decoder()(torch.tensor([text]), use_cache=False).last_hidden_state @ weight_H).sum().backward()
    for name, each in model.named_parameters():
        if each.grad is not None:
            largest = float(each.grad.abs().max())
            torch.testing.assert_close(found[name], each.grad, rtol=0, atol=1e-4 * largest)


def test_a_model_in_pieces_is_refused() -> None:
    model = random_model("lfm2", **RECURRENT["lfm2"])
    next(model.parameters()).ds_id = 0
    with pytest.raises(RequestError, match="recurrent layers, which run document by document.*zero2"):
        hidden_states(model, packed(LENGTHS)[0].batch([0]))


@pytest.mark.parametrize("family", KINDS)
def test_texts_that_models_write_for_training_begin_at_their_own_prompts(family: str) -> None:
    model = random_model(family, **RECURRENT[family])
    prompts = [[5], [7, 3, 50, 9, 22], [4, 5]]
    warper, uniforms = Warper(0.0), Uniforms(0, [0, 1, 2], torch.device("cpu"))
    found = write([ready(model)], [1.0], prompts, warper=warper, max_new_tokens=12, uniforms=uniforms)
    assert found == [own_text(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "eagle3", "distill"])
@pytest.mark.parametrize("family", KINDS)
def test_the_loss_of_packed_rows_is_that_of_their_documents(family: str, method: str) -> None:
    """A draft model that is trained is recurrent itself, with another's weights."""
    model = random_model(family, **RECURRENT[family])
    rows, texts = packed(LENGTHS)
    goal = objective(method, model)

    def loss_of(batch: dict[str, torch.Tensor]) -> float:
        with torch.no_grad():
            return float(goal.module(batch, goal.prepare(batch))[0])

    alone = [packed([len(text)], len(text))[0] for text in texts]
    for row, text in zip(alone, texts, strict=True):
        row.ids_RS[0] = text
    wanted = sum(loss_of(row.batch([0])) for row in alone)
    assert loss_of(rows.batch(range(len(rows)))) == pytest.approx(wanted, rel=1e-4)


def objective(method: str, model: torch.nn.Module) -> Any:
    torch.manual_seed(0)
    if method == "distill":
        student = copy.deepcopy(model).requires_grad_(True)
        with torch.no_grad():
            for weight in student.parameters():
                weight.add_(0.02 * torch.randn(weight.shape))
        recipe = Recipe(method="distill", data=DataConfig(sequence_length=16))
        return DistillObjective(recipe, student, model, nothing)
    own = {
        "eagle": {"eagle": EagleConfig(ce=1.0, noise=0)},
        "eagle3": {"eagle3": Eagle3Config(passes=2, layers=(0, 1, 2))},
    }
    ids = range(VOCABULARY) if method == "eagle3" else None
    return build(method, model, data=DataConfig(sequence_length=16), ids=ids, **own.get(method, {}))
