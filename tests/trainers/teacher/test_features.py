"""Features of the target: the right states, the same run from the cache, and nothing left behind."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import VOCABULARY, make_target
from draftsmith.benchmarks.common.random_models import WINDOWED
from draftsmith.data.config import DataConfig
from draftsmith.data.features import model_hash
from draftsmith.data.features.store import FeatureStore
from draftsmith.data.rows.cache import Prepared
from draftsmith.data.rows.packed import Document, PackedRows, pack
from draftsmith.decoding.backbone.attention import use_own_attention
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.backbone.hidden_states import LAST, decoder_of
from draftsmith.errors import DataError, RequestError, Stopped
from draftsmith.trainers import boost
from draftsmith.trainers.config import (
    CheckpointConfig,
    FeaturesConfig,
    LoopConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProbeConfig,
)
from draftsmith.trainers.loop import setup, state
from draftsmith.trainers.loop.feed import Feed
from draftsmith.trainers.loop.loop import Loop, Plan, RunOutcome
from draftsmith.trainers.loop.objective import Batch, Objective
from draftsmith.trainers.method_config import BoostConfig, Eagle3Config, MedusaConfig
from draftsmith.trainers.packed.masks import document_mask
from draftsmith.trainers.packed.passes import hidden_states
from draftsmith.trainers.teacher import feature_cache
from draftsmith.trainers.teacher.features import CachedFeatures, OnlineFeatures, states_of
from helpers.models.learnable_text import stop_behind
from helpers.models.method_objectives import build
from helpers.models.random_models import hidden_states as all_states
from helpers.models.random_models import random_model
from helpers.runs.small_run import RECIPE, assert_same_weights, losses, train
from safetensors.torch import load_file

STEPS = 6


def packed(rows: int, seed: int, fingerprint: str = "f") -> PackedRows:
    """Rows of 24 tokens, two documents and padding in each."""
    g = np.random.default_rng(seed)

    def document(length: int) -> Document:
        ids = g.integers(0, VOCABULARY, length).astype(np.int32)
        return Document(ids, np.ones(length, dtype=np.bool_))

    documents = [document(length) for _ in range(rows) for length in (14, 8)]
    return pack(documents, 24, pad=0, fingerprint=fingerprint)


@pytest.fixture(scope="module")
def rows() -> Prepared:
    # rows of ten, steps of four: epochs end inside of steps
    return Prepared(packed(10, 1), packed(3, 2), report=None)  # type: ignore[arg-type]


# ---- states -----------------------------------------------------------------------------------


def of_family(name: str):
    """A random model of a family of `transformers`, of 3 layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "gpt2": {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 64},
        "gpt_neox": {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
        "opt": {
            "num_hidden_layers": 3,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "word_embed_proj_dim": 16,
            "max_position_embeddings": 64,
        },
    }.get(
        name,
        {
            "num_hidden_layers": 3,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 32,
        },
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=VOCABULARY, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt"])
def test_states_are_those_of_transformers(family: str, rows: Prepared) -> None:
    """As `hidden_states` counts them, whatever a family calls its layers."""
    decoder = of_family(family).get_decoder()
    batch = rows.train.batch([0, 3])
    layers = (0, 2, 1, 3, LAST)
    whole = all_states(decoder, batch)
    with torch.no_grad():
        found = states_of(decoder, batch, layers)
    assert len(whole) == 4
    for layer, states in zip(layers, found, strict=True):
        assert torch.equal(states, whole[layer]), layer
    assert not any(module._forward_pre_hooks for module in decoder.modules())


@pytest.mark.parametrize("family", WINDOWED)
@torch.no_grad()
def test_packed_rows_of_four_windows(family: str) -> None:
    """Every document has the states that `transformers` gives it alone, whatever its windows have left behind."""
    model = random_model(family, num_key_value_heads=2, head_dim=8, **WINDOWED[family])
    masked = copy.deepcopy(model)
    use_own_attention(masked)
    lengths = [33, 5, 17, 9]
    ids = (7 * torch.arange(sum(lengths))[None] ** 2 + 3) % VOCABULARY
    documents = torch.cat([torch.full((length,), n) for n, length in zip([0, 1, 2, -1], lengths, strict=True)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {"input_ids": ids, "documents": documents, "positions": positions}
    found = states_of(decoder_of(masked), batch, (0, 1, 2))
    torch.testing.assert_close(hidden_states(masked, batch), found[2])
    for part in (slice(0, 33), slice(33, 38), slice(38, 55)):
        whole = model(ids[:, part], output_hidden_states=True).hidden_states
        alone = tuple(states[:, part] for states in found)
        torch.testing.assert_close(alone, tuple(whole), rtol=1e-4, atol=1e-4)


def test_one_mask_for_all_layers_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "draftsmith.trainers.packed.passes.row_masks", lambda _config, documents, _positions: document_mask(documents)
    )
    for family in WINDOWED:
        with pytest.raises(AssertionError, match="not close"):
            test_packed_rows_of_four_windows(family)


@pytest.mark.parametrize(
    ("family", "settings"), [("qwen3", {"max_position_embeddings": 8}), ("gpt2", {"max_position_embeddings": 8})]
)
def test_rows_beyond_the_context_are_refused(family: str, settings: dict) -> None:
    """Up to it a mask for all layers alike gives what `transformers` does without one."""
    model = random_model(family, num_key_value_heads=2, **settings)
    decoder: Any = model.get_decoder()

    def row(length: int) -> Batch:
        ids = (7 * torch.arange(length)[None] + 3) % VOCABULARY
        where = {"documents": torch.zeros_like(ids), "positions": torch.arange(length)[None]}
        return {"input_ids": ids, **where}

    with torch.no_grad():
        whole = model(row(8)["input_ids"], output_hidden_states=True).hidden_states
        found = states_of(decoder, row(8), (0, 1, 2))
    torch.testing.assert_close(found, tuple(whole), rtol=1e-4, atol=1e-4)
    message = rf"sequence_length\) is 9; the context of {type(decoder).__name__} is 8 tokens"
    with pytest.raises(RequestError, match=message):
        states_of(decoder, row(9), (LAST,))
    with pytest.raises(RequestError, match=message):
        hidden_states(model, row(9))


def test_no_hook_stays_after_an_error(rows: Prepared) -> None:
    decoder = of_family("llama").get_decoder()
    batch = rows.train.batch([0])
    with pytest.raises(IndexError):
        states_of(decoder, batch | {"input_ids": batch["input_ids"] + VOCABULARY}, (1, LAST))
    assert not any(module._forward_pre_hooks for module in decoder.modules())


def test_layers_in_no_list_are_refused(rows: Prepared) -> None:
    decoder = of_family("llama").get_decoder()
    decoder.layers = decoder.layers[:2]
    with pytest.raises(RequestError, match="LlamaModel keeps its 3 layers in no list"):
        states_of(decoder, rows.train.batch([0]), (1, LAST))


def test_states_are_the_targets_own_inside_of_autocast(rows: Prepared) -> None:
    """Validation runs in autocast and training's preparation does not: both see the same."""
    source = OnlineFeatures(of_family("llama"), (1, LAST))
    batch = rows.train.batch([0, 1])
    plain = source(batch)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = source(batch)
    assert all(map(torch.equal, plain, mixed))
    assert not any(states.requires_grad for states in plain)


def test_a_precision_of_its_own_is_that_of_the_products_alone(rows: Prepared) -> None:
    """Near the target's own, not equal, in its type, and the same inside of autocast and outside."""
    source, batch = OnlineFeatures(of_family("llama"), (1, LAST)), rows.train.batch([0, 1])
    exact = source(batch)
    source.precision = "bf16"
    rough = source(batch)
    for mine, wanted in zip(rough, exact, strict=True):
        assert mine.dtype == wanted.dtype == torch.float32
        distance = (mine - wanted).norm() / wanted.norm()
        assert 1e-5 < distance < 2e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, rough, source(batch)))


