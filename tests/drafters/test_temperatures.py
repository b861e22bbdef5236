"""Draft temperatures by depth: what is drawn from is what is declared, and the output stays the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_drafter
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.proposal import Proposal
from draftsmith.decoding.rules.acceptance import Outcome, accept_chain, accept_tree
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.model.ensemble import join, join_adapters
from draftsmith.drafters.model.pard import Pard
from draftsmith.drafters.temperatures import at_depth
from draftsmith.errors import RequestError
from draftsmith.eval.audit.enumeration import Enumeration, enumerate_decoding
from draftsmith.eval.audit.toys import TOYS, Toy, toy_of
from draftsmith.launch.recipe.load import load_recipe
from helpers.models.small_drafters import make_on_target
from pydantic import ValidationError

FACTORS = (0.5, 2.0)
TREES = ("chain", "static")
TEMPERED = [name for name in TOYS if name.endswith("tempered")]


@pytest.mark.parametrize(("depth", "temperature"), [(0, 0.4), (1, 1.6), (2, 1.6), (9, 1.6)])
def test_deeper_tokens_take_the_last_factor(depth: int, temperature: float) -> None:
    warper = Warper(0.8, top_k=5, top_p=0.9, min_p=0.1)
    made = at_depth(warper, FACTORS, depth)
    assert made.temperature == pytest.approx(temperature)
    assert (made.top_k, made.top_p, made.min_p) == (5, 0.9, 0.1)
    assert at_depth(warper, (), depth) is warper


def declared(
    drafter: Any, target: Backbone, temperature: float, proposals: list[Proposal] | None = None
) -> list[torch.Tensor]:
    """q of every proposal of a few steps; into `proposals` they go whole."""
    seen = []

    def rule(logits_BNV: torch.Tensor, proposal: Proposal, warper: Warper, uniforms: Any) -> Outcome:
        assert proposal.q_BNV is not None
        seen.append(proposal.q_BNV)
        if proposals is not None:
            proposals.append(proposal)
        accept = accept_chain if proposal.tree.is_chain else accept_tree
        return accept(logits_BNV, proposal, warper, uniforms)

    generate(target, drafter, [[1, 2, 3]], warper=Warper(temperature), max_new_tokens=12, rule=rule)
    return seen


@pytest.mark.parametrize("tree", ["draft model", "chain", "static"])
def test_q_is_the_distribution_at_the_depths_own_temperature(target: Backbone, tree: str) -> None:
    """The first step drafts after the same text whatever is drawn, so q_0 at factor f is q_0 at temperature f."""

    def drafter(**how: Any) -> Any:
        if tree == "draft model":
            return make_drafter(target, draft_length=3, **how)
        return make_on_target("eagle", target, tree=tree, draft_length=3, **how)

    tempered = declared(drafter(factors=FACTORS), target, 0.8)[0]
    cooler = declared(drafter(), target, 0.4)[0]
    torch.testing.assert_close(tempered[:, 0], cooler[:, 0])
    plain = declared(drafter(), target, 0.8)[0]
    assert not torch.allclose(tempered[:, 0], plain[:, 0], atol=1e-3)
    assert not torch.allclose(tempered[:, 1], plain[:, 1], atol=1e-3)


def test_at_temperature_0_they_say_nothing(target: Backbone) -> None:
    greedy: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 16}
    plain, tempered = (
        generate(target, make_drafter(target, factors=factors), [[1, 2, 3]], **greedy) for factors in ((), FACTORS)
    )
    assert plain.tokens == tempered.tokens
    assert plain.target_calls == tempered.target_calls


@pytest.mark.parametrize("kind", ["draft model", "chain", "static", "dflash", "dflash2", "dspark", "peagle", "pard"])
def test_at_factor_0_q_is_the_likeliest_token(target: Backbone, kind: str) -> None:
    """Behind a first draft that is drawn: q is one token, and that one is drafted."""
    how: dict[str, Any] = {"factors": (1.0, 0.0)}
    drafters: dict[str, Any] = {
        "draft model": lambda: make_drafter(target, draft_length=3, **how),
        "pard": lambda: Pard(make_drafter(target).backbone, target.vocabulary, mask=0, draft_length=3, **how),
        **{tree: lambda: make_on_target("eagle", target, tree=kind, draft_length=3, **how) for tree in TREES},
    }
    made = drafters.get(kind, lambda: make_on_target(kind, target, **how))()
    seen: list[Proposal] = []
    for q_BNV in declared(made, target, 0.8, seen):
        assert torch.isfinite(q_BNV).all()
        assert q_BNV[0, 0].count_nonzero() > 1, "the first is drawn"
    for each in seen:
        assert each.q_BNV is not None
        present = torch.ones_like(each.tokens_BN) if each.present_BN is None else each.present_BN
        for node, parent in enumerate(each.tree.parents):
            if parent > 0 and present[0, node]:
                assert each.q_BNV[0, parent].tolist() == one_hot(int(each.tokens_BN[0, node]), target.vocabulary)


def one_hot(token: int, vocabulary: int) -> list[float]:
    return [float(each == token) for each in range(vocabulary)]


@pytest.mark.parametrize(
    "name", ["draft-model tempered", "eagle static tempered", "dflash tempered", "dspark tempered"]
)
def test_at_factor_0_the_output_stays_the_targets(name: str) -> None:
    found = enumerated(name, (1.0, 0.0))
    assert found.p_value > 1e-4


def test_a_softmax_declared_at_factor_0_is_caught() -> None:
    """The likeliest token drafted, and the distribution that it was not drawn from given as q."""
    found = enumerated("draft-model tempered", (1.0, 0.0), declare=lambda logits, _probs: Warper(1.0)(logits))
    assert found.p_value < 1e-9


def enumerated(name: str, factors: tuple[float, ...], **changed: Any) -> Enumeration:
    """The joint counts of a toy's sequences, drafted with other factors."""
    small = Toy.of(name, seed=1)

    def proposer() -> Any:
        made: Any = small.proposer()
        made.factors = factors
        for attribute, value in changed.items():
            setattr(made, attribute, value)
        return made

    return enumerate_decoding(
        small.target,
        proposer,
        rule=None,
        sequences=20_000,
        warper=Warper(1.0),
        seed=2,
        level=1e-4,
        length=small.kind.length,
        prompt=small.kind.prompt,
    )


