"""DFlash decodes with the module that was trained: the same distributions, the same output, the same law."""

from __future__ import annotations

import inspect
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Committed, DraftSampling, Proposal
from draftsmith.decoding.random import SharedStream, Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.family import draft_by_block, load_block_folder
from draftsmith.drafters.block.net import BlockNet
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.folder import save_heads
from draftsmith.drafters.layers import sinks
from draftsmith.drafters.temperatures import at_depth
from draftsmith.errors import RequestError
from helpers.models.small_drafters import change_target_of, small_block_net
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11], [1, 2, 3]]
KINDS = list(itertools.product(("fill-in", "anchor-first"), (False, True)))
WARPERS = [Warper(1.0), Warper(0.7, top_p=0.9)]
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def target() -> Backbone:
    """A random target that prefers some tokens clearly."""
    backbone = make_target("qwen3")
    with torch.no_grad():
        backbone.model.model.norm.weight.mul_(3)
    return backbone


def net_for(target: Backbone, layout: str = "fill-in", causal: bool = False, **chosen: Any) -> BlockNet:
    torch.manual_seed(0)
    net = small_block_net(target.model, layout=layout, causal=causal, **chosen)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if net.config.mask_token is None or name != "mask_embedding.weight":  # which is a row of the target's then
                weight.add_(0.1 * torch.randn_like(weight))
    return net.requires_grad_(False).eval()


class Watched(DFlash):
    """DFlash that keeps every row's text in front of each proposal, and the proposal."""

    def reset(self, prompts: Any, room: int, *, static: bool = False) -> None:
        super().reset(prompts, room, static=static)
        self.texts = [list(prompt) for prompt in prompts]
        self.seen: list[tuple[list[list[int]], Proposal]] = []

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        self.last = last_B.tolist()
        texts = [[*text, last] for text, last in zip(self.texts, self.last, strict=True)]
        self.seen.append((texts, proposal))
        return proposal

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        for row, count in enumerate(committed.count_B.tolist()):
            if count:
                self.texts[row] += [self.last[row], *committed.tokens_BE[row, : count - 1].tolist()]


def features_of(net: BlockNet, target: Backbone, text: list[int]) -> Tensor:
    """What `transformers` says are the hidden states of every token. [1, S, F]."""
    states = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in net.config.layers], -1)


def forced(net: BlockNet, target: Backbone, text: list[int], *, masked: bool = True) -> Tensor:
    """The logits of the block whose anchor is the text's last token, as training makes them. [K, V].

    The row goes on behind the anchor, as rows in training do.
    """
    row, anchor = [*text, 3, 1], len(text) - 1
    embed: Any = target.model.get_input_embeddings()
    at_1S = torch.arange(len(row))[None]
    root_11H, anchor_11 = embed(torch.tensor([[text[-1]]])), torch.tensor([[anchor]])
    features = features_of(net, target, row)
    out = net.blocks(features, at_1S, torch.zeros_like(at_1S), root_11H, anchor_11, masked=masked)
    return target.model.get_output_embeddings()(out[0, 0])


def distances(drafter: Watched, target: Backbone, warper: Warper, *, masked: bool = True) -> list[float]:
    """How far each declared distribution is from the one that training's forward pass has there."""
    found = []
    for texts, proposal in drafter.seen:
        assert proposal.q_BNV is not None
        for row, text in enumerate(texts):
            for k, logits_V in enumerate(forced(drafter.net, target, text, masked=masked)[: drafter.draft_length]):
                q_V = at_depth(warper, drafter.factors, k)(logits_V)
                found.append(float((proposal.q_BNV[row, k] - q_V).abs().max()))
    return found


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("warper", WARPERS, ids=str)
@pytest.mark.parametrize(("layout", "causal"), KINDS)
@torch.inference_mode()
def test_training_and_decoding_see_the_same_distributions(
    layout: str, causal: bool, warper: Warper, static: bool, target: Backbone
) -> None:
    drafter = Watched(net_for(target, layout, causal), target, factors=(1.0, 0.5))
    generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=12, static=static)
    assert len(drafter.seen) > 2
    assert max(distances(drafter, target, warper)) < 1e-5


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("windows", [{"windows": (6, None), "causal_windows": True}, {"windows": (5, 7)}])
@torch.inference_mode()
def test_windows_are_the_same_in_training_and_in_decoding(
    windows: dict[str, Any], static: bool, target: Backbone
) -> None:
    """Texts grow beyond them."""
    drafter = Watched(net_for(target, **windows), target)
    generate(target, drafter, PROMPTS, warper=WARPERS[0], max_new_tokens=12, static=static)
    assert max(len(text) for texts, _ in drafter.seen for text in texts) > 10
    assert max(distances(drafter, target, WARPERS[0])) < 1e-5
    whole = Watched(net_for(target), target)
    whole.seen = drafter.seen
    assert max(distances(whole, target, WARPERS[0])) > 1e-3


