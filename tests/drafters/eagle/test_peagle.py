"""P-EAGLE drafts in one pass what training has there: the same distributions, the same output, the same law."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Committed, DraftSampling, Proposal
from draftsmith.decoding.random import SharedStream, Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.eagle import parallel
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.eagle.parallel import Peagle
from draftsmith.drafters.eagle.peagle import Branches, PeagleNet
from draftsmith.drafters.eagle.proposer import Eagle3
from draftsmith.drafters.layers import true_states
from draftsmith.drafters.layers.llama import Projected
from draftsmith.drafters.layers.true_states import TrueStates
from draftsmith.drafters.model.chains import chain_of, off_slots
from draftsmith.drafters.temperatures import at_depth
from draftsmith.eval.audit.enumeration import enumerate_decoding
from draftsmith.eval.audit.toys import Toy
from helpers.models.small_drafters import WORDS, small_peagle_net
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11], [1, 2, 3]]
WARPERS = [Warper(1.0), Warper(0.7, top_p=0.9)]


@pytest.fixture(scope="module")
def target() -> Backbone:
    """A random target that prefers some tokens clearly."""
    backbone = make_target("qwen3")
    with torch.no_grad():
        backbone.model.model.norm.weight.mul_(3)
    return backbone


def net_for(target: Backbone, **chosen: Any) -> PeagleNet:
    torch.manual_seed(0)
    net = small_peagle_net(target.model, **chosen)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return net.requires_grad_(False).eval()


class Watched(Peagle):
    """P-EAGLE that keeps every row's text in front of each proposal, and the proposal."""

    def reset(self, prompts: Any, room: int, *, static: bool = False) -> None:
        super().reset(prompts, room, static=static)
        self.texts = [list(prompt) for prompt in prompts]
        self.seen: list[tuple[list[list[int]], Proposal]] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        self.last = last_B.tolist()
        self.seen.append(([[*text, last] for text, last in zip(self.texts, self.last, strict=True)], proposal))
        return proposal

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        for row, count in enumerate(committed.count_B.tolist()):
            if count:
                self.texts[row] += [self.last[row], *committed.tokens_BE[row, : count - 1].tolist()]


def features_of(net: Eagle3Net, target: Backbone, text: list[int]) -> Tensor:
    """What `transformers` says are the hidden states of every token. [1, S, F]."""
    states = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in net.config.layers], -1)


def logits_of(net: Eagle3Net, out: Tensor) -> Tensor:
    full = out.new_full((*out.shape[:-1], net.config.vocabulary), -torch.inf)
    return full.index_copy(-1, net.ids_U, net.head(out))


def forced(net: PeagleNet, target: Backbone, text: list[int], depth: int) -> Tensor:
    """Logits of the branch whose anchor is the pair of the last two tokens, as training makes them. [depth, V].

    The row goes on behind the anchor, and other anchors have branches too, as rows in training do.
    """
    row, anchor = [*text, 3, 1], len(text) - 2
    pairs = len(row) - 1
    embed: Any = target.model.get_input_embeddings()
    at_1S = torch.arange(pairs)[None]
    at_1A = torch.tensor([[anchor, *(a for a in range(pairs) if a != anchor)][:2]])
    outputs = net.drafts(
        net.fuse(features_of(net, target, row)[:, :-1]),
        embed(torch.tensor([row[1:]])),
        at_1S,
        torch.zeros_like(at_1S),
        at_1A,
        [at_1A.shape[1], *[1] * (depth - 2)][: depth - 1],
    )
    return logits_of(net, torch.stack([outputs[0][0, anchor], *(out[0, 0] for out in outputs[1:])]))


def distances(drafter: Watched, target: Backbone, warper: Warper) -> list[float]:
    """How far each declared distribution is from the one that training's forward pass has there."""
    found = []
    for texts, proposal in drafter.seen:
        assert proposal.q_BNV is not None
        for row, text in enumerate(texts):
            for k, logits_V in enumerate(forced(drafter.net, target, text, drafter.draft_length)):
                q_V = at_depth(warper, drafter.factors, k)(logits_V)
                found.append(float((proposal.q_BNV[row, k] - q_V).abs().max()))
    return found


@pytest.mark.parametrize(("static", "warper"), [(False, WARPERS[0]), (True, WARPERS[1])], ids=str)
@torch.inference_mode()
def test_training_and_decoding_see_the_same_distributions(static: bool, warper: Warper, target: Backbone) -> None:
    drafter = Watched(net_for(target), target, factors=(1.0, 0.5))
    generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=12, static=static)
    assert len(drafter.seen) > 2
    assert max(distances(drafter, target, warper)) < 1e-5