def test_members_of_an_ensemble_draw_alike(target: Backbone) -> None:
    draft = make_drafter(target, factors=FACTORS)
    assert [each.factors for each in join([draft, draft]).members] == [FACTORS] * 2
    assert join_adapters(draft, ["a"]).members[0].factors == FACTORS


def test_the_audit_enumerates_tempered_drafters(target: Backbone) -> None:
    """As what they are: every toy is enumerated in `eval/audit/test_audit.py`."""
    drafters = [
        make_drafter(target, factors=FACTORS),
        join([make_drafter(target, factors=FACTORS)]),
        *(
            make_on_target(name, target, tree=tree, factors=FACTORS)
            for name in ("eagle", "eagle3", "mtp")
            for tree in ("chain", "static")
        ),
        *(make_on_target(name, target, factors=FACTORS) for name in ("dflash", "dflash2", "dspark", "peagle")),
        *(make_on_target(name, target, factors=FACTORS, least=0.5) for name in ("dflash", "dflash2", "dspark")),
        Pard(make_drafter(target).backbone, target.vocabulary, mask=0, factors=FACTORS),
    ]
    names = {toy_of(each) for each in drafters}
    hybrids = {name for name in TEMPERED if name.startswith("suffix-hybrid")}  # beside one of the others
    assert names == set(TEMPERED) - {"intersection tempered"} - hybrids
    for name in TEMPERED:
        made: Any = Toy.of(name, seed=1).proposer()
        inner = made.draft if name in hybrids else made
        assert (inner.members[0] if name.startswith("ensemble") else inner).factors


def test_what_draws_nothing_refuses_them(target: Backbone) -> None:
    with pytest.raises(ValidationError, match="policy argmax draws none"):
        DrafterConfig(policy="argmax", temperature_factors=[0.9])
    with pytest.raises(RequestError, match="a dynamic tree draws nothing"):
        make_on_target("eagle", target, tree="dynamic", factors=FACTORS)
    with pytest.raises(RequestError, match="greater than or equal to 0"):
        load_recipe("distill-tiny", [("drafter.temperature_factors", "[-1]")])
    with pytest.raises(RequestError, match="has 0.04; expected 0, which takes the likeliest token, or at least 0.05"):
        load_recipe("distill-tiny", [("drafter.temperature_factors", "[1, 0.04]")])
    made = load_recipe("distill-tiny", [("drafter.temperature_factors", "[0.9, 1.1]")]).recipe
    assert made.drafter.temperature_factors == [0.9, 1.1]
