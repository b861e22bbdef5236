"""The target's real context: rows and prompts beyond it are refused, by `check` and by `train`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.errors import RequestError
from draftsmith.eval.measure.probe import as_proposer
from draftsmith.launch import generate
from draftsmith.launch.check.check import _prompts
from draftsmith.launch.check.models import Models, check_model, check_target
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.launch.recipe.model import Recipe
from draftsmith.launch.train import train
from draftsmith.trainers import methods
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.student.draft import draft_model
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

WINDOW = 16
SHORT_ONE = f"{WINDOW} tokens"
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "rope_theta": 1e4,
    "factor": 8.0,
}


def gemma3() -> PretrainedConfig:
    """As Gemma 3 is from 4B on: its sizes are one level down."""
    marks = {"boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3}
    words = SIZES | {"max_position_embeddings": WINDOW, "sliding_window": 5}
    return AutoConfig.for_model("gemma3", text_config=words, vision_config=SIGHT, **marks)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "mistral": lambda: AutoConfig.for_model(
        "mistral", **SIZES | {"max_position_embeddings": WINDOW, "sliding_window": 5}
    ),
    "phi3": lambda: AutoConfig.for_model(
        "phi3", **SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=WINDOW
    ),
    "gemma3": gemma3,
    "gpt2": lambda: AutoConfig.for_model("gpt2", vocab_size=4096, n_embd=32, n_head=4, n_layer=2, n_positions=128),
}
CHANGES = f"{WINDOW} tokens, after which its rotary frequencies change"
LIMITS = {"mistral": SHORT_ONE, "gemma3": SHORT_ONE, "phi3": CHANGES, "gpt2": "128 tokens"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of every family, with the tokens of the embedded target."""
    folder = tmp_path_factory.mktemp("contexts")
    for name, make in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(make()).save_pretrained(folder / name)
        for path in Path(embedded_target()).glob("token*"):
            shutil.copy(path, folder / name / path.name)
    prompt = {"text": "import something\n" * 40}
    (folder / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    return folder


def recipe_of(method: str, **flags: Any) -> Recipe:
    words = [(name.replace("__", "."), str(value)) for name, value in flags.items()]
    return load_recipe(f"{method}-tiny", words).recipe


def on_the_data_s_rows(method: str) -> bool:
    """Whether it trains a drafter for a target that stays as it is, on the data's own rows."""
    recipe = load_recipe(f"{method}-tiny").recipe
    return recipe.record.has_target and not recipe.tunes_target and recipe.record.samples(recipe) is None


METHODS = [method for method in methods.METHODS if on_the_data_s_rows(method)]
FAMILIES = [("mistral", method) for method in METHODS] + [("gemma3", "eagle"), ("phi3", "eagle"), ("gpt2", "distill")]


@pytest.mark.parametrize(("family", "method"), FAMILIES)
def test_rows_beyond_the_context(family: str, method: str, place: Path, tmp_path: Path) -> None:
    """Known before rows are read: there are none."""
    path = str(place / family)
    printed = f"--data.sequence_length is 256; the context of target.path '{path}' is {LIMITS[family]}"
    with pytest.raises(RequestError, match=printed):
        train(f"{method}-tiny", out=tmp_path / "out", target__path=path, data__source=str(tmp_path / "none.jsonl"))
    recipe = recipe_of(method, target__path=path)
    models = Models(recipe)
    with pytest.raises(RequestError, match=f"{printed}.*Lower --data.sequence_length to"):
        check_model(recipe, models)
    assert check_target(recipe, models)  # which is nothing that speaks against the target


def test_rows_of_boost(place: Path) -> None:
    """The target reads prompts and their continuations, not the rows that prompts are cut from."""
    path = str(place / "mistral")
    flags = {"target__path": path, "boost__prompt_tokens": 8, "data__sequence_length": 64}
    recipe = recipe_of("boost", **flags, boost__continuation=9)
    printed = r"prompt_tokens and --boost.continuation is 17; the context of target.path .* is 16 tok"
    with pytest.raises(RequestError, match=printed):
        check_model(recipe, Models(recipe))
    recipe = recipe_of("boost", **flags, boost__continuation=8)
    assert f"context {WINDOW}" in check_target(recipe, Models(recipe))
    assert check_model(recipe, Models(recipe))


@pytest.mark.parametrize("method", ["target", "distill"])
def test_a_model_to_go_on_from(method: str, place: Path, tmp_path: Path) -> None:
    path = str(place / "mistral")
    recipe = recipe_of(method, model__start_from=path)
    printed = f"the context of model.start_from '{path}' is {SHORT_ONE}"
    with pytest.raises(RequestError, match=printed):
        check_model(recipe, Models(recipe))
    with pytest.raises(RequestError, match=printed):  # before rows are read
        train(
            f"{method}-tiny", out=tmp_path / "out", model__start_from=path, data__source=str(tmp_path / "none.jsonl")
        )


def test_a_model_from_scratch() -> None:
    recipe = recipe_of("distill", model__max_positions=128)
    with pytest.raises(RequestError, match=r"model from scratch \(model.max_positions\) is 128"):
        check_model(recipe, Models(recipe))


SHORT = {
    "data__sequence_length": WINDOW,
    "eval__prompt_tokens": 6,
    "eval__max_new_tokens": 3,
    "eval__draft_length": 2,
    "eval__sweep": "[1]",
    "audit__max_new_tokens": 8,
    "audit__draft_length": 2,
    "probe__max_new_tokens": 4,
    "probe__draft_length": 2,
    "medusa__heads": 2,
    "bpd__block": 3,
    "block__size": 3,
    "block__layout": "fill-in",
}


def short(method: str, **change: Any) -> dict[str, Any]:
    """SHORT, as far as the method reads it."""
    recipe, flags = load_recipe(f"{method}-tiny").recipe, SHORT | change
    return {flag: flags[flag] for flag in flags if recipe.record.reads_value(flag.replace("__", "."), recipe)}


@pytest.mark.parametrize("method", [*METHODS, "boost"])
def test_sizes_one_level_down(method: str, place: Path) -> None:
    """A model of text and images: everything that is read of its config is its text's."""
    flags = {"target__path": place / "gemma3", "eval__prompts": place / "prompts.jsonl", **short(method)}
    if method == "boost":
        flags |= {"boost__prompt_tokens": 8, "boost__continuation": 8, "boost__start_from": "[]"}
    recipe = recipe_of(method, **flags)
    models = Models(recipe)
    assert f"vocabulary 4,096, context {WINDOW}" in check_target(recipe, models)
    assert "M parameters" in check_model(recipe, models)
    assert "the longest has 6 tokens" in _prompts(recipe, models)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("eagle", {"eval__prompt_tokens": 7}),
        ("eagle", {"probe__draft_length": 3}),
        ("eagle", {"probe__max_new_tokens": 9}),
        ("medusa", {"medusa__heads": 3}),
        ("bpd", {"bpd__block": 4}),
    ],
)
def test_prompts_beyond_the_context(method: str, change: dict[str, int], place: Path, tmp_path: Path) -> None:
    """Training learns of it before rows are read, not at its first probe."""
    flags = {"target__path": place / "mistral", "eval__prompts": place / "prompts.jsonl"}
    recipe = recipe_of(method, **flags, **short(method, **change))
    printed = f"do not fit the target's context of {SHORT_ONE}; lower --eval.prompt_tokens"
    with pytest.raises(RequestError, match=printed):
        _prompts(recipe, Models(recipe))
    changed = {name: str(value) for name, value in (flags | short(method, **change)).items()}
    changed |= {"data__source": str(tmp_path / "none.jsonl"), "probe__max_new_tokens": "9"}
    with pytest.raises(RequestError, match=printed):
        train(f"{method}-tiny", out=tmp_path / "out", **changed)


