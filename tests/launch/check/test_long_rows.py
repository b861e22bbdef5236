"""Long rows of what has masks behind its text: the pre-flight's estimate is what a step holds, flat for each token."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from conftest import VOCABULARY
from draftsmith.benchmarks.common.peak import peak_bytes
from draftsmith.benchmarks.row_memory import one_row, step
from draftsmith.launch.check.memory import needs
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import MASKED, ModelConfig
from draftsmith.trainers.student.architecture import fresh_model
from helpers.models.method_objectives import objective_of

SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "head_size": 16}
SECTIONS: dict[str, dict[str, Any]] = {
    "pard": {"model": SIZES, "pard": {"drafts": 3}},
    "peagle": {"peagle": {"depths": 3, "decoder_layers": 2, "layers": [1, 2, 3], "vocabulary": 32}},
}


def target_of(tokens: int) -> Any:
    torch.manual_seed(0)
    sizes = ModelConfig(architecture="llama", **SIZES | {"layers": 4, "max_positions": tokens})
    return fresh_model(sizes, vocabulary=VOCABULARY, eos=None).eval()


def recipe_of(method: str, tokens: int) -> Recipe:
    loop = {"micro_rows": 1, "precision": "fp32"}
    objective = {"chunk": 64}
    return Recipe.model_validate(
        {"method": method, "data": {"sequence_length": tokens}, "loop": loop, "objective": objective}
        | SECTIONS[method]
    )


def estimated_and_held(method: str, tokens: int) -> tuple[float, float]:
    """Bytes for each token of a row: by the pre-flight, gradients with them, and the most that a step held."""
    recipe, target = recipe_of(method, tokens), target_of(tokens)
    goal = objective_of(recipe, target, ids=range(0, VOCABULARY, 2))
    batch = one_row(tokens, 2, "cpu")
    batch["input_ids"] %= VOCABULARY - 1
    held = peak_bytes(partial(step, goal, batch, goal.prepare(batch)), "cpu")
    need = needs(recipe, goal.draft(), target)
    gradient = 4.0 * sum(each.numel() for each in goal.draft().parameters() if each.requires_grad)
    return (need["activations"] + need["a chunk of logits"] + gradient) / tokens, held / tokens


@pytest.mark.parametrize("method", SECTIONS)
def test_a_token_takes_the_same_and_the_estimate_says_so(method: str) -> None:
    short, long = (estimated_and_held(method, tokens) for tokens in (MASKED + 64, 3 * MASKED // 2))
    print(method, short, long)
    assert long[1] == pytest.approx(short[1], rel=0.05)
    for estimate, held in (short, long):
        assert 1 <= estimate / held < 1.6, (estimate, held)


@pytest.mark.parametrize("method", SECTIONS)
def test_with_a_mask_it_would_grow(method: str) -> None:
    """Rows up to the limit have one, and are counted with it."""
    masks = {
        tokens: recipe_of(method, tokens).record.memory.mask(recipe_of(method, tokens))
        for tokens in (512, 1024, MASKED)
    }
    assert masks[1024] == pytest.approx(2 * masks[512], rel=0.1)
    assert masks[MASKED] == pytest.approx(2 * masks[1024], rel=0.1)
    assert recipe_of(method, MASKED + 1).record.memory.mask(recipe_of(method, MASKED + 1)) == 0
