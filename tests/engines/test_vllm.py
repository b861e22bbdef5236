"""Exported drafters in vLLM: loaded whole, the same greedy text, the same counts, the same law above T = 0.

The folders that it loads are read here too, as drafters of others are, and draft the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.registry import load_drafter
from engines.cases import CASES, MASK, Case, Trained
from engines.engine import MOST_TOKENS, NEEDED, Asked, Vllm
from engines.exported import exported
from engines.findings import Findings, beside, figure
from engines.measured import Prompts, first_drafts, greedy, plain
from safetensors.torch import load_file, save_file

pytestmark = NEEDED
K = 4
OURS, THEIRS = 2, 2  # times that each prompt is answered at T = 1
SHIFTED = "eagle_aux_hidden_state_layer_ids"


def own_target(run: Path, target: Backbone) -> Backbone:
    """The target that the run tuned, or the embedded one."""
    return load_target(str(run / "target")) if (run / "target").is_dir() else target


def test_plain_decoding(vllm: Vllm, target: Backbone, prompts: Prompts, findings: Findings) -> None:
    """Without a drafter the two write the same: what differs below is the drafter's doing.

    And what the CPU build has mended by itself goes from `in_vllm/mended.py`.
    """
    served = vllm.serve(target.name, None, [Asked(prompts, 0.0)])
    findings.versions["vllm"] = served.version
    assert served.untouched == []
    assert served.runs[0].tokens == plain(target, prompts, MOST_TOKENS)
    assert served.runs[0].drafts == 0
    assert served.faults == ["expand_batch_to_tokens", "rms_norm"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_drafter(
    case: Case, vllm: Vllm, target: Backbone, prompts: Prompts, trained: Trained, findings: Findings, tmp_path: Path
) -> None:
    run = trained(case.run)
    command = exported(run, case.form, tmp_path / "export")
    mine = own_target(run, target)
    text = plain(mine, prompts, MOST_TOKENS)
    findings.trained(case.title, run / "drafter")
    shares = {}
    for policy in ["argmax", "sample"] if command.samples else ["argmax"]:
        drawn = {"policy": policy} if command.samples else {}  # heads take their likeliest tokens, and no word for it
        config = DrafterConfig(**drawn, tree=case.tree)
        drafter = load_drafter(run / "drafter", mine, draft_length=K, config=config)
        ours = greedy(mine, drafter, prompts, MOST_TOKENS)
        shares[policy] = first_drafts(mine, drafter, prompts, MOST_TOKENS, repeats=OURS)
        theirs = command.config if policy == "sample" else command.greedy
        asked = [Asked(prompts, 0.0), Asked(list(prompts) * THEIRS, 1.0)]
        served = vllm.serve(command.model, theirs, asked, command.of_target)
        cold, warm = served.runs
        low, high = shares[policy].interval(len(prompts) * THEIRS)
        found = warm.accepted[0] / warm.drafts
        untouched = [name for name in served.untouched if name not in case.spare]
        findings.add(
            "vLLM",
            case.title,
            temperatures="0 and 1",
            **beside(untouched, text, ours, cold),
            **{policy: figure(shares[policy].value, (low, high)), f"{policy}_engine": figure(found)},
        )
        assert served.engine_class == case.engine_class
        assert untouched == []
        assert cold.tokens == text == ours.tokens
        assert (cold.drafts, cold.accepted) == (ours.steps, ours.accepted)
        assert ours.accepted[0] > 0  # otherwise nothing was compared
        if policy == "argmax" and (folder := tmp_path / "export").is_dir():
            # the folder that vLLM loads, loaded here as anybody's
            read = greedy(mine, load_drafter(folder, mine, draft_length=K, config=config), prompts, MOST_TOKENS)
            assert (cold.drafts, cold.accepted) == (read.steps, read.accepted)
        assert low <= found <= high
    if len(shares) == 2:  # one policy taken for the other would have been seen
        assert shares["argmax"].value < low


def test_layers_shifted_by_one_are_seen(
    vllm: Vllm, target: Backbone, prompts: Prompts, trained: Trained, findings: Findings, tmp_path: Path
) -> None:
    """The control: hidden states one layer off cost so little acceptance that only exact counts tell."""
    run = trained("eagle3")
    command = exported(run, "vllm", tmp_path / "export")
    path = tmp_path / "export" / "config.json"
    config = json.loads(path.read_text())
    assert SHIFTED not in config  # the default of every engine
    layers = json.loads((run / "drafter" / "config.json").read_text())["draftsmith"]["settings"]["layers"]
    path.write_text(json.dumps(config | {SHIFTED: [layer + 1 for layer in layers]}))
    served = vllm.serve(command.model, command.greedy, [Asked(prompts, 0.0)])
    ours = greedy(target, load_drafter(run / "drafter", target, draft_length=K), prompts, MOST_TOKENS)
    cold = served.runs[0]
    findings.add(
        "vLLM", "control: EAGLE-3, layers shifted by one", **beside(served.untouched, ours.tokens, ours, cold)
    )
    assert served.untouched == []
    assert cold.tokens == ours.tokens  # wrong drafts are rejected, so no text shows the fault
    assert (cold.drafts, cold.accepted) != (ours.steps, ours.accepted)


def test_one_norm_for_all_layers_is_seen(
    vllm: Vllm, target: Backbone, prompts: Prompts, trained: Trained, findings: Findings, tmp_path: Path
) -> None:
    """The control of one pass: the CPU build's own norm of DFlash's keys costs no text, and changes counts."""
    run = trained("dflash")
    command = exported(run, "vllm", tmp_path / "export")
    served = vllm.serve(command.model, command.greedy, [Asked(prompts, 0.0)], as_it_comes=True)
    ours = greedy(target, load_drafter(run / "drafter", target, draft_length=K), prompts, MOST_TOKENS)
    cold = served.runs[0]
    findings.add(
        "vLLM",
        "control: DFlash, the CPU build as it comes",
        **beside([name for name in served.untouched if name not in MASK], ours.tokens, ours, cold),
    )
    assert cold.tokens == ours.tokens
    assert (cold.drafts, cold.accepted) != (ours.steps, ours.accepted)


def test_a_weight_left_out_is_seen(vllm: Vllm, prompts: Prompts, trained: Trained, tmp_path: Path) -> None:
    """The control of the poison: vLLM says nothing of it."""
    command = exported(trained("eagle3"), "vllm", tmp_path / "export")
    path = tmp_path / "export" / "model.safetensors"
    weights = load_file(path)
    del weights["midlayer.hidden_norm.weight"]
    save_file(weights, path)
    served = vllm.serve(command.model, command.greedy, [Asked(prompts[:1], 0.0)])
    assert [name.rsplit(".", 2)[-2] for name in served.untouched] == ["hidden_norm"]
