"""Going on from a finished drafter: the very weights, of every family; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.folder import save_draft_model
from draftsmith.drafters.layers.llama import Rotary
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers import bpd, eagle, eagle3, hydra, medusa, medusa2, spine
from draftsmith.trainers.block import dflash, dflash2, dspark, mtp, peagle
from draftsmith.trainers.config import ModelConfig, ObjectiveConfig
from draftsmith.trainers.method_config import (
    BlockConfig,
    BpdConfig,
    DFlash2Config,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    Medusa2Config,
    MedusaConfig,
    MtpConfig,
    PeagleConfig,
    TuneConfig,
)
from draftsmith.trainers.methods import METHODS
from draftsmith.trainers.teacher.tuned import TunedTarget
from helpers.models.learnable_text import Chains, descend
from helpers.models.small_drafters import change_target_of
from safetensors.torch import load_file

TOKENS = ObjectiveConfig(kl=0, ce=1)
LORA = {"tune": TuneConfig(rank=4, dropout=0.0), "objective": TOKENS}
HEADS = MedusaConfig(heads=2)
PLUS = MedusaConfig(heads=2, layers=2, prefix=True)
WORDS = 40  # of EAGLE-3's draft vocabulary
FUSED = Eagle3Config(passes=2, layers=(0, 1, 2), vocabulary=WORDS)
# how a method is run on its own, by family
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "medusa": (medusa, {"medusa": HEADS, "objective": TOKENS}),
    "hydra": (hydra, {"medusa": HEADS, "objective": TOKENS}),
    "hydra++": (hydra, {"medusa": PLUS, "objective": TOKENS}),
    "bpd": (bpd, {"bpd": BpdConfig(block=3, inner=8), "tune": TuneConfig(), "objective": TOKENS}),
    "eagle": (eagle, {"eagle": EagleConfig(noise=0.0), "objective": ObjectiveConfig()}),
    "eagle3": (eagle3, {"eagle3": FUSED, "objective": ObjectiveConfig()}),
    "dflash": (dflash, {"block": BlockConfig(size=4, decoder_layers=1), "objective": ObjectiveConfig()}),
    "mtp": (mtp, {"mtp": MtpConfig(passes=2), "objective": ObjectiveConfig()}),
    "peagle": (
        peagle,
        {
            "peagle": PeagleConfig(layers=(0, 1, 2), vocabulary=40, depths=3, decoder_layers=2),
            "objective": ObjectiveConfig(),
        },
    ),
    "dflash2": (
        dflash2,
        {
            "block": BlockConfig(size=3, decoder_layers=1),
            "dflash2": DFlash2Config(rank=4, candidates=5),
            "objective": ObjectiveConfig(),
        },
    ),
    "dspark": (
        dspark,
        {
            "block": BlockConfig(size=3, decoder_layers=1),
            "dspark": DSparkConfig(rank=4),
            "objective": ObjectiveConfig(),
        },
    ),
}
# what goes on behind a family, where that is another method, or the same one otherwise
BEHIND: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{family: (family, *run) for family, run in RUNS.items()},
    "hass": ("eagle", eagle, {"eagle": EagleConfig(passes=3, top_k=1.0, noise=0.0), "objective": ObjectiveConfig()}),
    "medusa2": ("medusa", medusa2, {"medusa": HEADS, "medusa2": Medusa2Config(), **LORA}),
    "tuned bpd": ("bpd", bpd, {"bpd": BpdConfig(block=3, inner=8, backbone="tuned"), **LORA}),
}
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def target() -> Backbone:
    return with_tokenizer(make_target("qwen3"))


def with_tokenizer(backbone: Backbone) -> Backbone:
    backbone.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    return backbone


def counted(first: int) -> SimpleNamespace:
    """Rows of data in which the tokens from `first` on are the frequent ones."""
    ids = np.arange(first, first + WORDS)[None] % VOCABULARY
    return SimpleNamespace(train=SimpleNamespace(ids_RS=ids, in_loss_RS=np.ones_like(ids, bool)))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    return starter(monkeypatch, tmp_path)


def starter(patch: pytest.MonkeyPatch, place: Path) -> Start:
    """What `run` of a method would hand to the loop, no data being read."""

    def made(
        method: Any,
        sections: dict[str, Any],
        target: Backbone,
        begin: Path | str | None = None,
        *,
        seed: int = 0,
        first: int = 0,
    ) -> Any:
        found: list[Any] = []

        def frozen(build: Any, _run: Any, **_checks: Any) -> None:
            found.append(build(target, counted(first)))

        def tuned(build: Any, run: Any, *, remember: bool = False, **_checks: Any) -> None:
            found.append(
                build(
                    TunedTarget(target, run.recipe.tune, row_tokens=run.recipe.row_tokens, remember=remember),
                    counted(first),
                )
            )

        for name, instead in {"run_for_target": frozen, "run_tuned": tuned}.items():
            patch.setattr(spine, name, instead)
        torch.manual_seed(seed)
        named = None if begin is None else str(begin)
        kind = method.__name__.rpartition(".")[2]
        spine.run(Recipe(method=kind, model=ModelConfig(start_from=named), **sections), place / "run")
        return found[0]

    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, target: Backbone) -> dict[str, Path]:
    """A drafter folder of every family, trained for two steps."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        fresh = starter(patch, place)
        for family, (method, sections) in RUNS.items():
            goal = fresh(method, sections, target)
            descend(goal.module, goal.prepare, Chains(8, 0).batch(), steps=2, lr=1e-2)
            goal.export(place / family)
    return {family: place / family for family in RUNS}


