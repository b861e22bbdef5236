"""An MTP module: one step as a target's own module takes it, and every later one in decoding as in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import LAST, UNNORMED, HiddenStates, decoder_of
from draftsmith.decoding.backbone.kv_cache import KVCache
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.layers.passes import Passes
from draftsmith.drafters.layers.true_states import TrueStates
from draftsmith.drafters.mtp.family import Mtp
from draftsmith.drafters.mtp.layers import MtpShape
from draftsmith.drafters.mtp.net import MtpNet
from helpers.models.random_models import random_model, ready
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11], [1, 2, 3]]
DEPTH = 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
KINDS: list[dict[str, Any]] = [
    {},
    {"state": "before"},
    {"gated": True, "rotary": 4},
    {"query_norm": False, "bias": True, "blank_first": True},
]


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def net_for(target: Backbone, **chosen: Any) -> MtpNet:
    """A module whose guesses are right now and then: the state that it was given, shaken."""
    torch.manual_seed(0)
    shape = MtpShape(**({**vars(MtpShape.of(target.model.config))} | chosen))
    net = MtpNet(shape)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        net.fc.weight[:, shape.hidden :] += torch.eye(shape.hidden)
    return net.eval().requires_grad_(False)


def states_of(target: Backbone, text: list[int], number: int) -> Tensor:
    """A state of every token of a text, [S, H], by hand: what goes into the last norm, or comes out of it."""
    seen: list[Tensor] = []
    norm = target.model.model.norm
    hook = norm.register_forward_hook(lambda _norm, given, out: seen.append(given[0] if number == UNNORMED else out))
    try:
        with torch.no_grad():
            target.model(torch.tensor([text]), use_cache=False)
    finally:
        hook.remove()
    return seen[-1][0]


def own_forward(net: MtpNet, state_NH: Tensor, embed_NH: Tensor) -> Tensor:
    """The module written out by its formulas, one causal pass over N pairs; what is fed back, [N, H]."""
    shape, layer, N = net.config, net.layer, len(state_NH)
    if shape.blank_first:
        embed_NH = torch.cat((torch.zeros_like(embed_NH[:1]), embed_NH[1:]))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + shape.eps).sqrt() * weight

    def heads(x: Tensor) -> Tensor:
        return x.view(N, -1, shape.head_size).transpose(0, 1)

    def turn(x: Tensor) -> Tensor:
        half = shape.rotary // 2
        angle = torch.arange(N)[:, None] / shape.rope_theta ** (torch.arange(half) / half)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest), -1)

    pair = torch.cat(
        (norm(embed_NH, net.pre_fc_norm_embedding.weight), norm(state_NH, net.pre_fc_norm_hidden.weight)), -1
    )
    x = pair @ net.fc.weight.T
    read = norm(x, layer.input_layernorm.weight)
    own = layer.self_attn
    query, key, value = heads(own.q_proj(read)), heads(own.k_proj(read)), heads(own.v_proj(read))
    if shape.query_norm:
        query, key = norm(query, own.q_norm.weight), norm(key, own.k_norm.weight)
    query, key = turn(query), turn(key)
    key, value = (each.repeat_interleave(shape.heads // shape.kv_heads, 0) for each in (key, value))
    score = query @ key.transpose(1, 2) / shape.head_size**0.5
    score = score.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf)
    out = (score.softmax(-1) @ value).transpose(0, 1).flatten(1)
    if shape.gated:
        out = out * own.gate_proj(read).sigmoid()
    x = x + out @ own.o_proj.weight.T
    mlp, inner = layer.mlp, norm(x, layer.post_attention_layernorm.weight)
    x = x + mlp.down_proj(F.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
    return x if shape.state == "before" else norm(x, net.norm.weight)


@pytest.mark.parametrize("chosen", KINDS, ids=[str(kind) for kind in KINDS])
@torch.no_grad()
def test_the_module_is_its_formulas(target: Backbone, chosen: dict[str, Any]) -> None:
    net, g = net_for(target, **chosen), torch.Generator().manual_seed(3)
    state, embed = torch.randn(2, 9, 32, generator=g)
    found = net(net.fuse(state[None]), embed[None], torch.arange(9)[None], None)[0]
    torch.testing.assert_close(found, own_forward(net, state, embed), **CLOSE)


def plain_logits(net: MtpNet, target: Backbone, state_NH: Tensor, tokens_N: Tensor) -> Tensor:
    """A module for one token, written out of torch's own parts: logits [N, V] behind every pair.

    Embedding, norms of both halves, the embedding's in front, projection, one decoder layer, norm, the target's head.
    """
    shape, layer, N = net.config, net.layer, len(state_NH)
    model: Any = target.model

    def norm(x: Tensor, of: Any) -> Tensor:
        return F.rms_norm(x, of.weight.shape, of.weight, shape.eps)

    def heads(x: Tensor, of: Any = None) -> Tensor:
        x = x.view(1, N, -1, shape.head_size)
        return (x if of is None else norm(x, of)).transpose(1, 2)

    def turn(x: Tensor) -> Tensor:
        angle = torch.arange(N)[:, None] * (1.0 / shape.rope_theta ** (torch.arange(0, D, 2) / D)).repeat(2)
        left, right = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()

    own, mlp, D = layer.self_attn, layer.mlp, shape.head_size
    embed_NH = model.get_input_embeddings()(tokens_N)
    pair = torch.cat((norm(embed_NH, net.pre_fc_norm_embedding), norm(state_NH, net.pre_fc_norm_hidden)), -1)
    x = F.linear(pair[None], net.fc.weight)
    read = norm(x, layer.input_layernorm)
    query, key = turn(heads(own.q_proj(read), own.q_norm)), turn(heads(own.k_proj(read), own.k_norm))
    out = F.scaled_dot_product_attention(query, key, heads(own.v_proj(read)), is_causal=N > 1, enable_gqa=True)
    x = x + own.o_proj(out.transpose(1, 2).flatten(2))
    inner = norm(x, layer.post_attention_layernorm)
    x = x + mlp.down_proj(F.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
    logits: Tensor = model.get_output_embeddings()(norm(x, net.norm))[0]
    return logits


@pytest.mark.parametrize("state", ["behind", "before"])
def test_one_application_is_the_plain_module_to_the_bit(target: Backbone, state: str) -> None:
    """What training unrolls once, in training's own products (with gradients), is a module for one token."""
    net, tokens = net_for(target, state=state), torch.tensor([5, 9, 2, 33, 7, 1, 60, 12, 12])
    states = states_of(target, tokens.tolist(), net.reads)
    (ours,) = Mtp(net, target, tree="chain", draft_length=1).teacher_forced(states, tokens, 1)
    plain = plain_logits(net, target, states[:-1], tokens[1:])[:-1]
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("state", ["behind", "before"])
def test_a_draft_of_one_token_is_the_plain_modules(target: Backbone, state: str) -> None:
    """Decoding one draft a step, whatever was accepted before: the plain module over the whole text."""
    net = net_for(target, state=state)
    drafter = decoded(target, net, depth=1)
    for texts, _, (drafted_BV,) in drafter.met:
        for row, text in enumerate(texts):
            plain = plain_logits(net, target, states_of(target, text, net.reads)[:-1], torch.tensor(text[1:]))
            torch.testing.assert_close(drafted_BV[row], plain[-1], rtol=0.0, atol=1e-5)


