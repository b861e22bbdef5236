"""Boosting where it must win, killed and resumed, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.generate.continuations import Continuations
from draftsmith.data.rows.cache import Prepared
from draftsmith.data.rows.packed import PackedRows
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.folder import check_trainable_model, save_draft_model
from draftsmith.drafters.model.ensemble import Ensemble
from draftsmith.drafters.model.quantised import save_quantised
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.eval.measure.metrics import tau
from draftsmith.eval.measure.probe import as_proposer, tau_probe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import boost as b
from draftsmith.trainers.boosting import coverage_pass
from draftsmith.trainers.boosting.members import (
    check_derived_members,
    check_members,
    check_origins,
    member_plan,
    own_member,
)
from draftsmith.trainers.config import (
    CheckpointConfig,
    LoopConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProbeConfig,
)
from draftsmith.trainers.loop import setup
from draftsmith.trainers.loop.loop import Loop, Plan, Probe
from draftsmith.trainers.method_config import BoostConfig, LoraConfig
from draftsmith.trainers.recipe import Run
from draftsmith.trainers.student.architecture import fresh_model
from helpers.runs.damaged_files import damage
from safetensors.torch import load_file
from torch import Tensor

WORDS, PROMPT, LENGTH = 24, 2, 6
SIZES = ModelConfig(layers=1, hidden=32, intermediate=64, heads=1, kv_heads=1, head_size=16, max_positions=64)


def two_kinds(times: int) -> PackedRows:
    """Samples of two kinds that begin alike: the next word is w + 1, or w + 5 for the rarer kind.

    One SSM cannot foresee both, as nothing in front of the first label tells them apart. Of every
    beginning there are three of the one and two of the other.
    """
    start, step = (each.reshape(-1, 1) for each in np.meshgrid(range(WORDS), [1, 1, 1, 5, 5]))
    prompt = (start + np.arange(PROMPT)) % WORDS
    answer = (prompt[:, -1:] + step * np.arange(1, LENGTH + 1)) % WORDS
    ids = np.tile(np.concatenate([prompt, answer], 1).astype(np.int32), (times, 1))
    labels = np.zeros(ids.shape, bool)
    labels[:, PROMPT:] = True
    return PackedRows(ids, labels, np.zeros_like(ids), "two kinds")


# there are no others of these kinds: what is covered here is what was learnt, held out is nothing
SAMPLES = Continuations(two_kinds(2), two_kinds(1))


@pytest.fixture(scope="module")
def target(chat_tokenizer_folder: Path) -> Backbone:
    torch.manual_seed(0)
    model = fresh_model(SIZES, vocabulary=400, eos=None).eval()
    return Backbone(model, name=str(chat_tokenizer_folder))


def plan(steps: int = 160) -> Plan:
    loop = LoopConfig(
        steps=steps, batch_rows=16, micro_rows=16, precision="fp32", validate_every=1000, validate_rows=4, log_every=50
    )
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=2, final_share=0.01)
    return Plan(loop, optimizer, CheckpointConfig(every_steps=5), ProbeConfig())


def boosting(
    target: Backbone,
    out: Path,
    config: BoostConfig,
    steps: int = 160,
    *,
    model: ModelConfig = SIZES,
    lora: LoraConfig | None = None,
    make_probe: Any = None,
) -> b.Boosting:
    parts = plan(steps)
    recipe = Recipe(
        method="boost",
        model=model,
        objective=ObjectiveConfig(kl=0.0, ce=1.0, chunk=64),
        boost=config.model_copy(update={"prompt_tokens": PROMPT, "continuation": LENGTH}),
        lora=lora or LoraConfig(),
        loop=parts.loop,
        optimizer=parts.optimizer,
        checkpoint=parts.checkpoint,
        probe=parts.probe,
    )
    rows = Prepared(SAMPLES.train, SAMPLES.validation, report=None)  # type: ignore[arg-type]
    out.mkdir(parents=True, exist_ok=True)
    return b.Boosting(Run(recipe, out, "auto", make_probe), target, rows, SAMPLES)


def run(target: Backbone, out: Path, config: BoostConfig, steps: int = 160, **made: Any) -> dict[int, dict]:
    """The coverage records by the number of SSMs."""
    goal = boosting(target, out, config, steps, **made)
    team = setup.make_accelerator(goal.plan.loop, goal.plan.optimizer, out)
    (goal.together if config.order == "side_by_side" else goal.in_turn)(team)
    return covered(out)


def covered(out: Path) -> dict[int, dict]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if line["kind"] == "coverage"}


CHOICES = [
    ({"weights": "hard", "unit": "sample", "match_tokens": 0}, 160),
    ({"weights": "hard", "unit": "span", "match_tokens": 4}, 160),
    ({"weights": "soft", "soft": 4.0, "unit": "sample", "match_tokens": 2}, 160),
    # the first one is still changing while the second learns
    ({"weights": "hard", "unit": "sample", "match_tokens": 0, "order": "side_by_side"}, 300),
]


@pytest.fixture(scope="module")
def copies_in(target: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("copies")
    run(target, out, BoostConfig(members=2, weights="none", unit="sample", match_tokens=0))
    return out


@pytest.fixture(scope="module")
def copies(copies_in: Path) -> dict[int, dict]:
    return covered(copies_in)


def test_copies_learn_the_same(copies: dict[int, dict]) -> None:
    """Both foresee the commoner kind, three of five; the rarer one is covered by hardly any."""
    for each in copies.values():
        assert 0.5 < each["covered"] < 0.7
    assert copies[2]["union"] < 0.75


@pytest.mark.parametrize(
    ("values", "steps"),
    [CHOICES[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in CHOICES[1:])],
    ids=[str(each) for each, _ in CHOICES],
)
def test_the_second_learns_what_the_first_lacks(
    values: dict, steps: int, target: Backbone, copies: dict[int, dict], tmp_path: Path
) -> None:
    run(target, tmp_path, BoostConfig(members=2, stop_share=0.0, **values), steps)
    whole = BoostConfig(unit="sample", match_tokens=0)
    found = [coverage_pass.stored_matches(tmp_path / f"ssm-{k}") for k in (1, 2)]
    both = coverage_pass.coverage_record(found, SAMPLES, whole, draft=4)
    assert both["union"] > 0.9
    assert both["union"] > copies[2]["union"] + 0.2
    drafter = load_drafter(tmp_path / "drafter", target)
    assert isinstance(drafter, Ensemble)
    assert len(drafter.members) == 2


@pytest.mark.slow
def test_it_stops_when_little_is_left(target: Backbone, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two SSMs cover both kinds: the third is not trained, and a line says why."""
    config = BoostConfig(members=3, weights="hard", unit="sample", match_tokens=0, stop_share=0.2)
    with caplog.at_level("INFO", logger="draftsmith"):
        found = run(target, tmp_path, config)
    assert sorted(found) == [1, 2]
    assert not (tmp_path / "ssm-3").exists()
    assert "less than boost.stop_share (20.0%): the ensemble has 2 SSMs" in caplog.text


