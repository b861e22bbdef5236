"""The commands on a card are those of `draftsmith export`, for every family and format; so are the refusals."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.block.dspark import DSparkNet
from draftsmith.drafters.block.net import BlockNet
from draftsmith.drafters.block.selected import DFlash2Net
from draftsmith.drafters.eagle.net import EagleNet
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.eagle.peagle import PeagleNet
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.folder import save_draft_model
from draftsmith.drafters.heads.hydra import HydraHeads
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.drafters.mtp.net import MtpNet
from draftsmith.launch.cli import main
from draftsmith.launch.export import run_recipe
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.share.card import card_of, subject_of
from draftsmith.storage import replace_folder
from draftsmith.trainers.block.pard import student as pard_student
from draftsmith.trainers.teacher.frozen import saver

NAME, MODEL = "somebody/a-drafter", "somebody/the-target"
LAYERS = {"layers": (2, 10, 17)}
BLOCK: dict[str, Any] = LAYERS | {"decoder_layers": 1, "size": 5, "causal": False}
EDGES = {"vocabulary": 4096, "rank": 4}


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target("tiny")


def pard(model: Any) -> Any:
    return pard_student(load_recipe("pard-tiny").recipe, model, load_target("tiny").tokenizer)


# by family: drafters, of which some are refused in a format or read hidden states that are no engine's default
DRAFTERS: dict[str, list[Callable[[Any], Any]]] = {
    "draft_model": [lambda model: model],
    "pard": [pard],
    "medusa": [lambda model: MedusaHeads.for_target(model, heads=2, shared_head=True)],
    "hydra": [
        lambda model: HydraHeads.for_target(model, heads=2),
        lambda model: HydraHeads.for_target(model, heads=2, as_published=True),
    ],
    "hydra++": [lambda model: HydraHeads.for_target(model, heads=2, prefix=True, as_published=True)],
    "eagle": [EagleNet.for_target],
    "eagle3": [
        lambda model: Eagle3Net.for_target(model, ids=list(range(64)), **LAYERS),
        lambda model: Eagle3Net.for_target(model, ids=list(range(64)), layers=(0, 9, 16)),
    ],
    "mtp": [MtpNet.for_target, lambda model: MtpNet.for_target(model, state="before")],
    "peagle": [lambda model: PeagleNet.for_target(model, ids=list(range(64)), decoder_layers=2, **LAYERS)],
    "dflash": [
        lambda model: BlockNet.for_target(model, layout="fill-in", mask_token=7, **BLOCK),
        lambda model: BlockNet.for_target(model, layout="fill-in", mask_token=None, **BLOCK),
    ],
    "dspark": [
        lambda model: DSparkNet.for_target(model, layout="anchor-first", mask_token=7, **BLOCK, **EDGES),
        lambda model: DSparkNet.for_target(model, layout="anchor-first", mask_token=None, **BLOCK, **EDGES),
    ],
    "dflash2": [
        lambda model: DFlash2Net.for_target(
            model, layout="fill-in", mask_token=7, candidates=4, group=8, **BLOCK, **EDGES
        )
    ],
}
CASES = [(family, number) for family, nets in DRAFTERS.items() for number in range(len(nets))]


def test_every_family_that_is_exported_is_here() -> None:
    assert DRAFTERS.keys() == {each.name for each in FAMILIES.values() if each.exports}


def run_of(place: Path, family: str, net: Any, target: Any) -> Path:
    """A run as training leaves it, as far as an export and a card look."""
    recipe = {"draft_model": "distill", "hydra++": "hydra-plus"}.get(family, family)
    if FAMILIES[family].build is None:
        save_draft_model(net, place / "drafter", target, family=family)
    else:
        place.mkdir()
        replace_folder(place / "drafter", lambda folder: saver(target, family)(net, folder))
    (place / "run.yaml").write_text(load_recipe(f"{recipe}-tiny").yaml())
    return place


def shown(run: Path) -> str:
    return card_of(subject_of(run, NAME, run_recipe(run), MODEL, "mit"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "number"), CASES)
def test_the_card_says_what_export_says(
    family: str, number: int, target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", family, DRAFTERS[family][number](target.model), target)
    text = shown(run)
    blocks = re.findall(r"```sh\n(.*?)\n```", text.partition("## In serving engines")[2], re.DOTALL)
    found = 0
    for form, record in FAMILIES[family].exports.items():
        code = main(["export", str(run), "--format", form])
        said = capfd.readouterr()
        if code:
            reason = said.err.strip().splitlines()[-1].removeprefix("draftsmith: ")
            assert f"- {form}: " in text
            assert plain(reason) in plain(text).replace(MODEL, str(Path(embedded_target()).resolve()))
            continue
        assert f"- {form}: " not in text
        if form == "llama.cpp":  # its converter reads the target from a folder
            continue
        lines = said.out.partition(" with\n")[2]
        out = NAME if record.make is None else f"a-drafter-{form}"
        for mine, theirs in ((run / ("drafter" if record.make is None else form), out), (embedded_target(), MODEL)):
            lines = lines.replace(str(Path(mine).resolve()), theirs)
        export = f"draftsmith export --drafter hub:{NAME} --target {MODEL} --format {form} --out {out}\n"
        assert ("" if record.make is None else export) + textwrap.dedent(lines).rstrip() in blocks
        found += 1
    assert found == len(blocks)


def plain(text: str) -> str:
    """Without the marks that keep text from being read as Markdown."""
    return text.replace("\\", "").replace(MODEL, str(Path(embedded_target()).resolve()))


def test_without_the_targets_config_the_card_names_no_command(
    target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They depend on it; no hub is asked."""
    run = run_of(tmp_path / "run", "mtp", MtpNet.for_target(target.model), target)
    recipe = load_recipe("mtp-tiny", [("target.path", "somebody/never-fetched")])
    (run / "run.yaml").write_text(recipe.yaml())
    text = shown(run)
    assert "```sh" not in text.partition("## In serving engines")[2]
    assert f"`draftsmith export --drafter hub:{NAME} --target {MODEL} --format vllm --out FOLDER` says how" in text
    assert main(["push", str(run), NAME, "--dry-run"]) == 0
    assert "the card has no commands for engines: the target's config is not here" in capfd.readouterr().out
