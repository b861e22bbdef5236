"""EAGLE-3.1, the norms of `eagle3.feature_norms`: by hand, and in decoding as in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.eagle.family import load_eagle
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.eagle.proposer import Eagle3
from draftsmith.trainers import eagle3
from draftsmith.trainers.method_config import Eagle3Config
from draftsmith.trainers.teacher.frozen import Save, saver
from helpers.models.method_objectives import build
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11], [1, 2, 3]]
WORDS = [word for word in range(61) if word % 3 != 1]
DEPTH = 4


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def goal_for(target: Backbone, save: Save = lambda _m, _f: None) -> eagle3.Eagle3Objective:
    """An objective whose norms are not all ones, as training would leave them."""
    torch.manual_seed(0)
    config = Eagle3Config(passes=DEPTH, layers=(0, 1, 2), feature_norms=True)
    goal = build("eagle3", target.model, save, ids=WORDS, eagle3=config)
    with torch.no_grad():
        for name, parameter in goal.draft().named_parameters():
            if parameter.ndim == 1:
                assert "norm" in name
                parameter.uniform_(0.5, 1.5)
    return goal


def by_hand(x: Tensor, norm: torch.nn.Module, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.weight


@torch.no_grad()
def test_the_norms_by_hand(target: Backbone) -> None:
    net = goal_for(target).draft()
    assert isinstance(net, Eagle3Net)
    eps = net.config.eps
    states = [scale * torch.randn(2, 5, 32) for scale in (0.1, 1.0, 30.0)]
    normed = [by_hand(x, norm, eps) for x, norm in zip(states, net.fc_norm, strict=True)]
    wanted = torch.cat(normed, -1) @ net.fc.weight.T
    torch.testing.assert_close(net.fuse(torch.cat(states, -1)), wanted, atol=1e-5, rtol=1e-5)
    residual, attended = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    layer, inner = net.midlayer, residual + attended
    raw = inner + layer.mlp(layer.post_attention_layernorm(inner))
    out = net.finish(residual, attended)
    torch.testing.assert_close(out, by_hand(raw, net.norm, eps), atol=1e-5, rtol=1e-5)
    # what is fed back is what the head reads: the norm is applied once
    torch.testing.assert_close(net.head(out), out @ net.lm_head.weight.T)


class Watched(Eagle3):
    """Keeps what it proposed and behind which texts."""

    def reset(self, prompts, room, *, static=False):  # noqa: ANN001, ANN201
        super().reset(prompts, room, static=static)
        self.seen: list[Proposal] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        self.seen.append(super().propose(last_B, warper, uniforms))
        return self.seen[-1]


@torch.inference_mode()
def test_decoding_and_training_see_the_same_distributions(target: Backbone) -> None:
    """The first proposal of three prompts in a batch = the same texts packed into one row."""
    goal = goal_for(target)
    net = goal.draft().eval()
    assert isinstance(net, Eagle3Net)
    warper = Warper(1.0)
    drafter = Watched(net, target, tree="chain", draft_length=DEPTH)
    done = generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=8)
    first = drafter.seen[0]
    texts = [
        [*prompt, tokens[0], *first.tokens_BN[row, 1:].tolist()]
        for row, (prompt, tokens) in enumerate(zip(PROMPTS, done.tokens, strict=True))
    ]
    rows = {
        "input_ids": torch.tensor([sum(texts, [])]),
        "positions": torch.tensor([[at for text in texts for at in range(len(text))]]),
        "documents": torch.tensor([[n for n, text in enumerate(texts) for _ in text]]),
    }
    teacher_output = goal.prepare(rows)
    outputs = net.unroll(
        net.fuse(teacher_output.fused_RSF), teacher_output.embeds_RSH, rows["positions"], rows["documents"], DEPTH
    )
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 2 - DEPTH
    assert first.q_BNV is not None
    for depth, out in enumerate(outputs):
        logits = torch.full((3, 61), -torch.inf)
        logits[:, WORDS] = net.head(out[0, ends])
        torch.testing.assert_close(first.q_BNV[:, depth], warper(logits), atol=1e-5, rtol=1e-4)


def test_it_learns_exports_and_decodes_exactly(tmp_path: Path) -> None:
    target = make_target("qwen3")
    with torch.no_grad():  # one that prefers some tokens clearly
        target.model.model.norm.weight.mul_(3)
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    goal = goal_for(target, saver(target, "eagle3"))
    ids = torch.randint(0, 61, (4, 24), generator=torch.Generator().manual_seed(1))
    rows = {
        "input_ids": ids,
        "loss_mask": torch.ones_like(ids, dtype=torch.bool),
        "positions": torch.arange(24).expand(4, -1),
        "documents": torch.zeros_like(ids),
    }
    optimizer = torch.optim.AdamW(goal.module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss, _ = goal.module(rows, goal.prepare(rows))
        loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in goal.draft().parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    goal.export(tmp_path / "drafter")
    loaded = load_eagle(tmp_path / "drafter", target, tree="dynamic", top_k=4, nodes=12)
    names = set(loaded.module.state_dict())
    assert {f"fc_norm.{i}.weight" for i in range(3)} <= names
    base = autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=16)
    own = generate(target, loaded, PROMPTS, warper=Warper(0.0), max_new_tokens=16)
    assert own.tokens == base.tokens


def test_checkpoints_from_before_the_norms_have_none(tmp_path: Path) -> None:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    config = Eagle3Config(layers=(0, 1, 2))
    goal = build("eagle3", target.model, saver(target, "eagle3"), ids=WORDS, eagle3=config)
    goal.export(tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    entry = json.loads(path.read_text())
    assert entry["draftsmith"]["settings"].pop("feature_norms") is False
    path.write_text(json.dumps(entry))
    loaded = load_eagle(tmp_path / "drafter", target)
    assert isinstance(loaded.module, Eagle3Net)
    assert loaded.module.config.feature_norms is False
    assert not any(name.startswith("fc_norm") for name in loaded.module.state_dict())
