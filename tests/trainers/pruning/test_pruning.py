"""Drafts cut from their target: layers by measured acceptance, width by activations, runs that resume."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCABULARY
from draftsmith.data.rows.packed import Document, pack
from draftsmith.decoding.backbone.layers import config_with_layers, with_layers
from draftsmith.errors import RequestError
from draftsmith.launch.cli import main
from draftsmith.trainers.config import ModelConfig
from draftsmith.trainers.pruning import layers as pruning
from draftsmith.trainers.pruning.layers import AcceptanceOf, search_layers
from draftsmith.trainers.pruning.sizes import pruned_config
from draftsmith.trainers.pruning.width import cut_width
from draftsmith.trainers.student.architecture import fresh_model
from helpers.models.shallow_target import ON_SHALLOW
from helpers.runs.launcher import launched
from helpers.runs.small_flags import TRAINING
from helpers.runs.small_run import assert_same_weights
from torch import nn

LAYERS = 4


def make_model(architecture: str = "qwen3", *, tied: bool = True) -> Any:
    torch.manual_seed(3)
    sizes = ModelConfig(
        architecture=architecture,
        layers=LAYERS,
        hidden=48,
        heads=4,
        kv_heads=2,
        head_size=16,
        intermediate=40,
        max_positions=128,
        tied=tied,
    )
    model = fresh_model(sizes, vocabulary=VOCABULARY, eos=None).eval().requires_grad_(False)
    for parameter in model.parameters():
        # of gains as of matrices: no two channels, heads or norms are alike
        parameter.mul_(3) if parameter.ndim > 1 else parameter.mul_(1 + torch.rand_like(parameter))
    return model


def batches(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Two batches; rows of two documents, the last one padded."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(2):
        documents = torch.tensor([[0] * 9 + [1] * 7, [0] * 5 + [1] * 6 + [-1] * 5])
        positions = torch.tensor([[*range(9), *range(7)], [*range(5), *range(6), *range(5)]])
        mask = (torch.rand(2, 16, generator=g) < 0.7) & (documents >= 0)
        ids = torch.randint(VOCABULARY, (2, 16), generator=g)
        rows.append(
            {"input_ids": ids, "documents": documents, "positions": positions, "loss_mask": mask & (positions > 0)}
        )
    return rows


def brute_alpha(target: Any, layers: tuple[int, ...]) -> float:
    """A copy without the other layers, document by document, token by token, by numpy."""
    draft = copy.deepcopy(target)
    draft.config = config_with_layers(target.config, layers)
    draft.model.config = draft.config
    draft.model.layers = nn.ModuleList([draft.model.layers[layer] for layer in layers])
    overlaps = []
    for batch in batches():
        for row, document in itertools.product(range(2), range(2)):
            mine = batch["documents"][row] == document
            ids, counts = batch["input_ids"][row][mine], batch["loss_mask"][row][mine]
            distributions = [
                model(ids[None], use_cache=False).logits[0].double().softmax(-1).numpy() for model in (target, draft)
            ]
            overlaps += [
                np.minimum(distributions[0][at - 1], distributions[1][at - 1]).sum()
                for at in range(1, len(ids))
                if counts[at]
            ]
    return float(np.mean(overlaps))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_alpha_hat_of_every_subset_of_layers(architecture: str) -> None:
    target = make_model(architecture)
    measure = AcceptanceOf(target, batches(), chunk=5)
    seen = set()
    for size in range(1, LAYERS + 1):
        for layers in itertools.combinations(range(LAYERS), size):
            expected = brute_alpha(target, layers)
            assert measure(layers) == pytest.approx(expected, abs=2e-6)
            seen.add(round(expected, 6))
    assert len(seen) == 2**LAYERS - 1, "subsets that are told apart"
    assert measure(range(LAYERS)) == pytest.approx(1.0, abs=1e-6)


def test_every_removal_is_the_best_single_one() -> None:
    target = make_model()
    measure = AcceptanceOf(target, batches(), chunk=100)
    kept, rounds = search_layers(lambda each: [measure(one) for one in each], LAYERS, 1)
    here = list(range(LAYERS))
    for each in rounds:
        without = {layer: brute_alpha(target, tuple(x for x in here if x != layer)) for layer in here}
        assert each.removed == max(without, key=without.__getitem__)
        assert each.without == pytest.approx({str(k): v for k, v in without.items()}, abs=2e-6)
        assert each.alpha_hat == each.without[str(each.removed)]
        here.remove(each.removed)
    assert kept == here
    assert len(kept) == 1


def test_of_equal_layers_the_first_leaves() -> None:
    kept, rounds = search_layers(lambda each: [0.5] * len(each), 4, 2)
    assert kept == [2, 3]
    assert [each.removed for each in rounds] == [0, 1]
    assert search_layers(lambda _: pytest.fail("nothing to measure"), 3, 3) == ([0, 1, 2], [])


def cut(target: Any, **sizes: Any) -> Any:
    model = ModelConfig(start_from="target", **sizes)
    kept = sizes.get("keep_layers") or list(range(LAYERS))
    config = pruned_config(model, target.config, type(target).__name__, kept)
    return cut_width(target, config, kept, batches())


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_keeping_everything_is_the_target_bit_for_bit(architecture: str, tied: bool) -> None:
    target = make_model(architecture, tied=tied)
    draft = cut(target)
    assert draft.config.tie_word_embeddings == tied
    theirs = target.state_dict()
    assert draft.state_dict().keys() == theirs.keys()
    for name, weight in draft.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
        assert weight.data_ptr() != theirs[name].data_ptr(), "the target must not learn"
    ids = torch.arange(20)[None]
    assert torch.equal(draft.eval()(ids).logits, target(ids).logits)


def test_depth_is_the_same_as_taking_layers_out() -> None:
    target = make_model()
    draft = cut(target, keep_layers=[1, 3]).eval()
    ids = torch.arange(20)[None]
    assert torch.equal(draft(ids).logits, with_layers(target, [1, 3])(ids, use_cache=False).logits)
    assert draft.config.num_hidden_layers == 2
    assert {p.data_ptr() for p in draft.parameters()}.isdisjoint(p.data_ptr() for p in target.parameters())


def silenced(target: Any, channels: list[int], units: list[int], group: int) -> Any:
    """The target with parts that never say anything: other parts for every kind, in every layer."""
    target.model.embed_tokens.weight[:, channels] = 0
    for layer in target.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.o_proj.weight[channels] = 0
        mlp.down_proj.weight[channels] = 0
        mlp.up_proj.weight[units] = 0
        attention.v_proj.weight[16 * group : 16 * group + 16] = 0
    return target


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_was_zero_is_not_missed(architecture: str, tied: bool) -> None:
    """Channels, units, a key-value group: without them the draft says what the target says."""
    target = silenced(
        make_model(architecture, tied=tied), channels=[0, 7, 8, 40, 41, 42, 43, 47], units=[3, 30], group=0
    )
    draft = cut(target, hidden=40, intermediate=38, kv_heads=1).eval()
    ids = torch.randint(VOCABULARY, (2, 30))
    # what a norm adds below the root (1e-6) is not scaled, so a little is left
    torch.testing.assert_close(draft(ids).logits, target(ids).logits, atol=5e-4, rtol=1e-4)
    smaller = cut(target, hidden=39, intermediate=38, kv_heads=1).eval()
    assert not torch.allclose(smaller(ids).logits, target(ids).logits, atol=1e-2)


def read_by(model: Any, ids: torch.Tensor, *watched: nn.Module) -> list[torch.Tensor]:
    """What modules read in a forward of one text."""
    seen: dict[nn.Module, torch.Tensor] = {}
    hooks = [each.register_forward_pre_hook(lambda own, inputs: seen.update({own: inputs[0][0]})) for each in watched]
    model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [seen[each] for each in watched]


def test_the_least_active_parts_go() -> None:
    """Against activations that are collected by hand, layer by layer."""
    target = make_model()
    draft = cut(target, intermediate=17, heads=2, kv_heads=1)
    for at in range(LAYERS):
        units, heads = torch.zeros(40), torch.zeros(4)
        layer = target.model.layers[at]
        for batch in batches():
            for row, document in itertools.product(range(2), range(2)):
                ids = batch["input_ids"][row][batch["documents"][row] == document]
                attended, inner = read_by(target, ids, layer.self_attn.o_proj, layer.mlp.down_proj)
                units += inner.abs().sum(0)
                heads += attended.view(len(ids), 4, 16).norm(dim=-1).sum(0)
        best = units.topk(17).indices.sort().values
        mine = draft.model.layers[at]
        assert torch.equal(mine.mlp.gate_proj.weight, layer.mlp.gate_proj.weight[best])
        assert torch.equal(mine.mlp.down_proj.weight, layer.mlp.down_proj.weight[:, best])
        group = int(heads.view(2, 2).sum(1).argmax())
        queries = layer.self_attn.q_proj.weight.view(4, 16, 48)[2 * group : 2 * group + 2]
        assert torch.equal(mine.self_attn.q_proj.weight, queries.reshape(32, 48))
        keys = layer.self_attn.k_proj.weight.view(2, 16, 48)[group]
        assert torch.equal(mine.self_attn.k_proj.weight, keys)


def test_heads_inside_their_groups() -> None:
    """Half of the queries of both groups: each kept one still reads its own keys."""
    draft = cut(make_model(), heads=2, kv_heads=2)
    assert draft.config.num_attention_heads == draft.config.num_key_value_heads == 2
    assert draft.model.layers[0].self_attn.q_proj.weight.shape == (32, 48)
    assert draft.model.layers[0].self_attn.k_proj.weight.shape == (32, 48)


def test_the_target_is_left_as_it_was() -> None:
    target = make_model()
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    cut(target, hidden=40, keep_layers=[0, 3])
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


WRONG = [
    ({"layers": 5}, "model.layers is 5, and the target has 4"),
    ({"hidden": 64}, "model.hidden is 64, and the target has 48"),
    ({"intermediate": 41}, "model.intermediate is 41"),
    ({"heads": 3, "kv_heads": 2}, "each serves equally many"),
    ({"heads": 4, "kv_heads": 1}, "at most 2"),
    ({"heads": 8}, "model.heads is 8, and the target has 4"),
    ({"keep_layers": [0, 4]}, "the target has 4 layers: expected numbers from 0 to 3"),
    ({"keep_layers": [-1]}, "the target has 4 layers"),
    ({"keep_layers": [1, 1]}, "each layer once"),
    ({"keep_layers": []}, "at least one"),
    ({"keep_layers": [1], "layers": 2}, "give one"),
    ({"architecture": "llama"}, "model.architecture is llama, and a draft cut from the target"),
    ({"head_size": 8}, "model.head_size is 8"),
    ({"max_positions": 64}, "model.max_positions is 64"),
    ({"tied": False}, "model.tied is False"),
]


@pytest.mark.parametrize(("sizes", "reason"), WRONG, ids=[str(each) for each, _ in WRONG])
def test_what_cannot_be_cut_is_refused(sizes: dict[str, Any], reason: str) -> None:
    model = ModelConfig(start_from="target", **sizes)
    with pytest.raises(RequestError, match=reason):
        pruned_config(model, make_model().config, "Qwen3ForCausalLM")


def test_other_families_are_refused_by_name() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "vocab_size": 61,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    model = Gemma2ForCausalLM(Gemma2Config(**sizes))
    with pytest.raises(RequestError, match="cannot prune a target of class Gemma2ForCausalLM"):
        pruned_config(ModelConfig(start_from="target"), model.config, type(model).__name__)
    with pytest.raises(RequestError, match="class Gemma2ForCausalLM"):
        with_layers(model, [0])


def test_another_seed_measures_on_other_rows_and_searches_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty rows of one token each, three of which are measured on; what was found is kept with what it is of."""
    documents = [Document(np.full(8, n, np.int32), np.ones(8, np.bool_)) for n in range(40)]
    rows, model, searches = pack(documents, 8, pad=0, fingerprint="rows"), make_model(), [0]

    def chosen(seed: int) -> list[int]:
        parts = pruning._batches(rows, 3, seed=seed, micro_rows=2, target=model)
        assert [len(part["input_ids"]) for part in parts] == [2, 1]
        return torch.cat([part["input_ids"][:, 0] for part in parts]).tolist()

    def search(*_: Any) -> tuple[list[int], list[Any]]:
        searches[0] += 1
        return [0, 3], []

    assert chosen(0) == chosen(0) != chosen(1)
    monkeypatch.setattr(pruning, "search_layers", search)
    own = {"out": tmp_path, "micro_rows": 2, "chunk": 16}
    for seed, count, layers, made in ((0, 3, 2, 1), (0, 3, 2, 1), (1, 3, 2, 2), (1, 2, 2, 3), (1, 2, 2, 3)):
        config = ModelConfig(start_from="target", layers=layers, prune_rows=count)
        pruning.prune(config, model, rows, seed=seed, **own)  # type: ignore[arg-type]
        assert searches[0] == made