def same(module: torch.nn.Module, folder: Path) -> dict[str, bool]:
    saved = load_file(folder / "model.safetensors")
    own = module.state_dict()
    assert own.keys() == saved.keys()
    return {name: torch.equal(own[name], tensor) for name, tensor in saved.items()}


@pytest.mark.parametrize("name", BEHIND)
def test_step_0_has_the_weights_of_the_folder(
    name: str, start: Start, finished: dict[str, Path], target: Backbone
) -> None:
    """Other seed, other rows: all that is trained, and EAGLE-3's vocabulary, is the folder's."""
    family, method, sections = BEHIND[name]
    own = with_tokenizer(make_target("qwen3"))  # the tuned ones change theirs
    fresh = start(method, sections, with_tokenizer(make_target("qwen3")), seed=5, first=20)
    assert not all(same(fresh.draft(), finished[family]).values())
    goal = start(method, sections, own, finished[family], seed=5, first=20)
    found = same(goal.draft(), finished[family])
    assert all(found.values()), [name for name, equal in found.items() if not equal]
    # what the loss reads is what was taken over: it is that of the module that decodes
    batch = Chains(4, 3).batch()
    with torch.no_grad():
        teacher_output = goal.prepare(batch)
        losses = [float(each.module(batch, teacher_output)[0]) for each in (goal, fresh)]
    assert losses[0] != losses[1]
    loaded: Any = load_drafter(finished[family], target)
    for key, tensor in loaded.module.state_dict().items():
        assert torch.equal(goal.draft().state_dict()[key], tensor), key
    assert any(parameter.requires_grad for parameter in goal.draft().parameters())


def test_the_loss_goes_on_where_it_was(start: Start, target: Backbone, tmp_path: Path) -> None:
    """Two runs behind each other learn as one does that keeps its optimiser's moments."""
    method, sections = RUNS["eagle"]
    batch = Chains(8, 0).batch()
    first = start(method, sections, target)
    descend(first.module, first.prepare, batch, steps=8, lr=1e-2)
    first.export(tmp_path / "first")

    def loss_of(goal: Any) -> float:
        with torch.no_grad():
            return float(goal.module(batch, goal.prepare(batch))[0])

    second = start(method, sections, target, tmp_path / "first", seed=9)
    assert loss_of(second) == loss_of(first)
    descend(second.module, second.prepare, batch, steps=8, lr=1e-2)
    assert loss_of(second) < loss_of(first)


def test_the_draft_vocabulary_is_the_folders(start: Start, finished: dict[str, Path], target: Backbone) -> None:
    method, sections = RUNS["eagle3"]
    fresh = start(method, sections, target, first=20).draft()
    goal = start(method, sections, target, finished["eagle3"], first=20).draft()
    assert fresh.ids_U.tolist() != list(range(WORDS)) == goal.ids_U.tolist()
    assert goal.t2d.nonzero()[:, 0].tolist() == list(range(WORDS))


