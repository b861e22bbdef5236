"""Targets that cap, scale or shift their logits: losses, gradients and drafts beside the models' own forward pass.

Read next: `block/test_shaped_blocks.py`, the methods that draft several tokens in one pass.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_drafter
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.eagle.proposer import Eagle, Eagle3
from draftsmith.drafters.heads.bpd import Bpd
from draftsmith.drafters.heads.hydra import Hydra
from draftsmith.drafters.heads.medusa import Medusa
from draftsmith.drafters.projection import Projection, Shaping
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.audit.enumeration import enumerate_decoding
from draftsmith.eval.audit.toy_models.table import TableModel, tables
from draftsmith.eval.audit.toys import Toy
from draftsmith.eval.config import AuditConfig
from draftsmith.launch.train import train
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.method_config import BpdConfig, Eagle3Config, EagleConfig, MedusaConfig
from draftsmith.trainers.packed.passes import hidden_states
from draftsmith.trainers.student.distillation import DraftStudent, teacher_of
from draftsmith.trainers.student.draft import given_model
from draftsmith.trainers.target import NextToken
from helpers.models.method_objectives import build
from helpers.models.random_models import random_model
from helpers.models.shaped_targets import (
    FAMILIES,
    OBJECTIVE,
    S,
    assert_same_gradients,
    divergence,
    shake,
    shaped,
    text,
)
from helpers.models.small_drafters import make_on_target
from safetensors.torch import load_file

HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "medusa": (Medusa, {"medusa": MedusaConfig(heads=2)}),
    "medusa shared": (Medusa, {"medusa": MedusaConfig(heads=2, shared_head=True)}),
    "hydra shared": (Hydra, {"medusa": MedusaConfig(heads=2, shared_head=True)}),
    "bpd": (Bpd, {"bpd": BpdConfig(block=3, every_head=True)}),
}


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_learn_the_distribution_that_is_decoded(family: str, method: str) -> None:
    """p is the model's own forward pass, q what the drafter computes of the same text."""
    model: Any = shaped(family)
    make, sections = HEADS[method]
    goal = build(method.split()[0], model, objective=OBJECTIVE, **sections)
    heads, batch = shake(goal.draft()), text()
    ids_S = batch["input_ids"][0]
    loss, _ = goal.module.eval()(batch, goal.prepare(batch))
    own_SV = model(ids_S[None]).logits[0]
    hidden_SH = model.get_decoder()(ids_S[None]).last_hidden_state[0]
    wanted = torch.zeros(())
    drafter = make(heads, Backbone(model, name="own"))
    for k, q_XV in enumerate(drafter.teacher_forced(hidden_SH, ids_S, 2), 1):
        label_X = ids_S[k + 1 :]
        part = divergence(own_SV[k : k + len(label_X)], q_XV) + 0.5 * F.cross_entropy(q_XV, label_X, reduction="sum")
        wanted = wanted + part * (0.5 if method == "bpd" else sections["medusa"].decay ** k)
    assert_same_gradients(loss, wanted, heads)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eagle_learns_the_distribution_that_is_decoded(family: str, method: str) -> None:
    model: Any = shaped(family)
    layers = (0, 1, 2)
    how: dict[str, Any] = {"eagle": EagleConfig(feature=0.0, ce=1.0)}
    if method == "eagle3":
        how = {"eagle3": Eagle3Config(layers=layers, passes=1), "ids": range(VOCABULARY)}
    goal = build(method, model, objective=ObjectiveConfig(kl=0.0, chunk=4), **how)
    net, batch = shake(goal.draft()), text()
    ids_S = batch["input_ids"][0]
    loss, terms = goal.module.eval()(batch, goal.prepare(batch))
    out = model(ids_S[None], output_hidden_states=True)
    own_SV = out.logits[0]
    states = [out.hidden_states[layer] for layer in (layers if method == "eagle3" else (-1,))]
    drafter = (Eagle3 if method == "eagle3" else Eagle)(net, Backbone(model, name="own"))
    (q_XV,) = drafter.teacher_forced(torch.cat(states, -1)[0], ids_S, 1)
    p_XV = own_SV[1 : 1 + len(q_XV)].softmax(-1)
    assert_same_gradients(loss, -(p_XV * q_XV.log_softmax(-1)).sum(), net)
    # of labels, of which the first token behind the pair is none
    alpha = torch.minimum(p_XV, q_XV.softmax(-1)).sum() * (S - 1) / len(q_XV)
    torch.testing.assert_close(terms["alpha"], alpha.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "other"), [("gemma2", "phi"), ("phi", "granite"), ("cohere", "gemma2")])
