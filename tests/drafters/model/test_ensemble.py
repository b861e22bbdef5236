"""Several drafts as one tree: exact, row by row, and each goes on from what it got right itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.proposal import Committed, DraftSampling, Proposal, Trials
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.folder import check_trainable_model, save_draft_model, save_heads
from draftsmith.drafters.model.adapters import adapted_layers, use
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.ensemble import Ensemble, Member, SharedBase, join, join_adapters, save_ensemble
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from draftsmith.trainers.method_config import LoraConfig
from draftsmith.trainers.student.lora import add_adapter, save_adapted
from helpers.runs.damaged_files import damage
from torch import Tensor

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3]]
SEEDS = (1, 2, 3)
COMMON: dict[str, Any] = {"max_new_tokens": 24, "seed": 5}


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


def drafts_of(target: Backbone, **settings: Any) -> list[DraftModel]:
    settings = {"noise": 0.05, "draft_length": 3} | settings
    return [make_drafter(target, seed=seed, **settings) for seed in SEEDS]


def known_distribution(member: Member, row: int, drafted: list[int]) -> Tensor:
    """The distribution behind a row's committed tokens and some of its own, by a fresh forward. [K, V]"""
    past = member._history.tokens_BL[row, : int(member._history.lengths_B[row])].tolist()
    logits = member.module(torch.tensor([past + drafted])).logits[0, len(past) :]
    return logits.softmax(-1)


class Careful(Member):
    """Compares the distribution of every token that it drafts with that of a forward from the start."""

    checked = 0

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        proposal = super().propose(last_B, warper, uniforms)
        for row, tokens in enumerate(proposal.tokens_BN.tolist()):
            distribution = known_distribution(self, row, tokens[:-1])
            assert proposal.q_BNV is not None
            torch.testing.assert_close(proposal.q_BNV[row, :-1], distribution, atol=1e-5, rtol=1e-4)
            Careful.checked += 1
        return proposal


class Forgetful(Careful):
    """A bug: takes what the others drafted for its own."""

    observe = DraftModel.observe


def of_kind(kind: type[Member], target: Backbone) -> Ensemble:
    return Ensemble([kind(each.backbone, target.vocabulary, draft_length=3) for each in drafts_of(target)])


@torch.inference_mode()
def test_members_go_on_from_what_they_got_right_themselves(target: Backbone) -> None:
    Careful.checked = 0
    generate(target, of_kind(Careful, target), PROMPTS, warper=Warper(1.0), **COMMON)
    assert Careful.checked > 40
    with pytest.raises(AssertionError, match="not close"):
        generate(target, of_kind(Forgetful, target), PROMPTS, warper=Warper(1.0), **COMMON)


@pytest.mark.parametrize("static", [False, True])
def test_greedy_output_is_the_targets_and_no_member_is_better_alone(static: bool, target: Backbone) -> None:
    base = autoregressive(target, PROMPTS, warper=Warper(0.0), **COMMON)
    drafts = drafts_of(target)
    done = generate(target, join(drafts), PROMPTS, warper=Warper(0.0), static=static, **COMMON)
    assert done.tokens == base.tokens
    for draft in drafts:
        alone = generate(target, draft, PROMPTS, warper=Warper(0.0), **COMMON)
        assert done.target_calls <= alone.target_calls


# rows that share prefixes beside rows that do not: test_compact_trees_are_the_same_by_path
@pytest.mark.parametrize(("temperature", "seeds"), [(0.0, 1), pytest.param(0.3, 3, marks=pytest.mark.slow), (1.0, 1)])
def test_neither_other_rows_nor_fixed_shapes_change_a_row(temperature: float, seeds: int, target: Backbone) -> None:
    ensemble = join(drafts_of(target))
    for seed in range(seeds):
        how: dict[str, Any] = {**COMMON, "warper": Warper(temperature), "seed": seed}
        together = generate(target, ensemble, PROMPTS, **how).tokens
        assert generate(target, ensemble, PROMPTS, static=True, **how).tokens == together
        for row, prompt in enumerate(PROMPTS):
            assert generate(target, ensemble, [prompt], requests=[row], **how).tokens == [together[row]]


def test_equal_members_are_verified_once(target: Backbone) -> None:
    draft = drafts_of(target)[0]
    one = generate(target, draft, PROMPTS, warper=Warper(0.0), **COMMON)
    twice = generate(target, join([draft, draft]), PROMPTS, warper=Warper(0.0), **COMMON)
    assert twice.nodes == one.nodes
    assert twice.target_calls == one.target_calls


AUDITED = [(0.6, "sample"), *(pytest.param(1.0, each, marks=pytest.mark.slow) for each in ("sample", "argmax"))]


@pytest.mark.parametrize(("temperature", "policy"), AUDITED)
def test_the_audit_passes(temperature: float, policy: str, target: Backbone) -> None:
    report = audit(target, join(drafts_of(target, policy=policy)), PROMPTS, evidence(temperature))
    assert report.verdict == "lossless", report.text()
    assert report.replay.argmax == report.replay.tokens > 0


