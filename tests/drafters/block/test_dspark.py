"""DSpark's walk: each draft from the distribution that training has behind the same tokens, and lossless."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import SharedStream, Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.dspark import DSpark, DSparkNet
from draftsmith.drafters.block.net import BlockNet, BlockShape
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.temperatures import at_depth
from draftsmith.trainers.losses.chunked import Added
from helpers.models.small_drafters import small_dspark_net
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11], [1, 2, 3]]


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def net_for(target: Backbone, **chosen: Any) -> DSparkNet:
    torch.manual_seed(0)
    net = small_dspark_net(target.model, **chosen)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return net.requires_grad_(False).eval()


class Watched(DSpark):
    """DSpark that keeps the product of each block's slots, and what was drafted."""

    def reset(self, prompts: Any, room: int, *, static: bool = False) -> None:
        super().reset(prompts, room, static=static)
        self.seen: list[tuple[Tensor, Proposal]] = []

    def _block(self, last_B: Tensor) -> Tensor:
        self.out_BKH = super()._block(last_B)
        return self.out_BKH

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        self.seen.append((self.out_BKH, proposal))
        return proposal


def trained_logits(drafter: DSpark, target: Backbone, out_BKH: Tensor, tokens_BN: Tensor) -> Tensor:
    """As the loss makes them of the same slots, the tokens in front of drafts being the drafted ones."""
    added = Added(*drafter.net.behind(tokens_BN[:, :-1].flatten()))  # type: ignore[misc]
    head: Any = target.model.get_output_embeddings()
    product = head(out_BKH.flatten(0, 1)).float() + added.part(slice(None), torch.float32)
    return product.view(*out_BKH.shape[:2], -1)


@pytest.mark.parametrize("warper", [Warper(1.0), Warper(0.7, top_p=0.9)], ids=str)
@torch.inference_mode()
def test_each_draft_knows_the_one_in_front_of_it(warper: Warper, target: Backbone) -> None:
    drafter = Watched(net_for(target), target, factors=(1.0, 0.5))
    generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=12)
    assert len(drafter.seen) > 2
    for out_BKH, proposal in drafter.seen:
        assert proposal.sampling is DraftSampling.IID
        assert proposal.q_BNV is not None
        logits_BKV = trained_logits(drafter, target, out_BKH, proposal.tokens_BN)
        for k, logits_BV in enumerate(logits_BKV.unbind(1)):
            q_BV = at_depth(warper, drafter.factors, k)(logits_BV)
            torch.testing.assert_close(proposal.q_BNV[:, k], q_BV, rtol=0.0, atol=1e-5)


@torch.inference_mode()
def test_drafts_are_drawn_from_what_is_declared_behind_each_prefix(target: Backbone) -> None:
    """Counts of pairs against q of the first times q of the second behind that first."""
    rows = 4_000
    net = net_for(target)
    drafter = DSpark(net, target, draft_length=2)
    drafter.reset([PROMPTS[0]] * rows, 4)
    states = target.model(torch.tensor([PROMPTS[0]]), output_hidden_states=True).hidden_states
    drafter.begin([torch.cat([states[layer] for layer in net.config.layers], -1)[0]] * rows)
    proposal = drafter.propose(torch.full((rows,), 8), Warper(1.0, top_k=3), SharedStream(3, rows))
    assert proposal.q_BNV is not None
    first, second = proposal.tokens_BN[:, 1], proposal.tokens_BN[:, 2]
    kinds = first.unique()
    assert len(kinds) > 1
    rows_of = {int(kind): proposal.q_BNV[(first == kind).nonzero()[0, 0], 1] for kind in kinds}
    one, other, *_ = rows_of.values()
    assert not torch.allclose(one, other, atol=1e-3)
    V = proposal.q_BNV.shape[-1]
    wanted = torch.zeros(V, V)
    for kind, q_V in rows_of.items():
        wanted[kind] = proposal.q_BNV[0, 0, kind] * q_V
    found = torch.bincount(first * V + second, minlength=V * V).view(V, V) / rows
    assert float((found - wanted).abs().sum()) / 2 < 0.05


