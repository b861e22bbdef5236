"""`draftsmith export` from a run folder: what is written, what is said, what is refused."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.eagle.net import EagleNet, EagleShape
from draftsmith.drafters.eagle.net3 import Eagle3Net
from draftsmith.drafters.families import FAMILIES
from draftsmith.drafters.folder import save_draft_model
from draftsmith.drafters.heads.medusa import MedusaHeads
from draftsmith.drafters.identity import TUNED, mark_tuned
from draftsmith.drafters.tuned_file import write_tuned
from draftsmith.errors import RequestError
from draftsmith.launch.cli import main
from draftsmith.launch.engines import COMMANDS, Start, command
from draftsmith.launch.recipe.load import load_recipe
from draftsmith.storage import replace_folder
from draftsmith.trainers.block.dflash import student as dflash_student
from draftsmith.trainers.block.pard import student as pard_student
from draftsmith.trainers.teacher.frozen import saver
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target("tiny")


def run_folder(place: Path, recipe: str, net: Any, target: Any) -> Path:
    """A run as training leaves it, as far as an export looks."""
    run = place / recipe
    run.mkdir()
    resolved = load_recipe(recipe)
    (run / "run.yaml").write_text(resolved.yaml())
    family = resolved.recipe.method.removesuffix("2")  # Medusa-2's heads are Medusa's
    replace_folder(run / "drafter", lambda folder: saver(target, family)(net, folder))  # as the loop does
    return run


@pytest.fixture
def eagle(target: Any, tmp_path: Path) -> Path:
    return run_folder(tmp_path, "eagle-tiny", EagleNet(EagleShape.of(target.model.config)), target)


def test_a_run_becomes_a_folder_for_each_engine(eagle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(eagle)]) == 0
    message = capfd.readouterr().out
    assert f"vllm serve {embedded_target()}" in message
    assert '"method": "eagle"' in message
    assert main(["export", str(eagle), "--format", "sglang", "--dtype", "fp32"]) == 0
    assert "--speculative-algorithm EAGLE " in capfd.readouterr().out
    own = load_file(eagle / "drafter" / "model.safetensors")
    for form, dtype in (("vllm", torch.bfloat16), ("sglang", torch.float32)):
        assert {path.name for path in (eagle / form).iterdir()} == {"config.json", "model.safetensors"}
        config = json.loads((eagle / form / "config.json").read_text())
        assert (config["vocab_size"], config["max_position_embeddings"]) == (4096, 2048)
        tensors = load_file(eagle / form / "model.safetensors")
        assert tensors.keys() == {*own, "fc.bias"}
        for name, weight in own.items():
            assert torch.equal(tensors[name], weight.to(dtype))


def test_shared_heads_take_the_targets_projection_along(
    target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM gets no other; and it is told of no more heads than there are."""
    heads = MedusaHeads.for_target(target.model, heads=2, shared_head=True)
    run = run_folder(tmp_path, "medusa-tiny", heads, target)
    assert main(["export", str(run), "--dtype", "fp32"]) == 0
    assert '"num_speculative_tokens": 2' in capfd.readouterr().out
    tensors = load_file(run / "vllm" / "model.safetensors")
    head = target.model.get_output_embeddings().weight
    assert torch.equal(tensors["lm_head.weight"], head)


def other_target(place: Path, **changes: Any) -> Path:
    """The embedded target's config and tokenizer with other entries; no weights are read of it."""
    shutil.copytree(embedded_target(), place, ignore=lambda _, names: [n for n in names if "safetensors" in n])
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


