"""Any module is trained by any loss in the one loop: it learns, is probed, resumes to the same bits, and drafts."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import draftsmith
import numpy as np
import pytest
import torch
from conftest import make_target
from draftsmith.data.config import DataConfig
from draftsmith.data.rows.packed import Document, PackedRows, pack
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.random import Uniforms
from draftsmith.errors import RequestError, Stopped, TrainingFailed
from draftsmith.fitting import rows_of
from helpers.models.shallow_target import SHALLOW
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

V = 61
PROMPTS = [[5, 9, 2, 33], [11, 4]]
SMALL: dict[str, Any] = {
    "batch_rows": 4,
    "lr": 0.1,
    "probe_max_new_tokens": 10,
    "validate_rows": 2,
    "checkpoint_every_steps": 4,
    "prompts": PROMPTS,
}
FAST: dict[str, Any] = {**SMALL, "lr": 1.0}


class Bigram(nn.Module):
    """What follows a token, by the token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Drafting(draftsmith.Drafter):
    def __init__(self, net: Bigram) -> None:
        self.module, self.draft_length, self.draft_steps = net, 1, 1

    def propose(self, last_B: Tensor, warper: draftsmith.Warper, uniforms: Uniforms) -> draftsmith.Proposal:
        assert self.module is not None
        q_BV = warper(self.module(last_B))
        drawn_B = draftsmith.draw(q_BV, uniforms.take(1)[:, 0])
        tokens_BN, q_BNV = torch.stack([last_B, drawn_B], 1), torch.stack([q_BV, torch.zeros_like(q_BV)], 1)
        return draftsmith.Proposal(tokens_BN, draftsmith.chain(1), draftsmith.DraftSampling.IID, q_BNV)


class DraftsItself(Bigram, Drafting):
    """A module that is its own drafter."""

    def __init__(self) -> None:
        Bigram.__init__(self)
        self.draft_length = 1

    def propose(self, last_B: Tensor, warper: draftsmith.Warper, uniforms: Uniforms) -> draftsmith.Proposal:
        return Drafting(self).propose(last_B, warper, uniforms)