class Watched(Mtp):
    """Keeps the text of every row in front of each proposal, and the proposal."""

    def reset(self, prompts: Any, room: int, *, static: bool = False) -> None:
        super().reset(prompts, room, static=static)
        self.texts = [list(prompt) for prompt in prompts]
        self.met: list[tuple[list[list[int]], Proposal, list[Tensor]]] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        self.last, self.drafted = last_B.tolist(), []
        proposal = super().propose(last_B, warper, uniforms)
        texts = [[*text, last] for text, last in zip(self.texts, self.last, strict=True)]
        self.met.append((texts, proposal, self.drafted))
        return proposal

    def _logits(self, hidden_BNH: Tensor) -> Tensor:
        logits = super()._logits(hidden_BNH)
        if hasattr(self, "drafted"):
            self.drafted.append(logits[:, 0])
        return logits

    def observe(self, committed: Any) -> None:
        super().observe(committed)
        for row, count in enumerate(committed.count_B.tolist()):
            if count:
                self.texts[row] += [self.last[row], *committed.tokens_BE[row, : count - 1].tolist()]


def decoded(target: Backbone, net: MtpNet, depth: int = DEPTH) -> Watched:
    drafter = Watched(net, target, tree="chain", draft_length=depth)
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=14, seed=3)
    assert any(len(set(map(len, texts))) > 1 for texts, _, _ in drafter.met[1:])  # rows that accepted unlike counts
    return drafter


