"""Drafters made of the target itself: quantised copies and early exits, lossless like all others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_target
from draftsmith.data.rows.tokenizer import train_tokenizer
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.layers import with_layers
from draftsmith.decoding.backbone.loading import load_target
from draftsmith.decoding.backbone.quantised import group_for
from draftsmith.decoding.engine import generate
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model.draft_model import DraftModel
from draftsmith.drafters.model.early_exit import EarlyExit, first_layers, save_early_exit
from draftsmith.drafters.model.quantised import Quantised, quantised_copy, save_quantised
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.eval.audit.audit import audit
from draftsmith.eval.config import AuditConfig
from draftsmith.eval.measure.speed import bytes_of
from draftsmith.launch.cli import main
from helpers.runs.small_flags import AUDIT
from torch import nn

PROMPTS = [[5, 9, 2, 33, 7], [11, 4], [1, 2, 3], [60, 17, 17, 8, 40, 3]]
KINDS = ["quantised 8", "quantised 4", "early exit"]


@pytest.fixture
def target() -> Backbone:
    target = make_target("qwen3")
    target.tokenizer = train_tokenizer(["abc def ghi jkl mno pqr\n"] * 5, 300)
    return target


def make(kind: str, target: Backbone, folder: Path) -> Any:
    """The drafter as any command gets it: written, then loaded."""
    if kind == "early exit":
        save_early_exit(folder, target, layers=1)
    else:
        save_quantised(folder, target, bits=int(kind[-1]))
    return load_drafter(folder, target, draft_length=3)


FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_view_is_the_model(family: str) -> None:
    """All layers: the same logits, bit for bit; fewer: what `hidden_states` says behind them."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = torch.arange(24)[None]
    assert torch.equal(with_layers(model, range(3))(ids).logits, model(ids).logits)
    states = model(ids, output_hidden_states=True).hidden_states
    early = with_layers(model, range(2))
    expected = model.lm_head(model.model.norm(states[2]))
    torch.testing.assert_close(early(ids, use_cache=False).logits, expected)
    assert early.config.num_hidden_layers == 2
    assert model.config.num_hidden_layers == 3
    theirs = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in early.parameters()} < theirs, "no weight is copied"


@torch.inference_mode()
def test_an_early_exit_drafts_from_its_layer(target: Backbone, tmp_path: Path) -> None:
    """Its first proposal is the argmax of norm and head behind that layer."""
    drafter = make("early exit", target, tmp_path / "d")
    done = generate(target, drafter, PROMPTS[:1], warper=Warper(0.0), max_new_tokens=2, seed=0)
    text = torch.tensor([PROMPTS[0] + done.tokens[0][:1]])
    state = target.model(text, output_hidden_states=True).hidden_states[1]
    expected = int(target.model.lm_head(target.model.model.norm(state))[0, -1].argmax())
    drafter.reset(PROMPTS[:1], 8)
    proposal = drafter.propose(torch.tensor(done.tokens[0][:1]), Warper(0.0), None)
    assert int(proposal.tokens_BN[0, 1]) == expected


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_rounded_to_their_bits(bits: int, target: Backbone) -> None:
    """Every number within half a step of its own, a step being the range over the levels."""
    group = 32 if bits == 4 else None
    copy = quantised_copy(target, bits=bits, group_size=group)
    mine = {name: each for name, each in copy.model.named_modules() if isinstance(each, nn.Linear)}
    assert len(mine) == 2 * 7 + 1
    for name, layer in mine.items():
        weight, rounded = target.model.get_submodule(name).weight, layer.weight.dequantize()
        size = group or weight.shape[1]
        off = (rounded - weight).unflatten(-1, (-1, size)).abs()
        largest = weight.unflatten(-1, (-1, size)).abs().amax(-1, keepdim=True)
        step = largest / (2 ** (bits - 1) - 0.5)
        assert (off <= 0.501 * step).all()
        assert off.mean() > 0.2 * step.mean(), "something was rounded"
    again = quantised_copy(target, bits=bits, group_size=group)
    ids = torch.arange(20)[None]
    assert torch.equal(copy.model(ids).logits, again.model(ids).logits), "the same at every load"
    assert not torch.equal(copy.model(ids).logits, target.model(ids).logits)


