"""The table of docs/published.md: what is tested of every form, cell by cell, and the tests that no other file has.

A cell says yes where a test is parametrised by a folder of that form. Read next: `test_goes_on.py`, exports and
training; `test_logits.py`; `tests/helpers/models/published_forms.py`, the folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import draftsmith
import pytest
import torch
from draftsmith.api import audit
from draftsmith.data.config import DataConfig
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.engine import autoregressive, generate
from draftsmith.decoding.random import Uniforms
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.published.forms import FORMS as RECORDS
from draftsmith.drafters.published.forms import published
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.cli import main
from draftsmith.launch.recipe.model import Recipe
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.methods import METHODS
from helpers.models.published_doors import EXPORTED, TRAINED
from helpers.models.published_forms import FORMS

PARD, MASK = "PARD", 59
PROMPTS = [[5, 9, 2, 33, 7], [60, 11, 1, 48, 20]]


def folder_of(form: str, target: Backbone, place: Path) -> Path:
    """A published drafter; PARD's is a model of `transformers` whose config names a mask."""
    if form != PARD:
        return FORMS[form](target.model).write(place)
    target.model.save_pretrained(place)
    target.tokenizer.save_pretrained(place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return place


@pytest.mark.parametrize("form", [*FORMS, PARD])
def test_it_decodes(form: str, deep: Backbone, tmp_path: Path) -> None:
    """What the target writes by itself, of drafts that are proposed in every step."""
    drafter = load_drafter(folder_of(form, deep, tmp_path / "d"), deep, draft_length=3)
    how: dict[str, Any] = {"warper": Warper(0.0), "max_new_tokens": 12}
    out = generate(deep, drafter, PROMPTS, **how)
    assert out.tokens == autoregressive(deep, PROMPTS, **how).tokens
    assert out.nodes > out.target_calls
    assert out.draft_steps > 0


AUDITED = (
    "EAGLE-1, with a bias",
    "EAGLE-3, a layer of Qwen3",
    "P-EAGLE, native",
    "DFlash, z-lab",
    "DFlash, windows",
    "DSpark, DeepSpec",
    "DFlash 2, z-lab",
    "Medusa, FasterDecoding",
    "Hydra, its authors",
    "Hydra++, its authors",
    "MTP, speculators",
    "MTP, MiMo",
    "MTP, EXAONE-MoE",
    PARD,
)
"""One of each form."""


@pytest.mark.slow
@pytest.mark.parametrize("form", AUDITED)
def test_it_is_audited(form: str, deep: Backbone, tmp_path: Path) -> None:
    drafter = load_drafter(folder_of(form, deep, tmp_path / "d"), deep, draft_length=3)
    report = audit(deep, drafter, ["abc def", "ghi"], tokens=500, sequences=10_000)
    assert report.verdict == "lossless", report.text()


def test_pard_drafts_by_its_own_logits(deep: Backbone, tmp_path: Path) -> None:
    """Those of the model itself behind the text and so many masks, which are never drafted."""
    drafter: Any = load_drafter(folder_of(PARD, deep, tmp_path / "d"), deep, draft_length=3)
    *text, last = PROMPTS[0]
    drafter.reset([text], 20)
    proposal = drafter.propose(torch.tensor([last]), Warper(1.0), Uniforms(0, [0], "cpu"))
    for masks in range(3):
        logits_V = deep.model(torch.tensor([[*text, last, *[MASK] * masks]])).logits[0, -1]
        logits_V[MASK] = -torch.inf
        torch.testing.assert_close(proposal.q_BNV[0, masks], logits_V.softmax(-1), atol=1e-5, rtol=1e-4)


def test_pard_is_exported_and_trained_as_it_is(
    deep: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines load the folder, and training begins with its weights and its mask."""
    folder, out = folder_of(PARD, deep, tmp_path / "d"), tmp_path / "out"
    assert main(["export", "--drafter", str(folder), "--target", deep.name, "--out", str(out)]) == 0
    assert "so nothing was written: load it as it is" in capsys.readouterr().out
    recipe = Recipe(method="pard", model=ModelConfig(start_from=str(folder)), data=DataConfig(sequence_length=64))
    begun = METHODS["pard"].code().student(recipe, deep.model, deep.tokenizer)
    weights = begun.state_dict()
    assert begun.config.pard_token == MASK
    assert all(torch.equal(weights[name], tensor) for name, tensor in deep.model.state_dict().items())


TESTS: dict[str, tuple[str, Iterable[str]]] = {
    "recognised": ("test_no_folder_fits_two_forms", [*FORMS, PARD]),
    "logits": ("test_logits_are_those_of_its_own_code", [*FORMS, PARD]),
    "decodes": (test_it_decodes.__name__, [*FORMS, PARD]),
    "audited": (test_it_is_audited.__name__, AUDITED),
    "exported": ("test_it_is_exported_as_ours_are", [*EXPORTED, PARD]),
    "trained on": ("test_training_goes_on_from_it", [*TRAINED, PARD]),
}
"""Column -> the test that it speaks of, and the folders of that."""


def test_the_page_says_what_is_tested(deep: Backbone, tmp_path: Path) -> None:
    page = (Path(draftsmith.__file__).parent / "docs/published.md").read_text(encoding="utf-8")
    table = page[page.index("| form | recognised |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    titles = {}
    for number, form in enumerate([*FORMS, PARD]):
        found = published(folder_of(form, deep, tmp_path / str(number)))
        assert found is not None
        titles[form] = found.form.title
    tested = [{titles[form] for form in forms} for _, forms in TESTS.values()]
    wanted = [[each.title, *("yes" if each.title in column else "no" for column in tested)] for each in RECORDS]
    assert rows[0] == ["form", *TESTS]
    assert rows[2:] == wanted
    code = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    for column, (name, _) in TESTS.items():
        assert f"| {column} | `{name}` |" in page
        assert f"def {name}(" in code
