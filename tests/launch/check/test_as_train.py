"""What `train` refuses of a target, `check` refuses too, in the same words; and neither in transformers'."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import RequestError
from draftsmith.launch.check.check import _data
from draftsmith.launch.check.models import Models, check_target
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.train import train
from safetensors.torch import load_file, save_file


def write(folder: Path, name: str, content: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def without_projection(folder: Path, served: Path) -> None:
    shutil.copytree(served, folder)
    config = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", config | {"tie_word_embeddings": False})
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def narrower(folder: Path, served: Path) -> None:
    shutil.copytree(served, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"][:, 1:].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_tensors_over(folder: Path, served: Path) -> None:
    """What is missing may be among them by another name: loading finds out."""
    without_projection(folder, served)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"head.odd": weights["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")


def adapter(folder: Path, _served: Path) -> None:
    write(folder, "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/base"})


def gguf(folder: Path, _served: Path) -> None:
    write(folder, "model-Q4.gguf", {})


def encoder(folder: Path, _served: Path) -> None:
    write(folder, "config.json", {"model_type": "vit"})


def unknown(folder: Path, _served: Path) -> None:
    write(folder, "config.json", {"model_type": "not_yet_there"})


def nameless(folder: Path, _served: Path) -> None:
    write(folder, "config.json", {"hidden_size": 32})


def eagle3(folder: Path, _served: Path) -> None:
    write(folder, "config.json", {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9})


def empty(folder: Path, _served: Path) -> None:
    folder.mkdir()


REFUSED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "no projection": (without_projection, r"its weights lack lm_head.weight; expected a folder"),
    "a narrower layer": (
        narrower,
        r"hold model.layers.0.mlp.down_proj.weight as \[\d+, \d+\] in place of .* other sizes",
    ),
    "an adapter": (adapter, r"it holds an adapter of peft \(adapter_config.json\) and no model; name"),
    "gguf": (gguf, "model-Q4.gguf is cut short: it has 2 bytes; fetch it again from where it was published"),
    "an encoder": (encoder, r"vit is no causal LM\. Of models that read images too"),
    "unknown": (unknown, "has no class for its model_type 'not_yet_there': a newer one may, or take another model"),
    "nameless": (nameless, "its config.json names no model_type, so its class is not known"),
    "a drafter for engines": (eagle3, "it is an EAGLE-3 drafter in a form for serving engines, and no causal LM"),
    "nothing": (empty, "it holds no config.json"),
}
THEIRS = ("Unrecognized", "should have a", "Should contain one of", "AutoModel", "LOAD REPORT", "newly initialized")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_is_no_target(
    kind: str, served_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, said = REFUSED[kind]
    make(tmp_path / "target", served_folder)
    recipe = load_recipe("eagle-tiny", [("target.path", str(tmp_path / "target"))]).recipe
    told = []
    with pytest.raises(RequestError, match=said) as checked:
        check_target(recipe, Models(recipe))
    with pytest.raises(RequestError, match=said) as trained:
        train("eagle-tiny", out=tmp_path / "run", target__path=str(tmp_path / "target"))
    told = [str(checked.value), str(trained.value), *capfd.readouterr()]
    assert not [words for words in THEIRS for each in told if words in each]


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK" * 20)
    recipe = load_recipe("eagle-tiny", [("target.path", str(tmp_path / "model.gguf"))]).recipe
    said = "is no GGUF file, whatever its name says: it begins with other bytes"
    with pytest.raises(RequestError, match=said):
        check_target(recipe, Models(recipe))
    with pytest.raises(RequestError, match=said):
        load_target(str(tmp_path / "model.gguf"))


def test_what_may_be_there_under_another_name_is_left_to_loading(served_folder: Path, tmp_path: Path) -> None:
    """And no report of transformers, which goes through its own log, stands in front of our message."""
    with_tensors_over(tmp_path / "target", served_folder)
    recipe = load_recipe("eagle-tiny", [("target.path", str(tmp_path / "target"))]).recipe
    assert "context" in check_target(recipe, Models(recipe))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        with pytest.raises(RequestError, match=r"its weights lack lm_head.weight; expected a folder"):
            load_target(str(tmp_path / "target"))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert [each.getMessage() for each in records] == []


@pytest.mark.parametrize("used", [True, False])
def test_tokens_without_a_row(used: bool, tmp_path: Path) -> None:
    """A tokenizer that was given tokens, and a model that was not."""
    from transformers import AutoTokenizer

    folder = tmp_path / "target"
    shutil.copytree(embedded_target(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<odd>"])
    tokenizer.save_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"line {n} of {'<odd>' * used}"}) + "\n" for n in range(50)))
    flags = {"target.path": str(folder), "data.source": str(rows)}
    recipe = load_recipe("eagle-tiny", list(flags.items())).recipe
    models = Models(recipe)
    if not used:
        assert "; 1 tokens of the tokenizer have no row in the target's embedding" in str(_data(recipe, models))
        return
    said = r"a row has the token id 4096, and the embedding of .* has 4096 rows"
    with pytest.raises(RequestError, match=said):
        _data(recipe, models)
    with pytest.raises(RequestError, match=said):
        train("eagle-tiny", out=tmp_path / "run", target__path=str(folder), data__source=str(rows))


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "eagle3": ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}, "an EAGLE-3 drafter"),
    "peagle": ({"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 9}, "a P-EAGLE drafter"),
    "eagle": ({"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}, "an EAGLE drafter"),
    "speculators": ({"speculators_model_type": "dflash"}, "a drafter of type 'dflash', as speculators writes it,"),
    "dflash2": ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "a DFlash 2 drafter"),
    "dspark": ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, "a DSpark drafter"),
    "medusa": ({"medusa_num_heads": 2}, "a Medusa drafter"),
}


@pytest.mark.parametrize("vocabulary", ["same", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_for_engines_is_named_as_one(form: str, vocabulary: Any, served: Any, tmp_path: Path) -> None:
    config, named = FORMS[form]
    write(tmp_path, "config.json", config)
    with pytest.raises(
        RequestError, match=f"describes {named} in a form for serving engines, which is not read"
    ) as no:
        load_drafter(tmp_path, served, config=DrafterConfig(vocabulary=vocabulary))
    assert "drafter.vocabulary" not in str(no.value)