def test_what_any_ssm_before_covers_is_left_out(target: Backbone, tmp_path: Path) -> None:
    """Two SSMs cover a third of the samples each: the third one learns the rest, not all that the second lacks."""
    config = BoostConfig(members=3, weights="hard", unit="sample", match_tokens=0, stop_share=0.1)
    goal = boosting(target, tmp_path, config)
    label_RS = coverage_pass.labels_of(SAMPLES.train)
    number_R1 = torch.arange(len(label_RS))[:, None]
    for third in (0, 1):
        matched_RS = label_RS & (number_R1 % 3 == third)
        goal.matches.append(coverage_pass.Matches(matched_RS, matched_RS))
    weighted = goal.left(3)
    assert weighted is not None
    left = list(range(2, len(label_RS), 3))
    assert len(weighted) == len(left)
    found, wanted = weighted.batch(list(range(len(left)))), SAMPLES.train.batch(left)
    assert torch.equal(found["input_ids"], wanted["input_ids"])


def test_ssms_go_on_from_each_other_and_differ_in_size(target: Backbone, tmp_path: Path) -> None:
    """With a learning rate of nothing an SSM stays what it began as."""
    config = BoostConfig(members=3, unit="sample", match_tokens=0, start_from=["", "ssm-1"], layers=[1, None, 2])
    goal = boosting(target, tmp_path, config, steps=1)
    plan = goal.plan
    still = plan.optimizer.model_copy(update={"lr": 1e-12, "warmup_steps": 0})
    goal.plan = Plan(plan.loop, still, plan.checkpoint, plan.probe)
    goal.in_turn(setup.make_accelerator(plan.loop, still, tmp_path))
    first, second, third = (weights(tmp_path / f"ssm-{k}" / "drafter") for k in (1, 2, 3))
    assert all(torch.allclose(second[name], t, atol=1e-6) for name, t in first.items())
    assert len(third) > len(first)
    seeds = [member_plan(plan, number).loop.seed for number in (1, 2, 3)]
    assert seeds[0] == plan.loop.seed
    assert len(set(seeds)) == 3


