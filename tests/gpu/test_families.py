"""Recurrent, windowed, mixture-of-experts and quantised targets write on the device what transformers writes there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_drafter
from draftsmith.benchmarks.common.random_models import EXPERTS, GROUPED, RECURRENT, WINDOWED
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from helpers.models.random_models import own_text, random_model, ready, skip_unknown

GREEDY = Warper(0.0)
# four windows of eight tokens: one prompt has left the first already, the other leaves it in its answer
PROMPTS = [[(7 * n * n + 3) % VOCABULARY for n in range(21)], [7, 3, 50, 9, 22]]
NEW = 24
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": GROUPED | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": GROUPED | EXPERTS | {"num_experts": 4},
}
FAMILIES = RECURRENT | {name: GROUPED | settings for name, settings in WINDOWED.items()} | MIXTURES


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str, device: torch.device) -> None:
    skip_unknown(family)
    model = random_model(family, **FAMILIES[family])
    draft = make_drafter(ready(model), noise=0.03)
    draft.backbone.model.to(device)
    model.to(device)
    own = [own_text(model, prompt, NEW) for prompt in PROMPTS]
    assert max(len(set(text)) for text in own) > 2  # not by repeating one token
    target = ready(model)
    assert target.device.type == device.type
    assert autoregressive(target, PROMPTS, warper=GREEDY, max_new_tokens=NEW).tokens == own
    done = generate(target, draft, PROMPTS, warper=GREEDY, max_new_tokens=NEW, static=True)
    assert done.tokens == own
    assert {"draft", "correction"} <= set(sum(done.origin, []))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_greedy_text_of_fewer_bits_is_that_of_transformers(
    bits: str, served_folder: Path, device: torch.device
) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    target = load_target(str(served_folder), quantization=bits, device=str(device))
    plain = copy.deepcopy(target.model)
    plain.set_attn_implementation("sdpa")
    prompts = [[5, 9, 2, 33, 7, 9, 2], [11, 4], [1, 2, 3]]
    own = [own_text(plain, prompt, NEW) for prompt in prompts]
    assert [list(row) for row in autoregressive(target, prompts, warper=GREEDY, max_new_tokens=NEW).tokens] == own
    done = generate(target, PromptLookup(device=device), prompts, warper=GREEDY, max_new_tokens=NEW, static=True)
    assert [list(row) for row in done.tokens] == own
