"""Training over a draft vocabulary, of every family: what is compared, what is learnt, and a run that goes on.

Read next: `drafters/test_draft_vocabulary.py`, which decodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.families import FAMILIES, function
from draftsmith.drafters.layers.draft_vocabulary import ids_of
from draftsmith.errors import Stopped
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.losses.chunked import ChunkedLoss
from draftsmith.trainers.losses.mix import TERMS, UNKNOWN, Mix, OfTarget, drafted
from draftsmith.trainers.method_config import (
    BlockConfig,
    BpdConfig,
    DFlash2Config,
    DSparkConfig,
    EagleConfig,
    MedusaConfig,
    MtpConfig,
)
from draftsmith.trainers.methods import METHODS
from faults import toy
from helpers.models.learnable_text import Chains, descend, learnt
from helpers.models.method_objectives import build
from torch import Tensor

IDS = [word for word in range(VOCABULARY) if word % 3]
EVERY = list(range(VOCABULARY))
PACED = ObjectiveConfig(chunk=16, positions="d-pace")
BLOCK = BlockConfig(size=4, decoder_layers=1, anchors=8)
DRAFT = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, max_positions=128)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {"eagle": EagleConfig(noise=0.0)}),
    "hass": ("eagle", {"eagle": EagleConfig(noise=0.0, passes=2, top_k=1.0, top_k_tokens=4), "objective": PACED}),
    "mtp": ("mtp", {"mtp": MtpConfig(passes=2)}),
    "medusa": ("medusa", {"medusa": MedusaConfig(heads=2), "objective": PACED}),
    "medusa, text": ("medusa", {"medusa": MedusaConfig(heads=2), "objective": ObjectiveConfig(kl=0, ce=1)}),
    "medusa, shared": ("medusa", {"medusa": MedusaConfig(heads=2, shared_head=True)}),
    "hydra": ("hydra", {"medusa": MedusaConfig(heads=2)}),
    "bpd": ("bpd", {"bpd": BpdConfig(every_head=True, block=3)}),
    "dflash": ("dflash", {"block": BLOCK, "objective": PACED}),
    "dflash, target's": ("dflash", {"block": BLOCK.model_copy(update={"ce_label": "target"})}),
    "dspark": ("dspark", {"block": BLOCK, "dspark": DSparkConfig(rank=8, confidence=0.5)}),
    "dflash2": ("dflash2", {"block": BLOCK, "dflash2": DFlash2Config(rank=8, candidates=6)}),
    "distill": ("distill", {"model": DRAFT, "objective": ObjectiveConfig(chunk=16, ce=0.3)}),
}


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def goal_of(name: str, target: Backbone, ids: list[int] | None) -> Any:
    method, sections = CASES[name]
    torch.manual_seed(1)
    return build(method, target.model, ids=ids, **sections)


def test_every_method_that_projects_is_here() -> None:
    over = {name for name, method in METHODS.items() if "draft_vocabulary" in method.sizes}
    assert over == {method for method, _ in CASES.values()} | {"eagle3", "peagle", "medusa2"}


@pytest.mark.parametrize("name", CASES)
def test_over_all_tokens_it_is_the_loss_without_one(name: str, target: Backbone) -> None:
    batch = Chains(4, 0, uneven=True).batch()
    found = []
    for ids in (None, EVERY):
        goal = goal_of(name, target, ids)
        assert (ids_of(goal.draft()) is None) == (ids is None)
        loss, terms = goal.module(batch, goal.prepare(batch))
        loss.backward()
        found.append((loss, terms, {key: p.grad for key, p in goal.module.named_parameters() if p.requires_grad}))
    (plain, plain_terms, plain_grads), (mine, terms, grads) = found
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
    for term in plain_terms:
        torch.testing.assert_close(terms[term].float(), plain_terms[term].float(), rtol=1e-4, atol=1e-4)
    assert grads.keys() == plain_grads.keys()
    for key, grad in plain_grads.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-3, atol=1e-5)


class Seen:
    """What a loss was given: logits, the part of the target's, labels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[Tensor, OfTarget, Tensor]] = []
        whole = ChunkedLoss.forward

        def watched(judge: Any, hidden_PH: Tensor, label_P: Tensor, *given: Any, **more: Any) -> Any:
            loss = more.get("loss") or judge.loss

            def kept(logits: Tensor, outputs: Any, label: Tensor) -> Any:
                self.rows.append((logits.detach().clone(), outputs, label))
                return loss(logits, outputs, label)

            return whole(judge, hidden_PH, label_P, *given, **(more | {"loss": kept}))

        monkeypatch.setattr(ChunkedLoss, "forward", watched)