def test_greedy_output_is_the_targets(target: Backbone) -> None:
    drafter = DSpark(net_for(target), target)
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 24}
    plain = autoregressive(target, PROMPTS, **how)
    for static in (False, True):
        assert generate(target, drafter, PROMPTS, static=static, **how).tokens == plain.tokens


@torch.inference_mode()
def test_teacher_forced_logits_stand_behind_the_texts_own_tokens(target: Backbone) -> None:
    """Of every depth the slots' product, and what the Markov head adds behind the token in front, to the bit."""
    net = net_for(target)
    text = [5, 9, 2, 33, 7, 1, 0, 60, 12]
    states = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    features_SF = torch.cat([states[layer] for layer in net.config.layers], -1)[0]
    rows = list(DSpark(net, target).teacher_forced(features_SF, torch.tensor(text), 3))
    assert [len(each) for each in rows] == [7, 6, 5]
    slots = list(DSpark(net, target)._forced(features_SF, torch.tensor(text), 3))
    head: Any = target.model.get_output_embeddings()
    for d, (logits_XV, out_XH) in enumerate(zip(rows, slots, strict=True)):
        in_front = torch.tensor(text[1 + d : 1 + d + len(out_XH)])
        assert torch.equal(logits_XV, head(out_XH) + net.markov_head(in_front))


@torch.inference_mode()
def test_teacher_forced_logits_are_those_of_the_walk(target: Backbone) -> None:
    """A drafted chain, read back as a text: its forced distributions are the walk's own, draft by draft."""
    net, prompt = net_for(target), PROMPTS[0]
    drafter = DSpark(net, target)
    states = target.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    features_SF = torch.cat([states[layer] for layer in net.config.layers], -1)[0]
    drafter.reset([prompt], 8)
    drafter.begin([features_SF])
    proposal = drafter.propose(torch.tensor([8]), Warper(1.0), SharedStream(3, 1))
    assert proposal.q_BNV is not None
    text = [*prompt, 8, *proposal.tokens_BN[0, 1:].tolist(), 0]
    # no block reads a state at its anchor or behind it
    longer = torch.cat((features_SF, torch.zeros(len(text) - len(prompt), features_SF.shape[1])))
    forced = list(DSpark(net, target).teacher_forced(longer, torch.tensor(text), net.config.most))
    assert len(forced) == drafter.draft_length
    for k, logits_XV in enumerate(forced):
        q_V = logits_XV[len(prompt) - 1].softmax(-1)  # anchors begin at the second token
        torch.testing.assert_close(q_V, proposal.q_BNV[0, k], rtol=0.0, atol=1e-5)


def test_an_untrained_head_leaves_the_slots_as_they_are(target: Backbone) -> None:
    sizes: dict[str, Any] = {"layers": (0, 2), "decoder_layers": 1, "size": 3, "layout": "anchor-first"}
    net = DSparkNet.for_target(target.model, **sizes, causal=False, vocabulary=61, rank=4)
    assert not net.markov_head(torch.arange(61)).any()
    plain = BlockNet(BlockShape.of(target.model.config, **sizes, causal=False))
    assert net.state_dict().keys() - plain.state_dict().keys() == {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    }
    plain.load_state_dict({name: net.state_dict()[name] for name in plain.state_dict()})
    made = {kind: caught(kind(each.eval(), target)) for kind, each in ((DFlash, plain), (Watched, net))}
    for one, other in zip(made[DFlash], made[Watched], strict=True):
        assert torch.equal(one.tokens_BN, other.tokens_BN)
        assert one.q_BNV is not None
        assert torch.equal(one.q_BNV, other.q_BNV)  # to the bit


def caught(drafter: DFlash) -> list[Proposal]:
    """What it drafts at temperature 1, step by step."""
    found: list[Proposal] = []
    propose = drafter.propose

    def noted(*given: Any) -> Proposal:
        found.append(propose(*given))
        return found[-1]

    drafter.propose = noted  # type: ignore[method-assign]
    with torch.no_grad():
        generate(drafter._target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=12)
    return found


def test_sizes_without_a_head_are_refused(target: Backbone) -> None:
    with pytest.raises(ValueError, match="rank is 0"):
        small_dspark_net(target.model, rank=0)
