"""DFlash 2's convolutions and selector: at the start nothing, across a block's beginning nothing, and q as drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import DraftSampling
from draftsmith.decoding.random import SharedStream
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.net import BlockNet, BlockShape
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.block.selected import (
    CandidateSelector,
    DFlash2,
    DFlash2Net,
    DFlash2Shape,
    GroupedConv,
    check_tree,
)
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.drafters.temperatures import at_depth
from draftsmith.errors import RequestError
from helpers.models.small_drafters import small_dflash2_net
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7, 8], [1, 2, 3, 4, 8]]
SIZES: dict[str, Any] = {"layers": (0, 2), "decoder_layers": 2, "size": 4, "layout": "fill-in", "causal": False}
OWN: dict[str, Any] = {"vocabulary": 61, "rank": 4, "candidates": 5, "group": 8}


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def net_for(target: Backbone) -> DFlash2Net:
    torch.manual_seed(0)
    net = small_dflash2_net(target.model)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net.requires_grad_(False).eval()


# ---- convolutions -----------------------------------------------------------------------------


def loop_of(conv: GroupedConv, y_RNH: Tensor, sublayer: Any, block: int) -> Tensor:
    """The definition, a slot and a channel at a time."""
    R, N, H = y_RNH.shape
    width = H // conv.groups
    delta = (y_RNH @ conv.kernel_projection.weight.T).view(R, N, 2, conv.taps, conv.groups)

    def mixed(x_RNH: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(x_RNH)
        for r in range(R):
            for t in range(N):
                for h in range(H):
                    for tap in range(min(conv.taps, t % block + 1)):
                        kernel = conv.base_kernel[side, tap, h] + delta[r, t, side, tap, h // width]
                        out[r, t, h] += kernel * x_RNH[r, t - tap, h]
        return out

    return mixed(sublayer(mixed(y_RNH, 0)), 1)


@pytest.mark.parametrize("taps", [1, 2, 3])
@torch.no_grad()
def test_a_convolution_is_its_definition(taps: int) -> None:
    torch.manual_seed(taps)
    conv, y_RNH = GroupedConv(8, taps, 4), torch.randn(2, 6, 8)
    for parameter in conv.parameters():
        parameter.normal_()
    wanted = loop_of(conv, y_RNH, torch.tanh, 3)
    torch.testing.assert_close(conv(y_RNH, torch.tanh, 3), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_block_is_read_by_the_next_one() -> None:
    torch.manual_seed(0)
    conv, y_RNH = GroupedConv(8, 2, 4), torch.randn(1, 8, 8)
    for parameter in conv.parameters():
        parameter.normal_()
    before, y_RNH[:, 3] = conv(y_RNH, torch.tanh, 4), 7.0
    after = conv(y_RNH, torch.tanh, 4)
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.equal(before[:, 3], after[:, 3])


@torch.inference_mode()
def test_a_new_network_is_dflash_to_the_bit(target: Backbone) -> None:
    """Its slots, and the order and distributions of its drafts."""
    torch.manual_seed(0)
    plain = BlockNet(BlockShape.of(target.model.config, **SIZES)).eval()
    net = DFlash2Net(DFlash2Shape.of(target.model.config, **SIZES, **OWN | {"candidates": 61})).eval()
    missing = net.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert all("conv" in name or "candidate_selector" in name for name in missing)
    how: dict[str, Any] = {"max_new_tokens": 12, "seed": 3}
    for warper in (Warper(0.0), Warper(1.0)):
        runs = [
            generate(target, make(each, target), PROMPTS, warper=warper, **how)
            for make, each in ((DFlash, plain), (DFlash2, net))
        ]
        assert runs[0].tokens == runs[1].tokens
    states = target.model(torch.tensor(PROMPTS[:1]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in SIZES["layers"]], -1)
    index = torch.arange(features.shape[1])[None]
    given = (features, index, torch.zeros_like(index), torch.randn(1, 2, features.shape[-1] // 2), index[:, 1:3])
    assert torch.equal(plain.blocks(*given), net.blocks(*given))


# ---- the selector -----------------------------------------------------------------------------


@torch.no_grad()
def test_a_score_is_its_definition() -> None:
    torch.manual_seed(0)
    selector = CandidateSelector(8, 11, 3)
    selector.successor_codebook.weight.normal_()
    token, slot, best = torch.tensor([4, 9]), torch.randn(2, 8), torch.tensor([[0, 3, 7], [10, 2, 1]])
    A, Bc, W = selector.predecessor_codebook.weight, selector.successor_codebook.weight, selector.hidden_projection
    wanted = torch.stack([torch.stack([(A[u] * W(h)) @ Bc[b] for b in bs]) for u, h, bs in zip(token, slot, best)])
    torch.testing.assert_close(selector(token, slot, best), wanted)


class Watched(DFlash2):
    """Keeps what its slots were, and what it proposed."""

    def _block(self, last_B: Tensor) -> Tensor:
        self.out = super()._block(last_B)
        return self.out

    def propose(self, *given: Any) -> Any:
        proposal = super().propose(*given)
        self.seen = [*getattr(self, "seen", []), (self.out, proposal)]
        return proposal


@pytest.mark.parametrize("warper", [Warper(1.0), Warper(0.7, top_p=0.9)], ids=str)
@torch.inference_mode()
def test_q_is_the_softmax_over_candidates_behind_the_token_in_front(warper: Warper, target: Backbone) -> None:
    net = net_for(target)
    drafter = Watched(net, target, factors=(1.0, 0.5))
    generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=12)
    selector, C = net.candidate_selector, net.config.candidates
    assert len(drafter.seen) > 2
    for out_BKH, proposal in drafter.seen:
        assert proposal.sampling is DraftSampling.IID
        for row, out_KH in enumerate(out_BKH):
            for k, out_H in enumerate(out_KH):
                logits_V = target.project(out_H).float()
                best = logits_V.topk(C).indices
                score_C = logits_V[best] + selector(proposal.tokens_BN[row, k], out_H, best)
                scattered = torch.full_like(logits_V, -torch.inf)
                scattered[best] = score_C
                q_V = at_depth(warper, drafter.factors, k)(scattered)
                torch.testing.assert_close(proposal.q_BNV[row, k], q_V, rtol=0.0, atol=1e-5)
                assert int((proposal.q_BNV[row, k] > 0).sum()) <= C
                assert float(proposal.q_BNV[row, k].sum()) == pytest.approx(1, abs=1e-5)
                assert proposal.tokens_BN[row, k + 1] in best


@torch.inference_mode()
def test_teacher_forced_logits_are_those_of_the_walk(target: Backbone) -> None:
    """A drafted chain, read back as a text: its forced logits are the walk's own, draft by draft."""
    net, prompt = net_for(target), PROMPTS[0]
    drafter = Watched(net, target)
    states = target.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    features_SF = torch.cat([states[layer] for layer in net.config.layers], -1)[0]
    drafter.reset([prompt], 8)
    drafter.begin([features_SF])
    proposal = drafter.propose(torch.tensor([8]), Warper(1.0), SharedStream(3, 1))
    text = [*prompt, 8, *proposal.tokens_BN[0, 1:].tolist(), 0]
    longer = torch.cat((features_SF, torch.zeros(len(text) - len(prompt), features_SF.shape[1])))
    forced = list(DFlash2(net, target).teacher_forced(longer, torch.tensor(text), net.config.most))
    for k, logits_XV in enumerate(forced):
        q_V = logits_XV[len(prompt) - 1].softmax(-1)  # anchors begin at the second token
        torch.testing.assert_close(q_V, proposal.q_BNV[0, k], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("tree", [None, TreeShape(7, 3)])
def test_greedy_output_is_the_targets(tree: TreeShape | None, target: Backbone) -> None:
    drafter = DFlash2(net_for(target), target, tree=tree)
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 24}
    plain = autoregressive(target, PROMPTS, **how)
    for static in (False, True):
        assert generate(target, drafter, PROMPTS, static=static, **how).tokens == plain.tokens


def test_sizes_that_no_network_can_have_are_refused(target: Backbone) -> None:
    for wrong in ({"rank": 0}, {"candidates": 62}, {"group": 7}):
        with pytest.raises(ValueError, match=r"rank|candidates|groups"):
            DFlash2Net.for_target(target.model, **SIZES, **(OWN | wrong))
    with pytest.raises(RequestError, match="drafter.block.children is 6, and the drafter chooses among 5"):
        check_tree(6, 5)