# ---- whole runs ---------------------------------------------------------------------------------


def medusa_goal(target: Backbone) -> Objective:
    heads = MedusaConfig(heads=2)
    return build("medusa", target.model, _save, medusa=heads, objective=ObjectiveConfig(kl=0, ce=1))


def eagle3_goal(target: Backbone) -> Objective:
    config = Eagle3Config(passes=2, vocabulary=VOCABULARY, layers=(0, 1, 2))
    return build("eagle3", target.model, _save, ids=range(VOCABULARY), eagle3=config)


def _save(module: torch.nn.Module, folder: Path) -> None:
    state.save_tensors(folder / "weights.safetensors", module.state_dict())


GOALS = {"medusa": medusa_goal, "eagle3": eagle3_goal}


def own_target() -> Backbone:
    target = make_target("qwen3")
    # what the identity asks a tokenizer for, and no more
    target.__dict__["tokenizer"] = SimpleNamespace(get_vocab=lambda: {"a": 0}, chat_template=None)
    return target


def run(
    out: Path,
    rows: Prepared,
    features: FeaturesConfig,
    *,
    method: str = "medusa",
    stop_at: int | None = None,
    micro: int = 2,
    steps: int = STEPS,
) -> tuple[dict[int, float], RunOutcome]:
    """A run through the real loop; its losses by step."""
    plan = Plan(
        LoopConfig(
            steps=steps,
            batch_rows=4,
            micro_rows=micro,
            precision="fp32",
            validate_every=3,
            validate_rows=3,
            log_every=1,
        ),
        OptimizerConfig(lr=3e-3, warmup_steps=2),
        CheckpointConfig(every_steps=2),
        ProbeConfig(),
    )
    out.mkdir(parents=True, exist_ok=True)
    setup.make_deterministic(plan.loop)
    accelerator = setup.make_accelerator(plan.loop, plan.optimizer, out)
    target = own_target()
    goal = GOALS[method](target)
    with feature_cache.feature_source(goal, features, target, rows, DataConfig(), out=out, accelerator=accelerator):
        loop = Loop(
            goal, rows.train, rows.validation, plan, accelerator, out=out, export_to=out / "drafter", probe=None
        )
        stop_behind(loop, stop_at)
        outcome = loop.run(setup.resume_from(out, "auto"))
    return losses(out), outcome


def reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("features")]


def assert_same_run(left: Path, right: Path) -> None:
    mine, theirs = (load_file(out / "drafter" / "weights.safetensors") for out in (left, right))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert losses(left) == losses(right)


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_an_exact_cache_gives_the_online_run(method: str, tmp_path: Path, rows: Prepared) -> None:
    """To the bit: losses, validation, weights; with room for all rows and for some."""
    online, outcome = run(tmp_path / "online", rows, FeaturesConfig(), method=method)
    cache = FeaturesConfig(source="cache", dtype="fp32", folder=str(tmp_path / "f"))
    some = cache.model_copy(update={"max_gb": 60e-6, "folder": str(tmp_path / "some")})
    for name, features in (("fill", cache), ("read", cache), ("some", some)):
        out = tmp_path / name
        found, ended = run(out, rows, features, method=method)
        assert found == online
        assert ended.validation_loss == outcome.validation_loss
        assert_same_run(out, tmp_path / "online")
    held = sum(path.stat().st_size for path in (tmp_path / "some").glob("*.safetensors"))
    assert 20e3 < held <= 60e3
    assert not reading()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_lossy_cache_gives_one_run_however_it_is_cut(dtype: str, tmp_path: Path, rows: Prepared) -> None:
    """The rounded states are used while filling, so rows may come from anywhere."""
    features = FeaturesConfig(source="cache", dtype=dtype)
    whole, _ = run(tmp_path / "whole", rows, features)
    exact, _ = run(tmp_path / "exact", rows, FeaturesConfig())
    assert whole != exact
    assert list(whole.values()) == pytest.approx(list(exact.values()), rel=0.05)
    for cut in (1, 3):
        out = tmp_path / f"cut-{cut}"
        with pytest.raises(Stopped):
            run(out, rows, features, stop_at=cut)
        assert not reading(), "a signal leaves no thread behind"
        lost = sorted((out / "features").glob("*.safetensors"))[:: cut + 1]
        for shard in lost:  # as a kill would lose what was not written yet
            shard.unlink()
        run(out, rows, features)
        assert_same_run(out, tmp_path / "whole")
    # what has been stored does not depend on the rows that stood beside it
    again = features.model_copy(update={"folder": str(tmp_path / "whole" / "features")})
    fresh, _ = run(tmp_path / "fresh", rows, features, micro=4)
    stored, _ = run(tmp_path / "stored", rows, again, micro=4)
    assert fresh == stored


