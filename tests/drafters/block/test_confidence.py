"""Drafts that end where the drafter doubts: no output changes, and a cut by what was drawn is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.decoding.tree.tree import chain
from draftsmith.drafters.block.dspark import DSpark
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.block.selected import DFlash2
from draftsmith.drafters.model.chains import cut_short
from draftsmith.errors import RequestError
from draftsmith.eval.audit.enumeration import Enumeration, enumerate_decoding
from draftsmith.eval.audit.toys import Toy
from draftsmith.eval.measure.metrics import counts_of
from helpers.models.small_drafters import make_on_target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3]]


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def tau(target: Backbone, drafter: Any, warper: Warper) -> float:
    counts = counts_of(generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=40).steps)
    return sum(each.emitted for each in counts) / sum(each.steps for each in counts)


@pytest.mark.parametrize("policy", ["sample", "argmax"])
def test_doubt_shortens_drafts_and_changes_no_text(policy: Any, target: Backbone) -> None:
    plain = autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=40)
    found = {}
    for least in (0.0, 0.5, 0.999):
        settings = {"least": least} if least else {}
        drafter = make_on_target("dspark", target, noise=0.02, policy=policy, **settings)
        assert generate(target, drafter, PROMPTS, warper=Warper(0.0), max_new_tokens=40).tokens == plain.tokens
        found[least] = tau(target, drafter, Warper(1.0))
    assert found[0.999] == 1.0  # it is never as sure as that
    assert policy == "argmax" or found[0.0] > 1.0  # what is drawn from q is accepted now and then


class Watched(DSpark):
    """DSpark that keeps what its slots were and what it drafted."""

    seen: list[tuple[Tensor, Proposal]]

    def _block(self, last_B: Tensor) -> Tensor:
        self.out_BKH = super()._block(last_B)
        return self.out_BKH

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        self.seen.append((self.out_BKH, proposal))
        return proposal


@torch.inference_mode()
def test_what_is_cut_follows_from_the_slots_and_the_tokens_in_front(target: Backbone) -> None:
    """The confidence that training has behind the same tokens, slot by slot up to the first that is in doubt."""
    made = make_on_target("dspark", target, least=0.5)
    drafter = Watched(made.net, target, least=0.5)
    drafter.seen = []
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=30)
    lengths = set()
    for out_BKH, proposal in drafter.seen:
        K = proposal.tokens_BN.shape[1] - 1
        logit_BK = drafter.net.confidence(out_BKH[:, :K], proposal.tokens_BN[:, :-1])
        assert logit_BK is not None
        sure_BK = (logit_BK.sigmoid() >= 0.5).long().cumprod(1).bool()
        assert proposal.present_BN is not None
        assert torch.equal(proposal.present_BN[:, 1:], sure_BK)
        lengths |= set(sure_BK.sum(1).tolist())
    assert len(lengths) > 1


def test_rows_draft_as_they_do_alone(target: Backbone) -> None:
    """However long the drafts of others are."""
    drafter = make_on_target("dspark", target, least=0.5)
    how: dict[str, Any] = {"warper": Warper(1.0), "max_new_tokens": 24, "seed": 4}
    together = generate(target, drafter, PROMPTS, **how)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, [prompt], requests=[row], **how)
        assert alone.tokens[0] == together.tokens[row]


def by_what_was_drawn(kind: type[DFlash]) -> type[DFlash]:
    """The planted bug: a draft ends in front of the first token that was not likely itself."""

    class ByWhatWasDrawn(kind):  # type: ignore[misc, valid-type]
        def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
            proposal = super().propose(last_B, warper, uniforms)
            assert proposal.q_BNV is not None
            drawn_BK = proposal.q_BNV[:, :-1].gather(-1, proposal.tokens_BN[:, 1:, None])[..., 0]
            return cut_short(proposal, drawn_BK >= 0.4)

    return ByWhatWasDrawn


class SlotsOwn(DSpark):
    """The planted bug: q is what each slot says by itself, and the draft was drawn behind the one in front of it."""

    def _block(self, last_B: Tensor) -> Tensor:
        self.out_BKH = super()._block(last_B)
        return self.out_BKH

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        own_BKV = warper(self.head.logits(self.out_BKH).flatten(0, 1)).view(*self.out_BKH.shape[:2], -1)
        return replace(proposal, q_BNV=torch.cat((own_BKV, torch.zeros_like(own_BKV[:, :1])), 1))


def enumerated(name: str, kind: type[DFlash] | None = None, *, sequences: int = 40_000) -> Enumeration:
    toy = Toy.of(name, seed=1)

    def proposer() -> Any:
        own: Any = toy.proposer()
        return own if kind is None else kind(own.net, own._target)

    return enumerate_decoding(
        toy.target,
        proposer,
        rule=None,
        sequences=sequences,
        warper=Warper(0.7),
        seed=1,
        level=2.5e-4,
        length=toy.kind.length,
        prompt=toy.kind.prompt,
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "kind"), [("dflash", DFlash), ("dflash2", DFlash2), ("dspark", DSpark)])
def test_a_cut_by_the_drawn_tokens_own_probability_is_seen(name: str, kind: type[DFlash]) -> None:
    assert enumerated(f"{name} cut").p_value > 1e-3
    assert enumerated(name, by_what_was_drawn(kind)).p_value < 1e-6


@pytest.mark.parametrize("how", ["", " argmax", " tempered"])
@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark"])
def test_the_audits_toys_keep_drafts_of_every_length(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is never cut, or always, would pass the audit with a cut that is wrong."""
    kept: set[int] = set()

    def noted(proposal: Proposal, sure_BK: Tensor) -> Proposal:
        cut = cut_short(proposal, sure_BK)
        assert cut.present_BN is not None
        kept.update((cut.present_BN.sum(1) - 1).tolist())
        return cut

    for module in ("proposer", "walked"):
        monkeypatch.setattr(f"draftsmith.drafters.block.{module}.cut_short", noted)
    enumerated(f"{family} cut{how}", sequences=2_500)
    assert kept == {0, 1, 2}