SMALL = [*TRAINING, *ON_SHALLOW, "--loop.steps", "4", "--checkpoint.keep", "4", "--model.prune_rows", "1"]


@pytest.mark.slow
@pytest.mark.run
def test_a_run_that_was_cut_searches_once_and_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut_run = tmp_path / "whole", tmp_path / "cut"
    flags = [*SMALL, "--model.layers", "2", "--model.intermediate", "96", "--model.kv_heads", "1"]
    assert main(["train", "prune-tiny", "--out", str(whole), *flags]) == 0
    shutil.copytree(whole, cut_run)
    for step in (4, 3):
        (cut_run / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    shutil.rmtree(cut_run / "drafter")
    monkeypatch.setattr(pruning, "AcceptanceOf", lambda *_, **__: pytest.fail("searched again"))
    assert main(["train", "prune-tiny", "--out", str(cut_run), *flags]) == 0
    assert_same_weights(whole, cut_run, steps=4)
    search = json.loads((whole / "pruning.json").read_text())
    assert len(search["rounds"]) == 2
    assert len(search["rounds"][0]["without"]) == LAYERS
    assert search["kept"] == [n for n in range(LAYERS) if n not in [r["removed"] for r in search["rounds"]]]
    config = json.loads((whole / "drafter" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (2, 96)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (2, 1)
    # another question in the same folder is asked anew
    monkeypatch.undo()
    shutil.rmtree(whole / "checkpoints")
    flags[flags.index("--model.layers") + 1] = "3"
    assert main(["train", "prune-tiny", "--out", str(whole), *flags]) == 0
    assert len(json.loads((whole / "pruning.json").read_text())["kept"]) == 3


@pytest.mark.slow
@pytest.mark.run
def test_two_processes_share_the_search_and_find_the_same(tmp_path: Path) -> None:
    recipe = tmp_path / "two.yaml"
    recipe.write_text(
        "base: prune-tiny\nname: two\nmodel: {layers: 18, intermediate: 96}\n"
        "data: {limit_rows: 30, sequence_length: 64}\n"
        "loop: {steps: 2, batch_rows: 8, micro_rows: 2, precision: fp32, validate_rows: 3}\n"
        "probe: {prompts: 1, max_new_tokens: 6}\n"
    )
    assert main(["train", str(recipe), "--out", str(tmp_path / "one")]) == 0
    arguments = ["-m", "draftsmith.launch.train", str(recipe), "--out", str(tmp_path / "two")]
    assert "[rank 0] pruning: layers" in launched("multi_cpu", *arguments)
    searches = [json.loads((tmp_path / name / "pruning.json").read_text()) for name in ("one", "two")]
    assert searches[0] == searches[1]
    assert len(searches[0]["rounds"]) == 2


@pytest.mark.slow
def test_the_pre_flight_knows_the_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "prune-tiny", "--out", str(tmp_path / "out"), "--data.limit_rows", "40"]
    assert main(arguments) == 0
    assert "1.97 M parameters" in capfd.readouterr().out
    assert main([*arguments, "--model.hidden", "300"]) == 2
    assert "model.hidden is 300, and the target has 208" in capfd.readouterr().err
    assert main([*arguments, "--model.start_from", "", "--model.keep_layers", "[1]"]) == 2
    assert "set start_from: target" in capfd.readouterr().err
    assert main(["check", "target-tiny", "--model.start_from", "target"]) == 2
    assert "only method `distill` cuts a draft" in capfd.readouterr().err