def test_prefetching_changes_no_number(tmp_path: Path, rows: Prepared) -> None:
    features = FeaturesConfig(source="cache", dtype="fp8")
    for ahead in (True, False):
        words = {"prefetch": ahead}
        run(tmp_path / str(ahead), rows, features.model_copy(update=words), steps=8)
    assert_same_run(tmp_path / "True", tmp_path / "False")


# ---- looking ahead ------------------------------------------------------------------------------


def cached(folder: Path, rows: Prepared) -> tuple[CachedFeatures, OnlineFeatures]:
    """A source whose store holds all training rows."""
    online = OnlineFeatures(make_target("qwen3").model, (1, LAST))
    store = FeatureStore(folder, {}, max_bytes=10**7, row_bytes=24 * 2 * 32 * 4)
    source = CachedFeatures(online, store, "fp32")
    source(rows.train.batch(range(len(rows.train))))
    return source, online


def feed(source, rows: Prepared, steps: int = 3) -> Feed:  # noqa: ANN001
    batches = [[rows.train.batch([2 * s + i]) for i in range(2)] for s in range(steps)]
    return Feed(lambda step: batches[step], SimpleNamespace(features=source), steps=steps)


def test_the_next_batch_is_read_while_this_one_is_learnt(tmp_path: Path, rows: Prepared) -> None:
    source, online = cached(tmp_path, rows)
    online.fetch = None  # type: ignore[method-assign, assignment] - all rows are stored
    started: list[int] = []
    read = source.store.read
    source.store.read = lambda key: (  # type: ignore[method-assign]
        started.append(threading.get_ident()),
        read(key),
    )[1]
    fed = feed(source, rows)
    for step in range(3):
        batches = fed.step(step)
        for number, batch in enumerate(batches):
            expected = OnlineFeatures(make_target("qwen3").model, (1, LAST))(batch)
            assert all(map(torch.equal, source(batch), expected))
            before = len(started)
            fed.look_ahead(step, batches, number)
            last = (step, number) == (2, 1)
            while not last and len(started) == before:
                time.sleep(0.001)  # it is being read though nobody has asked for it yet
    mine = threading.get_ident()
    assert [thread == mine for thread in started] == [True] + [False] * 5
    assert reading()
    fed.close()
    assert not reading()
    source.store.close()


def test_validation_does_not_lose_what_is_expected(tmp_path: Path, rows: Prepared) -> None:
    source, _ = cached(tmp_path, rows)
    fed = feed(source, rows)
    batches = fed.step(0)
    fed.look_ahead(0, batches, 0)
    held_out = rows.validation.batch([0])
    assert all(map(torch.equal, source(held_out), source.online(held_out)))
    assert source._expected is not None
    source(batches[1])
    assert source._expected is None
    fed.close()
    source.store.close()


def test_waiting_for_features_is_waiting_for_data(tmp_path: Path, rows: Prepared) -> None:
    """What the thread takes longer than the drafter counts, in the step that waits."""
    source, _ = cached(tmp_path, rows)
    read = source.store.read

    def slow(key: str):  # noqa: ANN202
        time.sleep(0.05)
        return read(key)

    source.store.read = slow  # type: ignore[method-assign]
    fed = feed(source, rows)
    batches = fed.step(0)
    source(batches[0])
    assert fed.take_waited() > 0.04
    fed.look_ahead(0, batches, 0)
    source(batches[1])
    assert fed.take_waited() > 0.02
    source(rows.validation.batch([0]))
    fed.step(1)
    assert fed.take_waited() < 0.04, "what validation waited for is not the step's"
    fed.close()
    source.store.close()


def test_an_error_in_the_thread_ends_the_run_with_its_message(tmp_path: Path, rows: Prepared) -> None:
    source, _ = cached(tmp_path, rows)

    def broken(_key: str) -> None:
        raise DataError("the disk is gone")

    fed = feed(source, rows)
    batches = fed.step(0)
    source.store.read = broken  # type: ignore[method-assign]
    fed.look_ahead(0, batches, 0)
    with pytest.raises(DataError, match="the disk is gone"):
        source(batches[1])
    fed.close()
    assert not reading()
    source.store.close()


def test_a_cpu_that_computes_features_itself_does_not_look_ahead(rows: Prepared) -> None:
    source = OnlineFeatures(make_target("qwen3").model)
    batch = rows.train.batch([0])
    source.expect(batch)
    assert source._expected is None
    assert source.take_waited() == 0


