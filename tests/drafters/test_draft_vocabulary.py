"""A draft vocabulary while decoding, of every family: what is declared is what training compares, on the same ids.

Networks are trained over the tokens of `IDS`, or have the rows of their projection cut to them. Read next:
`trainers/losses/test_draft_vocabulary.py`, what is learnt over one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import DraftSampling, Proposal
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.block.dspark import DSpark, DSparkNet
from draftsmith.drafters.block.net import BlockNet
from draftsmith.drafters.block.proposer import DFlash
from draftsmith.drafters.block.selected import DFlash2, DFlash2Net
from draftsmith.drafters.block.trees import TreeShape
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.eagle.net import EagleNet
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.eagle.parallel import Peagle
from draftsmith.drafters.eagle.peagle import PeagleNet
from draftsmith.drafters.eagle.proposer import Eagle, Eagle3
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.heads.bpd import Bpd, BpdHeads
from draftsmith.drafters.heads.hydra import HydraHeads, hydra_on
from draftsmith.drafters.heads.medusa import Medusa, MedusaHeads
from draftsmith.drafters.layers.draft_vocabulary import ids_of, restrict
from draftsmith.drafters.layers.named_ids import ids_in
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.early_exit import EarlyExit, first_layers
from draftsmith.drafters.mtp.family import Mtp
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.eval.audit.enumeration import Enumeration, enumerate_decoding
from draftsmith.eval.audit.toys import Toy
from draftsmith.trainers.teacher.frozen import saver
from helpers.models.random_models import save_with_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

IDS = [0, 2, 3, 5, 7, 9, 11, 12, 20, 33, 34, 41, 47, 50, 52, 58, 60]
PROMPTS = [[5, 9, 2, 33, 7], [11], [1, 2, 3]]
BLOCK: dict[str, Any] = {"layers": (0, 1, 2), "decoder_layers": 1, "size": 4, "causal": False, "layout": "fill-in"}
DSPARK = BLOCK | {"layout": "anchor-first", "vocabulary": VOCABULARY, "rank": 6}
DFLASH2 = BLOCK | {"vocabulary": VOCABULARY, "rank": 6, "candidates": 5, "group": 8}
# name -> (an untrained network over some ids, or all; its drafter)
FAMILY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "eagle": (EagleNet.for_target, Eagle),
    "mtp": (MtpNet.for_target, Mtp),
    "medusa": (lambda model, **how: MedusaHeads.for_target(model, heads=3, **how), Medusa),
    "medusa shared": (lambda model, **how: MedusaHeads.for_target(model, heads=3, shared_head=True, **how), Medusa),
    "hydra": (lambda model, **how: HydraHeads.for_target(model, heads=3, **how), hydra_on),
    "hydra++": (lambda model, **how: HydraHeads.for_target(model, heads=3, prefix=True, **how), hydra_on),
    "bpd": (lambda model, **how: BpdHeads.for_target(model, block=4, **how), Bpd),
    "dflash": (lambda model, **how: BlockNet.for_target(model, **BLOCK, **how), DFlash),
    "dspark": (lambda model, **how: DSparkNet.for_target(model, **DSPARK, **how), DSpark),
    "dflash2": (lambda model, **how: DFlash2Net.for_target(model, **DFLASH2, **how), DFlash2),
}
OWN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "eagle3": (lambda model, ids: Eagle3Net.for_target(model, layers=(0, 1, 2), ids=ids), Eagle3),
    "peagle": (lambda model, ids: PeagleNet.for_target(model, layers=(0, 1, 2), ids=ids, decoder_layers=2), Peagle),
}
"""Families that have a draft vocabulary in any case."""


def shaken(net: Any) -> Any:
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=g))
    return net.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def drafter_of(name: str, target: Backbone, *, cut: bool, **how: Any) -> Any:
    """The drafter of a network that was trained over `IDS`, or of one over all tokens whose rows are cut to them."""
    make, kind = (FAMILY | OWN)[name]
    torch.manual_seed(1)
    if not cut:
        return kind(shaken(make(target.model, ids=IDS)), target, **how)
    net = shaken(make(target.model, ids=range(VOCABULARY)) if name in OWN else make(target.model))
    return kind(net, target, ids=IDS, **how)


class Met:
    """What a drafter proposed, and how much of each row's text was known."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.seen: list[tuple[list[int], Proposal]] = []
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def reset(self, prompts: Any, room: int, *, static: bool = False) -> None:
        self._drafter.reset(prompts, room, static=static)
        self.lengths = [len(prompt) + 1 for prompt in prompts]

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = self._drafter.propose(last_B, warper, uniforms)
        self.seen.append((list(self.lengths), proposal))
        return proposal

    def observe(self, committed: Any) -> None:
        self._drafter.observe(committed)
        counts = committed.count_B.tolist()
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]