@pytest.mark.parametrize("name", [each for each in CASES if each != "medusa, text"])
def test_a_part_is_the_whole_cut_to_its_tokens(name: str, target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the same network, the target's distribution renormalised, and labels on the same ids."""
    batch = Chains(4, 0, uneven=True).batch()
    seen = []
    for ids in (EVERY, IDS):
        with monkeypatch.context() as patch:
            rows = Seen(patch)
            goal = goal_of(name, target, ids)
            if ids is EVERY:
                first = goal.draft().state_dict()
            else:
                own = goal.draft().state_dict()
                part = torch.tensor(IDS)
                rows_of = {key: first[key] if first[key].shape == own[key].shape else first[key][part] for key in own}
                goal.draft().load_state_dict(rows_of | {key: own[key] for key in own if key == "d2t"})
            with torch.no_grad():
                goal.module(batch, goal.prepare(batch))
            seen.append(rows.rows)
    assert len(seen[0]) == len(seen[1]) > 0
    for (wide, all_of, label), (narrow, part_of, index) in zip(*seen, strict=True):
        torch.testing.assert_close(narrow, wide[:, IDS], rtol=1e-5, atol=1e-5)
        p = all_of.p_CU[:, IDS]
        torch.testing.assert_close(part_of.share_C, p.sum(-1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(part_of.p_CU, p / p.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)
        labels, indices = (each if each.ndim == 1 else each[:, 0] for each in (label, index))
        expected = [IDS.index(x) if x in IDS else UNKNOWN for x in labels.tolist()]
        assert indices.tolist() == expected


@pytest.mark.parametrize("name", TERMS)
def test_terms_over_a_part(name: str) -> None:
    """As EAGLE-3's: distributions are renormalised to be compared, acceptance takes the target's as it is."""
    mix, g = Mix(**{name: 0.7}), torch.Generator().manual_seed(4)
    draft, wide = (2 * torch.randn(9, size, generator=g) for size in (len(IDS), VOCABULARY))
    ids_U = torch.tensor(IDS)
    labels = torch.randint(0, VOCABULARY, (9,), generator=g)
    found = mix(draft, OfTarget.of(wide, ids_U, mix), drafted(labels, ids_U))
    short = Mix(**{name: 1.0})(draft, wide[:, ids_U], torch.zeros(9, dtype=torch.long))[name]
    p, q = wide.softmax(-1)[:, ids_U], draft.softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    known = torch.tensor([label in IDS for label in labels.tolist()])
    best = torch.tensor([int(each) in IDS for each in wide.argmax(-1)])
    assert set(known.tolist()) == set(best.tolist()) == {True, False}
    wanted = {"tv": 1 - overlap, "lk_alpha": -overlap.log()}.get(name)
    if wanted is None and name == "ce":
        place = drafted(labels, ids_U).clamp_min(0)
        wanted = -draft.log_softmax(-1).gather(-1, place[:, None])[:, 0] * known
    elif wanted is None and name == "lk_lambda":
        kl = Mix(kl=1.0)(draft, wide[:, ids_U], torch.zeros(9, dtype=torch.long))["kl"]
        share = (-3 * overlap).exp()
        wanted = (share * kl + (1 - share) * (1 - overlap)) * best
    elif wanted is None:
        wanted = short * best
    torch.testing.assert_close(found["loss"], 0.7 * wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["alpha"], overlap)
    torch.testing.assert_close(found["covered_mass"], p.sum(-1))


RUNS = ["eagle", "medusa", "dspark", "distill"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    method, sections = CASES[name]
    given = sections | {"ids": IDS}
    toy.run(toy.loop_in(tmp_path / "whole", method, given=given))
    with pytest.raises(Stopped):
        toy.run(toy.loop_in(tmp_path / "cut", method, given=given), stop_at=7)
    toy.run(toy.loop_in(tmp_path / "cut", method, given=given))
    assert toy.state_files(tmp_path / "cut") == toy.state_files(tmp_path / "whole")
    assert toy.losses(tmp_path / "cut") == toy.losses(tmp_path / "whole")


def tau(target: Backbone, goal: Any, prompts: list[list[int]]) -> float:
    family = FAMILIES[getattr(goal.draft(), "family", "draft_model")]
    drafter = function(family.proposer or "")(goal.draft().eval(), target, 3)
    text = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=24)
    drafts = sum(map(len, text.tokens))
    return drafts / text.target_calls / len(prompts)


@pytest.fixture(scope="module")
def chains() -> tuple[Chains, Backbone]:
    rows = Chains(24, 0)
    return rows, learnt(rows)


FAST = ("eagle", "dspark", "distill")
LEARNT = [
    *FAST,
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("mtp", "medusa", "hydra", "bpd", "dflash", "dflash2")),
]


@pytest.mark.parametrize("name", LEARNT)
def test_what_was_trained_is_accepted(name: str, chains: tuple[Chains, Backbone]) -> None:
    """Two of three tokens can be drafted: of an untrained drafter hardly any is, of a trained one most of these."""
    rows, target = chains
    goal, batch = goal_of(name, target, IDS), rows.batch()
    prompts = [row[:6].tolist() for row in Chains(6, 9).batch()["input_ids"]]
    before = tau(target, goal, prompts)

    goal.module.train()
    descend(goal.module, goal.prepare, batch, steps=80, lr=1e-2)
    after = tau(target, goal, prompts)
    assert after > before + 0.4
    assert after > 1.5