@pytest.fixture(scope="module")
def rounded(target: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origins") / "int8"
    save_quantised(folder, target, bits=8)
    return folder


def test_an_ssm_made_from_the_target_is_taken_as_it_stands(target: Backbone, rounded: Path, tmp_path: Path) -> None:
    """The second SSM learns what the quantised copy misses, and both draft together."""
    config = BoostConfig(members=2, start_from=[str(rounded)], stop_share=0.0)
    goal = boosting(target, tmp_path, config, steps=8)
    plan = goal.plan
    outcome = goal.in_turn(setup.make_accelerator(plan.loop, plan.optimizer, tmp_path))
    assert outcome.steps == 8, "one SSM was trained"
    assert not (tmp_path / "ssm-1" / "checkpoints").exists()
    found = covered(tmp_path)
    assert sorted(found) == [1, 2]
    assert found[1]["covered"] == found[1]["union"]
    drafter = load_drafter(tmp_path / "drafter", target)
    assert isinstance(drafter, Ensemble)
    prompts, how = [[5, 6, 7], [40, 41]], {"warper": Warper(0.0), "max_new_tokens": 10}
    done = generate(target, drafter, prompts, **how)
    assert done.tokens == autoregressive(target, prompts, **how).tokens
    assert tau([done.steps]) > 2, "the copy foresees what the target says"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("ssm-*/drafter/*")}
    again = boosting(target, tmp_path, config, steps=8)
    assert again.in_turn(setup.make_accelerator(plan.loop, plan.optimizer, tmp_path)).steps == 8
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_where_an_ssm_made_from_the_target_cannot_be(rounded: Path, target: Backbone) -> None:
    """Beside others in training, as what another goes on from, or of another target."""
    copied = str(rounded)
    for values, reason in [
        ({"start_from": [copied], "order": "side_by_side"}, "made from the target when it is loaded"),
        ({"start_from": [copied, "ssm-1"]}, "which is made from the target"),
        ({"start_from": [copied] * 3}, "there is nothing to train; let one learn"),
        ({"start_from": [copied], "layers": [2]}, "which has its own"),
    ]:
        with pytest.raises(RequestError, match=reason):
            check_members(BoostConfig(**values), LoraConfig(), SIZES)
    with pytest.raises(RequestError, match="was made for target"):
        check_derived_members(BoostConfig(start_from=[copied]), load_target("tiny"))
    with pytest.raises(RequestError, match="it has no weights to train"):
        check_trainable_model(copied)


def test_an_origin_of_other_tokens_is_refused_before_a_round_is_spent(
    target: Backbone, rounded: Path, tmp_path: Path
) -> None:
    save_draft_model(target.model, tmp_path / "own", target)
    target.model.save_pretrained(tmp_path / "foreign")
    train_tokenizer(["other words, other pieces"] * 9, 300).save_pretrained(tmp_path / "foreign")
    own = [str(tmp_path / "own"), "ssm-1", str(rounded), "target", ""]
    check_origins(BoostConfig(members=5, start_from=own), SIZES, target)
    foreign = BoostConfig(members=2, start_from=["", str(tmp_path / "foreign")])
    with pytest.raises(RequestError, match="foreign' has another tokenizer than the target"):
        check_origins(foreign, SIZES, target)


