"""One recipe under every launch configuration: the same losses in one process and in two."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import launched
from small_run import STEPS, drafter, losses, write_recipe


def launch(config: str, folder: Path, *words: str) -> tuple[Path, str]:
    """Run the small recipe with `accelerate launch` and return the run's folder."""
    out = folder / config
    recipe = str(write_recipe(folder))
    said = launched(config, "-m", "draftsmith.launch.train", recipe, "--out", str(out), *words)
    return out, said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("cpu", tmp_path_factory.mktemp("launch"))[0]


@pytest.mark.run
@pytest.mark.parametrize(
    "config", ["multi_cpu", "zero2", pytest.param("zero3", marks=pytest.mark.slow)]
)
def test_two_processes_train_the_same(config: str, alone: Path, tmp_path: Path) -> None:
    """Row order and loss do not depend on how the batch is spread; rounding alone differs."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    out, said = launch(config, tmp_path)
    assert "2 processes: " + {"multi_cpu": "MULTI_CPU", "zero2": "DEEPSPEED ZeRO-2",
                              "zero3": "DEEPSPEED ZeRO-3"}[config] in said
    compiled = Path(os.environ["XDG_CACHE_HOME"]) / "torch_extensions"
    assert not compiled.exists(), "DeepSpeed compiled what training does not call"
    one, two = losses(alone), losses(out)
    assert one.keys() == two.keys() == set(range(1, STEPS + 1))
    for step, loss in one.items():  # rounding grows from step to step
        assert two[step] == pytest.approx(loss, rel=1e-4 if step <= 12 else 1e-2), step
    mine, theirs = drafter(out), drafter(alone)
    for name, weight in theirs.items():
        assert mine[name].shape == weight.shape
        assert (mine[name] - weight).norm() < 0.05 * weight.norm(), name


@pytest.mark.run
def test_deepspeed_is_never_left_out_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(AssertionError, match="ACCELERATE_USE_CPU makes accelerate leave it out"):
        launch("zero2", tmp_path)


@pytest.mark.run
def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="loop.batch_rows is 8, which is not a multiple"):
        launch("multi_cpu", tmp_path, "--loop.micro_rows", "3")