@torch.inference_mode()
def test_mask_pairs_that_stay_are_seen(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: their keys and values stay in the text, in front of the next true pairs."""

    def kept(self: TrueStates, committed: Committed) -> None:
        right(self, committed)
        self._known_B += 1

    right = TrueStates.observe
    monkeypatch.setattr(true_states.TrueStates, "observe", kept)
    drafter = Watched(net_for(target), target)
    generate(target, drafter, PROMPTS, warper=WARPERS[0], max_new_tokens=4)
    assert max(distances(drafter, target, WARPERS[0])) > 1e-3


def test_one_layer_and_one_draft_are_eagle_3s_to_the_bit(target: Backbone) -> None:
    net = net_for(target, decoder_layers=1)
    sizes = {name: value for name, value in asdict(net.config).items() if name != "decoder_layers"}
    plain = Eagle3Net.from_settings(sizes)
    plain.load_state_dict({name: each for name, each in net.state_dict().items() if not name.startswith("mask_")})
    plain.requires_grad_(False).eval()
    how: dict[str, Any] = {"warper": Warper(0.8), "max_new_tokens": 10, "seed": 3}
    q: list[Tensor] = []
    for drafter in (Peagle(net, target, draft_length=1), Eagle3(plain, target, tree="chain", draft_length=1)):
        first = generate(target, drafter, PROMPTS, **how).tokens
        drafter.reset(PROMPTS, 4)
        drafter.begin([features_of(net, target, prompt)[0] for prompt in PROMPTS])
        proposal = drafter.propose(torch.tensor([1, 2, 3]), Warper(1.0), SharedStream(0, 3))
        assert proposal.q_BNV is not None
        q.append(proposal.q_BNV)
        assert first == generate(target, drafter, PROMPTS, **how).tokens
    assert torch.equal(*q)
    # and along a text, documents packed
    torch.manual_seed(1)
    hidden, embeds = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    positions, documents = torch.arange(9).expand(2, -1), torch.tensor([[0] * 4 + [1] * 5, [2] * 9])
    (ours,) = net.drafts(hidden, embeds, positions, documents, positions, ())
    (theirs,) = plain.unroll(hidden, embeds, positions, documents, 1)
    assert torch.equal(ours, theirs)


def test_greedy_output_is_the_targets(target: Backbone) -> None:
    drafter = Peagle(net_for(target), target)
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 24}
    plain = autoregressive(target, PROMPTS, **how)
    for static in (False, True):
        assert generate(target, drafter, PROMPTS, static=static, **how).tokens == plain.tokens
    assert (drafter.draft_steps, drafter.nodes, drafter.draft_length) == (1, 5, 4)


@pytest.mark.parametrize("policy", ["sample", "argmax"])
def test_a_row_alone_gives_the_same_tokens_as_in_a_batch(policy: Any, target: Backbone) -> None:
    drafter = Peagle(net_for(target), target, policy=policy, factors=() if policy == "argmax" else (1.0, 0.3))
    how: dict[str, Any] = {"warper": Warper(0.8), "max_new_tokens": 16, "seed": 3}
    together = generate(target, drafter, PROMPTS, requests=[0, 1, 2], **how).tokens
    for row, prompt in enumerate(PROMPTS):
        assert generate(target, drafter, [prompt], requests=[row], **how).tokens == [together[row]]


@torch.inference_mode()
def test_argmax_is_a_point_mass(target: Backbone) -> None:
    drafter = Watched(net_for(target), target, policy="argmax")
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=6)
    for texts, proposal in drafter.seen:
        assert (proposal.sampling, proposal.q_BNV) == (DraftSampling.POINT_MASS, None)
        for row, text in enumerate(texts):
            best = forced(drafter.net, target, text, 4).argmax(-1)
            assert proposal.tokens_BN[row, 1:].tolist() == best.tolist()


@torch.inference_mode()
def test_teacher_forced_logits_are_those_of_each_branch(target: Backbone) -> None:
    net, text = net_for(target), [5, 9, 2, 33, 7, 1]
    rows = list(Peagle(net, target).teacher_forced(features_of(net, target, text)[0], torch.tensor(text), 9))
    assert [len(each) for each in rows] == [4, 3, 2, 1]  # those that a token of the text stands for
    for d, logits_XV in enumerate(rows):
        for t, logits_V in enumerate(logits_XV):
            torch.testing.assert_close(logits_V, forced(net, target, text[: t + 2], d + 1)[d], rtol=0.0, atol=1e-5)
    for short in ([3], [3, 4]):
        given = torch.zeros(len(short), 96), torch.tensor(short)
        assert list(Peagle(net, target).teacher_forced(*given, 2)) == []


@torch.inference_mode()
def test_pairs_behind_an_anchor_change_nothing(target: Backbone) -> None:
    net = net_for(target)
    torch.manual_seed(2)
    hidden, embeds = torch.randn(1, 8, 32), torch.randn(1, 8, 32)
    positions, documents = torch.arange(8)[None], torch.zeros(1, 8, dtype=torch.long)
    one = net.drafts(hidden, embeds, positions, documents, torch.tensor([[3, 1]]), (2, 1))
    hidden[:, 4:], embeds[:, 4:] = torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    other = net.drafts(hidden, embeds, positions, documents, torch.tensor([[3, 1]]), (2, 1))
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[2], other[2])
    assert not torch.equal(one[0], other[0])


def attended(
    documents: list[int], at: list[int], counts: list[int], sees: Any, *, masked: bool = True
) -> tuple[Tensor, Tensor]:
    """Attention by `Branches`, and by a mask over all pairs that is a plain function of two pairs."""
    S, M, D = len(documents), sum(counts), 8
    torch.manual_seed(3)
    query, key, value = torch.randn(1, 4, S + M, D), torch.randn(1, 2, S + M, D), torch.randn(1, 2, S + M, D)
    branches = Branches(torch.tensor([documents]), torch.tensor([at]), counts, 2, masked=masked)
    ours = branches.attend(Projected(query, key, value))
    pairs = [(t, 0) for t in range(S)] + [(t, d) for d, count in enumerate(counts, 1) for t in at[:count]]
    mask = torch.tensor([[sees(documents, q, kv) for kv in pairs] for q in pairs])
    both = (x.repeat_interleave(2, 1) for x in (key, value))
    return ours, torch.nn.functional.scaled_dot_product_attention(query, *both, attn_mask=mask)


def seen_by(documents: list[int], query: tuple[int, int], kv: tuple[int, int]) -> bool:
    (t, d), (s, e) = query, kv
    return documents[t] == documents[s] and ((e == 0 and s <= t) or (s == t and e <= d))


LATER = {
    "the other document": lambda docs, q, kv: kv[1] == 0 and kv[0] <= q[0] or kv[0] == q[0] and kv[1] <= q[1],
    "pairs at the place of the draft": lambda docs, q, kv: (
        docs[q[0]] == docs[kv[0]] and (kv[1] == 0 and kv[0] <= sum(q) or kv[0] == q[0] and kv[1] <= q[1])
    ),
    "other branches": lambda docs, q, kv: docs[q[0]] == docs[kv[0]] and kv[0] <= q[0] and kv[1] <= q[1],
}


@pytest.mark.parametrize(
    ("at", "counts"), [([6, 1, 3, 2], [4, 3, 1]), ([0], [1]), ([4, 7, 2], [3]), ([2, 0], [2, 2, 2, 1])]
)
@pytest.mark.parametrize("masked", [True, False], ids=["with a mask", "without"])
def test_attention_is_that_of_a_mask(at: list[int], counts: list[int], masked: bool) -> None:
    documents = [0, 0, 0, 0, 1, 1, 1, 1, 1]
    torch.testing.assert_close(*attended(documents, at, counts, seen_by, masked=masked), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False], ids=["with a mask", "without"])
@pytest.mark.parametrize("wrong", LATER)
def test_another_mask_would_be_seen(wrong: str, masked: bool) -> None:
    documents = [0, 0, 0, 0, 1, 1, 1, 1, 1]
    ours, other = attended(documents, [6, 1, 3, 2], [4, 3, 1], LATER[wrong], masked=masked)
    assert float((ours - other).abs().max()) > 1e-2


def test_tokens_outside_the_draft_vocabulary_are_never_drafted(target: Backbone) -> None:
    drafter = Watched(net_for(target), target)
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=6)
    outside = [token for token in range(61) if token not in WORDS]
    for _, proposal in drafter.seen:
        assert proposal.q_BNV is not None
        assert not proposal.q_BNV[..., outside].any()


@pytest.mark.slow
def test_the_audit_sees_likeliest_tokens_that_are_called_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(logits_BKV: Tensor, last_B: Tensor, *how: Any) -> Proposal:
        q_BNV = off_slots(logits_BKV, last_B, *how).q_BNV
        assert q_BNV is not None
        return chain_of([last_B, *logits_BKV.argmax(-1).unbind(1)], q_BNV[:, :-1].unbind(1))

    def p_value() -> float:
        small = Toy.of("peagle", seed=1)
        how: dict[str, Any] = {"length": small.kind.length, "prompt": small.kind.prompt}
        how |= {"rule": None, "warper": Warper(1.0), "seed": 2, "level": 1e-3, "sequences": 20_000}
        return float(enumerate_decoding(small.target, small.proposer, **how).p_value)

    assert p_value() > 1e-3
    monkeypatch.setattr(parallel, "off_slots", planted)
    assert p_value() < 1e-12