@pytest.mark.parametrize(("family", "middle"), [("dflash", 0.033), ("dflash2", 0.25)])
def test_slots_without_a_likely_token_end_a_draft(family: str, middle: float, target: Backbone) -> None:
    """By what slots say behind the tokens in front, whatever is drawn then."""
    plain = autoregressive(target, PROMPTS, warper=Warper(0.0), max_new_tokens=40)
    found = {}
    for least in (0.0, middle, 0.999):
        drafter = make_on_target(family, target, noise=0.02, least=least)
        assert generate(target, drafter, PROMPTS, warper=Warper(0.0), max_new_tokens=40).tokens == plain.tokens
        done = generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=40)
        found[least] = done.nodes / done.target_calls
    assert found[0.999] == 2.0  # it is never as sure as that: a root, and a node that no row has
    assert found[0.999] < found[middle] < found[0.0]


def test_marginals_that_are_judged_as_conditionals_are_seen() -> None:
    assert enumerated("dspark", SlotsOwn).p_value < 1e-6


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_draft_ends_at_the_first_doubt(sure: list[list[bool]]) -> None:
    B, K = len(sure), 3
    tokens_BN = torch.arange(B * (K + 1)).view(B, K + 1)
    q_BNV = torch.rand(B, K + 1, 5)
    cut = cut_short(Proposal(tokens_BN, chain(K), DraftSampling.IID, q_BNV), torch.tensor(sure))
    wanted = [next((k for k, each in enumerate(row) if not each), K) for row in sure]
    assert cut.present_BN is not None
    assert cut.q_BNV is not None
    assert (cut.present_BN.sum(1) - 1).tolist() == wanted
    assert len(cut.tree) == cut.tokens_BN.shape[1] == cut.q_BNV.shape[1] == max(1, *wanted) + 1
    assert cut.coins == K + 1


def test_without_a_confidence_there_is_nothing_to_cut_by(target: Backbone) -> None:
    net = make_on_target("dspark", target).net
    with pytest.raises(RequestError, match=r"drafter.confidence is 0.5, and the drafter has learnt no confidence"):
        DSpark(net, target, least=0.5)