@pytest.mark.parametrize("family", ["eagle3", "hydra++", "mtp"])
def test_weights_go_on_with_the_positions_that_they_were_trained_with(
    family: str, start: Start, finished: dict[str, Path], target: Backbone, tmp_path: Path
) -> None:
    """Of a folder from before there was a word for scaling, for a target whose positions are scaled."""
    folder = Path(shutil.copytree(finished[family], tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    settings = config["draftsmith"]["settings"]
    layer = settings.get("prefix") or settings
    assert layer.pop("rope_scaling") is None
    layer["rope_theta"] = 777.0
    (folder / "config.json").write_text(json.dumps(config))
    scaled = with_tokenizer(make_target("qwen3"))
    scaled.model.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    fresh = start(*RUNS[family], scaled).draft()
    goal = start(*RUNS[family], scaled, folder)
    positions_1N = torch.arange(9)[None]

    def turns(module: Any) -> torch.Tensor:
        rotary = next(each for each in module.modules() if isinstance(each, Rotary))
        return rotary(positions_1N)[0][0, 0, :, 1]

    size = target.model.config.head_dim
    assert torch.allclose(turns(fresh), (torch.arange(9) / 4 / 5e5 ** (2 / size)).cos(), atol=1e-6)
    assert torch.allclose(turns(goal.draft()), (torch.arange(9) / 777.0 ** (2 / size)).cos(), atol=1e-6)
    goal.export(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())["draftsmith"]["settings"]
    again = again.get("prefix") or again
    assert (again["rope_theta"], again["rope_scaling"]) == (777.0, None)


OTHER_SIZES = {
    "medusa": ({"medusa": MedusaConfig(heads=3)}, "has heads 2; .* have heads 3: set medusa.heads to 2,"),
    "hydra": ({"medusa": MedusaConfig(heads=2, layers=2)}, "set medusa.layers to 1,"),
    "hydra++": (
        {"medusa": MedusaConfig(heads=2, layers=2, prefix=True, shared_head=True)},
        "has shared_head False; .* set medusa.shared_head to False,",
    ),
    "bpd": ({"bpd": BpdConfig(block=4, inner=9)}, "set bpd.block to 3, bpd.inner to 8,"),
    "eagle3": (
        {"eagle3": Eagle3Config(layers=(0, 1, 2), vocabulary=41)},
        "has draft_vocabulary 40; .* set eagle3.vocabulary to 40,",
    ),
}


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_other_sizes_are_refused_by_name(name: str, start: Start, finished: dict[str, Path], target: Backbone) -> None:
    changed, reason = OTHER_SIZES[name]
    method, sections = RUNS[name]
    with pytest.raises(RequestError, match=f"{reason} or leave model.start_from out"):
        start(method, sections | changed, target, finished[name])


@pytest.mark.parametrize(
    ("family", "size", "value", "reason"),
    [
        ("eagle", "kv_heads", 4, "has kv_heads 4; .* kv_heads 2: these follow from the target"),
        ("hydra++", "prefix", None, "has prefix None; .* these follow from the target"),
        ("eagle3", "layers", [0, 1, 3], r"has layers \[0, 1, 3\]; .* eagle3.layers to \[0, 1, 3\]"),
        ("eagle3", "experts", 2, "has experts 2; .* have experts None"),
    ],
)
def test_sizes_that_no_target_here_has_are_refused(
    family: str,
    size: str,
    value: object,
    reason: str,
    start: Start,
    finished: dict[str, Path],
    target: Backbone,
    tmp_path: Path,
) -> None:
    """Of targets with the same tokens and states, whose layers are others; of later versions."""
    folder = Path(shutil.copytree(finished[family], tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    config["draftsmith"]["settings"][size] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=reason):
        start(*RUNS[family], target, folder)


@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("medusa", "hydra"),
        ("hydra", "hydra++"),
        ("hydra++", "hydra"),
        ("bpd", "medusa"),
        ("eagle", "eagle3"),
        ("eagle3", "eagle"),
    ],
)
def test_another_family_is_refused(
    family: str, other: str, start: Start, finished: dict[str, Path], target: Backbone
) -> None:
    method, sections = RUNS[family]
    with pytest.raises(RequestError) as raised:
        start(method, sections, target, finished[other])
    assert f"a drafter of family {other!r}; this run trains one of family {family!r}" in str(raised.value)


@pytest.mark.parametrize("field", ["tokenizer", "vocabulary", "hidden_size"])
@pytest.mark.parametrize("name", BEHIND)
def test_another_target_is_refused(
    name: str, field: str, start: Start, finished: dict[str, Path], tmp_path: Path
) -> None:
    family, method, sections = BEHIND[name]
    folder = Path(shutil.copytree(finished[family], tmp_path / "drafter"))
    change_target_of(folder, field)
    own = with_tokenizer(make_target("qwen3"))
    with pytest.raises(RequestError, match=rf"\(model.start_from\) was made for .* with {field}"):
        start(method, sections, own, folder)


@pytest.mark.parametrize("family", RUNS)
def test_what_is_no_drafter_is_refused(
    family: str, start: Start, finished: dict[str, Path], target: Backbone, tmp_path: Path
) -> None:
    method, sections = RUNS[family]
    for name in (tmp_path, "Qwen/Qwen3-0.6B", ""):
        with pytest.raises(RequestError, match="model.start_from: .* holds no drafter"):
            start(method, sections, target, name)
    with pytest.raises(RequestError, match="model.start_from is target: only method `distill`"):
        start(method, sections, target, "target")
    save_draft_model(target.model, tmp_path / "draft", target)
    with pytest.raises(RequestError, match="a drafter of family 'draft_model'; this run"):
        start(method, sections, target, tmp_path / "draft")
    shutil.copytree(finished[family], tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"model\.safetensors"):
        start(method, sections, target, tmp_path / "cut")


def test_heads_of_a_tuned_target_go_on_with_that_one_alone(start: Start, tmp_path: Path) -> None:
    """Medusa-2 behind Medusa-2: on the target that the first run has left, not on the original."""
    _, method, sections = BEHIND["medusa2"]
    goal = start(method, sections, with_tokenizer(make_target("qwen3")))
    goal.export(tmp_path / "run" / "drafter")
    original = with_tokenizer(make_target("qwen3"))
    for run in (BEHIND["medusa2"][1:], RUNS["medusa"]):
        with pytest.raises(RequestError, match="as tuned to .* whose weights no run has changed"):
            start(*run, original, tmp_path / "run" / "drafter")
    tuned = load_target(str(tmp_path / "run" / "target"))
    again = start(method, sections, tuned, tmp_path / "run" / "drafter", seed=5)
    assert all(same(again.draft(), tmp_path / "run" / "drafter").values())


def without(finished: Path, setting: str, tmp_path: Path) -> Path:
    """A copy of a drafter's folder that does not say one of its settings."""
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    del config["draftsmith"]["settings"][setting]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_older_than_a_size_has_its_default(
    start: Start, finished: dict[str, Path], target: Backbone, tmp_path: Path
) -> None:
    folder = without(finished["eagle3"], "feature_norms", tmp_path)
    method, sections = RUNS["eagle3"]
    goal = start(method, sections, target, folder, seed=5)
    assert all(same(goal.draft(), folder).values())
    changed = {"eagle3": FUSED.model_copy(update={"feature_norms": True})}
    with pytest.raises(RequestError, match="set eagle3.feature_norms to False"):
        start(method, sections | changed, target, folder)


def test_a_size_that_the_folder_does_not_say_is_no_advice(
    start: Start, finished: dict[str, Path], target: Backbone, tmp_path: Path
) -> None:
    folder = without(finished["eagle3"], "layers", tmp_path)
    with pytest.raises(RequestError, match=r"model\.start_from: .*config\.json does not say its layers: copy"):
        start(*RUNS["eagle3"], target, folder)


def test_every_family_that_is_built_from_settings_is_here() -> None:
    assert set(RUNS) == {name for name, family in FAMILIES.items() if family.build}


def test_every_method_says_whether_it_goes_on() -> None:
    """Nobody drops the value: a method that does not read it refuses it (`launch/check/unread.py`)."""
    methods = set(get_args(Recipe.model_fields["method"].annotation))
    assert methods == set(METHODS)
    recipe = load_recipe("distill-tiny").recipe
    assert {name for name, method in METHODS.items() if method.reads_value("model.start_from", recipe)} == methods
    tested = {method.__name__.rpartition(".")[2] for _, method, _ in BEHIND.values()}
    assert methods - tested == {"target", "distill", "pard", "boost"}  # models of `transformers`