# ---- what is refused ----------------------------------------------------------------------------


def opened(folder: Path, rows: Prepared, **changes) -> None:
    rows = changes.pop("whose", rows)
    target = changes.pop("target", None) or own_target()
    goal = changes.pop("goal", medusa_goal)(target)
    data = changes.pop("data", DataConfig())
    features = FeaturesConfig(**{"source": "cache", "folder": str(folder), **changes})
    with feature_cache.feature_source(
        goal, features, target, rows, data, out=folder, accelerator=Accelerator(cpu=True)
    ):
        pass


def with_other_weights() -> Backbone:
    target = own_target()
    with torch.no_grad():
        target.model.get_decoder().layers[1].mlp.up_proj.weight.mul_(1.01)
    return target


def with_config(**changes) -> Backbone:
    """The same weights under another config."""
    target = own_target()
    vars(target.model.config).update(changes)
    return target


def with_tokenizer(**changes) -> Backbone:
    target = own_target()
    vars(target.tokenizer).update(changes)
    return target


def test_a_cache_of_something_else_is_refused_by_name(tmp_path: Path, rows: Prepared) -> None:
    opened(tmp_path, rows)
    opened(tmp_path, rows)
    others = Prepared(packed(10, 99), rows.validation, report=None)  # type: ignore[arg-type]
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    for name, change in {
        "target weights": {"target": with_other_weights()},
        "target config": {"target": with_config(rms_norm_eps=1e-3)},
        "tokenizer": {"target": with_tokenizer(get_vocab=lambda: {"b": 0})},
        "chat template": {"target": with_tokenizer(chat_template="{{ messages }}")},
        "layers": {"goal": eagle3_goal},
        "features.dtype": {"dtype": "fp8"},
        "features.precision": {"precision": "bf16"},
        "rows": {"whose": others},
    }.items():
        with pytest.raises(RequestError, match=f"was made for something else: {name} is"):
            opened(tmp_path, rows, **change)
    own = with_tokenizer(chat_template="own")
    opened(tmp_path / "t", rows, target=own)
    with pytest.raises(RequestError, match="something else: chat template is"):
        opened(tmp_path / "t", rows, target=own, data=DataConfig(chat_template=str(template)))


def test_states_of_rows_that_were_moved_are_the_same(tmp_path: Path, rows: Prepared) -> None:
    """A fingerprint holds where data lies and what read it; the states hang on neither."""
    opened(tmp_path, rows)
    moved = replace(rows.train, fingerprint="another path, another version")
    opened(tmp_path, rows, whose=replace(rows, train=moved))


@pytest.mark.parametrize(
    "entry",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}},
        {"use_sliding_window": True, "sliding_window": 16},
    ],
)
def test_the_same_weights_under_another_config_are_another_model(entry: dict) -> None:
    mine, other = own_target().model, with_config(**entry).model
    assert model_hash.weights_hash(mine) == model_hash.weights_hash(other)
    assert model_hash.config_hash(mine) != model_hash.config_hash(other)
    assert model_hash.model_hash(mine) != model_hash.model_hash(other)


def test_where_a_model_lies_is_not_what_it_computes() -> None:
    moved = with_config(
        _name_or_path="elsewhere", transformers_version="0", dtype="bfloat16", use_cache=False, eos_token_id=7
    )
    mine = own_target().model
    assert model_hash.config_hash(mine) == model_hash.config_hash(moved.model)
    assert model_hash.model_hash(mine) == model_hash.model_hash(moved.model)