class Mixed(Ensemble):
    """A bug: every trial is taken to be of the first member's distribution."""

    def propose(self, last_B: Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        found = super().propose(last_B, warper, uniforms)
        if found.sampling is DraftSampling.SEVERAL:
            trials = found.trials
            assert trials is not None
            first = trials.q_index_BNC % (self.draft_length + 1)
            same = Trials(trials.q_BXV, trials.child_BNC, first)
            found = Proposal(found.tokens_BN, found.tree, found.sampling, None, found.present_BN, same, found.coins)
        return found


def test_the_audit_sees_a_distribution_that_is_another_members(
    target: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.eval.audit import toys

    monkeypatch.setattr(toys, "join", lambda drafts: Mixed(join(drafts).members))
    report = audit(target, Mixed(join(drafts_of(target)).members), PROMPTS, evidence(1.0))
    assert report.verdict == "NOT lossless"
    assert report.enumeration is not None
    assert report.enumeration.p_value < 1e-9


def evidence(temperature: float) -> AuditConfig:
    return AuditConfig(
        tokens=500, sequences=20_000, temperature=temperature, batch=3, prompts=3, max_new_tokens=40, draft_length=3
    )


def test_done_rows_are_left_alone(target: Backbone) -> None:
    """A row that has ended commits nothing; its members keep what they knew."""
    member = join(drafts_of(target)).members[0]
    with torch.inference_mode():
        member.reset(PROMPTS[:2], 20)
        last = torch.tensor([3, 4])
        member.propose(last, Warper(0.0), Uniforms(0, [0, 1], "cpu"))
        before = member._known_B.clone()
        tokens = torch.zeros(2, 4, dtype=torch.long)
        path, logits = torch.full((2, 3), -1), torch.zeros(2, 4, 1)
        member.observe(Committed(tokens, torch.tensor([0, 1]), path, logits))
    assert member._known_B[0] == before[0]
    assert member._known_B[1] == before[1] + 1


# ---- adapters on one base -----------------------------------------------------------------


def with_adapters(target: Backbone) -> DraftModel:
    """A draft with two shaken adapters."""
    draft = drafts_of(target)[0]
    for name in ("one", "two"):
        add_adapter(draft.module, name, rank=4, alpha=8.0, dropout=0.0, layers=[], section="lora")
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in draft.module.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=g))
    draft.module.requires_grad_(False).eval()
    return draft


