"""A draft for a target: which tokenizers fit, padded vocabularies, learning in a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model.draft_model import DraftModel, fit_vocabulary
from draftsmith.errors import RequestError
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.student.architecture import fresh_model
from draftsmith.trainers.student.draft import draft_model
from helpers.models.method_objectives import build
from transformers import PreTrainedTokenizerFast

SMALL = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=256)
WORDS = ["the quick brown fox asks and a lazy dog answers\n"] * 20


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(WORDS, 300)


def saved(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: int) -> str:
    torch.manual_seed(0)
    fresh_model(SMALL, vocabulary=rows, eos=None).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def batch(rows: int = 4, length: int = 16, vocabulary: int = 61) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, vocabulary, (rows, length), generator=g),
        "loss_mask": torch.ones(rows, length, dtype=torch.bool),
        "positions": torch.arange(length).expand(rows, -1),
        "documents": torch.zeros(rows, length, dtype=torch.long),
    }


def test_another_tokenizer_is_refused_by_its_first_token(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    other = train_tokenizer(["zebras zigzag zealously\n"] * 20, 300)
    place = saved(tmp_path, other, 300)
    target = fresh_model(SMALL, vocabulary=300, eos=None)
    with pytest.raises(RequestError, match="has another tokenizer than the target: token"):
        draft_model(SMALL.model_copy(update={"start_from": place}), target, tokenizer)


def test_too_small_a_head_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    place = saved(tmp_path, tokenizer, len(tokenizer) - 5)
    target = fresh_model(SMALL, vocabulary=300, eos=None)
    with pytest.raises(RequestError, match="cannot say all of them"):
        draft_model(SMALL.model_copy(update={"start_from": place}), target, tokenizer)


@pytest.mark.parametrize("rows", [300, 320, 384])
def test_padded_heads_train(rows: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Draft and target may pad differently: what has a token is compared, the rest is left out."""
    place = saved(tmp_path, tokenizer, rows)
    torch.manual_seed(1)
    target = fresh_model(SMALL, vocabulary=352, eos=None)
    goal = build("distill", target, tokenizer=tokenizer, model=SMALL.model_copy(update={"start_from": place}))
    data = batch(vocabulary=len(tokenizer))
    loss, terms = goal.module(data, goal.prepare(data))
    loss.backward()
    assert torch.isfinite(loss)
    assert float(terms["kl"]) > 0


@pytest.mark.parametrize("rows", [61, 64, 80])
def test_padded_heads_decode(rows: int) -> None:
    """Whatever the draft's head is padded to, output is the target's own, and never padding."""
    target = make_target("qwen3")
    torch.manual_seed(3)
    draft = Backbone(fresh_model(SMALL, vocabulary=rows, eos=None).eval(), name="draft")
    drafter = DraftModel(draft, target.vocabulary, draft_length=3)
    prompts = [[5, 9, 2], [7]]
    own = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=16)
    base = autoregressive(target, prompts, warper=Warper(0.0), max_new_tokens=16)
    assert own.tokens == base.tokens
    sampled = generate(target, drafter, prompts, warper=Warper(1.0), max_new_tokens=16)
    assert max(max(row) for row in sampled.tokens) < target.vocabulary


def test_a_token_that_one_side_lacks_has_no_probability() -> None:
    logits = torch.randn(2, 5)
    assert fit_vocabulary(logits, 3).shape == (2, 3)
    wide = fit_vocabulary(logits, 8)
    assert wide.shape == (2, 8)
    assert (wide.softmax(-1)[:, 5:] == 0).all()


def test_nothing_to_learn_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    target = fresh_model(SMALL, vocabulary=300, eos=None)
    with pytest.raises(RequestError, match="nothing would be learnt"):
        build("distill", target, tokenizer=tokenizer, model=SMALL, objective=ObjectiveConfig(kl=0, ce=0))


def test_sizes_are_derived_from_the_target(tokenizer: PreTrainedTokenizerFast) -> None:
    """Fewer layers and half the width, where the recipe says nothing."""
    torch.manual_seed(0)
    sizes = ModelConfig(layers=8, hidden=64, heads=4, kv_heads=2, head_size=16, max_positions=128)
    target = fresh_model(sizes, vocabulary=300, eos=None)
    config = draft_model(ModelConfig(), target, tokenizer).config
    assert (config.num_hidden_layers, config.hidden_size) == (2, 32)
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (16, 300, 128)


def test_the_frozen_target_gets_no_gradient(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    target = fresh_model(SMALL, vocabulary=300, eos=None)
    goal = build("distill", target, tokenizer=tokenizer, model=SMALL)
    data = batch(vocabulary=len(tokenizer))
    goal.module(data, goal.prepare(data))[0].backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert any(parameter.grad is not None for parameter in goal.module.parameters())
    names = {id(parameter) for parameter in goal.module.parameters()}
    assert not names & {id(parameter) for parameter in target.parameters()}