def forced_logits(drafter: Any, target: Backbone, text: list[int], depth: int) -> list[Tensor]:
    states = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    layers = [layer if layer >= 0 else len(states) + layer for layer in drafter.layers]
    return list(drafter.teacher_forced(torch.cat([states[each] for each in layers], -1)[0], torch.tensor(text), depth))


@pytest.mark.parametrize("cut", [False, True], ids=["trained", "cut"])
@pytest.mark.parametrize("name", FAMILY | OWN)
@torch.inference_mode()
def test_what_is_drafted_is_what_training_compares(name: str, cut: bool, target: Backbone) -> None:
    """Along the decoded text each accepted path's distributions, or candidates, are those of the teacher-forced
    network, which has none outside of the ids."""
    drafter = Met(drafter_of(name, target, cut=cut))
    decoded = generate(target, drafter, PROMPTS, warper=Warper(0.8), max_new_tokens=24, seed=5)
    outside = torch.ones(VOCABULARY, dtype=torch.bool)
    outside[IDS] = False
    compared = deeper = 0
    for row, prompt in enumerate(PROMPTS):
        text = [*prompt, *decoded.tokens[row]]
        forced = forced_logits(drafter, target, text, 3)
        assert all(bool((each[:, outside] == -torch.inf).all()) for each in forced)
        for lengths, proposal in drafter.seen:
            known = lengths[row]
            if known > len(text) - 1:
                continue
            node = 0
            for depth, logits_XV in enumerate(forced):
                if known - 2 >= len(logits_XV):
                    break
                logits_V = logits_XV[known - 2]
                children = [at for at, parent in enumerate(proposal.tree.parents) if parent == node]
                drafted = proposal.tokens_BN[row, children].tolist()
                assert set(drafted) <= set(IDS)
                if proposal.sampling is DraftSampling.IID:
                    assert proposal.q_BNV is not None
                    q_V = Warper(0.8)(logits_V[None])[0]
                    torch.testing.assert_close(proposal.q_BNV[row, node], q_V, rtol=0.0, atol=2e-5)
                else:
                    assert drafted == logits_V.topk(len(children)).indices.tolist()
                compared, deeper = compared + 1, deeper + bool(depth)
                true = text[known + depth] if known + depth < len(text) else None
                if true not in drafted:
                    break
                node = children[drafted.index(true)]
    assert compared > 10
    assert deeper > 0


GREEDY = [(name, cut) for name in FAMILY | OWN for cut in (False, True)]


@pytest.mark.parametrize(("name", "cut"), GREEDY, ids=str)
def test_greedy_output_is_the_targets(name: str, cut: bool, target: Backbone) -> None:
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 16}
    drafter = drafter_of(name, target, cut=cut)
    assert generate(target, drafter, PROMPTS, **how).tokens == autoregressive(target, PROMPTS, **how).tokens


TREES: dict[str, dict[str, Any]] = {
    "eagle": {"tree": "dynamic", "draft_length": 3, "top_k": 3, "nodes": 9},
    "mtp": {"tree": "static", "paths": ((0,), (1,), (0, 0))},
    "dflash": {"tree": TreeShape(6, 3)},
    "dspark": {"tree": TreeShape(7, 3)},
    "dflash2": {"tree": TreeShape(7, 3)},
}


@pytest.mark.parametrize("warper", [Warper(0.0), Warper(0.9)], ids=str)
@pytest.mark.parametrize("name", TREES)
def test_trees_hold_the_ids_alone(name: str, warper: Warper, target: Backbone) -> None:
    for cut in (False, True):
        drafter = Met(drafter_of(name, target, cut=cut, **TREES[name]))
        generate(target, drafter, PROMPTS, warper=warper, max_new_tokens=12)
        for _, proposal in drafter.seen:
            present = proposal.present_BN if proposal.present_BN is not None else torch.ones_like(proposal.tokens_BN)
            drafted = proposal.tokens_BN[:, 1:][present[:, 1:].bool()]
            assert set(drafted.tolist()) <= set(IDS)


