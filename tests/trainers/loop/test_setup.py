"""What is refused before a run begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.errors import EnvironmentFailure, RequestError
from draftsmith.launch.train import run as train
from draftsmith.trainers import spine
from draftsmith.trainers.config import LoopConfig, OptimizerConfig
from draftsmith.trainers.loop.setup import accumulation, make_accelerator, make_deterministic, own_kernels, resume_from


def test_a_tracker_that_is_not_installed(tmp_path: Path) -> None:
    """accelerate would leave it out without a word."""
    pytest.importorskip("accelerate")
    with pytest.raises(EnvironmentFailure, match="pip install aim"):
        make_accelerator(LoopConfig(trackers=["aim"]), OptimizerConfig(), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can train in fp16")
def test_fp16_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs a GPU"):
        make_accelerator(LoopConfig(precision="fp16"), OptimizerConfig(), tmp_path)


def test_kernels_of_a_run_end_with_it() -> None:
    """Inside, memory is not filled before it is written: that is an operation more for nearly each."""
    memory = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    with own_kernels():
        make_deterministic(LoopConfig())
        assert torch.are_deterministic_algorithms_enabled()
        assert not memory.fill_uninitialized_memory
    assert (torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory) == before


def test_the_batch_must_divide() -> None:
    assert accumulation(LoopConfig(batch_rows=24, micro_rows=4), 3) == 2
    with pytest.raises(RequestError, match=r"try --loop.batch_rows 16"):
        accumulation(LoopConfig(batch_rows=18, micro_rows=4), 2)


def test_where_a_run_goes_on(tmp_path: Path) -> None:
    assert resume_from(tmp_path, "auto") is None
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert resume_from(tmp_path, "auto") is None  # no manifest: it is not there
    with pytest.raises(RequestError, match="--resume is never"):
        resume_from(tmp_path, "never")
    with pytest.raises(RequestError, match="expected a folder like"):
        resume_from(tmp_path, str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("value", ["true", "True", "1", "yes"])
@pytest.mark.parametrize(
    ("variable", "what"),
    [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism config")],
)
def test_what_accelerate_would_shard_is_refused_by_name(
    variable: str, what: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pieces would be saved as if they were the weights."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(RequestError, match=rf"asks for {what} \({variable}\).*zero2\.yaml or zero3\.yaml"):
        make_accelerator(LoopConfig(precision="fp32"), OptimizerConfig(), tmp_path)


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"])
def test_what_is_switched_off_is_not(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "false")
    assert make_accelerator(LoopConfig(precision="fp32"), OptimizerConfig(), tmp_path).num_processes == 1


@pytest.mark.parametrize("before", [True, False])
def test_a_run_does_without_the_attention_whose_gradient_may_be_nan(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's beside a mask. What decodes behind the run chooses as it did."""
    seen: list[bool] = []

    def method(*_: Any) -> None:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        raise RequestError("ended")

    recipe: Any = SimpleNamespace()
    monkeypatch.setattr(spine, "run", method)
    was = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(before)
        with pytest.raises(RequestError, match="ended"):
            train._train_method(recipe, Path(), "never")
        assert seen == [False]
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)
