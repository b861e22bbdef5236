"""What is enumerated is what drafts: the class of the drafter itself, as deep and as wide as bugs need."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.proposal import Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.rules import acceptance
from draftsmith.decoding.rules.acceptance import Outcome, accept_chain
from draftsmith.decoding.sampling import Warper, draw
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.errors import RequestError
from draftsmith.eval.audit.enumeration import Enumeration, enumerate_decoding
from draftsmith.eval.audit.toys import TOYS, Toy, toy_of
from helpers.models.small_drafters import make_on_target
from torch import Tensor

WARPER = Warper(0.7)
DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {}),
    ("hydra", {}),
    ("hydra++", {}),
    ("bpd", {}),
    *((family, {"tree": tree}) for family in ("eagle", "eagle3") for tree in ("chain", "static")),
    *((family, {"tree": "dynamic", "top_k": 4, "nodes": 12}) for family in ("eagle", "eagle3")),
    *((family, {"tree": tree, "policy": "argmax"}) for family in ("eagle", "eagle3") for tree in ("chain", "static")),
    ("dflash", {}),
    ("dflash", {"policy": "argmax"}),
    ("dflash2", {}),
    ("dflash2", {"policy": "argmax"}),
    ("dspark", {}),
    ("dspark", {"policy": "argmax"}),
    *((family, {"least": least}) for family, least in (("dflash", 0.38), ("dflash2", 0.55), ("dspark", 0.45))),
    *((family, {"tree": TreeShape(6, 2)}) for family in ("dflash", "dflash2", "dspark")),
    *(("mtp", {"tree": tree}) for tree in ("chain", "static")),
    ("mtp", {"tree": "dynamic", "top_k": 4, "nodes": 12}),
    ("peagle", {}),
    ("peagle", {"policy": "argmax"}),
]


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def enumerated(name: str, *, sequences: int, rule: Any = None) -> Enumeration:
    toy = Toy.of(name, seed=1)
    return enumerate_decoding(
        toy.target,
        toy.proposer,
        rule=rule,
        sequences=sequences,
        warper=WARPER,
        seed=1,
        level=2.5e-4,
        length=toy.kind.length,
        prompt=toy.kind.prompt,
    )


@pytest.mark.parametrize(("family", "settings"), DRAFTERS, ids=[f"{f} {s}" for f, s in DRAFTERS])
def test_the_toy_is_of_the_drafters_own_class_and_drafts_as_it_does(
    target: Backbone, family: str, settings: dict[str, Any]
) -> None:
    drafter = make_on_target(family, target, **settings)
    mine = Toy.of(toy_of(drafter), seed=1).proposer()
    assert type(mine) is type(drafter)
    for name in ("kind", "policy"):
        assert getattr(mine, name, None) == getattr(drafter, name, None)


def test_a_draft_model_is_its_own_toy_and_a_stranger_has_none(target: Backbone) -> None:
    drafter = make_drafter(target)
    assert type(Toy.of(toy_of(drafter), seed=1).proposer()) is type(drafter)
    drafter.family = "tarot"
    with pytest.raises(RequestError, match="no drafter of family 'tarot'; known: draft_model"):
        toy_of(drafter)


@pytest.mark.parametrize(
    "name", ["medusa", "hydra++", "eagle chain", "eagle3 static", "dflash", "dflash2", "dspark", "peagle"]
)
def test_states_of_a_table_are_those_that_its_projection_reads(name: str) -> None:
    toy = Toy.of(name, seed=1)
    V = toy.target.vocabulary
    logits_VV = toy.target.model.get_output_embeddings()(toy.target.states(torch.arange(V), (-1,)))
    torch.testing.assert_close(logits_VV, toy.target.logits_VV)
    layers = toy.target.states(torch.arange(V), (0, 1, 2))
    assert layers.shape == (V, 24)
    assert len({tuple(row) for row in layers.view(-1, 8).tolist()}) == 3 * V


def _raw_behind(depth: int):
    """A chain's rule that draws corrections from the residual of the raw p from that depth on."""

    def rule(logits_BNV: Tensor, proposal: Proposal, warper: Warper, uniforms: Uniforms) -> Outcome:
        right = accept_chain(logits_BNV, proposal, warper, uniforms)
        q_BKV = acceptance.chain_q(proposal)
        left_BV = acceptance.residual(logits_BNV.float().softmax(-1), q_BKV, right.accepted_B)
        wrong_B = draw(left_BV, uniforms.take(1)[:, 0])
        return right._replace(extra_B=torch.where(right.accepted_B >= depth, wrong_B, right.extra_B))

    return rule


@pytest.mark.parametrize("depth", [2, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (3, 4))])
def test_a_bug_of_the_deeper_drafts_alone_shows_where_drafts_are_deep(depth: int) -> None:
    assert enumerated("draft-model, four deep", sequences=150_000).p_value > 1e-3
    assert enumerated("draft-model, four deep", sequences=150_000, rule=_raw_behind(depth)).p_value < 1e-12
    if depth > 2:  # drafts of two tokens have no such place
        assert enumerated("draft-model", sequences=50_000, rule=_raw_behind(depth)).p_value > 1e-3


def forget_the_first_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one line of the rule: q without the sibling before, and not without all of them."""
    source = inspect.getsource(acceptance._try_children)
    right, wrong = "Q_BV.scatter(1, token_B1, 0.0)", "first_q_BV.scatter(1, token_B1, 0.0)"
    assert source.count(right) == 1
    names = dict(vars(acceptance))
    exec(source.replace(right, wrong), names)
    monkeypatch.setattr(acceptance, "_try_children", names["_try_children"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.startswith("tree") else pytest.mark.slow)
        for name in TOYS
        if "three siblings" in name
    ],
)
def test_a_third_sibling_that_is_judged_without_the_second_alone_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert enumerated(name, sequences=100_000).p_value > 1e-3
    forget_the_first_sibling(monkeypatch)
    assert enumerated(name, sequences=100_000).p_value < 1e-12
    # with three tokens the third sibling is certain, and nothing is to be seen
    assert enumerated("tree, without replacement", sequences=50_000).p_value > 1e-3