def test_probes_too_short_for_a_step_that_counts(place: Path, tmp_path: Path) -> None:
    """Every tau would be missing, and the first probe's draft the best for ever."""
    flags = {"target__path": place / "mistral", "eval__prompts": place / "prompts.jsonl"}
    message = "probe.max_new_tokens is 3, and the probes draft up to 2 tokens .* set --probe.max_new_tokens 4 or more"
    recipe = recipe_of("eagle", **flags, **short("eagle", probe__max_new_tokens=3))
    with pytest.raises(RequestError, match=message):
        _prompts(recipe, Models(recipe))
    changed = {name: str(value) for name, value in (flags | short("eagle")).items()}
    changed |= {"data__source": str(tmp_path / "none.jsonl"), "probe__max_new_tokens": "3"}
    with pytest.raises(RequestError, match=message):
        train("eagle-tiny", out=tmp_path / "out", **changed)


OF_ONE_SIZE = ["medusa", "hydra", "bpd", "dflash", "dspark", "dflash2"]


@pytest.mark.parametrize("length", [1, 4, 40])
@pytest.mark.parametrize("method", [*OF_ONE_SIZE, "eagle"])
def test_a_probe_s_depth_is_what_its_drafter_drafts(method: str, length: int, place: Path) -> None:
    """A block drafts as many as are asked for and it has; heads draft their tree."""
    recipe = recipe_of(method, target__path=place / "mistral", probe__draft_length=length)
    target = load_target(str(place / "mistral"))
    module = recipe.record.code().student(recipe, target.model)
    drafter = as_proposer(recipe.record.family or "", target, recipe.probe.draft_length)(module)
    assert recipe.record.probe_depth(recipe) == drafter.draft_length
    assert recipe.record.drafts_of(recipe, 40) == (40 if method == "eagle" else recipe.record.most_drafts(recipe))