def alone(draft: DraftModel, name: str | None, target: Backbone) -> DraftModel:
    """A copy of the draft that uses one of its adapters."""
    copied = copy.deepcopy(draft.module)
    use(copied, name)
    return DraftModel(Backbone(copied, name="copy"), target.vocabulary, draft_length=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adapters_of_one_base_draft_as_separate_models_do(temperature: float, target: Backbone) -> None:
    draft, names = with_adapters(target), ["one", "two", None]
    shared = Ensemble([SharedBase(draft.backbone, target.vocabulary, names, draft_length=3)])
    separate = join([alone(draft, name, target) for name in names])
    how = {"warper": Warper(temperature), **COMMON}
    one, two = (generate(target, each, PROMPTS, **how) for each in (shared, separate))
    assert one.tokens == two.tokens
    assert one.origin == two.origin
    assert one.nodes == two.nodes
    # decoding again begins anew, with as many hooks as before
    assert generate(target, shared, PROMPTS[:2], **how).tokens == one.tokens[:2]
    assert {len(layer._forward_pre_hooks) for layer in adapted_layers(draft.module)} == {1}


def test_adapters_of_one_base_decode_as_one_batch(target: Backbone) -> None:
    """A step of drafting calls the base once, with the rows of all adapters."""
    draft = with_adapters(target)
    ensemble = join_adapters(draft, ["one", "two"])
    rows: list[int] = []
    words = draft.backbone.model.get_input_embeddings()
    words.register_forward_pre_hook(lambda _module, given: rows.append(given[0].shape[0]))
    made, propose = [], ensemble.propose

    def watched(last_B: torch.Tensor, warper: Warper, uniforms: Uniforms) -> Proposal:
        rows.clear()
        found = propose(last_B, warper, uniforms)
        made.append(rows == [2 * len(last_B)] * ensemble.draft_length)
        return found

    ensemble.propose = watched  # type: ignore[method-assign]
    generate(target, ensemble, PROMPTS, warper=Warper(1.0), **COMMON)
    assert len(made) > 3
    assert all(made)


@pytest.mark.parametrize("temperature", [pytest.param(0.6, marks=pytest.mark.slow), 1.0])
def test_the_audit_passes_with_adapters(temperature: float, target: Backbone) -> None:
    report = audit(target, join_adapters(with_adapters(target), ["one", "two"]), PROMPTS, evidence(temperature))
    assert report.verdict == "lossless", report.text()


# ---- folders ------------------------------------------------------------------------------


def test_adapters_are_saved_with_their_base_once(tmp_path: Path) -> None:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    draft = with_adapters(target)
    save_adapted(draft.module, tmp_path / "draft", target, LoraConfig(rank=4, name="two"))
    save_ensemble(tmp_path / "all", [tmp_path / "draft"], target, adapters=["one", "two"])
    loaded = load_drafter(tmp_path / "all", target, draft_length=3)
    how = {"warper": Warper(1.0), **COMMON}
    expected = generate(target, join_adapters(draft, ["one", "two"]), PROMPTS, **how)
    assert generate(target, loaded, PROMPTS, **how).tokens == expected.tokens
    assert len(list((tmp_path / "all").glob("*/model.safetensors"))) == 1
    first = load_drafter(tmp_path / "all", target, config=DrafterConfig(members=1))
    assert isinstance(first, Ensemble)
    assert first.chains == 1
    with pytest.raises(RequestError, match=r"drafter.adapter is 'one', and .* is an ensemble"):
        load_drafter(tmp_path / "all", target, config=DrafterConfig(adapter="one"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Backbone, Ensemble, Path]:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    drafts = drafts_of(target)
    places = [tmp_path / f"draft-{number}" for number in SEEDS]
    for draft, place in zip(drafts, places, strict=True):
        save_draft_model(draft.module, place, target)
    save_ensemble(tmp_path / "ensemble", places, target)
    return target, join(drafts), tmp_path / "ensemble"


def test_a_saved_ensemble_drafts_the_same(saved: tuple[Backbone, Ensemble, Path]) -> None:
    target, ensemble, folder = saved
    loaded = load_drafter(folder, target, draft_length=3)
    how = {"warper": Warper(1.0), **COMMON}
    one, two = (generate(target, each, PROMPTS, **how) for each in (ensemble, loaded))
    assert one.tokens == two.tokens
    assert one.origin == two.origin


def test_the_first_members_can_draft_alone(saved: tuple[Backbone, Ensemble, Path]) -> None:
    target, _, folder = saved
    found = load_drafter(folder, target, config=DrafterConfig(members=2))
    assert isinstance(found, Ensemble)
    assert len(found.members) == 2
    with pytest.raises(RequestError, match=r"drafter.members is 4; the ensemble .* has 3: ssm-1"):
        load_drafter(folder, target, config=DrafterConfig(members=4))


def test_auto_takes_an_ensemble_as_any_draft(saved: tuple[Backbone, Ensemble, Path]) -> None:
    """Its tokens are the target's; what names no ensemble has no members to choose from."""
    target, _, folder = saved
    found = load_drafter(folder, target, config=DrafterConfig(vocabulary="auto", members=2))
    assert isinstance(found, Ensemble)
    with pytest.raises(RequestError, match=r"drafter.members is 1, and .*ssm-1 is a drafter of"):
        load_drafter(folder / "ssm-1", target, config=DrafterConfig(members=1))


def test_an_ensemble_is_no_model_to_go_on_from(saved: tuple[Backbone, Ensemble, Path]) -> None:
    _, _, folder = saved
    with pytest.raises(RequestError, match="family 'ensemble', no model by itself; name one of"):
        check_trainable_model(str(folder))
    check_trainable_model(str(folder / "ssm-1"))


def test_members_that_draft_no_chain_are_refused(saved: tuple[Backbone, Ensemble, Path]) -> None:
    from draftsmith.drafters.heads.medusa import MedusaHeads

    target, _, folder = saved
    heads = MedusaHeads.for_target(target.model, heads=2)
    settings = {"heads": 2, "layers": 1, "hidden": 32, "vocabulary": target.vocabulary}
    save_heads(heads, folder / "ssm-2", target, family="medusa", settings=settings)
    with pytest.raises(RequestError, match=r"ssm-2 is a drafter of family 'medusa'; expected draft"):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "lists no members"),
        ({"members": []}, "lists no members"),
        ({"members": "ssm-1"}, "says that its members are 'ssm-1'"),
        ({"members": [1]}, r"says that its members are \[1\]"),
        ({"members": ["ssm-1"], "adapters": {"one": 1}}, "says that its adapters are"),
        ([], "does not describe a drafter"),
    ],
)
def test_settings_that_list_no_members(settings: Any, says: str, saved: tuple[Backbone, Ensemble, Path]) -> None:
    target, _, folder = saved
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["draftsmith"]["settings"] = settings
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match=rf"config\.json {says}"):
        load_drafter(folder, target)


def test_a_damaged_member_is_named(saved: tuple[Backbone, Ensemble, Path]) -> None:
    target, _, folder = saved
    damage(folder / "ssm-2" / "model.safetensors", "cut")
    with pytest.raises(RequestError, match=r"ssm-2/model\.safetensors .* cannot be read"):
        load_drafter(folder, target)
