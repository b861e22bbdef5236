"""EAGLE-3 drafters that the code of speculators writes: read here, they make the logits of its own forward pass.

Wants that package in a folder of its own, as `pip install --no-deps --target FOLDER speculators hs-connectors` puts it
there, named by `DRAFTSMITH_SPECULATORS`; 0.9.0 ran. Read next: `test_logits.py`, the same against networks of the tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.registry import load_drafter
from helpers.models.published_forms import HEADS, HIDDEN, INNER, KV, SIZE, VOCABULARY, WORDS, known, offsets
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

PLACE = os.environ.get("DRAFTSMITH_SPECULATORS", "")
pytestmark = pytest.mark.skipif(not PLACE, reason="needs the package of speculators: DRAFTSMITH_SPECULATORS")
TOKENS, STATES = [5, 9, 2, 33, 7, 60, 11, 1, 48, 20, 4, 8], (1, 4, 6)


@pytest.fixture
def speculators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its EAGLE-3, run as it is written, without a compiler."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(PLACE)
    from speculators.models import eagle3

    with torch.compiler.set_stance("force_eager"):
        yield eagle3
    for name in set(sys.modules) - before:
        if name.startswith(("speculators", "hs_connectors")):
            del sys.modules[name]


KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "a layer of Llama": (LlamaConfig, {}),
    "a layer of Qwen3": (Qwen3Config, {}),
    "a residual behind the norm": (LlamaConfig, {"norm_before_residual": True}),
    "a norm in front of fc": (Qwen3Config, {"norm_before_fc": True}),
    "3.1": (LlamaConfig, {"fc_norm": True, "norm_output": True}),
    "a norm of what is fed back": (LlamaConfig, {"norm_output": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_speculators_writes_has_its_logits(kind: str, deep: Backbone, tmp_path: Path, speculators: Any) -> None:
    made = _made(kind, deep, speculators)
    made.save_pretrained(tmp_path / "d")
    seen: list[Tensor] = []
    made.lm_head.register_forward_hook(lambda _module, _given, out: seen.append(out[0].detach()))
    ids = torch.tensor([TOKENS])
    states = deep.model(ids, output_hidden_states=True).hidden_states
    features_1SF = torch.cat([states[number] for number in STATES], -1)
    with torch.no_grad():  # beside the state of t it is given the token behind t
        made(features_1SF[:, :-1], ids[:, 1:], torch.zeros_like(ids[:, 1:]), ttt_steps=2)
    drafter: Any = load_drafter(tmp_path / "d", deep, draft_length=3)
    mine = list(drafter.teacher_forced(features_1SF[0], ids[0], 2))
    assert len(mine) == len(seen) == 2
    for depth, (own, theirs) in enumerate(zip(mine, seen, strict=True)):
        rows = len(TOKENS) - 2 - depth
        torch.testing.assert_close(own[:rows, WORDS], theirs[:rows], rtol=2e-4, atol=2e-4)


def _made(kind: str, deep: Backbone, speculators: Any) -> Any:
    """A drafter of random weights, of their class."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config, flags = KINDS[kind]
    layer = config(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=SIZE,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    beside = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=deep.name, architectures=["Qwen3ForCausalLM"]),
    )
    net = speculators.Eagle3DraftModel(
        speculators.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=len(WORDS),
            eagle_aux_hidden_state_layer_ids=list(STATES),
            speculators_config=beside,
            **flags,
        )
    ).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
        net.embed_tokens.weight.copy_(deep.model.get_input_embeddings().weight)
        net.d2t.copy_(offsets(WORDS))
        net.t2d.copy_(known(WORDS))
    return net
