"""Medusa-2 and the target that it moves: loss, what moves and when, export, exact resume."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.attention import use_grouped_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.lean.families import misfit
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.heads.medusa import Medusa, load_medusa
from draftsmith.drafters.identity import TargetIdentity
from draftsmith.drafters.projection import Projection
from draftsmith.errors import RequestError, Stopped
from draftsmith.trainers.config import ObjectiveConfig, OptimizerConfig, TargetConfig
from draftsmith.trainers.loop import optimizer, setup, state
from draftsmith.trainers.loop.loop import RunOutcome
from draftsmith.trainers.medusa2 import Medusa2Objective, sine
from draftsmith.trainers.method_config import Medusa2Config, MedusaConfig, TuneConfig
from draftsmith.trainers.teacher.tuned import TunedTarget, check_precision, tuned_saver
from helpers.models.learnable_text import Batch, Chains, loop_on, stop_behind
from helpers.models.method_objectives import build
from torch import Tensor

PAPER = ObjectiveConfig(kl=0, ce=1, chunk=5)
HEADS = MedusaConfig(heads=2)
LORA = TuneConfig(rank=4, alpha=8, dropout=0.0)
FULL = TuneConfig(how="full")
EACH = pytest.mark.parametrize("tune", [LORA, FULL], ids=["lora", "full"])


def decoding_target() -> Backbone:
    """As `load_target` gives it, with a tokenizer whose first tokens stand for the model's."""
    target = make_target("qwen3")
    use_grouped_attention(target.model)
    target.tokenizer = train_tokenizer(["abc def ghi jkl\n"] * 5, 300)
    return target


def joint(
    tune: TuneConfig, medusa2: Medusa2Config | None = None, target: Backbone | None = None
) -> tuple[Medusa2Objective, TunedTarget]:
    config = medusa2 or Medusa2Config()
    tuned = TunedTarget(target or decoding_target(), tune, row_tokens=64, remember=config.self_distillation)
    return build("medusa2", tuned, medusa=HEADS, medusa2=config, objective=PAPER), tuned


def shake(parameters, size: float = 0.1) -> None:  # noqa: ANN001
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(size * torch.randn(parameter.shape, generator=g))


def hand_made() -> Batch:
    """Two packed rows: documents of 5 and 6 tokens and padding; one of 12 with a prompt of 7."""
    documents = torch.tensor([[0] * 5 + [1] * 6 + [-1], [0] * 12])
    positions = torch.tensor([[*range(5), *range(6), 0], [*range(12)]])
    mask = (documents >= 0) & (positions > 0)
    mask[1, :7] = False
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "loss_mask": mask, "positions": positions, "documents": documents}


# ---- the loss --------------------------------------------------------------------------------


def plain_losses(goal: Medusa2Objective, tuned: TunedTarget, batch: Batch, original) -> Tensor:  # noqa: ANN001
    """[L_LM, L_Medusa-1], label by label, every document computed on its own."""
    model, heads = tuned.model, goal.draft()
    own, drafted = torch.zeros(()), torch.zeros(())
    for r, t in (batch["loss_mask"]).nonzero().tolist():
        first = t - int(batch["positions"][r, t])
        ids, label = batch["input_ids"][r, first:t], batch["input_ids"][r, t]
        logits = model(input_ids=ids[None]).logits[0, -1]
        if original is None:
            own = own + F.cross_entropy(logits, label)
        else:
            p = original(input_ids=ids[None]).logits[0, -1].softmax(-1)
            own = own + (p * (p.log() - logits.log_softmax(-1))).sum()
        for k in (1, 2):
            if len(ids) <= k:
                continue
            state_H = model.get_decoder()(input_ids=ids[None]).last_hidden_state[0, -1 - k]
            message = heads.logits(heads(state_H), Projection(tuned.head.weight))[k - 1]
            drafted = drafted + 0.8**k * F.cross_entropy(message, label)
    return torch.stack([own, drafted])