@pytest.mark.parametrize("name", FAMILY)
def test_a_cut_network_drafts_as_one_over_the_ids(name: str, target: Backbone) -> None:
    """The same weights, and the rows of the ids where the network has rows of its own."""
    make, kind = FAMILY[name]
    torch.manual_seed(1)
    whole, part = shaken(make(target.model)), make(target.model, ids=IDS)
    mine = part.state_dict()
    rows = torch.tensor(IDS)
    for key, tensor in whole.state_dict().items():
        mine[key] = tensor if mine[key].shape == tensor.shape else tensor[rows]
    part.load_state_dict(mine)
    met = [Met(each) for each in (kind(whole, target, ids=IDS), kind(part.requires_grad_(False).eval(), target))]
    texts = [generate(target, each, PROMPTS, warper=Warper(1.0), max_new_tokens=16, seed=2) for each in met]
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].target_calls == texts[1].target_calls
    for (_, one), (_, other) in zip(*(each.seen for each in met), strict=True):
        assert torch.equal(one.tokens_BN, other.tokens_BN)
        torch.testing.assert_close(one.q_BNV, other.q_BNV)


@pytest.mark.parametrize("cut", [False, True], ids=["trained", "cut"])
@pytest.mark.parametrize("name", ["eagle", "medusa", "dspark", "dflash2", "eagle3"])
def test_a_folder_holds_the_map(name: str, cut: bool, target: Backbone, tmp_path: Path) -> None:
    """Of a network over the ids; and a folder of one over all drafts them by an option."""
    made = drafter_of(name, target, cut=cut)
    place = save_with_tokenizer(tmp_path / "target")
    own = Backbone(target.model, name=str(place))
    saver(own, made.module.family)(made.module, tmp_path / "drafter")
    config = DrafterConfig(draft_vocabulary=IDS if cut else None)
    drafter = load_drafter(tmp_path / "drafter", own, draft_length=4, config=config)
    how: dict[str, Any] = {"warper": Warper(0.9), "max_new_tokens": 12, "seed": 4}
    ours, loaded = (generate(own, each, PROMPTS, **how) for each in (made, drafter))
    assert ours.tokens == loaded.tokens
    assert ours.target_calls == loaded.target_calls
    settings = json.loads((tmp_path / "drafter/config.json").read_text())["draftsmith"]["settings"]
    assert (settings.get("draft_vocabulary") == len(IDS)) == (not cut)


# ---- draft models -----------------------------------------------------------------------------


def draft_over(target: Backbone, ids: list[int] | None) -> DraftModel:
    model = shaken(copy.deepcopy(target.model))
    restrict(model, ids)
    return DraftModel(Backbone(model, name="draft"), target.vocabulary)


@torch.inference_mode()
def test_a_draft_models_rows_are_cut(target: Backbone) -> None:
    """Its distributions are those of all rows, renormalised on the ids; a projection beneath others stays whole."""
    whole, cut = draft_over(target, None), Met(draft_over(target, IDS))
    how: dict[str, Any] = {"warper": Warper(1.0), "max_new_tokens": 12}
    decoded = generate(target, cut, PROMPTS, **how)
    wanted = torch.zeros(VOCABULARY, dtype=torch.bool)
    wanted[IDS] = True
    for row, prompt in enumerate(PROMPTS):
        text = torch.tensor([[*prompt, *decoded.tokens[row]]])
        logits_SV = whole.backbone.model(text).logits[0]
        for lengths, proposal in cut.seen:
            if lengths[row] <= text.shape[1]:
                assert proposal.q_BNV is not None
                q_V = logits_SV[lengths[row] - 1].masked_fill(~wanted, -torch.inf).softmax(-1)
                torch.testing.assert_close(proposal.q_BNV[row, 0], q_V, rtol=0.0, atol=2e-5)
    assert len(cut.backbone.model.get_output_embeddings().weight) == len(IDS)


def test_a_model_in_training_drafts_the_ids_too(target: Backbone) -> None:
    """Its projection has all rows while it learns."""
    drafter = Met(draft_over(target, None))
    drafter.module.d2t = torch.tensor(IDS) - torch.arange(len(IDS))
    generate(target, drafter, PROMPTS, warper=Warper(1.0), max_new_tokens=12)
    drafted = torch.cat([proposal.tokens_BN[:, 1:].flatten() for _, proposal in drafter.seen])
    assert set(drafted.tolist()) <= set(IDS)
    assert len(drafter.module.get_output_embeddings().weight) == VOCABULARY


