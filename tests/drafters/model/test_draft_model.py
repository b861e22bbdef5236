"""The module that is trained is the module that decodes; checkpoints fit their target or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.folder import save_draft_model
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from helpers.models.recording_draft import Watched, teacher_forced
from helpers.models.small_drafters import change_target_of

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3]]
WORDS = ["abc def ghi jkl mno pqr\n"] * 5


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@torch.inference_mode()
def test_training_and_decoding_see_the_same_logits(architecture: str) -> None:
    """Step-j distribution of drafting = teacher-forced distribution at the same place, in a batch and packed."""
    target = make_target(architecture)
    base = make_drafter(target, noise=0.1)
    drafter = Watched(base.backbone, target.vocabulary, draft_length=3)
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=16)
    assert len(drafter.seen) > 4
    for known, proposal in drafter.seen:
        assert proposal.q_BNV is not None
        drafted = proposal.tokens_BN.tolist()
        texts = [past + row for past, row in zip(known, drafted, strict=True)]
        for row, logits in enumerate(teacher_forced(drafter.module, texts)):
            here = logits[len(known[row]) : -1].softmax(-1)
            torch.testing.assert_close(proposal.q_BNV[row, :-1], here, atol=1e-5, rtol=1e-4)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Backbone, DraftModel, Path]:
    """A target with a tokenizer, a drafter for it, and the drafter saved."""
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(WORDS, 300)
    drafter = make_drafter(target)
    save_draft_model(drafter.module, tmp_path / "drafter", target)
    return target, drafter, tmp_path / "drafter"


def test_a_saved_drafter_drafts_the_same(pair: tuple[Backbone, DraftModel, Path]) -> None:
    target, drafter, folder = pair
    loaded = load_drafter(folder, target, draft_length=drafter.draft_length)
    for temperature in (0.0, 1.0):
        how = {"warper": Warper(temperature), "max_new_tokens": 20, "seed": 3}
        one = generate(target, drafter, PROMPTS, **how)
        two = generate(target, loaded, PROMPTS, **how)
        assert one.tokens == two.tokens
        assert one.origin == two.origin


def test_the_folder_is_a_model_of_transformers(pair: tuple[Backbone, DraftModel, Path]) -> None:
    """Safetensors, a card, a tokenizer, and nothing pickled."""
    from transformers import AutoModelForCausalLM

    _, drafter, folder = pair
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(model(ids).logits, drafter.module(ids).logits)


@pytest.mark.parametrize("field", ["tokenizer", "vocabulary", "hidden_size"])
def test_another_target_is_refused_by_field(field: str, pair: tuple[Backbone, DraftModel, Path]) -> None:
    target, _, folder = pair
    change_target_of(folder, field)
    with pytest.raises(RequestError, match=f"with {field}"):
        load_drafter(folder, target)


def test_what_is_no_drafter_is_refused(pair: tuple[Backbone, DraftModel, Path], tmp_path: Path) -> None:
    target, _, folder = pair
    with pytest.raises(RequestError, match=r"config\.json is missing"):
        load_drafter(tmp_path / "nowhere", target)
    config = json.loads((folder / "config.json").read_text())
    config["draftsmith"]["family"] = "oracle"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="family 'oracle'"):
        load_drafter(folder, target)
    del config["draftsmith"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="does not describe a drafter"):
        load_drafter(folder, target)
