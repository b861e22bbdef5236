"""Where the host waits for the device: every planted wait is seen, at its place, and the engine has none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.benchmarks.common.waits import Watch, Watched, count_waits
from draftsmith.benchmarks.on_gpu.setting import tiny
from draftsmith.benchmarks.on_gpu.shapes import LLAMA_1B, target_of
from draftsmith.decoding.backbone.backbone import Backbone
from draftsmith.decoding.sampling import Warper
from draftsmith.drafters.model.draft_model import DraftModel
from helpers.benchmark_scripts import SCRIPTS
from torch import Tensor

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
EVERYWHERE = pytest.mark.parametrize("device", ["cpu", CUDA])
STEPS = 4
SAMPLED = Warper(0.8, top_k=50, top_p=0.95)


class WatchedDraft(Watched, DraftModel):
    """A draft model that opens the watch for some steps."""


def pair_on(device: str) -> tuple[Backbone, Backbone]:
    """A target and a draft of a single layer, fp32."""
    shape = tiny(Path()).shapes[LLAMA_1B.name]
    made = [replace(shape, layers=layers) for layers in (2, 1)]
    target, draft = (target_of(each, torch.device(device), torch.float32, positions=512) for each in made)
    return target, draft


def counted(device: str, family: type[WatchedDraft] = WatchedDraft, *, static: bool = True) -> dict:
    target, draft = pair_on(device)
    drafter = family(draft, target.vocabulary, draft_length=4)
    prompt = [1, 5, 9, 2, 33, 7, 9, 2]
    return count_waits(target, drafter, prompt, warper=SAMPLED, steps=STEPS, room=8 * 5, static=static)


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
def test_a_planted_wait_is_counted(device: str, planted: str) -> None:
    class Waiting(WatchedDraft):
        def choose(self, probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
            PLANTED[planted](probs_BV)
            return super().choose(probs_BV, uniform_B)

    found = counted(device, Waiting)
    # one for every drafted token, and at its place; on CUDA one operation may wait twice
    assert found["steps"] == STEPS
    assert found["count"] == 4 * found["steps"] or device != "cpu"
    assert found["count"] >= 4 * found["steps"]
    assert all(" at test_waits.py:" in place for place in found["places"])


@EVERYWHERE
def test_the_engine_waits_only_where_it_says(device: str) -> None:
    assert counted(device)["count"] == 0
    free = counted(device, static=False)
    assert free["count"] >= free["steps"] == STEPS
    assert any("kv_cache.py" in place for place in free["places"])


def test_places_are_known_behind_a_link(tmp_path: Path) -> None:
    """As `gpu.py` puts the checkout on the path: a link for the package, files of tests by their own paths."""
    (tmp_path / "draftsmith").symlink_to(SCRIPTS.parent)
    code = (
        "import torch\n"
        "from draftsmith.benchmarks.common.waits import Watch\n"
        "watch = Watch(cuda=False)\n"
        "watch.open = True\n"
        "from draftsmith.decoding.sampling import Warper\n"
        "with watch:\n"
        "    from draftsmith.decoding.tree.tree import chain\n"
        "    exec(compile('torch.ones(2).sum().item()', PLACE, 'exec'))\n"
        "print(*watch.waits)\n"
    )
    place = str(SCRIPTS.parent / "tests" / "a_test.py")
    done = subprocess.run(
        [sys.executable, "-c", f"PLACE = {place!r}\n{code}"],
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "_local_scalar_dense at a_test.py:1"


def test_on_cuda_the_word_of_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch refuses is noted and run again; another error is not taken for a wait."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Refusing(Watch):
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
    assert next(iter(watch.waits)).startswith("exp at test_waits.py:")