def test_an_early_exit_is_cut_and_the_target_is_not(target: Backbone) -> None:
    head = target.model.get_output_embeddings()
    draft = first_layers(target, 1)
    restrict(draft.model, IDS)
    drafter = Met(EarlyExit(draft, target.vocabulary))
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 12}
    assert generate(target, drafter, PROMPTS, **how).tokens == autoregressive(target, PROMPTS, **how).tokens
    assert set(torch.cat([p.tokens_BN[:, 1:].flatten() for _, p in drafter.seen]).tolist()) <= set(IDS)
    assert target.model.get_output_embeddings() is head
    assert ids_of(target.model) is None


# ---- files of ids -----------------------------------------------------------------------------


def test_files_of_ids(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[7, 3, 5]")
    (tmp_path / "a.txt").write_text("7\n3\n5\n")
    (tmp_path / "a").mkdir()
    save_file({"d2t": torch.tensor([3, 4, 5])}, tmp_path / "a/model.safetensors")
    assert all(ids_in(tmp_path / name, 9) == [3, 5, 7] for name in ("a.json", "a.txt", "a"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[3, 9]", "has 9; expected two ids or more, each once, from 0 to 8"),
        ("[3, 3]", "names 1 tokens in 2 ids"),
        ("[3]", "names 1 tokens in 1 ids"),
        ("[3, -1]", "has -1;"),
        ("3\nfour", r"cannot be read \(ValueError"),
        ("[3, 4.5]", "has 4.5;"),
    ],
)
def test_other_files_are_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(text)
    with pytest.raises(RequestError, match=why):
        ids_in(tmp_path / "ids", 9)


def test_what_cannot_be_drafted_is_refused(target: Backbone, tmp_path: Path) -> None:
    place = save_with_tokenizer(tmp_path / "target")
    own = Backbone(target.model, name=str(place))
    saver(own, "eagle")(drafter_of("eagle", target, cut=False).module, tmp_path / "drafter")
    for asked, why in (
        ([1, 4], "names 2 tokens, none of which is among the 17 that the drafter was trained to draft"),
        (8, "drafter.draft_vocabulary is 8, and no rows are here whose tokens could be counted"),
        ([1, 500], "has 500; expected two ids or more, each once, from 0 to 60"),
    ):
        with pytest.raises(RequestError, match=why):
            load_drafter(tmp_path / "drafter", own, config=DrafterConfig(draft_vocabulary=asked))
    weights = load_file(tmp_path / "drafter/model.safetensors")
    save_file(weights | {"d2t": weights["d2t"] + 1000}, tmp_path / "drafter/model.safetensors")
    with pytest.raises(RequestError, match=r"holds a draft vocabulary \(d2t\) that is no choice of the target's 61"):
        load_drafter(tmp_path / "drafter", own)


def test_families_without_a_projection_refuse_the_option() -> None:
    projecting = {name for name, family in FAMILIES.items() if "draft_vocabulary" in family.options}
    loaded = {name for name, family in FAMILIES.items() if family.load}
    assert loaded - projecting == {"quantised"}  # whose rows are rounded together


# ---- lossless ---------------------------------------------------------------------------------


class Slipped(Eagle):
    """The planted bug: what is declared stands one id beside what is drawn."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        assert proposal.q_BNV is not None
        return replace(proposal, q_BNV=proposal.q_BNV.roll(1, -1))


def counted(name: str, kind: Any) -> Enumeration:
    """The joint counts of a toy's sequences, which drafts two of three tokens by the rows of its projection."""
    small = Toy.of(name, seed=1)

    def proposer() -> Any:
        own: Any = small.proposer()
        return kind(own.module, own._target, ids=[0, 2])

    return enumerate_decoding(
        small.target,
        proposer,
        rule=None,
        sequences=10_000,
        warper=Warper(0.7),
        seed=1,
        level=2.5e-4,
        length=small.kind.length,
        prompt=small.kind.prompt,
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("eagle chain", Eagle), ("medusa", partial(Medusa, paths=((0,), (1,), (0, 0)))), ("dspark", DSpark)],
)
def test_every_sequence_has_its_probability(name: str, kind: Any) -> None:
    """Counted by the audit's enumeration, a third of the tokens being the target's alone."""
    assert counted(name, kind).p_value > 1e-3


def test_a_map_that_slips_is_seen() -> None:
    assert counted("eagle chain", Slipped).p_value < 1e-6