def test_a_draft_model_of_another_kind(family: str, other: str) -> None:
    """Every weight of the draft has the gradient of the whole computation, its head's bias among them."""
    target, draft, batch = shaped(family), copy.deepcopy(shaped(other)).requires_grad_(True), text()
    student = DraftStudent(draft, target, OBJECTIVE).eval()
    with torch.no_grad():
        states = target.get_decoder()(batch["input_ids"]).last_hidden_state
        p_PV = target(batch["input_ids"]).logits[0, :-1]
    loss, _ = student(batch, teacher_of(target, states, batch))
    q_PV = draft(batch["input_ids"]).logits[0, :-1]
    ce = F.cross_entropy(q_PV, batch["input_ids"][0, 1:], reduction="sum")
    assert_same_gradients(loss, divergence(p_PV, q_PV) + 0.5 * ce, draft)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_that_learns_text(family: str) -> None:
    model, batch = copy.deepcopy(shaped(family)).requires_grad_(True), text()
    loss, _ = NextToken(model, chunk=4)(batch)
    logits_PV = model(batch["input_ids"]).logits[0, :-1]
    assert_same_gradients(loss, F.cross_entropy(logits_PV, batch["input_ids"][0, 1:], reduction="sum"), model)


def test_a_cap_that_is_left_out_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug of all these tests."""
    whole = Shaping.of
    monkeypatch.setattr("draftsmith.drafters.projection.Shaping.of", lambda model: Shaping(whole(model).scale))
    monkeypatch.setattr("draftsmith.trainers.teacher.frozen.check_logits", lambda *_: None)
    for test in (
        lambda: test_heads_learn_the_distribution_that_is_decoded("gemma2", "bpd"),
        lambda: test_eagle_learns_the_distribution_that_is_decoded("gemma2", "eagle"),
        lambda: test_a_target_that_learns_text("gemma2"),
    ):
        with pytest.raises(AssertionError, match="not close"):
            test()


# ---- decoding ------------------------------------------------------------------------------------


def drafters(target: Backbone) -> Iterator[Any]:
    yield make_drafter(target, noise=0.03)
    for family in ("medusa", "bpd", "eagle", "eagle3"):
        yield make_on_target(family, target, noise=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    model: Any = shaped(family)
    target, prompts = Backbone(model, name="own"), [[7, 3, 50, 9, 22], [4, 5, 60, 7, 8, 31, 10, 11, 12]]
    own = [
        model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)[0, len(prompt) :]
        for prompt in prompts
    ]
    wanted = [ids.tolist() for ids in own]
    assert autoregressive(target, prompts, warper=Warper(0.0), max_new_tokens=16).tokens == wanted
    for drafter in drafters(target):
        done = generate(target, drafter, prompts, warper=Warper(0.0), max_new_tokens=16)
        assert done.tokens == wanted


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_drafter_s_own_distribution_goes_through_all_that_the_target_does(family: str) -> None:
    """EAGLE-1, MTP modules, slots, BPD and shared heads say of the target's last state what the target says."""
    model: Any = shaped(family)
    target, ids = Backbone(model, name="own"), torch.tensor([[7, 3, 50, 9]])
    states, logits = model.get_decoder()(ids).last_hidden_state, model(ids).logits
    torch.testing.assert_close(make_on_target("eagle", target)._logits(states), logits)
    torch.testing.assert_close(make_on_target("mtp", target)._logits(states), logits)
    block = make_on_target("dflash", target)
    torch.testing.assert_close(block._behind(states, block.head.product(states), ids), logits)
    heads = make_on_target("bpd", target)
    torch.testing.assert_close(heads.heads.logits_by(heads._drafting, states), logits)


