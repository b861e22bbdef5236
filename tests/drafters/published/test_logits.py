"""Drafters as others publish them: read from their files, they make the logits that their own code makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from helpers.models.published_forms import FORMS, Text
from safetensors.torch import save_file

TOKENS = [5, 9, 2, 33, 7, 60, 11, 1, 48, 20]


def text_of(target: Backbone) -> Text:
    model = target.model
    states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return Text(TOKENS, [state[0] for state in states], table.weight, head.weight)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_its_own_code(form: str, deep: Backbone, tmp_path: Path) -> None:
    torch.manual_seed(1)
    made, text = FORMS[form](deep.model), text_of(deep)
    drafter = load_drafter(made.write(tmp_path / "d"), deep, draft_length=4)
    assert drafter.family == made.family
    features = torch.cat([text.states[number] for number in drafter.layers], -1)
    wanted = made.logits(text)
    given = list(drafter.teacher_forced(features, torch.tensor(TOKENS), len(wanted)))
    assert len(given) == len(wanted)
    for mine, theirs in zip(given, wanted, strict=True):
        rows = min(len(mine), len(theirs))
        assert rows > 3
        assert torch.equal(mine[:rows].isinf(), theirs[:rows].isinf())
        torch.testing.assert_close(mine[:rows], theirs[:rows], rtol=2e-4, atol=2e-4)


def test_words_that_say_the_same_of_eagle3(deep: Backbone, tmp_path: Path) -> None:
    """States as DeepSpec names them, on top by their layers; and `norm_output` as engines have it, of what is fed back."""
    made = FORMS["EAGLE-3, SpecForge"](deep.model)
    plain: Any = load_drafter(made.write(tmp_path / "plain"), deep)
    made.config |= {"norm_output": False, "norm_before_residual": False}
    made.config["target_layer_ids"] = made.config.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    other: Any = load_drafter(made.write(tmp_path / "other"), deep)
    assert other.module.config == plain.module.config


def test_weights_in_several_files_and_in_half_precision(deep: Backbone, tmp_path: Path) -> None:
    """As large drafters are published; a tensor that two files hold is refused."""
    torch.manual_seed(1)
    made = FORMS["EAGLE-3, SpecForge"](deep.model)
    made.tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in made.tensors.items()}
    whole = load_drafter(made.write(tmp_path / "whole"), deep).module.state_dict()
    folder = made.write(tmp_path / "parts")
    names = sorted(made.tensors)
    (folder / "model.safetensors").unlink()
    for number, part in enumerate((names[:6], names[6:])):
        save_file({name: made.tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    parts = load_drafter(folder, deep).module.state_dict()
    assert whole["fc.weight"].dtype == torch.float32
    assert torch.equal(whole["fc.weight"], made.tensors["fc.weight"].float())
    assert all(torch.equal(whole[name], tensor) for name, tensor in parts.items())
    save_file({names[0]: made.tensors[names[0]]}, folder / "more.safetensors")
    with pytest.raises(RequestError, match=rf"more\.safetensors holds {names[0]}, which model-0\.safetensors"):
        load_drafter(folder, deep)