def forced_error(target: Backbone, drafter: Watched, net: MtpNet) -> float:
    """The largest difference between what was drafted and `teacher_forced` along the same text."""
    worst = 0.0
    plain = Mtp(net, target, tree="chain", draft_length=DEPTH)
    for texts, proposal, drafted in drafter.met:
        for row, text in enumerate(texts):
            whole = [*text, *proposal.tokens_BN[row, 1:].tolist()]
            features = states_of(target, whole, net.reads)
            forced = list(plain.teacher_forced(features, torch.tensor(whole), DEPTH))
            for depth, logits in enumerate(drafted):
                gap = logits[row] - forced[depth][len(text) - 2]
                worst = max(worst, float(gap.detach().abs().max()))
    return worst


@pytest.mark.parametrize("chosen", KINDS, ids=[str(kind) for kind in KINDS])
def test_what_is_trained_is_what_decodes(target: Backbone, chosen: dict[str, Any]) -> None:
    net = net_for(target, **chosen)
    assert forced_error(target, decoded(target, net), net) < 1e-5


def test_a_plain_causal_mask_in_training_is_found(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some trainers do it: a later pass attends to keys of its own pass, which drafting never sees."""
    net = net_for(target)
    drafter = decoded(target, net)
    monkeypatch.setattr(Passes, "later", lambda self, pairs, _sunk, _between: self.first(pairs))
    assert forced_error(target, drafter, net) > 0.1


@pytest.mark.parametrize("state", ["behind", "before"])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_greedy_text_is_the_targets(target: Backbone, state: str, tree: str) -> None:
    drafter = Mtp(net_for(target, state=state), target, tree=tree, draft_length=DEPTH, top_k=3, nodes=9)
    plain = autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=16)
    done = generate(target, drafter, PROMPTS, warper=Warper(0.0), max_new_tokens=16)
    assert done.tokens == plain.tokens
    assert sum(done.origin, []).count("draft") > 0


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_the_state_before_the_norm_is_what_goes_into_it(family: str) -> None:
    """By the target's own layers and by those that are computed in their place."""
    model = make_target("qwen3").model if family == "qwen3" else random_model(family)
    states = HiddenStates((UNNORMED, LAST), model.config.num_hidden_layers)
    ids = torch.tensor([[5, 9, 2, 33]])
    with torch.no_grad(), states.taken_from(decoder_of(model)):
        model(ids, use_cache=False)
    before, behind = states.in_order
    norm = decoder_of(model).norm if family == "qwen3" else decoder_of(model).final_layer_norm
    with torch.no_grad():
        torch.testing.assert_close(norm(before), behind)
    assert not torch.allclose(before, behind, atol=1e-3)
    backbone, seen = ready(model), []
    backbone.prefill([[5, 9, 2, 33]], KVCache(1, 8), layers=(UNNORMED,), features=seen)
    torch.testing.assert_close(seen[0], before[0], rtol=1e-4, atol=1e-5)


def test_a_state_that_is_stale_after_a_rejection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module drafts on from its own states where the target's are known: losslessness stays, acceptance falls."""
    target, net = make_target("qwen3"), net_for(make_target("qwen3"))
    honest = forced_error(target, decoded(target, net), net)
    observe = TrueStates.observe

    def stale(self: TrueStates, committed: Any) -> None:
        assert committed.features_BNF is not None
        observe(self, replace(committed, features_BNF=committed.features_BNF.roll(1, 1)))

    monkeypatch.setattr(TrueStates, "observe", stale)
    assert forced_error(target, decoded(target, net), net) > 100 * honest
