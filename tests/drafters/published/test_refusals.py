"""Folders of others that are not read: one message that says what was found and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import draftsmith
import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.folder import read_entry
from draftsmith.drafters.identity import TargetIdentity
from draftsmith.drafters.model.pard import Pard
from draftsmith.drafters.published.files import files_of
from draftsmith.drafters.published.forms import FORMS as RECORDS
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from helpers.models.published_forms import FORMS, HIDDEN, VOCABULARY, Folder, drawn, norm_weight

Change = Callable[[Folder], None]


def words(**changed: Any) -> Change:
    return lambda made: made.config.update(changed)


def layer_words(**changed: Any) -> Change:
    def change(made: Folder) -> None:
        made.config["transformer_layer_config"] = made.config["transformer_layer_config"] | changed

    return change


def tensors(**changed: Any) -> Change:
    return lambda made: made.tensors.update({name.replace("__", "."): tensor for name, tensor in changed.items()})


def without(*names: str) -> Change:
    return lambda made: [made.tensors.pop(name) for name in names] and None


def shifted(name: str) -> Change:
    return lambda made: made.tensors.update({name: made.tensors[name] + 1})


SPECULATORS, NATIVE, ZLAB = "EAGLE-3, speculators", "EAGLE-3, SpecForge", "DFlash, z-lab"
REFUSED: dict[str, tuple[str, Change, str]] = {
    "a bias in attention": (
        "EAGLE-1, with a bias",
        tensors(layers__0__self_attn__q_proj__bias=torch.ones(32)),
        r"with a bias \(layers\.0\.self_attn\.q_proj\.bias\), which no network here has",
    ),
    "norms of query and key": (
        "EAGLE-1, with a bias",
        tensors(layers__0__self_attn__q_norm__weight=torch.ones(8)),
        r"also holds layers\.0\.self_attn\.q_norm\.weight \[8\], which that form does not have",
    ),
    "a norm in front of fc": (
        SPECULATORS,
        words(norm_before_fc=True),
        r"does not hold the weights that its config\.json describes: input_norm\.weight is absent",
    ),
    "no norm in front of the head": (
        NATIVE,
        words(norm_output=False),
        r"no norm in front of its head \(norm_output false, which says so to SpecForge",
    ),
    "a norm of queries alone": (
        SPECULATORS,
        tensors(layers__0__self_attn__q_norm__weight=torch.ones(8)),
        r"midlayer\.self_attn\.k_norm\.weight is absent, expected float32 \[8\]",
    ),
    "several layers": (
        SPECULATORS,
        tensors(layers__1__mlp__up_proj__weight=drawn(40, HIDDEN)),
        r"with several layers and no mask \(layers\.1\)",
    ),
    "a window of EAGLE-3": (
        SPECULATORS,
        layer_words(layer_types=["sliding_attention"], sliding_window=4096),
        r"attention over a window \(sliding_attention\)",
    ),
    "narrower without an embedding": (
        "EAGLE-3, narrower than its target",
        without("embed_tokens.weight"),
        r"hidden_size 16 beside a target of 32 \(target_hidden_size\)",
    ),
    "a narrower block drafter": (
        ZLAB,
        words(target_hidden_size=64),
        r"hidden_size 32 beside a target of 64 \(target_hidden_size\)",
    ),
    "narrower than its target": (
        SPECULATORS,
        words(target_hidden_size=64),
        r"hidden_size 32 beside a target of 64 \(target_hidden_size\)",
    ),
    "another activation": (NATIVE, words(hidden_act="gelu"), "the activation 'gelu'"),
    "another hidden size": (
        NATIVE,
        words(hidden_size=64),
        r"fc\.weight reads 96 numbers of a target of hidden size 64; expected one state for each 64",
    ),
    "another vocabulary": (
        SPECULATORS,
        layer_words(vocab_size=128),
        "was made for target 'org/target' with vocabulary 128; this target .* has vocabulary 300",
    ),
    "an embedding of its own": (
        SPECULATORS,
        shifted("embed_tokens.weight"),
        r"holds embed_tokens\.weight \[300, 32\], of which 300 rows are not the target's \(row 0 differs by 1\)",
    ),
    "a state behind the last layer": (
        SPECULATORS,
        words(eagle_aux_hidden_state_layer_ids=[1, 4, 8]),
        r"names the hidden states \[1, 4, 8\].* the target's last of 8 layers makes number 8",
    ),
    "too few states": (
        SPECULATORS,
        words(eagle_aux_hidden_state_layer_ids=[1, 4]),
        r"names the hidden states \[1, 4\], and fc\.weight reads 96 numbers",
    ),
    "no choice of tokens": (NATIVE, tensors(d2t=torch.zeros(200, dtype=torch.long) - 3), r"draft vocabulary \(d2t"),
    "a weight is missing": (
        NATIVE,
        without("midlayer.mlp.up_proj.weight"),
        r"midlayer\.mlp\.up_proj\.weight is absent, expected float32 \[40, 32\]",
    ),
    "a size is missing": (
        NATIVE,
        lambda made: made.config.pop("num_attention_heads"),
        "'num_attention_heads' is missing",
    ),
    "a size is a word": (
        NATIVE,
        words(num_attention_heads="four"),
        r"does not hold the sizes of a drafter in the form",
    ),
    "positions that nobody knows": (
        NATIVE,
        words(rope_scaling={"rope_type": "odd", "factor": 2.0}),
        "rope_scaling of type 'odd'",
    ),
    "a window of no length": (ZLAB, words(layer_types=["sliding_attention"] * 2), r"does not name \(sliding_window\)"),
    "a window shorter than a block": (
        ZLAB,
        words(layer_types=["sliding_attention"] * 2, sliding_window=3),
        r"windows are \[3, 3\]|windows are \(3, 3\)|does not hold the sizes",
    ),
    "chunks": (ZLAB, words(layer_types=["chunked_attention"]), r"attention over a window \(chunked_attention\)"),
    "windows of another reader": (ZLAB, words(use_swa=True), r"attention over a window \(use_swa\)"),
    "a mask behind the vocabulary": (
        ZLAB,
        lambda made: made.config["dflash_config"].update(mask_token_id=300),
        "says that the mask is token 300, and the embedding has 300 rows",
    ),
    "a scaled embedding": (ZLAB, words(input_embedding_scale=8), r"an embedding times 8 \(input_embedding_scale\)"),
    "a cap that the target has not": (
        "DFlash 2, z-lab",
        words(final_logit_softcapping=30.0),
        r"says final_logit_softcapping 30\.0, and the target has None",
    ),
    "a gated head": (
        "DSpark, DeepSpec",
        words(markov_head_type="gated"),
        r"a head of type 'gated' \(markov_head_type\)",
    ),
    "a trained mask table": (
        "P-EAGLE, native",
        shifted("embed_tokens.weight"),
        r"of which 299 rows are not the target's",
    ),
    "heads that see no tokens": (
        "Hydra, its authors",
        without(*(f"hydra_mlp.{k}.0.res_connection.{part}" for k in range(3) for part in ("weight", "bias"))),
        r"heads that do not see the tokens in front of theirs \(grounded_heads false\)",
    ),
    "an embedding of another target": (
        "Hydra, its authors",
        shifted("input_embed_fn.weight"),
        r"holds input_embed_fn\.weight \[300, 32\], of which 300 rows are not the target's",
    ),
    "an earlier state": ("Hydra, its authors", words(hidden_state_offset=1), r"a hidden state 1 in front of the last"),
    "another layer in front": (
        "Hydra++, its authors",
        tensors(prefix_embeding_layer__layers__0__mlp__up_proj__weight=drawn(40, HIDDEN)),
        r"prefix\.mlp\.up_proj\.weight is float32 \[40, 32\], expected float32 \[",
    ),
    "an unknown part": (
        "Medusa, FasterDecoding",
        tensors(adapter=drawn(3)),
        r"in the form of Medusa, and also holds adapter \[3\]",
    ),
    "NaN": (NATIVE, tensors(norm__weight=norm_weight() * torch.nan), "norm.weight of its weights holds NaN"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_network_here_computes_is_refused(what: str, deep: Backbone, tmp_path: Path) -> None:
    form, change, says = REFUSED[what]
    made = FORMS[form](deep.model)
    change(made)
    with pytest.raises(RequestError, match=says) as error:
        load_drafter(made.write(tmp_path / "d"), deep)
    assert str(tmp_path / "d") in str(error.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_of_a_wider_target_says_of_which(
    form: str, deep: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FORMS[form](deep.model).write(tmp_path / "d")
    monkeypatch.setattr(deep.model.config, "hidden_size", 64)
    with pytest.raises(RequestError, match=f"with hidden_size {HIDDEN}; this target .* has hidden_size 64"):
        load_drafter(folder, deep)


@pytest.mark.parametrize("form", FORMS)
def test_no_folder_fits_two_forms(form: str, deep: Backbone, tmp_path: Path) -> None:
    files = files_of(FORMS[form](deep.model).write(tmp_path / "d"))
    assert files is not None
    assert len([record.title for record in RECORDS if record.fits(files)]) == 1


def test_pickles_are_not_read(deep: Backbone, tmp_path: Path) -> None:
    """Nothing of the file is run; the message says how it becomes safetensors, and those are read."""
    made = FORMS["EAGLE-1, with a bias"](deep.model)
    folder = made.write(tmp_path / "d")
    (folder / "model.safetensors").unlink()
    torch.save(made.tensors, folder / "pytorch_model.bin")
    with pytest.raises(
        RequestError, match=r"as a pickle \(pytorch_model\.bin\), .* convert it where you trust it"
    ) as no:
        load_drafter(folder, deep)
    code = str(no.value).split('python -c "')[1].removesuffix('"')
    import os

    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(code)  # noqa: S102 - the very line that the message shows
    finally:
        os.chdir(before)
    assert load_drafter(folder, deep).family == "eagle"


def test_an_unknown_form_says_what_it_holds(deep: Backbone, tmp_path: Path) -> None:
    made = FORMS["EAGLE-1, with a bias"](deep.model)
    made.tensors = {"odd.weight": drawn(3), "more.weight": drawn(3)}
    folder = made.write(tmp_path / "d")
    with pytest.raises(
        RequestError, match=r"nor is it a published drafter .*EAGLE-3.*its 2 tensors are more\.weight, odd"
    ):
        load_drafter(folder, deep)


def test_code_that_a_config_names_is_not_run(deep: Backbone, tmp_path: Path) -> None:
    folder = FORMS["EAGLE-3, SpecForge"](deep.model).write(tmp_path / "d")
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "auto_map" in json.loads((folder / "config.json").read_text())
    assert load_drafter(folder, deep).family == "eagle3"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("vocabulary", ["same", "auto"])
def test_a_model_with_a_mask_is_pard(vocabulary: Any, deep: Backbone, tmp_path: Path) -> None:
    """An ordinary folder of transformers, as AMD publishes it: known by the mask's id, of any vocabulary's padding."""
    deep.model.save_pretrained(tmp_path)
    deep.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pard_token": 59}))
    assert read_entry(tmp_path)["family"] == "pard"
    drafter = load_drafter(tmp_path, deep, config=DrafterConfig(vocabulary=vocabulary))
    assert isinstance(drafter, Pard)
    assert drafter.mask == 59


def test_the_page_lists_the_forms_that_are_read() -> None:
    """With the family that drafts each, and no other."""
    page = (Path(draftsmith.__file__).parent / "docs/published.md").read_text(encoding="utf-8")
    table = page[page.index("| form | family here |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("| ")]
    assert [(row[0], row[1].strip("`")) for row in rows[1:]] == [(each.title, each.family) for each in RECORDS]


def test_a_drafter_of_others_does_not_say_of_which_weights_it_is() -> None:
    """So it drafts for a target that a run has tuned, where one of ours is refused; sizes have to fit all the same."""
    theirs = TargetIdentity("another one", None, 32, VOCABULARY, None)
    tuned = TargetIdentity("mine", None, 32, VOCABULARY, "tokens", tuned="abc")
    theirs.check_same(tuned, "folder")
    with pytest.raises(RequestError, match="whose weights no run has changed; this target 'mine' is one as tuned"):
        replace(theirs, tokenizer="tokens").check_same(tuned, "folder")
    with pytest.raises(RequestError, match="hidden_size 64"):
        replace(theirs, hidden_size=64).check_same(tuned, "folder")
