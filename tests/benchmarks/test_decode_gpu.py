"""The GPU benchmark as far as a CPU can check it: it runs, its arithmetic, and that it sees waits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.decoding.target.backbone import Backbone
from draftsmith.eval.measure.speed import Costs
from scripts import SCRIPTS, load
from torch import Tensor

SCRIPT = SCRIPTS / "decode_gpu.py"
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
EVERYWHERE = pytest.mark.parametrize("device", ["cpu", CUDA])


decode_gpu = load("decode_gpu")
TINY = decode_gpu.TINY


@pytest.fixture(scope="module")
def pair() -> tuple[Backbone, Backbone]:
    return decode_gpu.random_model(TINY, TINY.layers), decode_gpu.random_model(TINY, 1)


def on(device: str, pair: tuple[Backbone, Backbone]) -> tuple:
    """Sizes, target and draft on a device."""
    sizes = replace(TINY, device=device)
    if device == "cpu":
        return sizes, *pair
    return sizes, decode_gpu.random_model(sizes, sizes.layers), decode_gpu.random_model(sizes, 1)


@pytest.mark.slow
def test_tiny_runs_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny CPU mode: checks the script, measures nothing\n")
    assert done.stdout.endswith("tiny CPU mode: checks the script, measures nothing\n")
    found = json.loads(out.read_text())
    assert found["note"] == "tiny CPU mode: checks the script, measures nothing"
    assert set(found["costs"]["verify"]) == {"1", "2", "4", "8", "16", "32", "64"}
    assert found["costs"]["verify"]["1"] == 1
    assert found["costs"]["draft"] > 0
    assert {len(row) for row in found["surface"].values()} == {8}
    assert found["waits"] == {"steps": TINY.watched_steps, "count": 0, "places": {}}


def test_without_cuda_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode_gpu.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "no CUDA device" in printed.err


def test_expected_tokens_by_hand() -> None:
    assert decode_gpu.expected_tokens(0.5, 1) == 1.5
    # 1 + 0.5 + 0.25 + 0.125, and 1 + 0.9 + 0.81
    assert decode_gpu.expected_tokens(0.5, 3) == 1.875
    assert decode_gpu.expected_tokens(0.9, 2) == pytest.approx(2.71)


def test_surface_by_hand() -> None:
    found = decode_gpu.surface(Costs(1.0, 0.1, {k: 1 + k / 10 for k in range(1, 9)}))
    # tau 1.875 over a verify call of 1.3 and three draft steps of 0.1
    assert found["0.5"]["3"] == pytest.approx(1.875 / 1.6)
    assert found["0.9"]["2"] == pytest.approx(2.71 / 1.4)
    assert list(found) == ["0.5", "0.6", "0.7", "0.8", "0.9"]


def test_verify_costs_are_of_one_node_more_than_was_drafted() -> None:
    seconds = {str(n): 1.0 + n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)} | {"draft": 0.5}
    costs = decode_gpu.costs_of(seconds)
    assert costs.c == 0.25
    assert costs.c_v[1] == 1.5
    assert costs.c_v[8] == 5.0
    assert decode_gpu.relative(seconds)["verify"]["64"] == 32.5


def test_bytes_by_hand(pair: tuple[Backbone, Backbone]) -> None:
    # Llama-2-7B in bf16: keys and values, 32 layers of 4096, two bytes each
    assert decode_gpu.kv_bytes(decode_gpu.Sizes(), 1) == 2 * 32 * 4096 * 2
    # per layer: q and o 32x32, k and v 32x16, three of the MLP, two norms; a norm and the head
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert decode_gpu.bytes_of(pair[0].model) == 4 * (2 * layer + 32 + 61 * 32)
    assert decode_gpu.kv_bytes(TINY, 10) == 10 * 4 * 2 * 2 * 2 * 8


def test_a_tied_embedding_is_read_as_the_head() -> None:
    from conftest import make_target

    model = make_target("llama").model
    assert decode_gpu.bytes_of(model) == 4 * sum(p.numel() for p in model.parameters())


def test_bandwidths_by_hand() -> None:
    found = decode_gpu.bandwidths(12e9, 0.004, 2 * 2e9 * 10, 0.01)
    assert found["tokens_per_second"] == 250
    assert found["bytes_per_second"] == pytest.approx(3e12)
    assert found["attainable_bytes_per_second"] == pytest.approx(4e12)
    assert found["share"] == pytest.approx(0.75)


PLANTED = {
    "item": lambda probs_BV: probs_BV.sum().item(),
    "bool": lambda probs_BV: bool((probs_BV > 0).any()),
    "nonzero": lambda probs_BV: probs_BV.nonzero(),
    "where": lambda probs_BV: torch.where(probs_BV > 0),
    "mask": lambda probs_BV: probs_BV[probs_BV > 0],
    "masked_select": lambda probs_BV: probs_BV.masked_select(probs_BV > 0),
    "tolist": lambda probs_BV: probs_BV.tolist(),
}


@EVERYWHERE
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_wait_is_counted(device: str, planted: str, pair: tuple[Backbone, Backbone]) -> None:
    class Waiting(decode_gpu.WatchedDraft):
        def choose(self, probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
            PLANTED[planted](probs_BV)
            return super().choose(probs_BV, uniform_B)

    sizes, target, draft = on(device, pair)
    found = decode_gpu.count_waits(sizes, target, draft, family=Waiting)
    # one for every drafted token, and at its place; on CUDA one operation may wait twice
    assert found["steps"] == sizes.watched_steps
    assert found["count"] == 4 * found["steps"] or device != "cpu"
    assert found["count"] >= 4 * found["steps"]
    assert all(" at test_decode_gpu.py:" in place for place in found["places"])


@EVERYWHERE
def test_the_engine_waits_only_where_it_says(device: str, pair: tuple[Backbone, Backbone]) -> None:
    sizes, target, draft = on(device, pair)
    assert decode_gpu.count_waits(sizes, target, draft)["count"] == 0
    free = decode_gpu.count_waits(sizes, target, draft, static=False)
    assert free["count"] >= free["steps"] == sizes.watched_steps
    assert any("kv_cache.py" in place for place in free["places"])


def test_on_cuda_the_word_of_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch refuses is noted and run again; another error is not taken for a wait."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Refusing(decode_gpu.Watch):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            def call() -> object:
                if modes[-1] == "error" and func is torch.ops.aten.exp.default:
                    raise RuntimeError("called a synchronizing CUDA operation")
                if func is torch.ops.aten.log.default:
                    raise RuntimeError("CUDA error: something else")
                return func(*args, **(kwargs or {}))

            return self._run_on_cuda(func.overloadpacket.__name__, call)

    watch = Refusing(cuda=True)
    watch.open = True
    with watch:
        assert (torch.ones(2).exp() + 1).shape == (2,)
        with pytest.raises(RuntimeError, match="something else"):
            torch.ones(2).log()
    watch.open = False
    assert modes == ["error", "default", "error", "default"]
    assert list(watch.waits.values()) == [1]
    assert next(iter(watch.waits)).startswith("exp at test_decode_gpu.py:")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_every_section_runs_on_a_gpu(pair: tuple[Backbone, Backbone]) -> None:
    sizes, target, draft = on("cuda", pair)
    assert decode_gpu.measure_baseline(sizes, target)["attainable_bytes_per_second"] > 0
    assert decode_gpu.measure_forwards(sizes, target, draft)["draft"] > 0
