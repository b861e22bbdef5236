"""What `--format llama.cpp` writes: through llama.cpp's own converter, back by its own reader, and in its server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hub import embedded_target
from draftsmith.drafters.config import DrafterConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.launch.cli import main
from engines.cases import Trained
from engines.engine import MOST_TOKENS, NEEDED
from engines.findings import Findings
from engines.llama_server import answered, converted, llama_server
from engines.measured import Prompts, greedy, plain
from safetensors.torch import load_file
from torch import Tensor

pytestmark = NEEDED
LAYER = "midlayer.self_attn"
K = 4


def unturned(weight: Tensor, heads: int) -> Tensor:
    """Rows in the order of the file: the converter puts the halves of a head, which RoPE pairs, side by side."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


@pytest.mark.parametrize(("name", "layers"), [("eagle3", [2, 10, 17]), ("eagle3-layers", [1, 9, 15])])
def test_eagle3_is_converted_whole(name: str, layers: list[int], trained: Trained, tmp_path: Path) -> None:
    """Every weight of ours, and what the engine reads of the target: layers, vocabulary, widths."""
    run, out = trained(name), tmp_path / "export"
    assert main(["export", str(run), "--format", "llama.cpp", "--out", str(out), "--dtype", "fp32"]) == 0
    fields, found = converted(tmp_path / "drafter", str(out), "--target-model-dir", embedded_target())
    own = load_file(out / "model.safetensors")
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == layers
    assert fields["eagle3.target_hidden_size"] == 208
    assert not fields["eagle3.norm_before_residual"]
    names = {
        "fc.weight": "fc.weight",
        "output.weight": "lm_head.weight",
        "output_norm.weight": "norm.weight",
        "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
        "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
        "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
        "blk.0.attn_q.weight": f"{LAYER}.q_proj.weight",
        "blk.0.attn_k.weight": f"{LAYER}.k_proj.weight",
        "blk.0.attn_v.weight": f"{LAYER}.v_proj.weight",
        "blk.0.attn_output.weight": f"{LAYER}.o_proj.weight",
        **{f"blk.0.ffn_{kind}.weight": f"midlayer.mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")},
    }
    assert found.keys() == {*names, "d2t"}
    assert own.keys() == {*names.values(), "d2t", "t2d"}
    for theirs, mine in names.items():
        heads = {"blk.0.attn_q.weight": 4, "blk.0.attn_k.weight": 2}.get(theirs)
        weight = found[theirs] if heads is None else unturned(found[theirs], heads)
        assert torch.equal(weight, own[mine]), theirs
    # the converter writes token ids where ours are offsets
    assert torch.equal(found["d2t"], own["d2t"] + torch.arange(len(own["d2t"])))


def test_a_draft_model_is_converted_as_it_is(trained: Trained, tmp_path: Path) -> None:
    """Its folder and the target's, whose words have to be the same."""
    fields, draft = converted(tmp_path / "drafter", str(trained("distill") / "drafter"))
    whole, target = converted(tmp_path / "target", embedded_target())
    assert fields["general.architecture"] == whole["general.architecture"] == "qwen3"
    assert len(draft["token_embd.weight"]) == len(target["token_embd.weight"]) == 4096
    own = load_file(trained("distill") / "drafter" / "model.safetensors")
    assert torch.equal(draft["blk.0.ffn_down.weight"], own["model.layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize(("title", "run"), [("draft model", "distill"), ("EAGLE-3", "eagle3")])
def test_the_server_drafts_as_we_do(
    title: str, run: str, target: Backbone, prompts: Prompts, trained: Trained, findings: Findings, tmp_path: Path
) -> None:
    """Greedy text equal to plain decoding's, and as many drafted tokens accepted as here."""
    folder, kind = trained(run) / "drafter", "draft-simple"
    words = [str(folder)]
    if title == "EAGLE-3":
        out, kind = tmp_path / "export", "draft-eagle3"
        assert main(["export", str(trained(run)), "--format", "llama.cpp", "--out", str(out), "--dtype", "fp32"]) == 0
        words = [str(out), "--target-model-dir", embedded_target()]
    converted(tmp_path / "drafter", *words)
    converted(tmp_path / "target", embedded_target())
    gguf = tmp_path / "target.gguf"
    speculative = ("-md", str(tmp_path / "drafter.gguf"), "--spec-type", kind, "--spec-draft-n-max", str(K))
    with llama_server(tmp_path / "drafted.log", gguf, *speculative, "--spec-draft-p-min", "0") as address:
        drafted = answered(address, prompts)
    with llama_server(tmp_path / "plain.log", gguf) as address:
        alone = answered(address, prompts)
    drafter = load_drafter(folder, target, draft_length=K, config=DrafterConfig(policy="argmax"))
    ours = greedy(target, drafter, prompts, MOST_TOKENS)
    findings.add(
        "llama.cpp",
        title,
        text=f"{sum(a == b for a, b in zip(drafted.tokens, alone.tokens, strict=True))} of {len(prompts)}",
        accepted=sum(ours.accepted),
        accepted_engine=drafted.accepted,
    )
    assert alone.tokens == plain(target, prompts, MOST_TOKENS)
    assert drafted.tokens == alone.tokens
    assert alone.drafted == 0 < ours.accepted[0]
    assert drafted.accepted == sum(ours.accepted)