@pytest.mark.parametrize("method", ["dflash", "dspark", "dflash2"])
def test_a_probe_of_few_drafts_of_a_large_block(method: str, place: Path) -> None:
    """What the block could draft besides needs no room, and no longer answer."""
    flags = {"target__path": place / "gpt2", "eval__prompts": place / "prompts.jsonl", **short(method)}
    flags |= {"block__size": 64, "eval__prompt_tokens": 110, "audit__max_new_tokens": 8, "probe__max_new_tokens": 4}
    recipe = recipe_of(method, **flags)
    assert "the longest has 110 tokens" in _prompts(recipe, Models(recipe))


@pytest.mark.parametrize("method", [*OF_ONE_SIZE, "eagle"])
@pytest.mark.parametrize("flag", ["eval__draft_length", "audit__draft_length", "eval__sweep"])
def test_more_drafts_than_a_drafter_has(method: str, flag: str, place: Path) -> None:
    """`eval` and `audit` draft what there is of them, and so much room is asked for."""
    flags = {"target__path": place / "mistral", "eval__prompts": place / "prompts.jsonl", **short(method)}
    recipe = recipe_of(method, **flags | {flag: [1000] if flag == "eval__sweep" else 1000})
    if method == "eagle":
        with pytest.raises(RequestError, match="a draft of 1000 do not fit"):
            _prompts(recipe, Models(recipe))
    else:
        assert "the longest has 6 tokens" in _prompts(recipe, Models(recipe))


def test_rows_with_tokens_that_the_target_lacks(place: Path, tmp_path: Path) -> None:
    """Tokens were added to the tokenizer, and the embedding was not resized."""
    small = AutoConfig.for_model("qwen3", **{**SIZES, "vocab_size": 300})
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "small")
    for path in Path(embedded_target()).glob("token*"):
        shutil.copy(path, tmp_path / "small" / path.name)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "import something\n" * 20}) + "\n")
    words = {"target__path": str(tmp_path / "small"), "data__source": str(rows)}
    words |= {"data__validation": str(rows), "data__sequence_length": "32"}
    with pytest.raises(RequestError, match=r"a row has the token id \d+, and the embedding of"):
        train("eagle-tiny", out=tmp_path / "out", eval__prompt_tokens="32", **words)


def test_a_draft_for_sizes_one_level_down(place: Path) -> None:
    """A fresh draft takes its sizes from the text part of its target."""
    target = load_target(str(place / "gemma3"))
    made = draft_model(ModelConfig(), target.model, target.tokenizer)
    assert (made.config.hidden_size, made.config.vocab_size) == (16, 4096)


def test_a_server_is_not_bound_by_what_bounds_our_decoder(place: Path, tmp_path: Path) -> None:
    request = generate.GenerateRequest(
        source="none", target=str(place / "phi3"), out=tmp_path, server="http://localhost:1", model="it"
    )
    server = generate._server_request(request)
    assert server is not None
    assert generate._by_server(request, recipe_of("distill"), server).positions == 128


def test_the_end_of_a_text_one_level_down(place: Path) -> None:
    """Where the generation settings are silent the config says it, and that one is nested."""
    target = load_target(str(place / "gemma3"))
    target.model.generation_config.eos_token_id = None
    assert target.eos_ids == (1,)


@pytest.mark.parametrize(("tokens", "told"), [(120, True), (40, False)])
def test_a_draft_that_reads_less_than_is_decoded(tokens: int, told: bool, place: Path) -> None:
    """Said before training: behind its own context a draft model drafts nothing."""
    lengths = dict.fromkeys(("eval__max_new_tokens", "audit__max_new_tokens", "probe__max_new_tokens"), 16)
    flags: dict[str, Any] = {"model__start_from": place / "gpt2", "eval__prompts": place / "prompts.jsonl"}
    recipe = recipe_of("distill", **flags, **lengths, eval__prompt_tokens=tokens, data__sequence_length=64)
    said = _prompts(recipe, Models(recipe))
    assert ("; the draft reads 128 tokens, and with answer and drafts that is up to" in said) == told