def loss(net: Bigram, batch: dict[str, Tensor], states: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The text's next token; and how large the target's states are, which is no loss."""
    (hidden_RSH,) = states
    assert not hidden_RSH.requires_grad
    counts_RX = batch["loss_mask"][:, 1:]
    logits_PV = net(batch["input_ids"][:, :-1][counts_RX])
    label_P = batch["input_ids"][:, 1:][counts_RX]
    return {"loss": F.cross_entropy(logits_PV, label_P, reduction="sum"), "size": hidden_RSH.abs().sum()}


def other_loss(net: Bigram, batch: dict[str, Tensor], states: tuple[Tensor, ...]) -> Tensor:
    return 2 * loss(net, batch, states)["loss"]


def mean(net: Bigram, batch: dict[str, Tensor]) -> Tensor:
    """What is no sum."""
    return loss(net, batch, (torch.zeros(()),))["loss"] / batch["loss_mask"][:, 1:].sum()


@pytest.fixture(scope="module")
def target() -> Backbone:
    return make_target("qwen3")


@pytest.fixture(scope="module")
def rows(target: Backbone) -> PackedRows:
    """Text of the target itself."""
    done = draftsmith.autoregressive(target, [[n] for n in range(40)], temperature=0.5, max_new_tokens=30)
    documents = [Document(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in done.tokens]
    return pack(documents, 32, pad=0, fingerprint="own")


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_it_learns_is_probed_and_drafts(target: Backbone, rows: PackedRows, tmp_path: Path) -> None:
    net = Bigram()
    drafter = draftsmith.fit(
        target, net, loss, rows, steps=24, drafter=Drafting, out=tmp_path, probe_every_steps=8, log_every=1, **FAST
    )
    train = records(tmp_path, "train")
    assert train[-1]["loss"] < 0.7 * train[0]["loss"]
    assert train[0]["size"] > 0
    probes = records(tmp_path, "probe")
    assert [each["step"] for each in probes] == [8, 16, 24]
    assert isinstance(drafter, Drafting)
    assert drafter.module is net
    # what is returned has the best weights by tau, and decodes as the probe did
    best = max(probes, key=lambda each: (each["tau"], each["step"]))
    assert draftsmith.generate(target, drafter, PROMPTS, max_new_tokens=10, eos_ids=[]).tau == best["tau"] > 1
    kept = load_file(tmp_path / "drafter" / "model.safetensors")
    assert net.state_dict()["table.weight"].equal(kept["table.weight"])


def test_a_run_that_was_cut_off_ends_with_the_same_bits(target: Backbone, rows: PackedRows, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def run(out: Path, goal: Any = loss, **how: Any) -> Bigram:
        net = Bigram()
        draftsmith.fit(target, net, goal, rows, steps=8, drafter=Drafting, out=out, **{"log_every": 1, **SMALL, **how})
        return net

    first = run(whole)
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "drafter")
    shutil.rmtree(cut / "checkpoints" / "step-00000008")
    assert run(cut).table.weight.equal(first.table.weight)
    assert [each["step"] for each in records(cut, "train")] == [*range(1, 9)]
    assert run(whole, log_every=4).table.weight.equal(first.table.weight)  # a finished run is read again
    for change, said in (({"goal": other_loss}, "code of the loss is"), ({"lr": 0.2}, "optimizer.lr is 0.1 there")):
        with pytest.raises(RequestError, match=said):
            run(whole, **change)


def test_a_net_may_draft_by_itself_and_the_loss_be_a_number(target: Backbone, rows: PackedRows) -> None:
    net = DraftsItself()
    before = net.table.weight.clone()
    assert draftsmith.fit(target, net, other_loss, rows, steps=2, **SMALL) is net
    assert not net.table.weight.equal(before)
    assert not net.training


def test_no_state_is_computed_where_none_is_asked_for(
    target: Backbone, rows: PackedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.trainers.teacher.features import OnlineFeatures

    monkeypatch.setattr(OnlineFeatures, "fetch", lambda *_: pytest.fail("the target made a pass"))
    seen: list[Any] = []

    def without(net: Bigram, batch: dict[str, Tensor], states: tuple[Tensor, ...]) -> Tensor:
        seen.append(states)
        return net(batch["input_ids"]).sum()

    draftsmith.fit(target, Bigram(), without, rows, steps=1, drafter=Drafting, layers=(), **SMALL)
    assert set(seen) == {()}


def test_rows_of_texts_ids_and_sources(rows: PackedRows) -> None:
    tiny = load_target(SHALLOW)
    data = draftsmith.DataConfig(sequence_length=16, validation_share=0.25)
    texts = ["def f(x):\n    return x\n", [7, 8, 9, 10], "class A:\n    pass\n", "import os\n"]
    train, held_out = rows_of(texts, tiny, data)
    said = tiny.tokenizer(texts[3]).input_ids
    assert held_out.ids_RS[0, : len(said)].tolist() == said
    assert sum((part.document_RS >= 0).sum() for part in (train, held_out)) >= 4 + len(said)
    train, held_out = rows_of(rows, tiny, data)
    assert len(train) + len(held_out) == len(rows)
    assert len(held_out) == len(rows) // 4
    train, held_out = rows_of("stdlib", tiny, data.model_copy(update={"limit_rows": 30}))
    assert train.sequence_length == 16
    assert len(held_out) > 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"drafter": None}, "Bigram does not draft by itself, as it has no `propose`"),
        ({"loss": lambda net, batch, _: {"ce": net.table.weight.sum()}}, "returned a dict of 'ce'; expected the loss"),
        ({"loss": lambda net, batch, _: net.table.weight}, r"a tensor of shape \[61, 61\] as 'loss'"),
        ({"loss": lambda net, batch, _: net.table.weight.detach().sum()}, "does not depend on any weight"),
        ({"loss": lambda net, batch, _: mean(net, batch)}, r"as 'loss' of 4 rows, .*: that is a mean; expected a sum"),
        (
            {"loss": lambda net, batch, states: {**loss(net, batch, states), "right": 0.5 * torch.ones(())}},
            "returned 0.5 as 'right' of 4 rows, 0.5 of the one half of them and 0.5 of the other: that is a mean",
        ),
        ({"rows": ["one"]}, "holds 1 texts; expected at least 2"),
        ({"lrr": 1.0}, "lrr is no argument of fit and no field of loop, optimizer"),
        (
            {"every_steps": 1},
            "every_steps is a value of several sections; expected checkpoint_every_steps or probe_every",
        ),
        ({"loop__steps": 0}, "steps: found 0"),
    ],
)
def test_wrong_arguments_are_named(how: dict[str, Any], said: str, target: Backbone, rows: PackedRows) -> None:
    given = {"loss": loss, "rows": rows, "drafter": Drafting, **SMALL, **how}
    with pytest.raises(RequestError, match=said):
        draftsmith.fit(target, Bigram(), given.pop("loss"), given.pop("rows"), steps=1, **given)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (6, "step 3: 4 non-finite steps in a row, in the last loss is nan"),
        (2, "step 1: the run ends, and all of its 2 steps were skipped"),
    ],
)
def test_a_loss_that_is_not_a_number_ends_the_run(
    steps: int, said: str, target: Backbone, rows: PackedRows, caplog: pytest.LogCaptureFixture
) -> None:
    net = Bigram()
    before = net.table.weight.clone()
    with pytest.raises(TrainingFailed, match=said):
        draftsmith.fit(
            target, net, lambda *of: loss(*of)["loss"] * torch.nan, rows, steps=steps, drafter=Drafting, **SMALL
        )
    assert "step 0 skipped: loss or gradient is not finite (loss is nan)" in caplog.text
    assert net.table.weight.equal(before)


@pytest.mark.parametrize("keeps", [True, False])
def test_an_interrupted_run_says_what_is_kept_and_goes_on(
    keeps: bool, target: Backbone, rows: PackedRows, tmp_path: Path
) -> None:
    calls = 0

    def interrupted(net: Bigram, batch: dict[str, Tensor], states: tuple[Tensor, ...]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            signal.raise_signal(signal.SIGINT)
        return loss(net, batch, states)["loss"]

    how = {"steps": 6, "drafter": Drafting, "out": tmp_path / "run" if keeps else None, "log_every": 1, **SMALL}
    net = Bigram()
    said = (
        "with a checkpoint in .*run; the same call goes on" if keeps else "nothing else is kept: name a folder, out="
    )
    with pytest.raises(Stopped, match=f"SIGINT: stopped after step 3 of 6.*{said}"):
        draftsmith.fit(target, net, interrupted, rows, **how)
    assert isinstance(draftsmith.fit(target, net, interrupted, rows, **how), Drafting)
    if keeps:
        whole = Bigram()
        draftsmith.fit(target, whole, interrupted, rows, **{**how, "out": tmp_path / "whole"})
        assert net.table.weight.equal(whole.table.weight)
        assert [each["step"] for each in records(tmp_path / "run", "train")] == [*range(1, 7)]


def test_the_folder_of_a_recipe_is_not_taken(target: Backbone, rows: PackedRows, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("method: medusa\n")
    with pytest.raises(RequestError, match="holds the run of a recipe"):
        draftsmith.fit(target, Bigram(), loss, rows, steps=1, drafter=Drafting, out=tmp_path, **SMALL)


# ---- recipes from Python ----------------------------------------------------------------------


def test_a_recipe_is_a_dict_and_values_are_named_as_python_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.launch.train import run

    seen: list[Any] = []
    monkeypatch.setattr(run, "_dispatch", lambda recipe, out, resume: seen.append(recipe))
    for number, recipe in enumerate(
        ("medusa-tiny", {"method": "medusa", "base": "medusa-tiny", "loop": {"steps": 7}})
    ):
        values = {"data": {"source": "stdlib"}, "warmup_steps": 3, "lr": 0.5, "loop__batch_rows": 4, "micro_rows": 2}
        draftsmith.train(recipe, out=tmp_path / f"{number}", **values, medusa_heads=2, eval_temperatures=[0.5])
    for made, steps in zip(seen, (None, 7), strict=True):
        assert (made.data.source, made.optimizer.warmup_steps, made.optimizer.lr) == ("stdlib", 3, 0.5)
        assert (made.loop.batch_rows, made.medusa.heads, made.eval.temperatures) == (4, 2, [0.5])
        assert steps is None or made.loop.steps == steps


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        (
            {"method": "medusa", "loop": {"stepz": 3}},
            {},
            "loop.stepz .the given recipe.: unknown key; did you mean 'loop.steps'",
        ),
        ({"method": "meduza"}, {}, "the given recipe: 1 error in the recipe"),
        ("medusa-tiny", {"data_sorce": "x"}, "unknown flag; did you mean 'data.source'"),
        ("medusa-tiny", {"stepz": 3}, "stepz is no value of a recipe; did you mean steps"),
        ("medusa-tiny", {"loop": {"stepz": 3}}, "loop.stepz: unknown flag; did you mean 'loop.steps'"),
        ("medusa-tiny", {"data": "x"}, "data is 'x'; expected a dict, as data is a section"),
        ("medusa-tiny", {"steps": torch.ones(())}, r"steps is tensor\(1.\); expected a number, a text, a list"),
        (Path("recipes/none.yaml"), {}, "there is no recipe file recipes/none.yaml"),
        (Path("medusa-tiny.yaml"), {}, "there is no recipe file ./medusa-tiny.yaml"),
        (3, {}, "recipe is 3; expected a shipped recipe's name, a file, or a dict of sections"),
        ("medusa-tiny", {"resume": 3}, "resume is 3; expected `auto`, `never` or a checkpoint's path"),
        ("medusa-tiny", {"top_k": 3}, "top_k is a value of several sections; expected objective_top_k or eval_top_k"),
    ],
)
def test_wrong_values_of_a_recipe_are_named(recipe: Any, overrides: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        draftsmith.train(recipe, out=tmp_path / "run", **overrides)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"net": Bigram}, "net is <class .*; expected a torch module that is made"),
        ({"net": nn.Identity()}, "net, a Identity, has no weight that is trained"),
        ({"loss": None}, r"loss is None; expected a function loss\(net, batch, states\)"),
        ({"drafter": "x"}, r"drafter is 'x'; expected a function drafter\(net\)"),
        ({"layers": -1}, "layers is -1; expected a list of the numbers of hidden states"),
        ({"steps": "x"}, "steps is 'x'; expected a whole number of at least 1"),
        ({"rows": 5}, "rows is 5; expected `stdlib`, a file or folder"),
        ({"rows": [[1, 2], None]}, "row 2 of 2 is None; expected a text or token ids"),
        ({"rows": [["a"], ["b"]]}, "row 1 of 2 holds 'a'; expected a text or token ids"),
        ({"target": "tiny"}, "target is a str; expected what draftsmith.load_target"),
    ],
)
def test_what_cannot_be_trained_is_named(
    change: dict[str, Any], said: str, target: Backbone, rows: PackedRows
) -> None:
    given = {"target": target, "net": Bigram(), "loss": loss, "rows": rows, "drafter": Drafting, "steps": 2, **change}
    with pytest.raises(RequestError, match=said):
        draftsmith.fit(**given, **SMALL)


def test_rows_without_a_token_are_named() -> None:
    with pytest.raises(RequestError, match="the 2 rows make none that is trained on: they are empty"):
        rows_of(["", ""], load_target(SHALLOW), DataConfig())