def test_what_a_quantised_copy_shares(target: Backbone) -> None:
    copy = quantised_copy(target, bits=8, group_size=None).model
    assert copy.model.embed_tokens is target.model.model.embed_tokens
    assert type(target.model.lm_head.weight) is nn.Parameter, "the target is not touched"
    assert target.model.lm_head.weight is target.model.model.embed_tokens.weight


def linear_sizes(model: nn.Module) -> list[tuple[int, int]]:
    return [each.weight.shape for each in model.modules() if isinstance(each, nn.Linear)]


def test_bytes_are_those_that_a_forward_reads(target: Backbone, tmp_path: Path) -> None:
    """A tied table is read as a projection, an embedding that is looked up counts nothing."""
    norms = 4 * sum(p.numel() for p in target.model.parameters() if p.ndim == 1)
    numbers = sum(rows * columns for rows, columns in linear_sizes(target.model))
    rows = sum(rows for rows, _ in linear_sizes(target.model))
    assert bytes_of(target.model) == 4 * numbers + norms
    eight = bytes_of(make("quantised 8", target, tmp_path / "8").module)
    # a byte per weight, and per output a scale of four bytes and a zero point
    assert eight == numbers + 5 * rows + norms
    four = bytes_of(make("quantised 4", target, tmp_path / "4").module)
    groups = sum(rows * columns // 32 for rows, columns in linear_sizes(target.model))
    assert four == numbers + 5 * groups + norms
    exit_after_one = make("early exit", target, tmp_path / "e").module
    assert bytes_of(exit_after_one) == bytes_of(target.model) - bytes_of(target.model.model.layers[1])
    untied = nn.ModuleList([nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)])
    assert bytes_of(untied) == 4 * 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_batch(kind: str, temperature: float, target: Backbone, tmp_path: Path) -> None:
    drafter = make(kind, target, tmp_path / "d")
    how: dict[str, Any] = {"warper": Warper(temperature), "max_new_tokens": 24, "seed": 5}
    together = generate(target, drafter, PROMPTS, requests=range(4), **how)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, drafter, [prompt], requests=[row], **how)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.origin[0] == together.origin[row]
    assert any("draft" in row for row in together.origin)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_audit_passes(kind: str, target: Backbone, tmp_path: Path) -> None:
    """At T = 1 the sampled tokens, at T = 0 the greedy ones; rows together."""
    drafter = make(kind, target, tmp_path / "d")
    prompts = [[n, n + 1, 2 * n % 61][: 1 + n % 3] for n in range(1, 20)]
    evidence = AuditConfig(tokens=500, sequences=20_000, temperature=1.0, batch=4, prompts=4, max_new_tokens=40)
    report = audit(target, drafter, prompts, evidence)
    assert report.verdict == "lossless", report.text()
    assert report.replay.argmax == report.replay.tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_settings_alone(kind: str, target: Backbone, tmp_path: Path) -> None:
    drafter = make(kind, target, tmp_path / "d")
    assert isinstance(drafter, Quantised if "quantised" in kind else EarlyExit)
    assert isinstance(drafter, DraftModel)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"config.json", "README.md"}
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    config["draftsmith"]["target"]["hidden_size"] = 8
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="hidden_size 8"):
        load_drafter(tmp_path / "d", target)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("early exit", {"layers": 2}, "has 2: expected 1 to 1"),
        ("early exit", {"layers": "x"}, "after x layers"),
        ("early exit", {}, "after 0 layers"),
        ("quantised 8", {"bits": 3, "group_size": None}, "3 bits"),
        ("quantised 8", {}, "expected 8 bits without groups, or 4 with"),
        ("quantised 4", {"bits": 4, "group_size": 24}, "a group of 24 does not divide the 32"),
        ("quantised 4", {"bits": 4, "group_size": "x"}, "4 bits with groups of x"),
        ("quantised 4", {"bits": 4, "group_size": 0}, "4 bits with groups of 0"),
    ],
)
def test_settings_that_cannot_be(
    kind: str, settings: dict[str, Any], reason: str, target: Backbone, tmp_path: Path
) -> None:
    make(kind, target, tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    config = json.loads(path.read_text())
    config["draftsmith"]["settings"] = settings
    path.write_text(json.dumps(config))
    with pytest.raises(RequestError, match=reason):
        load_drafter(path.parent, target)


def test_other_families_are_refused_by_name(target: Backbone) -> None:
    from draftsmith.decoding.backbone.attention import use_grouped_attention
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(
        Gemma2Config(
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=32,
            vocab_size=61,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
    ).eval()
    use_grouped_attention(model)
    other = Backbone(model, name="gemma")
    with pytest.raises(RequestError, match="class Gemma2ForCausalLM"):
        first_layers(other, 1)
    with pytest.raises(RequestError, match="class Gemma2ForCausalLM"):
        quantised_copy(other, bits=8, group_size=None)


def test_without_torchao_the_message_says_what_to_install(target: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(EnvironmentFailure, match=r"pip install 'draftsmith\[quant\]'"):
        quantised_copy(target, bits=8, group_size=None)


def test_the_group_that_fits() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(96, 8))
    assert group_for(model) == 32
    assert group_for(load_target("tiny").model) == 16
    with pytest.raises(RequestError, match="take 8 bits"):
        group_for(nn.Sequential(nn.Linear(60, 8)))


SMALL = [
    *["--eval.limit", "1", "--eval.repeats", "1", "--eval.max_new_tokens", "24"],
    *["--eval.sweep", "[]", "--eval.temperatures", "[0]", *AUDIT],
]


@pytest.mark.slow
@pytest.mark.run
def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["derive", "quantised", "--bits", "8", "--out", "drafts/int8"]) == 0
    assert "a draft step reads 26% of the target's bytes" in capfd.readouterr().out
    assert main(["derive", "early-exit", "--layers", "4", "--out", "drafts/exit"]) == 0
    for name in ("int8", "exit"):
        pair = ["--target", "tiny", "--drafter", f"drafts/{name}", "--out", name]
        assert main(["eval", *pair, *SMALL, *(["--no-audit"] if name == "int8" else [])]) == 0
        results = json.loads((tmp_path / name / "results.json").read_text())
        [row] = results["rows"]
        share = results["draft"]["bytes"] / results["target"]["bytes"]
        assert row["verdict"] == {"int8": "not audited", "exit": "lossless"}[name]
        assert row["mbsu"] == pytest.approx(row["tau"][0] / (1 + row["draft_length"] * share))
    assert main(["train", "distill-tiny", "--model.start_from", "drafts/int8"]) == 2
    capfd.readouterr()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["quantised", "--layers", "2"], "--layers means nothing here"),
        (["quantised", "--group-size", "16"], "--group-size means nothing here"),
        (["early-exit"], "early-exit needs --layers"),
        (["early-exit", "--layers", "0"], "after 0 layers"),
        (["early-exit", "--layers", "20"], "has 20: expected 1 to 19"),
        (["early-exit", "--layers", "2", "--bits", "4"], "--bits means nothing here"),
        (["quantised", "--bits", "4", "--group-size", "32"], "does not divide the 208 inputs"),
    ],
)
def test_flags_that_cannot_be(
    words: list[str], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["derive", *words, "--out", str(tmp_path / "d")]) == 2
    assert reason in capfd.readouterr().err
    assert not (tmp_path / "d").exists()


def test_a_folder_that_is_there_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["derive", "quantised", "--out", str(tmp_path)]) == 2
    assert "exists; name a new folder" in capfd.readouterr().err