ONE_TOO_FAR = {
    "seen": ("index_S < anchor_BA", "index_S <= anchor_BA"),
    "spans_of": ("(anchors + behind).repeat", "(anchors + behind + 1).repeat"),
}


@pytest.mark.parametrize("function", ONE_TOO_FAR)
@torch.inference_mode()
def test_a_context_up_to_the_anchor_itself_is_seen(
    function: str, target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most frequent bug of others: in training a block sees the state of its own anchor."""
    right, wrong = ONE_TOO_FAR[function]
    source = inspect.getsource(getattr(sinks, function))
    assert source.count(right) == 1
    names = dict(vars(sinks))
    exec(source.replace(right, wrong), names)
    drafter, masked = Watched(net_for(target), target), function == "seen"
    generate(target, drafter, PROMPTS, warper=WARPERS[0], max_new_tokens=12)
    assert max(distances(drafter, target, WARPERS[0], masked=masked)) < 1e-5
    monkeypatch.setattr(sinks, function, names[function])
    assert max(distances(drafter, target, WARPERS[0], masked=masked)) > 1e-3


@torch.inference_mode()
def test_a_shorter_draft_is_the_beginning_of_a_whole_block(target: Backbone) -> None:
    for layout, causal in KINDS:
        net = net_for(target, layout, causal)
        drafter = Watched(net, target, draft_length=2)
        generate(target, drafter, PROMPTS, warper=WARPERS[0], max_new_tokens=8)
        assert {len(proposal.tree) for _, proposal in drafter.seen} == {3}
        assert max(distances(drafter, target, WARPERS[0])) < 1e-5


@pytest.mark.parametrize(("layout", "causal"), KINDS)
def test_greedy_output_is_the_targets(layout: str, causal: bool, target: Backbone) -> None:
    drafter = DFlash(net_for(target, layout, causal), target)
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 24}
    plain = autoregressive(target, PROMPTS, **how)
    for static in (False, True):
        assert generate(target, drafter, PROMPTS, static=static, **how).tokens == plain.tokens


@pytest.mark.parametrize("policy", ["sample", "argmax"])
def test_a_row_alone_gives_the_same_tokens_as_in_a_batch(policy: Any, target: Backbone) -> None:
    drafter = DFlash(net_for(target), target, policy=policy, factors=() if policy == "argmax" else (1.0, 0.3))
    how: dict[str, Any] = {"warper": Warper(0.8), "max_new_tokens": 20, "seed": 3}
    together = generate(target, drafter, PROMPTS, requests=[0, 1, 2], **how).tokens
    for row, prompt in enumerate(PROMPTS):
        assert generate(target, drafter, [prompt], requests=[row], **how).tokens == [together[row]]


@torch.inference_mode()
def test_tokens_are_drawn_independently_from_what_is_declared(target: Backbone) -> None:
    """Counts of pairs against the product of both rows of q: drafts do not see each other."""
    rows = 4_000
    net = net_for(target)
    drafter = DFlash(net, target, draft_length=2, factors=(1.0, 0.5))
    drafter.reset([PROMPTS[0]] * rows, 4)
    drafter.begin([features_of(net, target, PROMPTS[0])[0]] * rows)
    proposal = drafter.propose(torch.full((rows,), 8), Warper(1.0, top_k=4), SharedStream(3, rows))
    assert proposal.sampling is DraftSampling.IID
    assert proposal.q_BNV is not None
    first_V, second_V, _ = proposal.q_BNV[0]
    V = len(first_V)
    pairs = torch.bincount(proposal.tokens_BN[:, 1] * V + proposal.tokens_BN[:, 2], minlength=V * V) / rows
    wanted = (first_V[:, None] * second_V).flatten()
    assert (pairs[wanted == 0] == 0).all()
    assert float((pairs - wanted).abs().sum()) / 2 < 0.05


def test_argmax_is_a_point_mass(target: Backbone) -> None:
    for policy, warper in (("argmax", Warper(1.0)), ("sample", Warper(0.0))):
        drafter = Watched(net_for(target), target, policy=policy)  # type: ignore[arg-type]
        generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=6)
        for texts, proposal in drafter.seen:
            assert proposal.sampling is DraftSampling.POINT_MASS
            assert proposal.q_BNV is None
            for row, text in enumerate(texts):
                best = forced(drafter.net, target, text).argmax(-1)
                assert proposal.tokens_BN[row, 1:].tolist() == best.tolist()


@torch.inference_mode()
def test_teacher_forced_logits_are_those_of_each_block(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.drafters.block.proposer._ANCHORS", 4)
    net = net_for(target, "anchor-first")
    text = [5, 9, 2, 33, 7, 1, 0, 60, 12]
    rows = list(DFlash(net, target).teacher_forced(features_of(net, target, text)[0], torch.tensor(text), 9))
    assert [len(each) for each in rows] == [7, 6, 5, 4, 3]
    for d, logits_XV in enumerate(rows):
        for t, logits_V in enumerate(logits_XV):
            torch.testing.assert_close(logits_V, forced(net, target, text[: t + 2])[d], **CLOSE)
    short = torch.tensor(text[:2])
    assert list(DFlash(net, target).teacher_forced(features_of(net, target, text[:2])[0], short, 3)) == []


def test_drafts_longer_than_a_block_are_refused_or_cut(target: Backbone) -> None:
    net = net_for(target)
    with pytest.raises(
        RequestError, match="a draft of 5 tokens is asked for; expected 1 to 4, what a block of 5 slots"
    ):
        DFlash(net, target, draft_length=5)
    with pytest.raises(RequestError, match="expected 1 to 4"):
        DFlash(net, target, draft_length=0)
    assert draft_by_block(net, target, 9).draft_length == 4
    drafter = DFlash(net, target)
    assert (drafter.draft_length, drafter.nodes, drafter.draft_steps) == (4, 5, 1)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Backbone, BlockNet, Path]:
    """A target with a tokenizer, and the drafter saved for it."""
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    net, folder = net_for(target, mask_token=7), tmp_path / "drafter"
    save_heads(net, folder, target, family=BlockNet.family, settings=asdict(net.config))
    return target, net, folder


def loaded(folder: Path, target: Backbone, **config: Any) -> DFlash:
    return load_block_folder(folder, target, draft_length=3, config=DrafterConfig(**config))


def test_a_saved_drafter_drafts_the_same(saved: tuple[Backbone, BlockNet, Path]) -> None:
    target, net, folder = saved
    drafter = loaded(folder, target, temperature_factors=[1.0, 0.3])
    assert drafter.draft_length == 3
    how: dict[str, Any] = {"warper": Warper(1.0), "max_new_tokens": 12, "seed": 3}
    one = generate(target, DFlash(net, target, draft_length=3, factors=(1.0, 0.3)), PROMPTS, **how)
    two = generate(target, drafter, PROMPTS, **how)
    assert (one.tokens, one.origin) == (two.tokens, two.origin)


@pytest.mark.parametrize(("token", "found"), [(8, "weights whose mask is another vector"), (10**9, "ids 0 to")])
def test_a_mask_that_is_not_its_token_s_is_refused(
    token: int, found: str, saved: tuple[Backbone, BlockNet, Path]
) -> None:
    """Engines embed the token that is named, and the learnt mask would be lost."""
    target, _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    config["draftsmith"]["settings"]["mask_token"] = token
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=f"mask_token is {token}, beside .*{found}"):
        loaded(folder, target)


def test_another_target_is_refused(saved: tuple[Backbone, BlockNet, Path]) -> None:
    target, _, folder = saved
    change_target_of(folder, "hidden_size")
    with pytest.raises(RequestError, match="with hidden_size"):
        loaded(folder, target)


def test_states_that_the_target_lacks_are_refused(saved: tuple[Backbone, BlockNet, Path]) -> None:
    target, _, folder = saved
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["draftsmith"]["settings"]["layers"] = [0, 1, 9]
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match="config.json: hidden state 9 is asked for"):
        loaded(folder, target)