@pytest.mark.slow  # the enumeration below, and trees behind a window in decoding/backbone/test_families.py
def test_the_audit_of_a_capped_target_behind_its_window() -> None:
    """Answers of more than three windows, tree and chain."""
    window = {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    model: Any = random_model("gemma2", spread=0.3, **FAMILIES["gemma2"] | window)
    use_grouped_attention(model)
    target = Backbone(model, name="own")
    config = AuditConfig(tokens=500, sequences=20_000, temperature=1.0, batch=2, prompts=2, max_new_tokens=50)
    for settings in ({}, {"tree": "dynamic", "top_k": 4, "nodes": 12}):
        drafter = make_on_target("eagle", target, noise=0.02, **settings)
        report = audit(target, drafter, [[n, n + 1, 2 * n % 61][: 1 + n % 3] for n in range(1, 20)], config)
        assert report.verdict == "lossless", report.text()


@torch.no_grad()
def test_a_capped_model_that_is_trained_reads_the_mask_of_its_documents(tmp_path: Path) -> None:
    """Its own attention adds a boolean mask as 0 and 1 where it is left as it was loaded."""
    random_model("gemma2", spread=0.5, **FAMILIES["gemma2"]).save_pretrained(tmp_path)
    given: Any = given_model(ModelConfig(start_from=str(tmp_path)))
    ids, half = text()["input_ids"], S // 2
    batch = {"input_ids": ids, "documents": torch.arange(S)[None] // half, "positions": torch.arange(S)[None] % half}
    found = hidden_states(given, batch)
    for part in (slice(0, half), slice(half, S)):
        torch.testing.assert_close(found[:, part], given.get_decoder()(ids[:, part]).last_hidden_state)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capped target with short windows, a model with a biased head, their tokens and rows of text."""
    folder = tmp_path_factory.mktemp("shaped")
    tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    for family, more in (("gemma2", window), ("phi", {})):
        random_model(family, spread=0.5, **FAMILIES[family] | more | {"vocab_size": 300}).save_pretrained(
            folder / family
        )
        tokenizer.save_pretrained(folder / family)
    rows = [{"text": f"abc {n} def ghi jkl mno pqr " * 12} for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    "recipe",
    ["medusa2", "eagle3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("distill", "bpd", "eagle"))],
)
def test_a_run_on_rows_of_six_windows(recipe: str, place: Path, tmp_path: Path) -> None:
    """Through the loop: checkpoints, a probe that decodes, the drafter's folder. A draft's bias moves with it."""
    rows = str(place / "rows.jsonl")
    flags: dict[str, Any] = {"target__path": place / "gemma2", "data__source": rows, "data__validation": rows}
    flags |= {"data__sequence_length": 48, "loop__steps": 2, "loop__batch_rows": 4, "loop__micro_rows": 2}
    flags |= {"probe__prompts": 1, "probe__max_new_tokens": 12, "eval__prompts": rows, "eval__prompt_tokens": 24}
    flags |= {"optimizer__warmup_steps": 0}
    if recipe == "distill":
        flags["model__start_from"] = place / "phi"
    train(f"{recipe}-tiny", out=tmp_path / "out", **{name: str(value) for name, value in flags.items()})
    drafter = load_file(tmp_path / "out" / "drafter" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in drafter.values())
    if recipe == "distill":
        before = load_file(place / "phi" / "model.safetensors")["lm_head.bias"]
        assert not torch.equal(drafter["lm_head.bias"], before)


SHAPINGS = {"cap": Shaping(1.0, 4.0), "scale": Shaping(0.25), "both": Shaping(2.0, 5.0)}


@pytest.mark.parametrize("kind", ["eagle chain", "eagle static", "bpd"])
@pytest.mark.parametrize(
    "shaping",
    [pytest.param(each, id=name, marks=[] if name == "both" else pytest.mark.slow) for name, each in SHAPINGS.items()],
)
def test_the_audit_s_enumeration(shaping: Shaping, kind: str) -> None:
    """Over a table whose logits are capped or scaled, and a drafter that reads its projection."""
    table, drafts = tables(1)
    target = TableModel(table.logits_VV, shaping)
    states_VH = target.states(torch.arange(target.vocabulary), (-1,))
    torch.testing.assert_close(Projection.of(target.model).logits(states_VH), table.logits_VV)
    toy = Toy(kind, target, drafts)
    found = enumerate_decoding(
        target,
        toy.proposer,
        rule=None,
        sequences=20_000,
        warper=Warper(0.7),
        seed=1,
        level=2.5e-4,
        length=toy.kind.length,
        prompt=toy.kind.prompt,
    )
    assert found.p_value > 1e-3