def test_continuations_of_boost_are_those_of_one_config(
    tmp_path: Path, rows: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(boost, "continuations", lambda *given: asked.append(given[2]))
    for target in (own_target(), own_target(), with_config(rms_norm_eps=1e-3)):
        boost._samples(target, rows, BoostConfig(), tmp_path, Accelerator(cpu=True))
    assert asked[0] == asked[1] != asked[2]


def holding(*tensors: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    for number, tensor in enumerate(tensors):
        weight = torch.nn.Parameter(tensor, requires_grad=False)
        module.register_parameter(f"w{number}", weight)
    return module


def hash_of(*tensors: torch.Tensor) -> str:
    return model_hash.weights_hash(holding(*tensors))


def swapped(tensor: torch.Tensor, i: int, j: int) -> torch.Tensor:
    order = torch.arange(len(tensor))
    order[[i, j]] = order[[j, i]]
    return tensor[order]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_every_number_counts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column, one row, one number, its sign, two rows, two tensors; chunks end inside rows."""
    monkeypatch.setattr(model_hash, "_CHUNK", 1000)
    g = torch.Generator().manual_seed(0)
    A, B = (torch.randint(1, 100, (96, 64), generator=g).to(dtype) for _ in range(2))
    A[9] = A[5].flip(0)  # two rows of the same numbers
    changes = {"column": (slice(None), 3), "row": (7, slice(None)), "number": (95, 63)}
    found = [hash_of(A, B)]
    for place in changes.values():
        other = A.clone()
        other[place] += 1
        found.append(hash_of(other, B))
    signs = A.clone()
    signs[4, 1:3] *= -1  # two, whose highest bits cancel out in a sum
    found += [hash_of(signs, B), hash_of(swapped(A, 0, 95), B), hash_of(swapped(A, 5, 9), B)]
    found += [hash_of(B, A), hash_of(A.reshape(64, 96), B), hash_of(A), hash_of(A, B.flip(1))]
    assert len(set(found)) == len(found)
    assert hash_of(A.clone(), B.clone()) == found[0]
    assert hash_of(A.T.contiguous().T, B) == found[0], "how it lies in memory is no matter"
    assert hash_of(torch.stack([A, B], 2)[..., 0], B) == found[0]


def test_a_matrix_wider_than_what_was_sampled() -> None:
    """A stride over the flat matrix, a multiple of its width, saw one of its columns."""
    A = torch.zeros(4096, 256)
    other = A.clone()
    other[:, 1] = 1
    assert hash_of(A) != hash_of(other)


def test_saved_buffers_count_and_others_do_not() -> None:
    """Quantised weights are such; frequencies that a config gives differ from device to device."""
    modules = [holding(torch.ones(2)) for _ in range(3)]
    for module, kept, there in zip(modules, (1.0, 2.0, 1.0), (1.0, 1.0, 2.0), strict=True):
        module.register_buffer("kept", torch.tensor([kept]))
        module.register_buffer("there", torch.tensor([there]), persistent=False)
    mine, saved, fleeting = map(model_hash.weights_hash, modules)
    assert mine != saved
    assert mine == fleeting


def test_a_target_that_learns_has_no_cache(tmp_path: Path, rows: Prepared) -> None:
    target = own_target()
    goal = medusa_goal(target)
    target.model.get_decoder().norm.weight.requires_grad_(True)
    features = FeaturesConfig(source="cache")
    with (
        pytest.raises(RequestError, match="the target is trained in this run"),
        feature_cache.feature_source(
            goal, features, target, rows, DataConfig(), out=tmp_path, accelerator=Accelerator(cpu=True)
        ),
    ):
        pass
    assert not OnlineFeatures(target.model).looks_ahead


# ---- a real kill ----------------------------------------------------------------------------------

_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(["draftsmith.trainers.distill", "draftsmith.eval.measure.probe"])


def start(recipe: Path, out: Path) -> multiprocessing.process.BaseProcess:
    process = _SPAWN.Process(target=train, args=(recipe, out))
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL to a real run in its second epoch, when the cache is half written and half read."""
    source = tmp_path / "rows.jsonl"
    lines = [f"line {n} of a text in which {n * n} stands for a number" for n in range(40)]
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    recipe = tmp_path / "recipe.yaml"
    text = RECIPE.replace("limit_rows: 30", f"source: {source}, validation_share: 0.2")
    text = text.replace("steps: 24", "steps: 8") + "features: {source: cache, dtype: fp8}\n"
    recipe.write_text(text)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    process = start(recipe, whole)
    process.join()
    assert process.exitcode == 0
    process = start(recipe, cut)
    while max(losses(cut) if (cut / "metrics.jsonl").is_file() else [], default=0) < 4:
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    process = start(recipe, cut)
    process.join()
    assert process.exitcode == 0
    assert_same_weights(whole, cut, steps=8)
    assert losses(cut) == losses(whole)
    assert list((whole / "features").glob("*.safetensors"))