def test_a_drafter_of_a_tuned_target_is_exported_beside_it_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Beside the target as it was published an engine would load it, and accept little."""
    tuned = load_target("tiny")
    mark_tuned(tuned.model, name="tiny-target", identity="abc")
    heads = MedusaHeads.for_target(tuned.model, heads=2)
    run = run_folder(tmp_path, "medusa2-tiny", heads, tuned)
    assert main(["export", str(run)]) == 2  # its folder `target` is gone
    message = capfd.readouterr().err
    assert "as tuned to abc; this target 'tiny-target' is one whose weights no run" in message
    assert not (run / "vllm").exists()
    other_target(run / "target", **{TUNED: {"from": "tiny-target", "sha256": "abc"}})
    assert main(["export", str(run)]) == 0
    assert f"vllm serve {run}/target" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--format", "speculators"], "expected vllm or sglang"),
        (["--out", "{run}/drafter"], "exists; name a new folder"),
        (["--target", "{narrow}"], "with hidden_size 208; this target 'narrow' has hidden_size 192"),
        (["--target", "{padded}"], "with vocabulary 4096; this target 'padded' has vocabulary 5000"),
        (["--target", "{tuned}"], "is one as tuned to abc. Use the folder"),
        (["--target", "{words}"], "this target 'words' has tokenizer"),
    ],
)
def test_what_cannot_be_is_one_message(
    words: list[str], reason: str, eagle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    others = {
        "narrow": other_target(tmp_path / "narrow", hidden_size=192),
        "padded": other_target(tmp_path / "padded", vocab_size=5000),
        "tuned": other_target(tmp_path / "tuned", **{TUNED: {"from": "tiny", "sha256": "abc"}}),
        "words": other_target(tmp_path / "words"),
    }
    train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300).save_pretrained(others["words"])
    given = [word.format(run=eagle, **others) for word in words]
    assert main(["export", str(eagle), *given]) == 2
    message = capfd.readouterr().err
    assert reason in message
    assert message.count("draftsmith: ") == 1
    assert not (eagle / "vllm").exists()


def test_no_run_and_no_drafter(eagle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert "is no run folder" in capfd.readouterr().err
    shutil.rmtree(eagle / "drafter")
    assert main(["export", str(eagle)]) == 2
    assert "holds no drafter" in capfd.readouterr().err


def test_the_command_says_how_drafts_are_drawn(
    eagle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From wherever the engine is started; vLLM would take the argmax unasked."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", eagle.name]) == 0
    message = capfd.readouterr().out
    assert f'"model": "{eagle / "vllm"}"' in message
    assert '"draft_sample_method": "probabilistic"' in message
    write_tuned(eagle / "drafter", {"drafter.policy": "argmax", "eval.draft_length": "2"}, {})
    assert main(["export", eagle.name, "--out", "again"]) == 0
    message = capfd.readouterr().out
    assert '"num_speculative_tokens": 2' in message
    assert "draft_sample_method" not in message


DYNAMIC = {"drafter.eagle.tree": "dynamic", "drafter.tree": "default", "drafter.temperature_factors": "[]"}
MEASURED = {"temperature": 0.0, "batch": 1, "processor": "here"}


@pytest.mark.parametrize(
    ("depth", "asked", "nodes"),
    [("3", "16", "16"), ("5", "61", "61"), ("1", "32", "11")],  # ten children of the root, and no more
)
def test_a_tuned_tree_becomes_the_engines_tree(
    depth: str,
    asked: str,
    nodes: str,
    eagle: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """SGLang expands one as EAGLE-2 does, and counts its nodes with the root."""
    values = {**DYNAMIC, "eval.draft_length": depth, "drafter.eagle.nodes": asked}
    write_tuned(eagle / "drafter", values, MEASURED)
    assert main(["export", str(eagle), "--format", "sglang"]) == 0
    (words,) = started(capfd.readouterr().out)
    told = [value(words, f"--speculative-{each}") for each in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert told == [depth, "10", nodes]
    assert (
        f"a tree of {nodes} nodes, {depth} deep, as tuned for T = 0.0, batch 1, here: tree of {asked}" in caplog.text
    )


@pytest.mark.parametrize("tuned", [True, False])
def test_where_an_engine_has_no_tree_it_is_said_what_is_written(
    tuned: bool, eagle: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the tree is of `tuned.json` or of the recipe."""
    whose = "the recipe has it"
    if tuned:
        values = {**DYNAMIC, "eval.draft_length": "5", "drafter.eagle.nodes": "16"}
        write_tuned(eagle / "drafter", values, MEASURED)
        whose = "tuned for T = 0.0, batch 1, here: tree of 16 nodes, 5 deep"
    else:
        (eagle / "run.yaml").write_text(load_recipe("eagle-tiny", [("drafter.eagle.tree", "dynamic")]).yaml())
    assert main(["export", str(eagle)]) == 0
    assert '"num_speculative_tokens": 4' in capfd.readouterr().out
    assert "vllm is started with a chain of 4, which is not tuned; left out is the tree that" in caplog.text
    assert f"the drafter has as {whose}; `draftsmith tune --chains`" in caplog.text


