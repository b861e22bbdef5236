"""Models that read images too, on text alone: decoded and learnt from as `transformers` runs them on text."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY
from draftsmith.benchmarks.common.random_models import SEEING, random_model
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import skeleton
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import Tree
from draftsmith.drafters.lookup.prompt_lookup import PromptLookup
from draftsmith.drafters.projection import check_logits
from draftsmith.errors import RequestError
from helpers.models.random_models import own_text, ready
from transformers import AutoConfig, PreTrainedModel

PROMPTS = [[7, 3, 50, 9, 22, 3, 50], [4, 5, 60, 7]]
TREE = Tree((-1, 0, 0, 1, 1, 2, 4))


@lru_cache
def seeing(family: str) -> PreTrainedModel:
    return random_model(family)


@pytest.mark.parametrize("family", SEEING)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    model = seeing(family)
    target = ready(model)
    wanted = [own_text(model, prompt, 16) for prompt in PROMPTS]
    assert len(set(wanted[0])) > 3
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 16}
    assert [list(row) for row in autoregressive(target, PROMPTS, **how).tokens] == wanted
    assert [list(row) for row in generate(target, PromptLookup(), PROMPTS, **how).tokens] == wanted


@pytest.mark.parametrize("family", SEEING)
@torch.no_grad()
def test_a_tree_is_read_path_by_path(family: str) -> None:
    model = seeing(family)
    target: Backbone = ready(model)
    kv_cache = KVCache(1, 40, rollback=len(TREE))
    target.prefill(PROMPTS[:1], kv_cache)
    tokens_1N = torch.randint(0, VOCABULARY, (1, len(TREE)), generator=torch.Generator().manual_seed(1))
    found = target.forward(tokens_1N, torch.tensor([len(PROMPTS[0])]), TREE, kv_cache)
    for node in range(len(TREE)):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(tokens_1N[0, at]))
            at = TREE.parents[at]
        own = model(torch.tensor([PROMPTS[0] + path])).logits[0, -1]
        torch.testing.assert_close(found[0, node], own, rtol=1e-4, atol=1e-4)
    check_logits(target.model)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_it_is_read_from_a_folder(family: str, tmp_path: Path) -> None:
    seeing(family).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    read = load_target(str(tmp_path))
    ids = torch.tensor(PROMPTS[:1])
    torch.testing.assert_close(read.model(ids).logits, seeing(family)(ids).logits, rtol=1e-4, atol=1e-4)


def test_others_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="llava_next is no causal LM.*qwen2_5_vl, qwen3_vl are decoded on text"):
        skeleton(AutoConfig.for_model("llava_next"))