@EACH
@pytest.mark.parametrize("distils", [False, True], ids=["text", "self"])
def test_the_loss_is_the_plain_formula(tune: TuneConfig, distils: bool) -> None:
    """L = L_LM + lambda_0 sum_k 0.8^k CE_k, with gradients of all that moves."""
    target = decoding_target()
    original = copy.deepcopy(target.model)
    config = Medusa2Config(weight=0.3, self_distillation=distils)
    goal, tuned = joint(tune, config, target)
    shake(p for p in goal.module.parameters() if p.requires_grad)
    batch = hand_made()
    loss, terms = goal.module(batch, goal.prepare(batch))

    own, drafted = plain_losses(goal, tuned, batch, original if distils else None)
    torch.testing.assert_close(loss, own + 0.3 * drafted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(terms["lm_loss"], own.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(terms["heads_loss"], drafted.detach(), rtol=1e-5, atol=1e-4)

    moving = list(tuned.trained().values()) + list(goal.draft().parameters())
    ours = torch.autograd.grad(loss, moving)
    theirs = torch.autograd.grad(own + 0.3 * drafted, moving)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)


@EACH
def test_the_original_stays_what_it_was(tune: TuneConfig) -> None:
    """p_original is the distribution before the run, whatever the weights have become, and is no mode."""
    target = decoding_target()
    before = copy.deepcopy(target.model)
    _, tuned = joint(tune, Medusa2Config(self_distillation=True), target)
    shake(tuned.trained().values())
    ids = hand_made()["input_ids"]
    adapted = tuned.model.eval()(input_ids=ids).logits
    tuned.model.train()
    with tuned.original() as original:
        torch.testing.assert_close(original(input_ids=ids).logits, before(input_ids=ids).logits, rtol=0, atol=0)
    assert (adapted - before(input_ids=ids).logits).abs().max() > 0.1
    assert tuned.model.training
    assert torch.equal(tuned.model.eval()(input_ids=ids).logits, adapted)
    assert all(p.requires_grad for p in tuned.trained().values())
    if tune.how == "full":
        with pytest.raises(ValueError, match="only on request"), joint(tune)[1].original():
            pass


@pytest.mark.parametrize("distils", [False, True])
def test_no_label_gives_zeros_of_the_same_names(distils: bool) -> None:
    goal, tuned = joint(LORA, Medusa2Config(self_distillation=distils))
    batch = hand_made()
    _, expected = goal.module(batch, goal.prepare(batch))
    empty = batch | {"loss_mask": torch.zeros_like(batch["loss_mask"])}
    loss, terms = goal.module(empty, goal.prepare(empty))
    loss.backward()
    assert list(terms) == list(expected)
    assert all(float(value) == 0 for value in terms.values())
    assert all(p.grad is not None for p in tuned.trained().values())


def test_mixed_precision_is_near() -> None:
    goal, tuned = joint(LORA)
    shake(tuned.trained().values())
    batch = hand_made()
    plain, _ = goal.module(batch, goal.prepare(batch))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = goal.module(batch, goal.prepare(batch))
    torch.testing.assert_close(mixed.float(), plain, rtol=0.03, atol=0.1)


# ---- what moves, when, how fast --------------------------------------------------------------


def test_lora_moves_adapters_alone_and_saves_nothing_else() -> None:
    goal, tuned = joint(LORA)
    names = list(state.trainable(goal.module))
    adapters = [name for name in names if not name.startswith("student.")]
    # 7 linear layers in each of 2 blocks, 2 matrices each; the output projection has none
    assert len(adapters) == 28
    assert all(".lora_" in name for name in adapters)
    numbers = sum(t.numel() for t in state.trainable(goal.module).values())
    heads = sum(p.numel() for p in goal.draft().parameters())
    assert numbers == heads + sum(p.numel() for p in tuned.trained().values())
    few = TunedTarget(decoding_target(), LORA.model_copy(update={"layers": ["q_proj"]}), row_tokens=64)
    assert len(few.trained()) == 4


def test_full_saves_every_weight_once() -> None:
    goal, tuned = joint(FULL)
    numbers = sum(t.numel() for t in state.trainable(goal.module).values())
    assert numbers == sum(p.numel() for p in goal.module.parameters())
    assert len(tuned.trained()) == len(list(tuned.model.parameters()))


@pytest.mark.parametrize("layers", [["lm_head"], ["embed_tokens"], ["q_proj", "k_porj"]])
def test_layers_that_cannot_be_adapted_are_refused(layers: list[str]) -> None:
    with pytest.raises(RequestError, match=f"{layers[-1]}.*it has down_proj, gate_proj"):
        TunedTarget(decoding_target(), LORA.model_copy(update={"layers": layers}), row_tokens=64)


def test_coarse_weights_are_not_trained() -> None:
    check_precision(LORA, TargetConfig(dtype="bf16"))
    with pytest.raises(RequestError, match="full and target.dtype is bf16"):
        check_precision(FULL, TargetConfig(dtype="bf16"))


def test_a_frozen_target_in_half_precision_takes_adapters() -> None:
    target = decoding_target()
    target.model.to(torch.bfloat16)
    goal, tuned = joint(LORA, target=target)
    batch = hand_made()
    goal.module(batch, goal.prepare(batch))[0].backward()
    assert {p.dtype for p in tuned.trained().values()} == {torch.float32}
    assert all(torch.isfinite(p.grad).all() for p in tuned.trained().values())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_heads_learn_four_times_faster(name: str) -> None:
    goal, tuned = joint(LORA.model_copy(update={"rest_steps": 10}))
    config = OptimizerConfig(name=name, lr=5e-4, warmup_steps=4, schedule="constant")
    groups = [g for each in optimizer.build(goal.module, config) for g in each.param_groups]
    backbone, heads = {id(p) for p in tuned.trained().values()}, set()
    heads |= {id(p) for p in goal.draft().parameters()}
    seen: set[int] = set()
    for group in groups:
        ids = {id(p) for p in group["params"]}
        seen |= ids
        assert ids <= backbone or ids <= heads

        def rate(step: int, group=group) -> float:  # noqa: ANN001
            lr = optimizer.rate(step, 100, config)
            return optimizer.group_rate(group, step, lr, config)

        found = [rate(step) for step in (1, 8, 9, 10, 11, 13, 50)]
        if ids <= heads:
            assert found == pytest.approx([1e-3, *[2e-3] * 6])
        else:  # at rest, then a warm-up of its own
            assert found == pytest.approx([0, 0, 0, 1.25e-4, 2.5e-4, 5e-4, 5e-4])
    assert seen == backbone | heads


def test_the_weight_grows_along_a_sine() -> None:
    assert [sine(step, 4) for step in (-3, -1, 0, 1, 3, 9)] == pytest.approx(
        [0, 0, math.sin(math.pi / 8), math.sin(math.pi / 4), 1, 1]
    )
    assert sine(0, 0) == 1
    goal, _ = joint(LORA, Medusa2Config(weight=0.2, sine_steps=4))
    batch = hand_made()
    goal.begin_step(0, 0)
    loss, terms = goal.module(batch, None)
    small = 0.2 * math.sin(math.pi / 8)
    torch.testing.assert_close(loss.detach(), terms["lm_loss"] + small * terms["heads_loss"])
    goal.module.eval()  # what is measured is measured alike at every step
    loss, terms = goal.module(batch, None)
    torch.testing.assert_close(loss.detach(), terms["lm_loss"] + 0.2 * terms["heads_loss"])


# ---- a whole run -----------------------------------------------------------------------------

STEPS, RESTS = 8, 3


rows = partial(Chains, length=16)


def train(
    out: Path,
    tune: TuneConfig,
    *,
    stop_at: int | None = None,
    watch=None,  # noqa: ANN001
    steps: int = STEPS,
    lr: float = 3e-3,
    micro: int = 4,
    medusa2: Medusa2Config | None = None,
    uneven: bool = False,
) -> tuple[Medusa2Objective, TunedTarget, RunOutcome]:
    """A run through the real loop, cut by a signal behind `stop_at` steps."""
    config = medusa2 or Medusa2Config()

    def make() -> Medusa2Objective:
        target = decoding_target()
        torch.manual_seed(0)
        tuned = TunedTarget(target, tune, row_tokens=64, remember=config.self_distillation)
        made.append(tuned)
        return build(
            "medusa2", tuned, tuned_saver(tuned, "medusa", out), medusa=HEADS, medusa2=config, objective=PAPER
        )

    made: list[TunedTarget] = []
    goal, loop = loop_on(out, make, partial(rows, uneven=uneven), steps=steps, lr=lr, micro=micro, validate_every=4)
    (tuned,) = made
    stop_behind(loop, stop_at, watch and (lambda step: watch(step, goal, tuned)))
    return goal, tuned, loop.run(setup.resume_from(out, "auto"))


def with_rest(tune: TuneConfig) -> TuneConfig:
    return tune.model_copy(update={"rest_steps": RESTS, "dropout": 0.1})


@EACH
def test_stage_one_leaves_the_target_still(tune: TuneConfig, tmp_path: Path) -> None:
    """To the bit, weight decay included; the heads move at once, frozen weights never."""
    original = decoding_target().model.state_dict()
    moved: dict[int, tuple[bool, bool]] = {}
    before: dict[str, Tensor] = {}

    def look(step: int, goal: Medusa2Objective, tuned: TunedTarget) -> None:
        now = {f"t.{name}": p.detach().clone() for name, p in tuned.trained().items()}
        now |= {f"h.{name}": p.detach().clone() for name, p in goal.draft().named_parameters()}
        if before:
            moved[step] = tuple(
                any(not torch.equal(now[n], before[n]) for n in now if n.startswith(kind)) for kind in ("t.", "h.")
            )  # type: ignore[assignment]
        before.update(now)

    _, tuned, _ = train(tmp_path, with_rest(tune), watch=look)
    assert moved == {n: (n >= RESTS, True) for n in range(1, STEPS)}
    if tune.how == "lora":
        now = {name.replace(".base_layer", ""): t for name, t in tuned.model.state_dict().items()}
        assert all(torch.equal(now[name], tensor) for name, tensor in original.items())


@EACH
@pytest.mark.parametrize(
    "distils", [pytest.param(False, id="text", marks=pytest.mark.slow), pytest.param(True, id="self")]
)
def test_a_cut_run_resumes_to_the_same_bits(tune: TuneConfig, distils: bool, tmp_path: Path) -> None:
    """Cut at rest and behind it, with dropout on."""
    tune, how = with_rest(tune), {"medusa2": Medusa2Config(self_distillation=distils)}
    whole, _, _ = train(tmp_path / "whole", tune, **how)
    expected = state.trainable(whole.module)
    for cut in (2, 4) if tune.how == "lora" else (4,):
        with pytest.raises(Stopped, match=f"after step {cut} of {STEPS}"):
            train(tmp_path / f"cut-{cut}", tune, stop_at=cut, **how)
        resumed, _, _ = train(tmp_path / f"cut-{cut}", tune, **how)
        got = state.trainable(resumed.module)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    names = [path.name for path in (tmp_path / f"cut-{cut}").iterdir()]
    assert {"target", "drafter"} <= set(names)


def test_accumulation_does_not_change_the_mathematics(tmp_path: Path) -> None:
    found = [train(tmp_path / str(m), LORA, micro=m, uneven=True)[2].validation_loss for m in (2, 8)]
    assert found == pytest.approx([found[0]] * 2, rel=1e-5)


# ---- what comes out --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """A few dozen steps of each kind: folder, objective and tuned target."""
    found = {}
    for how, tune in (("lora", LORA), ("full", FULL)):
        out = tmp_path_factory.mktemp(how)
        lr = 1e-2 if how == "lora" else 3e-3
        goal, tuned, _ = train(out, tune, steps=40, lr=lr)
        found[how] = (out, goal, tuned)
    return found


@pytest.mark.parametrize("how", ["lora", "full"])
def test_the_export_is_the_adapted_target(how: str, runs: dict[str, tuple]) -> None:
    out, _, tuned = runs[how]
    exported = load_target(str(out / "target"))
    assert type(exported.model) is type(tuned.model)
    assert not any("lora" in name for name, _ in exported.model.named_modules())
    ids = rows(4, 5).ids
    with torch.no_grad():
        adapted = tuned.model.eval()(input_ids=ids).logits
        plain = exported.model(input_ids=ids).logits
        before = decoding_target().model(input_ids=ids).logits
    torch.testing.assert_close(plain, adapted, rtol=1e-5, atol=1e-5)
    assert (plain - before).abs().max() > 0.1
    assert exported.tokenizer.get_vocab() == tuned.backbone.tokenizer.get_vocab()


@pytest.mark.parametrize("how", ["lora", "full"])
def test_the_drafter_fits_the_tuned_target_alone(how: str, runs: dict[str, tuple]) -> None:
    out, _, _ = runs[how]
    other = runs["full" if how == "lora" else "lora"][0]
    target = load_target(str(out / "target"))
    drafter = load_medusa(out / "drafter", target)
    prompts = [row[:4].tolist() for row in rows(4, 3).ids]
    words = {"warper": Warper(0.0), "max_new_tokens": 16}
    done = generate(target, drafter, prompts, **words)
    assert done.tokens == autoregressive(target, prompts, **words).tokens
    assert done.target_calls < 16
    original = decoding_target()
    mine, theirs = TargetIdentity.of(target), TargetIdentity.of(original)
    assert {k for k, v in mine.to_dict().items() if v != theirs.to_dict()[k]} == {"tuned"}
    with pytest.raises(RequestError, match="'random' as tuned to .* no run has changed"):
        load_medusa(out / "drafter", original)
    with pytest.raises(RequestError, match="as tuned to .* as tuned to"):
        load_medusa(out / "drafter", load_target(str(other / "target")))


def test_an_identity_of_before_still_fits() -> None:
    """Drafters that were saved without the field were made for targets as published."""
    fields = TargetIdentity.of(decoding_target()).to_dict()
    del fields["tuned"]
    TargetIdentity(**fields).check_same(TargetIdentity.of(decoding_target()), "it")


@pytest.mark.parametrize("how", ["lora", "full"])
def test_training_and_decoding_say_the_same(how: str, runs: dict[str, tuple]) -> None:
    """Logits of the heads met while decoding with the live model, adapters in place, and with the
    export, against those that training computes for the same text."""
    out, goal, tuned = runs[how]
    goal.module.eval()
    exported = load_target(str(out / "target"))
    pairs = [
        (tuned.backbone, Medusa(goal.draft(), tuned.backbone)),
        (exported, load_medusa(out / "drafter", exported)),
    ]
    prompt = rows(1, 3).ids[0, :5].tolist()
    for target, drafter in pairs:
        met: dict[int, Tensor] = {}
        committed = [len(prompt)]
        propose = drafter.propose

        def remember(*given, met=met, committed=committed, drafter=drafter, propose=propose):  # noqa: ANN001, ANN002, ANN202
            met[committed[-1] - 1] = drafter.logits()[0].clone()
            return propose(*given)

        observe = drafter.observe

        def follow(found, committed=committed, observe=observe) -> None:  # noqa: ANN001
            committed.append(committed[-1] + int((found.path_BD[0] >= 0).sum()) + 1)
            observe(found)

        drafter.propose, drafter.observe = remember, follow  # type: ignore[method-assign]
        done = generate(target, drafter, [prompt], warper=Warper(0.0), max_new_tokens=12)
        text = torch.tensor([prompt + done.tokens[0]])
        batch = {
            "input_ids": text,
            "positions": torch.arange(text.shape[1])[None],
            "documents": torch.zeros_like(text),
        }
        with torch.no_grad():
            hidden_SH = goal.module.states(batch)[0]
            expected = goal.draft().logits(goal.draft()(hidden_SH), Projection(tuned.head.weight))
        assert len(met) >= 3
        for at, logits in met.items():
            torch.testing.assert_close(logits, expected[at], rtol=1e-5, atol=1e-5)


def test_lean_decoding_runs_adapters(runs: dict[str, tuple]) -> None:
    """The fast forward calls layers, so it sees what stands in their place."""
    _, _, tuned = runs["lora"]
    tuned.model.eval()
    assert misfit(tuned.model) is None
    prompts = [rows(1, 3).ids[0, :5].tolist()]
    words = {"warper": Warper(0.0), "max_new_tokens": 10}
    with torch.no_grad():
        text = prompts[0] + autoregressive(tuned.backbone, prompts, **words).tokens[0]
        message = tuned.model(input_ids=torch.tensor([text])).logits[0].argmax(-1).tolist()
    assert message[4:-1] == text[5:]