def test_a_tuned_tree_of_heads_is_not_dropped_in_silence(
    target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    heads = MedusaHeads.for_target(target.model, heads=2, shared_head=True)
    run = run_folder(tmp_path, "medusa-tiny", heads, target)
    write_tuned(run / "drafter", {"drafter.tree": "default", "drafter.medusa.nodes": "8"}, MEASURED)
    assert main(["export", str(run)]) == 0
    assert '"num_speculative_tokens": 2' in capfd.readouterr().out
    assert "vllm is started with a chain of 2, which is not tuned; left out is the tree" in caplog.text


BLOCK = {"drafter.block.tree": "tree", "drafter.block.nodes": "6", "drafter.temperature_factors": "[]"}
CUT = {"drafter.block.tree": "chain", "drafter.confidence": "0.4", "eval.draft_length": "2"}


def test_a_setting_that_is_gone_is_one_message(target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Some are read for the command that starts the engine, before any network is built."""
    run = run_folder(tmp_path, "dflash-tiny", dflash_student(load_recipe("dflash-tiny").recipe, target.model), target)
    config = json.loads((run / "drafter" / "config.json").read_text())
    for name in ("layout", "causal", "size"):
        kept = {key: each for key, each in config["draftsmith"]["settings"].items() if key != name}
        damaged = {"draftsmith": config["draftsmith"] | {"settings": kept}}
        (run / "drafter" / "config.json").write_text(json.dumps(damaged))
        assert main(["export", str(run)]) == 2
        said = capfd.readouterr().err
        assert f"{run / 'drafter' / 'config.json'} does not hold the sizes of" in said
        assert name in said
        assert "copy the drafter's folder again" in said


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (BLOCK, ["vllm is started with a chain of 3, which is not tuned; left out is the tree that the drafter has"]),
        (CUT, ["vllm drafts all 3 tokens: left out is drafter.confidence 0.4, which ends drafts in front of a slot"]),
        ({"drafter.block.tree": "chain", "drafter.confidence": "0.0"}, []),
    ],
)
def test_a_block_s_tree_and_its_doubt_are_not_dropped_in_silence(
    values: dict[str, str], said: list[str], tuned: bool, target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether they are of `tuned.json` or of the recipe."""
    recipe = load_recipe("dflash-tiny", [("block.size", "4")]).recipe
    run = run_folder(tmp_path, "dflash-tiny", dflash_student(recipe, target.model), target)
    if tuned:
        write_tuned(run / "drafter", values, MEASURED)
    else:
        (run / "run.yaml").write_text(load_recipe("dflash-tiny", list(values.items())).yaml())
    assert main(["export", str(run)]) == 0
    named = [line for line in caplog.messages if "left out is" in line]
    assert len(named) == len(said)
    for line, words in zip(named, said, strict=True):
        assert line.startswith(words)
        assert ("as tuned for T = 0.0, batch 1, here" if tuned else "as the recipe has it") in line


@pytest.mark.parametrize(
    ("recipe", "flags"), [("eagle-tiny", {"drafter.eagle.tree": "static"}), ("medusa-tiny", {}), ("eagle-tiny", {})]
)
def test_a_static_tree_is_named_too(
    recipe: str, flags: dict[str, str], target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads always have one, unless a chain is asked for."""
    heads = MedusaHeads.for_target(target.model, heads=2, shared_head=True)
    net = heads if recipe == "medusa-tiny" else EagleNet(EagleShape.of(target.model.config))
    run = run_folder(tmp_path, recipe, net, target)
    for chain, more in ((False, flags), (True, {**flags, "drafter.tree": "chain"} if flags or net is heads else {})):
        caplog.clear()
        (run / "run.yaml").write_text(load_recipe(recipe, list(more.items())).yaml())
        assert main(["export", str(run), "--out", str(tmp_path / f"out-{chain}")]) == 0
        told = "left out is the tree that the drafter has as the recipe has it" in caplog.text
        assert told == (not chain and bool(flags or net is heads))


@pytest.mark.parametrize(("form", "policy"), [("vllm", "sample"), ("vllm", "argmax"), ("sglang", "sample")])
def test_a_cap_of_the_targets_logits_is_said_where_drafts_are_drawn(
    form: str, policy: str, eagle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It moves the likeliest token nowhere."""
    write_tuned(eagle / "drafter", {"drafter.policy": policy, "eval.draft_length": "3"}, {})
    capped = other_target(tmp_path / "capped", final_logit_softcapping=30.0)
    assert main(["export", str(eagle), "--format", form, "--target", str(capped)]) == 0
    said = "caps its logits at 30, for which vllm has no word: above T = 0" in caplog.text
    assert said == ((form, policy) == ("vllm", "sample"))


@pytest.fixture
def draft_model(target: Any, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    save_draft_model(target.model, run / "drafter", target)
    (run / "run.yaml").write_text(load_recipe("distill-tiny").yaml())
    return run


def started(message: str) -> list[list[str]]:
    """The words of each printed line, as a shell would pass them."""
    return [shlex.split(line) for line in message.splitlines() if line.startswith("  ")]


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_a_draft_model_is_told_how_it_is_loaded(draft_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing needs to be written for it, in no format: what is said ends with the command."""
    folder, target = str(draft_model / "drafter"), embedded_target()
    said = {}
    for form in FAMILIES["draft_model"].exports:
        assert main(["export", str(draft_model), "--format", form]) == 0
        message = capfd.readouterr().out
        assert "ordinary transformers model" in message
        said[form] = started(message)
    assert not any((draft_model / form).exists() for form in said)
    (vllm,), (sglang,), (options, serve), (_, convert, run) = said.values()
    assert vllm[:3] == ["vllm", "serve", target]
    assert json.loads(value(vllm, "--speculative-config")) == {
        "method": "draft_model",
        "model": folder,
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert value(sglang, "--speculative-algorithm") == "STANDALONE"
    assert json.loads(options[1])["speculative_config"] == {
        "decoding_type": "DraftTarget",
        "max_draft_len": 4,
        "speculative_model": folder,
    }
    assert serve[:2] == ["trtllm-serve", target]
    assert (convert[2], "--target-model-dir" in convert) == (folder, False)
    assert (value(run, "-md"), value(run, "--spec-type")) == (value(convert, "--outfile"), "draft-simple")


@pytest.mark.parametrize("mask", [None, 77])
def test_a_pard_draft_carries_its_mask_and_is_served_in_one_pass(
    mask: int | None, target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM reads the mask's id off the draft's own config, and drafts token by token where it is not told otherwise."""
    run = tmp_path / "run"
    resolved = load_recipe("pard-tiny", [] if mask is None else [("pard.mask_token", str(mask))])
    draft = pard_student(resolved.recipe, target.model, target.tokenizer)
    save_draft_model(draft, run / "drafter", target, family="pard")
    (run / "run.yaml").write_text(resolved.yaml())
    config = json.loads((run / "drafter" / "config.json").read_text())
    assert config["spd_type"] == "pard"
    assert config["pard_token"] == (target.tokenizer.pad_token_id if mask is None else mask)
    assert config["vocab_size"] == target.vocabulary
    assert main(["export", str(run), "--format", "vllm"]) == 0
    message = capfd.readouterr().out
    assert "ordinary transformers model" in message
    ((*serve, told),) = started(message)
    assert serve == ["vllm", "serve", str(Path(embedded_target()).resolve()), "--speculative-config"]
    assert json.loads(told) == {
        "method": "draft_model",
        "model": str((run / "drafter").resolve()),
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
        "draft_sample_method": "probabilistic",
    }
    assert not (run / "vllm").exists()


@pytest.mark.parametrize(
    ("mask", "found"), [(None, "no pard_token"), (10**9, f"pard_token {10**9}, and its embedding has 4096 rows")]
)
def test_a_pard_draft_that_does_not_name_its_mask_is_not_served(
    mask: int | None, found: str, target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_draft_model(target.model, run / "drafter", target, family="pard")
    path = run / "drafter" / "config.json"
    if mask is not None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": mask}))
    (run / "run.yaml").write_text(load_recipe("pard-tiny").yaml())
    assert main(["export", str(run)]) == 2
    said = capfd.readouterr()
    assert f"{path} has {found}; expected the id of the mask" in said.err
    assert "vllm serve" not in said.out


@pytest.mark.parametrize("family", ["draft_model", "pard"])
@pytest.mark.parametrize(
    ("changes", "reason"), [({"words": True}, "this target 'other' has tokenizer"), ({"vocab_size": 4095}, None)]
)
def test_a_draft_model_is_held_to_its_target_too(
    family: str,
    changes: dict[str, Any],
    reason: str | None,
    target: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is written for it, and an engine would draft from other tokens, or refuse the pair."""
    run = tmp_path / "run"
    save_draft_model(target.model, run / "drafter", target, family=family)
    (run / "run.yaml").write_text(load_recipe("distill-tiny").yaml())
    other = other_target(tmp_path / "other", **{k: v for k, v in changes.items() if k != "words"})
    if "words" in changes:
        train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300).save_pretrained(other)
    assert main(["export", str(run), "--target", str(other)]) == 2
    said = capfd.readouterr()
    own = "with vocabulary 4096; this target" if family == "draft_model" else "vocabulary has 4096 rows, that of"
    assert (reason or own) in said.err
    assert (reason is not None or family != "pard") or "where pard.mask_token names no id" in said.err
    assert "vllm serve" not in said.out


@pytest.mark.parametrize("form", FAMILIES["draft_model"].exports)
def test_a_draft_of_more_rows_than_the_target_is_refused_where_the_engine_does(
    form: str, target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Padding of another size: vLLM compares the numbers of rows, others the tokens."""
    draft = load_target("tiny").model
    draft.resize_token_embeddings(4160, mean_resizing=False)
    save_draft_model(draft, tmp_path / "run" / "drafter", target)
    (tmp_path / "run" / "run.yaml").write_text(load_recipe("distill-tiny").yaml())
    refused = main(["export", str(tmp_path / "run"), "--format", form]) == 2
    assert refused == (form == "vllm")
    said = "the draft model's vocabulary has 4160 rows, that of the target"
    assert (said in capfd.readouterr().err) == refused


@pytest.fixture
def eagle3(target: Any, tmp_path: Path) -> Path:
    """Of hidden states that are no engine's default."""
    net = Eagle3Net.for_target(target.model, layers=(1, 9, 16), ids=list(range(64)))
    return run_folder(tmp_path, "eagle3-tiny", net, target)


@pytest.mark.parametrize(("flags", "told"), [([], True), ([("block.mask_token", "7")], False)])
def test_a_mask_that_vllm_alone_reads_is_named(
    flags: list[tuple[str, str]], told: bool, target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe("dflash-tiny", [("block.size", "4"), *flags]).recipe
    run = run_folder(tmp_path, "dflash-tiny", dflash_student(recipe, target.model), target)
    with caplog.at_level(logging.INFO):
        assert main(["export", str(run)]) == 0
    assert ("which vLLM alone reads" in caplog.text) is told
    assert ("Set block.mask_token for a drafter that is to be exchanged" in caplog.text) is told


def test_every_engine_is_started_with_the_same_draft(eagle3: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Target, folder, method, length and hidden states, in the words of each."""
    write_tuned(eagle3 / "drafter", {"drafter.policy": "sample", "eval.draft_length": "3"}, {})
    target, said = embedded_target(), {}
    for form in FAMILIES["eagle3"].exports:
        assert main(["export", str(eagle3), "--format", form]) == 0
        said[form] = started(capfd.readouterr().out)
        assert (eagle3 / form / "model.safetensors").is_file()
    assert said.keys() == COMMANDS.keys()  # no engine that nobody is told how to start
    (vllm,), (sglang,), (speculators,), (options, serve), (whole, convert, run) = said.values()
    drawn = {"draft_sample_method": "probabilistic"}
    config = {"method": "eagle3", "model": str(eagle3 / "vllm"), "num_speculative_tokens": 3}
    assert vllm == ["vllm", "serve", target, "--speculative-config", json.dumps(config | drawn)]
    assert speculators == ["vllm", "serve", str(eagle3 / "speculators"), "--speculative-config", json.dumps(drawn)]
    named = json.loads((eagle3 / "speculators" / "config.json").read_text())["speculators_config"]
    assert named["proposal_methods"][0]["speculative_tokens"] == 3
    assert named["verifier"]["name_or_path"] == target
    assert (value(sglang, "--model-path"), value(sglang, "--speculative-algorithm")) == (target, "EAGLE3")
    assert (value(sglang, "--speculative-num-steps"), value(sglang, "--speculative-num-draft-tokens")) == ("3", "4")
    assert json.loads(options[1]) == {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": 3,
            "speculative_model": str(eagle3 / "tensorrt-llm"),
            "eagle3_layers_to_capture": [0, 8, 15],
        }
    }
    assert serve == ["trtllm-serve", target, "--config", options[-1]]
    assert (whole[2], convert[2]) == (target, str(eagle3 / "llama.cpp"))
    assert value(convert, "--target-model-dir") == target
    assert [value(run, "-m"), value(run, "-md")] == [value(whole, "--outfile"), value(convert, "--outfile")]
    assert (value(run, "--spec-type"), value(run, "--spec-draft-n-max")) == ("draft-eagle3", "3")


def test_llama_cpp_needs_the_targets_folder() -> None:
    """Its converter reads config and tokenizer there, and has no other way to a target."""
    start = Start("org/target", Path("/run/llama.cpp"), "draft-eagle3", 3, sampled=True)
    with pytest.raises(RequestError, match="'org/target' is none here; download it, and name its folder"):
        command("llama.cpp", start)


def test_others_may_read_the_weights(eagle: Path) -> None:
    """An engine in a container runs as somebody else."""
    assert main(["export", str(eagle)]) == 0
    before = os.umask(0)
    os.umask(before)
    for path in (*(eagle / "vllm").iterdir(), *(eagle / "drafter").iterdir()):
        assert path.stat().st_mode & 0o777 == 0o666 & ~before, path