# ---- resuming ---------------------------------------------------------------------------------


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(left: Path, right: Path) -> None:
    names = sorted(path.relative_to(left) for path in left.rglob("*.safetensors"))
    assert names == sorted(path.relative_to(right) for path in right.rglob("*.safetensors"))
    assert len(names) > 8
    for name in names:
        mine, theirs = load_file(left / name), load_file(right / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
    assert (left / "metrics.jsonl").read_text() == (right / "metrics.jsonl").read_text()


class Killed(BaseException):
    """What no code may catch."""


@pytest.fixture(scope="module")
def undisturbed(target: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    run(target, out, HARD, steps=12)
    return out


HARD = BoostConfig(members=3, weights="hard", unit="span", match_tokens=1, stop_share=0.0)


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("step", 19),
        ("measure", 2),
        *(
            pytest.param(*place, marks=pytest.mark.slow)
            for place in (
                ("publish", 1),
                ("step", 7),
                ("step", 12),
                ("step", 33),
                ("measure", 1),
                ("publish", 3),
                ("export", 2),
            )
        ),
    ],
)
def test_a_kill_anywhere(
    where: str, number: int, target: Backbone, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside rounds, between training and measuring, between rounds: the same bits at the end."""
    calls = 0

    def dying(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return real(*args, **kwargs)

        return call

    places = {
        "step": (Loop, "train_step"),
        "measure": (b, "measure_matches"),
        "publish": (b, "save_ensemble"),
        "export": (Loop, "export"),
    }
    owner, name = places[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name)))
        with pytest.raises(Killed):
            run(target, tmp_path, HARD, steps=12)
    run(target, tmp_path, HARD, steps=12)
    assert_same(tmp_path, undisturbed)


def test_a_finished_run_does_nothing_again(
    target: Backbone, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_args, **_kwargs) -> None:
        raise AssertionError("trained or measured again")

    monkeypatch.setattr(Loop, "train_step", never)
    monkeypatch.setattr(b, "measure_matches", never)
    before = (undisturbed / "metrics.jsonl").read_text()
    run(target, undisturbed, HARD, steps=12)
    assert (undisturbed / "metrics.jsonl").read_text() == before


def test_damaged_coverage_is_found_again_without_training(
    target: Backbone, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(undisturbed, out)
    damage(out / "ssm-2" / "coverage.safetensors", "noise")
    monkeypatch.setattr(Loop, "train_step", lambda *_args: 1 / 0)
    run(target, out, HARD, steps=12)
    assert_same(out, undisturbed)


# ---- adapters on one base ---------------------------------------------------------------------


ADAPTED = BoostConfig(members=2, weights="hard", unit="sample", match_tokens=0, stop_share=0.0)


def on_base(copies_in: Path) -> dict[str, Any]:
    base = str(copies_in / "ssm-1" / "drafter")
    return {"model": ModelConfig(start_from=base), "lora": LoraConfig(rank=8, alpha=16.0)}


@pytest.mark.slow
def test_adapters_on_one_base_are_boosted(target: Backbone, copies_in: Path, tmp_path: Path) -> None:
    """The second learns what the first lacks; the folder holds the base once, as it was."""
    run(target, tmp_path, ADAPTED, **on_base(copies_in))
    found = [coverage_pass.stored_matches(tmp_path / f"ssm-{k}") for k in (1, 2)]
    both = coverage_pass.coverage_record(found, SAMPLES, ADAPTED, draft=4)
    alone = coverage_pass.coverage_record(found[:1], SAMPLES, ADAPTED, draft=4)
    assert both["union"] > alone["union"] + 0.2
    drafter = load_drafter(tmp_path / "drafter", target)
    assert isinstance(drafter, Ensemble)
    assert drafter.chains == 2
    assert drafter.members[0].adapters == ("ssm-1", "ssm-2")
    assert len(list((tmp_path / "drafter").glob("*/model.safetensors"))) == 1
    kept = weights(tmp_path / "drafter" / "ssm-1")
    before = weights(copies_in / "ssm-1" / "drafter")
    assert all(torch.equal(kept[name], t) for name, t in before.items())


def embeddings(goal: b.Boosting, probed: list[torch.nn.Module]) -> set[int]:
    """Tables of words in memory: those that a probe decodes with, and what the run holds."""
    models = [*goal.earlier, *probed[-1:]]
    return {p.data_ptr() for m in models for name, p in m.named_parameters() if "embed" in name}


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_probes_decode_with_all_ssms_and_hold_a_base_once(
    adapters: bool, target: Backbone, copies_in: Path, tmp_path: Path
) -> None:
    """What the last probe saw is what the ensemble that was saved does."""
    prompts, probed = [[1, 2], [3, 4], [5, 6]], []

    def make_probe(target: Backbone) -> Probe:
        real = tau_probe(target, prompts, make_proposer=as_proposer("ensemble", target, 4), max_new_tokens=12)
        return lambda module: (probed.append(module), real(module))[1]

    config = ADAPTED.model_copy(update={"members": 3})
    made = on_base(copies_in) if adapters else {}
    goal = boosting(target, tmp_path, config, 4, make_probe=make_probe, **made)
    goal.in_turn(setup.make_accelerator(goal.plan.loop, OptimizerConfig(), tmp_path))
    assert len(embeddings(goal, probed)) == (1 if adapters else 3)
    # nothing of decoding is left on the layers that were trained
    assert not any(m._forward_pre_hooks for m in probed[-1].modules())
    saved = load_drafter(tmp_path / "drafter", target, draft_length=4)
    done = generate(target, saved, prompts, warper=Warper(0.0), max_new_tokens=12)
    lines = map(json.loads, (tmp_path / "ssm-3" / "metrics.jsonl").read_text().splitlines())
    assert [x["tau"] for x in lines if x["kind"] == "probe"] == [tau([done.steps])]


@pytest.mark.slow
def test_adapters_that_are_killed_go_on(
    target: Backbone, copies_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, made = tmp_path / "one", tmp_path / "two", on_base(copies_in)
    run(target, one, ADAPTED, steps=8, **made)
    with monkeypatch.context() as patch:
        patch.setattr(b, "measure_matches", lambda *_args, **_named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(target, two, ADAPTED, steps=8, **made)
    run(target, two, ADAPTED, steps=8, **made)
    assert_same(one, two)


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"members": 1, "layers": [1, 2]}, "boost.layers has 2 entries, and boost.members is 1"),
        ({"start_from": ["ssm-1"]}, "SSM 1 is initialised from ssm-1; expected one before it"),
        ({"start_from": ["", "ssm-3"]}, "SSM 2 is initialised from ssm-3; expected one before it"),
        ({"start_from": ["", "ssm-1"], "order": "side_by_side"}, "none that is trained before"),
        ({"start_from": ["", "target"], "order": "side_by_side"}, "SSM 2 begins at 'target'"),
        ({"start_from": ["", "ssm-1"], "layers": [1, 2]}, "gives SSM 2 2 layers, and it is initialised from"),
        ({"start_from": ["", "org/small"], "layers": [1, 2]}, "is initialised from org/small, which has"),
    ],
)
def test_refusals(values: dict, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        check_members(BoostConfig(**values), LoraConfig(), SIZES)


def test_only_digits_name_an_earlier_ssm() -> None:
    assert [own_member(name) for name in ("ssm-2", "ssm-²", "ssm-", "ssm-one", "2")] == [2, None, None, None, None]


def test_an_origin_that_nothing_reads_is_refused() -> None:
    all_named, one = BoostConfig(members=2, start_from=["a", "b"]), ModelConfig(start_from="c")
    with pytest.raises(RequestError, match="nothing would read it"):
        check_members(all_named, LoraConfig(), one)
    check_members(BoostConfig(members=2, start_from=["", "b"]), LoraConfig(), one)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"start_from": ["ssm-1"]}, "boost.start_from is set, and lora.rank too: all SSMs are"),
        ({"layers": [1]}, "boost.layers is set, and lora.rank too"),
        ({"order": "side_by_side"}, "boost.order is side_by_side: adapters on one base"),
    ],
)
def test_what_adapters_do_not_go_with(values: dict, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        check_members(BoostConfig(**values), LoraConfig(rank=4), SIZES)
