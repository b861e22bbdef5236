"""Exported drafters in vLLM beside targets of other families: of random weights, so nothing is trained.

What differs is what an engine is told of the target: Llama's config has no kinds of layers, Granite scales its logits.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.block.net import BlockNet
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import replace_folder
from draftsmith.trainers.teacher.frozen import saver
from engines.engine import MOST_TOKENS, NEEDED, Asked, Vllm
from engines.exported import exported
from engines.measured import Prompts, first_drafts, greedy
from helpers.models.random_models import random_model

pytestmark = NEEDED
K, REPEATS = 4, 2
SIZES: dict[str, Any] = {
    **{"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512},
    **{"bos_token_id": None, "eos_token_id": None},
}
TARGETS: dict[str, dict[str, Any]] = {"llama": {}, "granite": {"logits_scaling": 8.0}}
NETS = {
    "mtp": MtpNet.for_target,
    "dflash": lambda model: BlockNet.for_target(
        model, layers=(2, 4, 6), decoder_layers=2, size=K + 1, layout="fill-in", causal=False, mask_token=None
    ),
}


def saved(place: Path, architecture: str) -> Backbone:
    """A target with the embedded one's tokenizer."""
    shutil.copytree(embedded_target(), place, ignore=lambda _, names: [n for n in names if not n.startswith("token")])
    torch.manual_seed(3)
    random_model(architecture, **SIZES, **TARGETS[architecture]).save_pretrained(place)
    return load_target(str(place))


@pytest.mark.parametrize(("architecture", "family"), [("llama", "mtp"), ("granite", "mtp"), ("granite", "dflash")])
def test_beside_another_target(architecture: str, family: str, vllm: Vllm, prompts: Prompts, tmp_path: Path) -> None:
    target = saved(tmp_path / "target", architecture)
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text(load_recipe(f"{family}-tiny", [("target.path", str(tmp_path / "target"))]).yaml())
    torch.manual_seed(1)
    net = NETS[family](target.model)
    replace_folder(run / "drafter", lambda folder: saver(target, family)(net, folder))
    command = exported(run, "vllm", tmp_path / "export")
    drafter = load_drafter(run / "drafter", target, draft_length=K, config=DrafterConfig())
    ours = greedy(target, drafter, prompts, MOST_TOKENS)
    share = first_drafts(target, drafter, prompts, MOST_TOKENS, repeats=REPEATS)
    asked = [Asked(prompts, 0.0), Asked(list(prompts) * REPEATS, 1.0)]
    cold, warm = vllm.serve(command.model, command.config, asked, command.of_target).runs
    assert cold.tokens == ours.tokens
    assert (cold.drafts, cold.accepted) == (ours.steps, ours.accepted)
    low, high = share.interval(len(prompts) * REPEATS)
    assert 0 < low <= warm.accepted[0] / warm.drafts <= high
